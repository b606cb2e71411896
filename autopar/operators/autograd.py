"""ATen operators as functions whose forward and backward are made of autopar's own: what tracing calls instead."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from autopar.operators import (
    attention_autograd,
    batch_norm_autograd,
    complex_autograd,
    fused_autograd,
    grids,
    losses,
    own_gradients,
    random_autograd,
    registration,  # noqa: F401 (defines torch.ops.autopar)
)
from autopar.operators.basic import no_class
from autopar.operators.ctc import trace_ctc_loss
from autopar.operators.dropout_autograd import trace_dropout
from autopar.operators.experts import trace_experts
from autopar.operators.iterated import trace_iterate
from autopar.operators.losses import trace_cross_entropy_terms
from autopar.operators.matmul_autograd import trace_matmul
from autopar.operators.recurrent import trace_lstm, trace_rnn

_ops = torch.ops.autopar
_aten = torch.ops.aten


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, valid: int | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return _ops.linear(x, w) if valid is None else _ops.linear(x, w, valid=valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        grad_x = _ops.linear_grad_input(g, w.conj()) if ctx.needs_input_grad[0] else None
        return grad_x, _ops.linear_grad_weight(g, x.conj()) if ctx.needs_input_grad[1] else None, None


class _Embedding(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, weight: Tensor, ids: Tensor, padding_idx: int) -> Tensor:
        ctx.save_for_backward(ids)
        ctx.num_rows, ctx.padding_idx = weight.shape[0], padding_idx
        return _ops.embedding(weight, ids)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        return _ops.embedding_grad(g, ctx.saved_tensors[0], ctx.num_rows, 0, ctx.padding_idx), None, None


class _CrossEntropyRows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, ignore_index: int) -> Tensor:
        maximum = x.amax(-1)
        lse = _ops.sum_exp(x, maximum).log() + maximum
        ctx.save_for_backward(x, target, lse)
        ctx.ignore_index = ignore_index
        rows = (lse - _ops.take_label(x, target)).masked_fill(target == ignore_index, 0)
        return rows.masked_fill(no_class(target, x.shape[-1], ignore_index), math.nan)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, target, lse = ctx.saved_tensors
        return _ops.cross_entropy_grad(g, x, target, lse, ignore_index=ctx.ignore_index), None, None


class _CrossEntropy(torch.autograd.Function):
    """The sum of the losses of rows, and how many rows count."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, target: Tensor, ignore_index: int) -> tuple[Tensor, Tensor]:
        maximum = x.amax(-1)
        total, label = _ops.sum_exp(x, maximum), _ops.take_label(x, target)
        loss, count, lse = _ops.cross_entropy(maximum, total, label, target, ignore_index, x.shape[-1])
        ctx.save_for_backward(x, target, lse)
        ctx.ignore_index = ignore_index
        ctx.mark_non_differentiable(count)
        return loss, count

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, target, lse = ctx.saved_tensors
        return _ops.cross_entropy_grad(grads[0], x, target, lse, ignore_index=ctx.ignore_index), None, None


def _trace_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, valid: int | None = None) -> Tensor:
    """The bias is added apart, so that the product may be a partial sum, and the bias counts once."""
    out = _Linear.apply(x, weight, valid) if weight.dim() == 2 else torch.matmul(x, weight)
    return out if bias is None else out + bias


