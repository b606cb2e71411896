"""ATen operators as functions whose forward and backward are made of autopar's own: what tracing calls instead."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autopar.errors import AutoparError
from autopar.operators import batch_norm_autograd, registration  # noqa: F401 (defines torch.ops.autopar)

_ops = torch.ops.autopar
_aten = torch.ops.aten


@contextmanager
def tracing_seed(seed: Tensor) -> Iterator[None]:
    """Each dropout that `AUTOGRAD` traces within draws from `seed` (an int64 scalar), salted by its number."""
    token = _SEED.set((seed, itertools.count()))
    try:
        yield
    finally:
        _SEED.reset(token)


_SEED: ContextVar[tuple[Tensor, Iterator[int]] | None] = ContextVar("autopar_tracing_seed", default=None)


class _Linear(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor, valid: int | None) -> Tensor:
        ctx.save_for_backward(x, w)
        return _ops.linear(x, w) if valid is None else _ops.linear(x, w, valid=valid)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        grad_x = _ops.linear_grad_input(g, w) if ctx.needs_input_grad[0] else None
        return grad_x, _ops.linear_grad_weight(g, x) if ctx.needs_input_grad[1] else None, None


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
        return (lse - _ops.take_label(x, target)).masked_fill(target == ignore_index, 0)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, target, lse = ctx.saved_tensors
        g = g.masked_fill(target == ctx.ignore_index, 0)
        return _ops.cross_entropy_grad(g, x, target, lse), None, None


class _Attention(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
    ) -> Tensor:
        # Query heads that share a key head are told apart from those of a rank, which may have other shapes.
        group = {} if q.shape[1] == k.shape[1] else {"group": q.shape[1] // k.shape[1]}
        out, lse = _ops.attention(q, k, v, mask, is_causal, scale, **group)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.options, ctx.group = (is_causal, scale), group
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        return *_ops.attention_backward(g, *ctx.saved_tensors, *ctx.options, **ctx.group), None, None, None


class _RepeatHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.num_heads, ctx.group = x.shape[1], group
        return _ops.repeat_heads(x, group, x.shape[1] * group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        return _ops.repeat_heads_grad(g, ctx.num_heads, ctx.group), None


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor, salt: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.options = (p, salt)
        return _ops.dropout(x, p, seed, salt, [], list(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        p, salt = ctx.options
        return _ops.dropout(g, p, ctx.saved_tensors[0], salt, [], list(g.shape)), None, None, None


def _trace_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None, *, valid: int | None = None) -> Tensor:
    """The bias is added apart, so that the product may be a partial sum, and the bias counts once."""
    out = _Linear.apply(x, weight, valid)
    return out if bias is None else out + bias


def _trace_addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(mat1, mat2) if alpha == 1 else torch.mm(mat1, mat2) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _trace_baddbmm(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(batch1, batch2) if alpha == 1 else torch.bmm(batch1, batch2) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _ops.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, g: Tensor) -> tuple[Tensor | None, Tensor | None]:  # type: ignore[override]
        a, b = ctx.saved_tensors
        grad_a = _ops.matmul(g, b.transpose(-1, -2)) if ctx.needs_input_grad[0] else None
        return grad_a, _ops.matmul(a.transpose(-1, -2), g) if ctx.needs_input_grad[1] else None


def _trace_matmul(a: Tensor, b: Tensor) -> Tensor:
    if a.dim() == b.dim() and a.dim() > 2 and a.shape[:-2] == b.shape[:-2]:
        return _Matmul.apply(a, b)
    return torch.matmul(a, b)


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
    return _trace_linear(a, b) if target is _aten.linear.default else _trace_matmul(a, b)


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
        return _aten.cross_entropy_loss.default(x, target, weight, reduction, ignore_index, label_smoothing)
    rows = _CrossEntropyRows.apply(x.movedim(1, -1) if x.dim() > 2 else x, target, ignore_index)
    if reduction == 0:
        return rows.to(x.dtype)
    loss = rows.sum()
    if reduction == 1:
        loss = loss / (target != ignore_index).sum()
    return loss.to(x.dtype)


def _trace_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.dim() == 3 and key.dim() == 3 and value.dim() == 3:
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return _trace_attention(q, k, v, mask, dropout_p, is_causal, scale=scale).squeeze(1)
    plain = dropout_p == 0 and not (attn_mask is not None and attn_mask.requires_grad and torch.is_grad_enabled())
    if plain and _is_attention(query, key, value):
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        return _Attention.apply(query, key, value, attn_mask, is_causal, scale)
    return _attention_by_steps(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _is_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    ranks_fit = q.dim() == 4 and k.dim() == 4 and v.dim() == 4
    return (
        ranks_fit
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and q.shape[1] % k.shape[1] == 0
    )


def _attention_by_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """Attention whose mask has a gradient, or whose probabilities are dropped: product, softmax, product."""
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = (_trace_repeat_heads(x, repeats) for x in (k, v))
    scores = _trace_matmul(q * scale, k.transpose(-1, -2))
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(keep, scores, -math.inf)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    probabilities = scores.softmax(-1) if mask is None else _aten._safe_softmax.default(scores, -1)
    return _trace_matmul(_trace_dropout(probabilities, dropout_p, True), v)


def _trace_repeat_heads(x: Tensor, group: int, count: int | None = None) -> Tensor:
    """x[..., G, T, D] with each of its heads `group` times; `count`, if given, is G * group."""
    if x.dim() == 4:
        return _RepeatHeads.apply(x, group)
    return x.unsqueeze(-3).expand(*x.shape[:-2], group, *x.shape[-2:]).flatten(-4, -3)


def _trace_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    if p == 0 or not train:
        return x
    state = _SEED.get()
    if state is None:
        raise AutoparError(
            "dropout needs a seed", values=f"p={p}", remedy="trace under autopar.operators.tracing_seed(seed)"
        )
    seed, salts = state
    return _Dropout.apply(x, p, seed, next(salts))


def _trace_native_dropout(x: Tensor, p: float, train: bool | None) -> tuple[Tensor, Tensor]:
    """What dropout is after functionalization; of the mask, which no forward reads, the shape and dtype alone."""
    return _trace_dropout(x, p, train is not False), torch.empty_like(x, dtype=torch.bool)


AUTOGRAD: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _trace_linear,
    _aten.matmul.default: _trace_matmul,
    _aten.addmm.default: _trace_addmm,
    _aten.baddbmm.default: _trace_baddbmm,
    _aten.embedding.default: _trace_embedding,
    _aten.index.Tensor: _trace_index,
    _aten.cross_entropy_loss.default: _trace_cross_entropy,
    _aten.scaled_dot_product_attention.default: _trace_attention,
    _aten.dropout.default: _trace_dropout,
    _aten.native_dropout.default: _trace_native_dropout,
    **batch_norm_autograd.AUTOGRAD,
    _ops.repeat_heads.default: _trace_repeat_heads,
    _ops.linear.default: _trace_linear,
}
