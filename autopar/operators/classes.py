"""Functions over a row's classes, each in pieces that can be split along them.

`F.softmax`, `log_softmax` and the like are one ATen operator, which needs a row's classes whole. Here a row's maximum
and its sum of exponentials are made first, of which ranks have terms, and what comes behind walks the classes one by
one: so a loss of one's own runs on the pieces of a vocabulary, for two sums a row forward and one backward.

    log_softmax(x, -1)  →  m = amax(x, -1); s = sum_exp(x, m); y = autopar.log_softmax(x, m, s)
    its gradient        →  autopar.log_softmax_grad(g, y, sum(g, -1))
    x.gather(-1, i)     →  take_label(x, i), whose gradient is put_label(g, i)

`trace_*` stand for ATen's functions along any dim of x. Shape suffixes: V classes.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.operators.basic import no_class, wide, wide_dtype

_ops = torch.ops.autopar
_aten = torch.ops.aten


def log_softmax(x: Tensor, maximum: Tensor, total: Tensor) -> Tensor:
    """x[..., V] - maximum - log(total), in the dtype of x.

    maximum, total [...]: of whole rows, `amax` and `sum_exp`.
    """
    out = torch.sub(x, maximum.to(total.dtype).unsqueeze(-1), out=_room(x, total.dtype))
    return out.sub_(total.log().unsqueeze(-1)).to(x.dtype)


def log_softmax_grad(g: Tensor, y: Tensor, total: Tensor) -> Tensor:
    """The gradient of a log-softmax y[..., V]: g - exp(y) * total, in the dtype of y. total [...]: the sum of g."""
    out = _room(y, wide_dtype(y.dtype)).copy_(y).exp_().mul_(total.unsqueeze(-1))
    return torch.sub(g, out, out=out).to(y.dtype)


def softmax(x: Tensor, maximum: Tensor, total: Tensor) -> Tensor:
    """exp(x[..., V] - maximum) / total, in the dtype of x; maximum, total [...] as of `log_softmax`."""
    out = torch.sub(x, maximum.to(total.dtype).unsqueeze(-1), out=_room(x, total.dtype))
    return out.exp_().div_(total.unsqueeze(-1)).to(x.dtype)


def softmax_grad(g: Tensor, y: Tensor, total: Tensor) -> Tensor:
    """The gradient of a softmax y[..., V]: y * (g - total), in the dtype of y. total [...]: the sum of g * y."""
    out = torch.sub(g, total.unsqueeze(-1), out=_room(y, wide_dtype(y.dtype)))
    return out.mul_(y).to(y.dtype)


def _room(x: Tensor, dtype: torch.dtype) -> Tensor:
    """Contiguous memory for what has the shape of x. An operand in `dtype` has it computed so, not rounded before."""
    return x.new_empty(x.shape, dtype=dtype)


def put_label(g: Tensor, target: Tensor, size: int, start: int = 0) -> Tensor:
    """The gradient of `take_label`: [..., size], with g[...] at `target - start` and 0 elsewhere."""
    local = (target - start).unsqueeze(-1)
    inside = (local >= 0) & (local < size)
    out = g.new_zeros((*g.shape, size))
    return out.scatter_(-1, torch.where(inside, local, 0), g.unsqueeze(-1).masked_fill(~inside, 0))


class _LogSoftmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        maximum = x.amax(-1)
        y: Tensor = _ops.log_softmax(x, maximum, _ops.sum_exp(x, maximum))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return _ops.log_softmax_grad(grads[0], y, grads[0].sum(-1, dtype=wide_dtype(y.dtype)))


class _Softmax(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        maximum = x.amax(-1)
        y: Tensor = _ops.softmax(x, maximum, _ops.sum_exp(x, maximum))
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (y,) = ctx.saved_tensors
        return _ops.softmax_grad(grads[0], y, (wide(grads[0]) * y).sum(-1))


class _LogSumExp(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        maximum = x.amax(-1)
        # Infinite less itself is no number.
        shift = maximum.masked_fill(maximum.abs() == math.inf, 0)
        total = _ops.sum_exp(x, shift)
        ctx.save_for_backward(x, shift, total)
        return (total.log() + shift).to(x.dtype)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ops.softmax(*ctx.saved_tensors) * grads[0].unsqueeze(-1)


class _TakeLabel(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor) -> Tensor:
        ctx.save_for_backward(target)
        ctx.size = x.shape[-1]
        taken: Tensor = _ops.take_label(x, target)
        return taken

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ops.put_label(grads[0], ctx.saved_tensors[0], ctx.size), None


def _last(x: Tensor, dim: int) -> Tensor:
    """x with its classes along the last dim."""
    return x if dim % x.dim() == x.dim() - 1 else x.movedim(dim, -1)


def _back(y: Tensor, dim: int) -> Tensor:
    return y if dim % y.dim() == y.dim() - 1 else y.movedim(-1, dim)


def trace_log_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.log_softmax.int`."""
    return _back(_LogSoftmax.apply(_last(x if dtype is None else x.to(dtype), dim)), dim)


def trace_softmax(x: Tensor, dim: int, dtype: torch.dtype | None = None) -> Tensor:
    """`aten.softmax.int`."""
    return _back(_Softmax.apply(_last(x if dtype is None else x.to(dtype), dim)), dim)


def _trace_log_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return trace_log_softmax(x, dim, torch.float32 if half_to_float else None)


def _trace_softmax(x: Tensor, dim: int, half_to_float: bool) -> Tensor:
    return trace_softmax(x, dim, torch.float32 if half_to_float else None)


def _trace_logsumexp(x: Tensor, dim: int | list[int], keepdim: bool = False) -> Tensor:
    (along,) = [dim] if isinstance(dim, int) else dim
    found: Tensor = _LogSumExp.apply(_last(x, along))
    return found.unsqueeze(along) if keepdim else found


def trace_gather(x: Tensor, dim: int, index: Tensor, sparse_grad: bool = False) -> Tensor:
    """`aten.gather` of one class a row: index as x, but for 1 in `dim`."""
    labels = index.squeeze(dim)
    taken = take_class(x, dim, labels)
    return taken.masked_fill(no_class(labels, x.shape[dim]), math.nan).unsqueeze(dim)


def take_class(x: Tensor, dim: int, labels: Tensor) -> Tensor:
    """x at `labels`, which has its other dims."""
    taken: Tensor = _TakeLabel.apply(_last(x, dim), labels)
    return taken


OVER_CLASSES: Mapping[Any, Callable[..., Tensor]] = {
    _aten.log_softmax.int: trace_log_softmax,
    _aten._log_softmax.default: _trace_log_softmax,
    _aten.softmax.int: trace_softmax,
    _aten._softmax.default: _trace_softmax,
    _aten.logsumexp.default: _trace_logsumexp,
    _aten.gather.default: trace_gather,
}
"""What stands for an operator whose `dim` is that of classes which a matrix of parameters makes: the last one, or
another.
"""
