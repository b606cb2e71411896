"""How a kernel is launched: which device it is on, which arguments it takes, the memory of tensor descriptors."""

from __future__ import annotations

import contextvars
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from functools import lru_cache
from typing import Any

import torch
import triton
from torch import Tensor
from triton.runtime.jit import JITFunction


def is_interpreted(kernel: Any) -> bool:
    """Whether Triton's interpreter runs the kernel (TRITON_INTERPRET=1 when its module was imported)."""
    return not isinstance(kernel, JITFunction)


def capability(device: torch.device) -> int:
    """Compute capability of a CUDA device, 90 for a Hopper; 0 for the interpreter's tensors on the CPU."""
    if device.type != "cuda":
        return 0
    major, minor = _capability(torch.cuda.current_device() if device.index is None else device.index)
    return 10 * major + minor


@lru_cache
def _capability(index: int) -> tuple[int, int]:
    return torch.cuda.get_device_capability(index)


@lru_cache(maxsize=256)
def int32_tensor(values: tuple[int, ...], device: torch.device) -> Tensor:
    """The numbers on the device, copied there once."""
    return torch.tensor(values, dtype=torch.int32, device=device)


def launch(
    kernel: Any,
    num_programs: int | Callable[[dict[str, Any]], tuple[int]],
    device: torch.device,
    arguments: Mapping[str, Any],
    **options: Any,
) -> None:
    """Launch on `device`, with those of the arguments that the kernel takes. Nothing where there are no programs.

    num_programs: or a function of the constants that tuning chooses, as Triton calls it.
    """
    if num_programs == 0:
        return
    taken = {name: arguments[name] for name in kernel.arg_names if name in arguments}
    guard = torch.cuda.device(device) if device.type == "cuda" else nullcontext()
    with guard:
        # A context of its own: the caller's allocator stays as it is.
        contextvars.copy_context().run(_launch, kernel, num_programs, device, {**taken, **options})


def _launch(
    kernel: Any,
    num_programs: int | Callable[[dict[str, Any]], tuple[int]],
    device: torch.device,
    arguments: dict[str, Any],
) -> None:
    def allocate(size: int, alignment: int, stream: int | None) -> Tensor:
        return torch.empty(size, dtype=torch.int8, device=device)

    triton.set_allocator(allocate)
    kernel[(num_programs,) if isinstance(num_programs, int) else num_programs](**arguments)


def next_block(size: int) -> int:
    """The block that holds `size` columns: a power of two, 16 at least (what a matrix product takes)."""
    return 1 << (max(size, 16) - 1).bit_length()


def ceil_div(size: int, block: int) -> int:
    """How many blocks hold `size` elements."""
    return -(-size // block)
