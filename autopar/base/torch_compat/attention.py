"""Which of PyTorch's own kernels of attention a script prefers."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch.nn.attention import SDPBackend


def prefers_cudnn() -> bool:
    """Whether `torch.nn.attention.sdpa_kernel([CUDNN_ATTENTION, …], set_priority=True)` puts cuDNN's kernel before
    flash attention, or leaves that out; or `cudnn_first` does.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    order = torch._C._get_sdp_priority_order()
    kernels: tuple[Any, Any] = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    flash, cudnn = (order.index(int(each.value)) for each in kernels)
    return _CUDNN_FIRST.get() or cudnn < flash or not torch.backends.cuda.flash_sdp_enabled()


_CUDNN_FIRST: ContextVar[bool] = ContextVar("_CUDNN_FIRST", default=False)
"""Of a thread: ranks that are simulated run side by side, and torch's own order is the whole process's."""


@contextmanager
def cudnn_first() -> Iterator[None]:
    """Inside, cuDNN's kernel comes before flash attention, unless a script has switched it off."""
    token = _CUDNN_FIRST.set(True)
    try:
        yield
    finally:
        _CUDNN_FIRST.reset(token)
