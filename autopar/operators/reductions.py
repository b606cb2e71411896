"""What ATen reduces, as sums and maxima of terms: so it can be split along the dims that are reduced, too.

`DECOMPOSITIONS` replaces operators while a region is differentiated, below autograd: torch derives what it always
derives, and the operators of the backward are replaced like those of the forward. A function that returns
`NotImplemented` leaves its operator as it is: what reduces the last dim alone stays one operator.

    var(x, 0)            →  m = sum(x, 0) / n;  sum((x - m)², 0) / (n - 1)
    any(x, 0)            →  sum(x != 0, 0) > 0
    logsumexp(x, 0)      →  m = amax(x, 0);  log(sum(exp(x - m), 0)) + m
    mse_loss(x, y, mean) →  sum(mse_loss(x, y, none)) / n          (`losses.py`)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten
Dims = Sequence[int] | int | None


def _axes(x: Tensor, dims: Dims) -> list[int]:
    """The dims that are reduced, counted from the front: none given, all."""
    given = [dims] if isinstance(dims, int) else list(dims or ())
    return [dim % x.dim() for dim in given] if given and x.dim() else list(range(x.dim()))


def _stays(x: Tensor, axes: Sequence[int]) -> bool:
    """Whether one operator does: the rows of a batch are not what is reduced where it is the last dim of several."""
    return not x.dim() or (x.dim() > 1 and list(axes) == [x.dim() - 1])


def _count(x: Tensor, axes: Sequence[int]) -> int:
    return math.prod(x.shape[axis] for axis in axes)


def _mean(x: Tensor, dims: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None) -> Any:
    """A mean is a sum (which splits into partial sums) times a constant."""
    axes = _axes(x, dims)
    count = _count(x, axes)
    scale = 1.0 / count if count else math.inf  # the mean of none is no number: 0 · ∞
    return torch.sum(x, axes, keepdim, dtype=dtype) * scale if axes else x


def _mean_all(x: Tensor, *, dtype: torch.dtype | None = None) -> Any:
    return _mean(x, None, False, dtype=dtype)


def _variance(x: Tensor, axes: list[int], correction: float | None) -> tuple[Tensor, Tensor]:
    """Variance and mean, both with the reduced dims kept: in two passes, as where numbers are large."""
    count = _count(x, axes)
    left = count - (1 if correction is None else correction)
    mean = torch.sum(x, axes, True) / count
    squares = torch.sum((x - mean).square(), axes, True)
    return squares / left if left > 0 else squares / 0.0, mean


def _squeezed(x: Tensor, axes: Sequence[int], keepdim: bool) -> Tensor:
    return x if keepdim else x.reshape([size for dim, size in enumerate(x.shape) if dim not in axes])


def _var(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    axes = _axes(x, dim)
    if _stays(x, axes) or x.is_complex():
        return NotImplemented
    return _squeezed(_variance(x, axes, correction)[0], axes, keepdim)


def _std(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    found = _var(x, dim, correction=correction, keepdim=keepdim)
    return found if found is NotImplemented else found.sqrt()


def _var_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    axes = _axes(x, dim)
    if _stays(x, axes) or x.is_complex():
        return NotImplemented
    variance, mean = _variance(x, axes, correction)
    return _squeezed(variance, axes, keepdim), _squeezed(mean, axes, keepdim)


def _std_mean(x: Tensor, dim: Dims = None, *, correction: float | None = None, keepdim: bool = False) -> Any:
    found = _var_mean(x, dim, correction=correction, keepdim=keepdim)
    return found if found is NotImplemented else (found[0].sqrt(), found[1])


def _amin(x: Tensor, dim: Dims = (), keepdim: bool = False) -> Any:
    """A minimum is a maximum, of which ranks have terms."""
    axes = _axes(x, dim)
    return NotImplemented if _stays(x, axes) or not x.is_floating_point() else -torch.amax(-x, axes, keepdim)


def _min(x: Tensor) -> Any:
    return _amin(x)


def _any(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Any:
    """How many are not zero, of which ranks have terms. No dims at all, where they are listed, reduce nothing."""
    axes = _axes(x, dim)
    stays = _stays(x, axes) or dim == [] or x.dtype == torch.uint8
    return NotImplemented if stays else torch.sum(x != 0, axes, keepdim) > 0


def _all(x: Tensor, dim: Dims = None, keepdim: bool = False) -> Any:
    axes = _axes(x, dim)
    stays = _stays(x, axes) or dim == [] or x.dtype == torch.uint8
    return NotImplemented if stays else torch.sum(x == 0, axes, keepdim) == 0


def _vector_norm(
    x: Tensor, ord: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: torch.dtype | None = None
) -> Any:
    axes = _axes(x, dim)
    if _stays(x, axes) or x.is_complex():
        return NotImplemented
    x = x if dtype is None else x.to(dtype)
    if math.isinf(ord):
        return torch.amax(x.abs(), axes, keepdim) if ord > 0 else -torch.amax(-x.abs(), axes, keepdim)
    if ord == 0:
        return torch.sum((x != 0).to(x.dtype), axes, keepdim)
    if ord == 1:
        return torch.sum(x.abs(), axes, keepdim)
    if ord == 2:
        return torch.sum(x * x, axes, keepdim).sqrt()
    return torch.sum(x.abs().pow(ord), axes, keepdim).pow(1 / ord)


def _norm(x: Tensor, p: float | None = 2, dim: Dims = None, keepdim: bool = False, **given: Any) -> Any:
    return _vector_norm(x, 2 if p is None else p, dim, keepdim, **given)


def _logsumexp(x: Tensor, dim: Dims, keepdim: bool = False) -> Any:
    axes = _axes(x, dim)
    if _stays(x, axes) or not x.is_floating_point():
        return NotImplemented
    shift = _finite(torch.amax(x, axes, True))
    total = torch.sum(torch.exp(x - shift), axes, True)
    return _squeezed(total.log() + shift, axes, keepdim)


def _finite(maximum: Tensor) -> Tensor:
    """What may be subtracted: a maximum that is infinite would give infinity less itself."""
    return maximum.masked_fill(maximum.abs() == math.inf, 0)


def _is_over_rows(x: Tensor, dim: int) -> bool:
    return x.dim() > 1 and dim % x.dim() == 0


def _softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if not _is_over_rows(x, dim) or half_to_float:
        return NotImplemented
    exponentials = torch.exp(x - torch.amax(x, [dim], True))
    return exponentials / torch.sum(exponentials, [dim], True)


def _softmax_backward(g: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not _is_over_rows(y, dim) or input_dtype != y.dtype:
        return NotImplemented
    terms = g * y
    return terms - y * torch.sum(terms, [dim], True)


def _log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Any:
    if not _is_over_rows(x, dim) or half_to_float:
        return NotImplemented
    shifted = x - torch.amax(x, [dim], True)
    return shifted - torch.sum(torch.exp(shifted), [dim], True).log()


def _log_softmax_backward(g: Tensor, y: Tensor, dim: int, input_dtype: torch.dtype) -> Any:
    if not _is_over_rows(y, dim) or input_dtype != y.dtype:
        return NotImplemented
    return g - torch.exp(y) * torch.sum(g, [dim], True)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _aten.mean.dim: _mean,
    _aten.mean.default: _mean_all,
    _aten.var.correction: _var,
    _aten.std.correction: _std,
    _aten.var_mean.correction: _var_mean,
    _aten.std_mean.correction: _std_mean,
    _aten.amin.default: _amin,
    _aten.min.default: _min,
    _aten.any.default: _any,
    _aten.any.dim: _any,
    _aten.any.dims: _any,
    _aten._is_any_true.default: _any,
    _aten._is_all_true.default: _all,
    _aten.all.default: _all,
    _aten.all.dim: _all,
    _aten.all.dims: _all,
    _aten.linalg_vector_norm.default: _vector_norm,
    _aten.norm.Scalar: _norm,
    _aten.norm.ScalarOpt_dim: _norm,
    _aten.norm.ScalarOpt_dtype: _norm,
    _aten.norm.ScalarOpt_dim_dtype: _norm,
    _aten.logsumexp.default: _logsumexp,
    _aten._softmax.default: _softmax,
    _aten._softmax_backward_data.default: _softmax_backward,
    _aten._log_softmax.default: _log_softmax,
    _aten._log_softmax_backward_data.default: _log_softmax_backward,
}
