"""What an operator gives on tensors without values.

torch works out an elementwise operator's result in Python, at length. What depends on the kinds of its operands alone
is worked out by torch once; of which sizes the result is, broadcasting says.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.recent import Recent
from autopar.base.torch_compat.tracing import OpOverload

_KNOWN: Recent[Any, torch.dtype | None] = Recent(4096)
"""The dtype of a result by operator and the kinds of its operands; None where it is no one tensor."""


def on_meta(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`target(*args, **kwargs)`, of tensors on meta.

    Raises whatever torch does of operands that do not fit.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    if not _is_plain(target, args, kwargs, tensors):
        return target(*args, **kwargs)
    key = (target, tuple(map(_kind, args)), tuple((name, _kind(value)) for name, value in kwargs.items()))
    dtype = _KNOWN.peek(key)
    if dtype is None:
        made = target(*args, **kwargs)
        if isinstance(made, Tensor) and made.is_meta:
            _KNOWN.put(key, made.dtype)
        return made
    first = tensors[0].shape
    shape = (
        first if all(each.shape == first for each in tensors) else torch.broadcast_shapes(*(x.shape for x in tensors))
    )
    return torch.empty(shape, dtype=dtype, device="meta")


def _is_plain(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any], tensors: Sequence[Tensor]) -> bool:
    """An elementwise operator that writes nothing, on whole rows in their order: so is its result then."""
    if not isinstance(target, OpOverload) or torch.Tag.pointwise not in target.tags:
        return False
    if not tensors or target._schema.is_mutable or len(target._schema.returns) != 1 or "out" in kwargs:
        return False
    if any(isinstance(each, list | tuple) for each in (*args, *kwargs.values())):
        return False
    return all(each.is_meta and each.is_contiguous() for each in tensors)


def _kind(value: Any) -> Any:
    """What a result's dtype depends on."""
    if isinstance(value, Tensor):
        return value.dtype, value.dim() == 0
    return type(value) if isinstance(value, bool | int | float | complex) else repr(value)