def _trace_addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(mat1, mat2) if alpha == 1 else torch.mm(mat1, mat2) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _trace_baddbmm(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(batch1, batch2) if alpha == 1 else torch.bmm(batch1, batch2) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _trace_fractional_max_pool3d(
    x: Tensor, kernel: Sequence[int], size: Sequence[int], samples: Tensor
) -> tuple[Tensor, Tensor]:
    """The maxima are taken where torch finds them: its own gradient has no shapes for tracing."""
    _, at = torch.ops.aten.fractional_max_pool3d(x.detach(), kernel, size, samples)
    return x.flatten(-3).gather(-1, at.flatten(-3)).view_as(at), at


class _WholeParameter(torch.autograd.Function):
    """A parameter that is whole for use in whatever layout it is stored; its gradient is reduced into that layout."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return _ops.whole(x, 0, x.shape[0])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return grads[0]


class _WholeRows(torch.autograd.Function):
    """All rows of the batch, of which a rank may have some; the gradient is again of the rows that it has."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, dim: int) -> Tensor:
        ctx.dim = dim
        return _ops.whole(x, dim, x.shape[dim])

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ops.part(grads[0], ctx.dim, 0, grads[0].shape[ctx.dim]), None


def trace_coupled_product(target: Any, a: Tensor, b: Tensor) -> Tensor:
    """A product of rows with rows (`target`: a matmul of [B, K] and [K, B], or a linear of [B, K] and [B, K]): the
    second operand is needed whole wherever the first is split, so it passes through `whole`.
    """
    b = _WholeRows.apply(b, 0 if target is _aten.linear.default else 1)
    return _trace_linear(a, b) if target is _aten.linear.default else trace_matmul(a, b)


class _Rows(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, start: int, length: int) -> Tensor:
        ctx.start, ctx.num_rows = start, x.shape[0]
        return _ops.part(x, 0, start, length)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ops.whole(grads[0], 0, ctx.num_rows, ctx.start), None, None


class FusedLinear:
    """A linear whose result is cut into pieces of unequal lengths (queries, and fewer keys and values): each piece is a
    linear of its own, on its rows of the weight, so that each can be split by its own heads.

    No stripes of the stored weight, w[N, K], are the rows that one rank needs: it is stored in any layout, and taken
    whole for use.
    """

    def __init__(self, x: Tensor, w: Tensor, b: Tensor | None = None) -> None:
        self._x, self._w = x, _WholeParameter.apply(w)
        self._b = None if b is None else _WholeParameter.apply(b)

    def piece(self, start: int, length: int) -> Tensor:
        """The result's elements [..., start : start + length]."""
        bias = None if self._b is None else _Rows.apply(self._b, start, length)
        return _trace_linear(self._x, _Rows.apply(self._w, start, length), bias)


def _trace_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    if scale_grad_by_freq or sparse:
        return _aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return _Embedding.apply(weight, indices, padding_idx)


def _trace_index(x: Tensor, indices: list[Tensor | None]) -> Tensor:
    """Rows of a table by number are an embedding, whose gradient adds what equal numbers give."""
    rows = indices[0] if len(indices) == 1 else None
    if x.dim() != 2 or rows is None or rows.dtype not in (torch.int32, torch.int64) or not x.is_floating_point():
        return _aten.index.Tensor(x, indices)
    return _Embedding.apply(x, torch.where(rows < 0, rows + x.shape[0], rows), -1)


def _trace_cross_entropy(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None = None,
    reduction: int = 1,
    ignore_index: int = -100,
    label_smoothing: float = 0.0,
) -> Tensor:
    if weight is not None or label_smoothing != 0 or target.is_floating_point():
        return trace_cross_entropy_terms(x, target, weight, reduction, ignore_index, label_smoothing)
    rows = x.movedim(1, -1) if x.dim() > 2 else x
    if reduction == 0:
        return _CrossEntropyRows.apply(rows, target, ignore_index).to(x.dtype)
    loss, count = _CrossEntropy.apply(rows, target, ignore_index)
    return (loss / count if reduction == 1 else loss).to(x.dtype)


def _trace_native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """What dropout is after functionalization; of the mask, which no forward reads, the shape and dtype alone."""
    return trace_dropout(x, p, train is not False), torch.empty_like(x, dtype=torch.bool)


AUTOGRAD: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _trace_linear,
    _aten.matmul.default: trace_matmul,
    _aten.addmm.default: _trace_addmm,
    _aten.baddbmm.default: _trace_baddbmm,
    _aten.embedding.default: _trace_embedding,
    _aten.index.Tensor: _trace_index,
    _aten.fractional_max_pool3d.default: _trace_fractional_max_pool3d,
    _aten.cross_entropy_loss.default: _trace_cross_entropy,
    _aten.scaled_dot_product_attention.default: attention_autograd.trace_sdpa,
    _ops.attention.default: attention_autograd.trace_attention,
    _aten.dropout.default: trace_dropout,
    _aten.native_dropout.default: _trace_native_dropout,
    **batch_norm_autograd.AUTOGRAD,
    **complex_autograd.AUTOGRAD,
    **fused_autograd.AUTOGRAD,
    **grids.AUTOGRAD,
    **losses.AUTOGRAD,
    **own_gradients.AUTOGRAD,
    **random_autograd.AUTOGRAD,
    _ops.repeat_heads.default: attention_autograd.trace_repeat_heads,
    _ops.linear.default: _trace_linear,
    _ops.ctc_loss.default: trace_ctc_loss,
    _ops.experts.default: trace_experts,
    _ops.iterate.default: trace_iterate,
    _ops.lstm.default: trace_lstm,
    _ops.rnn.default: trace_rnn,
}
