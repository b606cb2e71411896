"""Which of PyTorch's own kernels of attention a script prefers."""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.attention import SDPBackend


def prefers_cudnn() -> bool:
    """Whether `torch.nn.attention.sdpa_kernel([CUDNN_ATTENTION, …], set_priority=True)` puts cuDNN's kernel before
    flash attention, or leaves that out.
    """
    if not torch.backends.cuda.cudnn_sdp_enabled():
        return False
    order = torch._C._get_sdp_priority_order()
    kernels: tuple[Any, Any] = (SDPBackend.FLASH_ATTENTION, SDPBackend.CUDNN_ATTENTION)
    flash, cudnn = (order.index(int(each.value)) for each in kernels)
    return cudnn < flash or not torch.backends.cuda.flash_sdp_enabled()
