"""What an operator gives on tensors without values.

torch works out an elementwise operator's result in Python, at length. What depends on the kinds of its operands alone
torch says of single numbers, which it computes at once; of which sizes the result is, broadcasting says. Layer norms,
sums, largest numbers and what puts tensors together it works out at length as well: what they give is said here, where
all fits, and by torch where something does not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.base.recent import Recent
from autopar.base.torch_compat.tracing import OpOverload
from autopar.ir.op_call import OpCall, TensorSpec, content_of, flatten_results, map_tensors, spec_of

_KNOWN: Recent[Any, torch.dtype | None] = Recent(4096)
"""The dtype of a result by operator and the kinds of its operands; None where it is no one tensor."""
_EXECUTED: Recent[Any, tuple[OpCall | None]] = Recent(4096)
"""Calls by their content; None of those that do not run."""


def executed(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: tuple[TensorSpec, ...]
) -> OpCall | None:
    """The call on tensors of these specs, run on meta; None where these arguments do not fit them."""
    key = content_of(target, args, kwargs)
    try:
        return _EXECUTED.get(key, lambda: (_executed(target, args, kwargs, operands),))[0]
    except TypeError:  # an argument that cannot be looked up
        return _executed(target, args, kwargs, operands)


def _executed(
    target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], operands: tuple[TensorSpec, ...]
) -> OpCall | None:
    def whole(spec: TensorSpec) -> Tensor:
        return torch.empty(spec.shape, dtype=spec.dtype, device="meta")

    given = [map_tensors(each, whole) for each in args]
    named = {name: map_tensors(value, whole) for name, value in kwargs.items()}
    try:
        made = on_meta(target, given, named)
    except (RuntimeError, ValueError, IndexError, NotImplementedError, AssertionError):
        return None
    return OpCall(target, args, kwargs, operands, tuple(map(spec_of, flatten_results(made))))


def on_meta(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """`target(*args, **kwargs)`, of tensors on meta.

    Raises whatever torch does of operands that do not fit.
    """
    tensors = [each for each in (*args, *kwargs.values()) if isinstance(each, Tensor)]
    own = _OWN.get(target)
    if own is not None and not kwargs and all(each.is_contiguous() for each in tensors):
        made = own(*args)
        if made is not None:
            return made
    if not _is_plain(target, args, kwargs, tensors):
        return target(*args, **kwargs)
    key = (target, tuple(map(_kind, args)), tuple((name, _kind(value)) for name, value in kwargs.items()))
    dtype = _KNOWN.get(key, lambda: _of_one(target, args, kwargs))
    if dtype is None:
        return target(*args, **kwargs)
    first = tensors[0].shape
    shape = (
        first if all(each.shape == first for each in tensors) else torch.broadcast_shapes(*(x.shape for x in tensors))
    )
    return torch.empty(shape, dtype=dtype, device="meta")


def _of_one(target: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> torch.dtype | None:
    """The dtype of the result, of ones in place of the tensors; None where torch does not compute it of these."""

    def one(value: Any) -> Any:
        return torch.ones((1,) * min(value.dim(), 1), dtype=value.dtype) if isinstance(value, Tensor) else value

    try:
        made = target(*map(one, args), **{name: one(value) for name, value in kwargs.items()})
    except (RuntimeError, ValueError, NotImplementedError):
        return None
    return made.dtype if isinstance(made, Tensor) else None


def _like(x: Tensor) -> Tensor:
    return torch.empty(x.shape, dtype=x.dtype, device="meta")


def _layer_norm(x: Tensor, normalized: Sequence[int], weight: Any, bias: Any, eps: float) -> Any:
    if not _are_normalized(x, normalized, weight, bias):
        return None
    kept = (*x.shape[: x.dim() - len(normalized)], *(1 for _ in normalized))
    dtype = torch.float32 if x.dtype in (torch.bfloat16, torch.float16) else x.dtype
    return _like(x), *(torch.empty(kept, dtype=dtype, device="meta") for _ in range(2))


def _layer_norm_backward(
    grad: Tensor, x: Tensor, normalized: Sequence[int], mean: Tensor, rstd: Tensor, weight: Any, bias: Any, mask: Any
) -> Any:
    if not _are_normalized(x, normalized, weight, bias) or (grad.shape, grad.dtype) != (x.shape, x.dtype):
        return None
    given = (x, weight, bias)
    return tuple(_like(each) if wanted and each is not None else None for each, wanted in zip(given, mask, strict=True))


def _are_normalized(x: Tensor, normalized: Sequence[int], *others: Any) -> bool:
    """Whether all fits; of the rest torch says what is wrong."""
    wanted = tuple(normalized)
    fit = all(each is None or (each.shape == wanted and each.dtype == x.dtype) for each in others)
    return fit and x.numel() > 0 and x.dtype.is_floating_point and x.shape[max(x.dim() - len(wanted), 0) :] == wanted


def _reduced(x: Tensor, dims: Sequence[int] | None = None, keepdim: bool = False) -> Any:
    ndim = x.dim()
    if not x.is_meta or not dims or x.numel() == 0 or not all(-ndim <= dim < ndim for dim in dims):
        return None
    over = {dim % ndim for dim in dims}
    if len(over) < len(dims) or not x.dtype.is_floating_point:
        return None
    left = [1 if dim in over else size for dim, size in enumerate(x.shape) if keepdim or dim not in over]
    return torch.empty(left, dtype=x.dtype, device="meta")


def _cat(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not _are_alike(tensors) or not -tensors[0].dim() <= dim < tensors[0].dim():
        return None
    first, dim = tensors[0], dim % tensors[0].dim()
    around = {(*each.shape[:dim], *each.shape[dim + 1 :]) for each in tensors}
    if len(around) > 1:
        return None
    shape = (*first.shape[:dim], sum(each.shape[dim] for each in tensors), *first.shape[dim + 1 :])
    return torch.empty(shape, dtype=first.dtype, device="meta")


def _stack(tensors: Sequence[Tensor], dim: int = 0) -> Any:
    if not _are_alike(tensors) or not -tensors[0].dim() - 1 <= dim <= tensors[0].dim():
        return None
    shape = tensors[0].shape
    if any(each.shape != shape for each in tensors):
        return None
    dim %= len(shape) + 1
    return torch.empty((*shape[:dim], len(tensors), *shape[dim:]), dtype=tensors[0].dtype, device="meta")


def _are_alike(tensors: Sequence[Tensor]) -> bool:
    """Whether these are some tensors of one kind, in the order of their elements, none of them empty."""
    kinds = {(each.dtype, each.dim()) for each in tensors}
    return len(kinds) == 1 and all(each.is_meta and each.is_contiguous() and each.numel() for each in tensors)


_OWN: Mapping[Any, Callable[..., Any]] = {
    torch.ops.aten.native_layer_norm.default: _layer_norm,
    torch.ops.aten.native_layer_norm_backward.default: _layer_norm_backward,
    torch.ops.aten.sum.dim_IntList: _reduced,
    torch.ops.aten.amax.default: _reduced,
    torch.ops.aten.cat.default: _cat,
    torch.ops.aten.stack.default: _stack,
}


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
