"""Operators that meta tensors cannot run where a size or a number depends on values, with the largest it may be."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch

from autopar.base.torch_compat.distributed import TorchDispatchMode

LARGEST: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.nonzero.default: lambda x: x.new_empty((x.numel(), x.ndim), dtype=torch.int64),
    torch.ops.aten.masked_select.default: lambda x, mask: x.new_empty(
        (torch.Size(torch.broadcast_shapes(x.shape, mask.shape)).numel(),)
    ),
    torch.ops.aten._local_scalar_dense.default: lambda x: 1,
    torch.ops.aten.equal.default: lambda x, y: True,
}
"""What each gives on meta tensors. All ranks take the same, so what they send after it can be compared."""


class LargestSizes(TorchDispatchMode):
    """Runs these operators as `LARGEST` says while it is active."""

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return LARGEST.get(func, func)(*args, **(kwargs or {}))
