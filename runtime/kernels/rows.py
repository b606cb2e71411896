"""What kernels that go over rows share: tensors as rows of their last dim, sizes of tiles, the device of a launch."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

KERNEL_DTYPES = (torch.float16, torch.bfloat16, torch.float32)
"""What the row kernels compute; wider types go to the PyTorch reference."""

_PROGRAMS_WHEN_INTERPRETED = 3


def as_rows(x: Tensor) -> Tensor:
    """x[..., N] as [M, N] whose rows are contiguous: a view where the strides allow it."""
    rows = x.reshape(-1, x.shape[-1])
    return rows if rows.stride(-1) == 1 or rows.shape[-1] <= 1 else rows.contiguous()


def power_of_2(size: int) -> int:
    """The smallest power of 2 that is at least `size`."""
    return 1 << max(0, size - 1).bit_length()


def num_warps(elements: int, most: int = 32) -> int:
    """Warps for a tile of so many elements, 16 a thread: a power of 2 from 4 to `most`."""
    return min(most, max(4, power_of_2(elements // 512)))


def num_programs(x: Tensor) -> int:
    """Programs that keep a device busy when each goes over many tiles: two a multiprocessor."""
    if x.device.type != "cuda":
        return _PROGRAMS_WHEN_INTERPRETED
    return 2 * torch.cuda.get_device_properties(x.device).multi_processor_count


def launch(kernel: Any, grid: tuple[int, ...], device: torch.device, *arguments: Any, **options: Any) -> None:
    """Launch a Triton kernel on that device, which Triton takes the current one for."""
    with torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext():
        kernel[grid](*arguments, **options)


def tiles(size: int, tile: int) -> int:
    """How many tiles cover `size`."""
    return -(-size // tile)


def computes(tensors: Iterable[Tensor | None]) -> bool:
    """Whether the row kernels have all these dtypes."""
    return all(x is None or x.dtype in KERNEL_DTYPES for x in tensors)
