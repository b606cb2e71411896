"""Which of PyTorch's kernels is the fastest for plain attention: measured, as a program calls them."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from autopar.base import environment
from autopar.base.torch_compat.attention import cudnn_first
from autopar.operators.scaled_dot_product import attention, attention_backward

_KERNELS = {"flash": SDPBackend.FLASH_ATTENTION, "cudnn": SDPBackend.CUDNN_ATTENTION}
_SHAPE = (2, 16, 4096, 128)
"""Batch rows, heads, tokens, head size: large enough that a kernel fills the device."""


def measured(
    dtype: torch.dtype, device: torch.device, seconds: Callable[[Callable[[], object]], float]
) -> dict[str, float]:
    """Seconds of causal attention, forward and backward, by kernel; none where a device has no two that serve, or
    AUTOPAR_ATTENTION has decided.

    seconds: times a function (`Timer.seconds`). Kernels that do not run there, or give other numbers than the first by
    more than their dtype explains, are left out.
    """
    decided = environment.attention_backend() in ("cudnn", "flash")
    if decided or device.type != "cuda" or dtype not in (torch.bfloat16, torch.float16):
        return {}
    return compared({kernel: _calls(kernel, dtype, device) for kernel in _KERNELS}, dtype, seconds)


def compared(
    calls: Mapping[str, Callable[[], tuple[Tensor, ...]]],
    dtype: torch.dtype,
    seconds: Callable[[Callable[[], object]], float],
) -> dict[str, float]:
    """The seconds of calls that should give the same numbers, of those that run and do; none where one is left."""
    found: dict[str, float] = {}
    wanted: tuple[Tensor, ...] | None = None
    for kernel, call in calls.items():
        try:
            made = call()
        except RuntimeError:  # not built in, or not for this device
            continue
        if wanted is not None and not all(_are_close(a, b, dtype) for a, b in zip(made, wanted, strict=True)):
            continue
        wanted = made if wanted is None else wanted
        found[kernel] = seconds(call)
    return found if len(found) > 1 else {}


def first(found: Mapping[str, float]) -> AbstractContextManager[None]:
    """Inside, plain attention goes where it was measured to be the fastest."""
    return cudnn_first() if found and min(found, key=lambda kernel: found[kernel]) == "cudnn" else nullcontext()


def _calls(kernel: str, dtype: torch.dtype, device: torch.device) -> Callable[[], tuple[Tensor, ...]]:
    generator = torch.Generator(device).manual_seed(0)
    q, k, v, g = (torch.randn(_SHAPE, dtype=dtype, device=device, generator=generator) for _ in range(4))
    options: dict[str, Any] = {"scale": _SHAPE[-1] ** -0.5, "right": 0}

    def call() -> tuple[Tensor, ...]:
        with sdpa_kernel(_KERNELS[kernel]):
            out, lse = attention(q, k, v, **options)
            grads = attention_backward(g, q, k, v, None, None, None, None, out, lse, **options)
        return out, lse, *grads

    return call


def _are_close(a: Tensor, b: Tensor, dtype: torch.dtype) -> bool:
    """Up to some roundings of the dtype, relative to the largest number."""
    largest = b.double().abs().max()
    return bool(((a.double() - b.double()).abs().max() <= 16 * torch.finfo(dtype).eps * largest).item())
