"""The operators that autopar puts into captured graphs, and that generated programs call.

Each is a plain, device-neutral torch function and also `torch.ops.autopar.<name>`, so that tracing records one node
where ATen would leave a dozen, or where the ATen operator cannot be sharded by its factors alone (a vocabulary-parallel
loss, a dropout mask that does not depend on the sharding). None has a derivative formula: `AUTOGRAD` maps ATen
operators to functions of the same signature whose forward *and* backward are made of these operators.

Shape suffixes: B batch, H query heads, G key/value heads, S queries, T keys, D head size, V vocabulary or classes.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.library import Library, register_fake

from autopar.errors import AutoparError

_LIBRARY = Library("autopar", "DEF")
_HALF = (torch.float16, torch.bfloat16)


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    register_fake(f"autopar::{name}", fake, lib=_LIBRARY)


def _wide(x: Tensor) -> Tensor:
    """`x` in the dtype in which it is reduced: float32 for half types."""
    return x.float() if x.dtype in _HALF else x


def _wide_dtype(dtype: torch.dtype) -> torch.dtype:
    return torch.float32 if dtype in _HALF else dtype


# ------------------------------------------------------------------------------------------------ products and tables


def linear(x: Tensor, w: Tensor, b: Tensor | None = None) -> Tensor:
    """x[..., K] @ w[N, K].T + b[N]."""
    return F.linear(x, w, b)


def linear_grad_input(g: Tensor, w: Tensor) -> Tensor:
    """The gradient of `linear` to x: g[..., N] @ w[N, K]."""
    return torch.matmul(g, w)


def linear_grad_weight(g: Tensor, x: Tensor) -> Tensor:
    """The gradient of `linear` to w: [N, K], summed over the leading dims of g[..., N] and x[..., K]."""
    return g.reshape(-1, g.shape[-1]).mT @ x.reshape(-1, x.shape[-1])


def embedding(weight: Tensor, ids: Tensor, start: int = 0) -> Tensor:
    """The rows `ids - start` of weight[V, D]; zeros where that is outside [0, V)."""
    local = ids - start
    inside = (local >= 0) & (local < weight.shape[0])
    rows = F.embedding(torch.where(inside, local, 0), weight)
    return rows.masked_fill_(~inside.unsqueeze(-1), 0)


def embedding_grad(g: Tensor, ids: Tensor, num_rows: int, start: int = 0, padding_idx: int = -1) -> Tensor:
    """The gradient of `embedding` to its weight: [num_rows, D]. `padding_idx` counts as `ids` do, before `start`."""
    local = ids - start
    counts = (local >= 0) & (local < num_rows) & (ids != padding_idx)
    local = torch.where(counts, local, num_rows)
    return torch.ops.aten.embedding_dense_backward(g, local, num_rows + 1, num_rows, False)[:num_rows]


# ------------------------------------------------------------------------------------------------------ cross entropy


def take_label(x: Tensor, target: Tensor, start: int = 0) -> Tensor:
    """x[..., V] at `target - start`; 0 where that is outside [0, V), as `ignore_index` is."""
    local = target - start
    inside = (local >= 0) & (local < x.shape[-1])
    taken = x.gather(-1, torch.where(inside, local, 0).unsqueeze(-1)).squeeze(-1)
    return taken.masked_fill_(~inside, 0)


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """The sum of exp(x - m) over the last dim of x[..., V], in float32 for half types; m[...]: usually the maximum."""
    return (_wide(x) - _wide(m).unsqueeze(-1)).exp_().sum(-1)


def cross_entropy_grad(g: Tensor, x: Tensor, target: Tensor, lse: Tensor, start: int = 0) -> Tensor:
    """g * (softmax(x) - onehot(target)), in the dtype of x[..., V]; g[...] is 0 in the rows that do not count."""
    local = target - start
    inside = (local >= 0) & (local < x.shape[-1])
    g = g.to(lse.dtype)
    out = (_wide(x) - lse.unsqueeze(-1)).exp_().mul_(g.unsqueeze(-1))
    index = torch.where(inside, local, 0).unsqueeze(-1)
    out.scatter_add_(-1, index, torch.where(inside, -g, 0).to(out.dtype).unsqueeze(-1))
    return out.to(x.dtype)


# ---------------------------------------------------------------------------------------------------------- attention


def attention(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    """Scaled dot product attention and the log-sum-exp of its scores.

    q[B, H, S, D], k[B, G, T, D], v[B, G, T, E], G divides H; mask broadcasts to [B, H, S, T] (bool: what to keep,
    float: added to the scores); `is_causal` keeps key t for query s where t <= s. Returns out[B, H, S, E], laid out as
    [B, S, H, E], and lse[B, H, S] in float32 (float64 for float64). A query whose every key is masked gets zeros, and
    lse 0.
    """
    if _fits_cpu_flash(q, v):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _float_mask(mask, q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _fits_cuda_flash(q, k, v, mask, is_causal):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
    elif _fits_cuda_efficient(q, k, v, mask, is_causal):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _expanded_mask(mask, q, k)
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, is_causal, scale=scale
        )[:2]
        lse = lse[..., : q.shape[2]]
    else:
        out, lse = _attention_math(q, k, v, mask, is_causal, scale)
    return _heads_inside(out), lse.contiguous()


def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attention` to q, k and v, each laid out with its heads inside, as [B, S, H, D]."""
    num_kv_heads = k.shape[1]
    if _fits_cpu_flash(q, v):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _float_mask(mask, q.dtype)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _fits_cuda_flash(q, k, v, mask, is_causal):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, offset, scale=scale
        )
    elif _fits_cuda_efficient(q, k, v, mask, is_causal):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _expanded_mask(mask, q, k)
        padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        needs = [True, True, True, False]
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, bias, out, padded, zero, zero, 0.0, needs, is_causal, scale=scale
        )
    else:
        dq, dk, dv = _attention_backward_math(g, q, k, v, mask, out, lse, is_causal, scale)
    return _heads_inside(dq), _heads_inside(_sum_heads(dk, num_kv_heads)), _heads_inside(_sum_heads(dv, num_kv_heads))


def _attention_math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill_(lse == -math.inf, 0)
    out = (scores - lse.unsqueeze(-1)).exp_() @ _repeat_heads(_wide(v), q)
    return out.to(q.dtype), lse


def _attention_backward_math(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    g, out = _wide(g), _wide(out)
    probabilities = (_scores(q, k, mask, is_causal, scale) - lse.unsqueeze(-1)).exp_()
    delta = (g * out).sum(-1, keepdim=True)
    score_grad = probabilities * (g @ _repeat_heads(_wide(v), q).mT - delta) * scale
    dq = score_grad @ _repeat_heads(_wide(k), q)
    return dq.to(q.dtype), (score_grad.mT @ _wide(q)).to(k.dtype), (probabilities.mT @ g).to(v.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = (_wide(q) * scale) @ _repeat_heads(_wide(k), q).mT
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return scores


def _fits_cpu_flash(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.numel() > 0 and v.numel() > 0


def _fits_cuda_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    head_fits = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    lengths_fit = not is_causal or q.shape[2] == k.shape[2]
    return q.device.type == "cuda" and q.dtype in _HALF and mask is None and head_fits and lengths_fit


def _fits_cuda_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    head_fits = q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0
    mask_fits = mask is None or (not is_causal and k.shape[2] % 16 == 0)
    lengths_fit = not is_causal or q.shape[2] == k.shape[2]
    return q.device.type == "cuda" and q.dtype != torch.float64 and head_fits and mask_fits and lengths_fit


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _expanded_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel wants it: rows whole in memory, other dims expanded by stride 0."""
    bias = _float_mask(mask, q.dtype)
    if bias is None:
        return None
    bias = bias.expand(*bias.shape[:-1], k.shape[2]).contiguous()
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sum_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)


def _heads_inside(x: Tensor) -> Tensor:
    """[B, H, S, D] laid out as [B, S, H, D], so that joining the heads afterwards moves no memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)


# ------------------------------------------------------------------------------------------------------------ dropout


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_GAMMA, _MIX_1, _MIX_2 = (_int64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def dropout(
    x: Tensor, p: float, seed: Tensor, salt: int, positions: Sequence[Tensor], global_shape: Sequence[int]
) -> Tensor:
    """x with each element zeroed with probability p, the others divided by 1 - p; its own gradient, too.

    Whether an element is kept depends on `seed` (an int64 scalar), `salt` and the element's place in the tensor of
    `global_shape` alone: any sharding draws the same mask. `positions` has, for each dim, the global index of each
    local element (int64, one dim); empty: x is the whole tensor. The generator is SplitMix64 (Steele, Lea, Flood 2014)
    over the linear position.
    """
    if p >= 1:
        return torch.zeros_like(x)
    key = _mix(seed + _int64(salt * _GAMMA))
    random = _mix(key + _linear_position(x, positions, global_shape) * _GAMMA)
    keep = ((random >> 11) & (2**53 - 1)) >= int(p * 2**53)
    return x * (keep.to(x.dtype) * (1 / (1 - p)))


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer; torch has no logical shift, so the sign's copies are masked off."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def _linear_position(x: Tensor, positions: Sequence[Tensor], global_shape: Sequence[int]) -> Tensor:
    if not positions:
        return torch.arange(x.numel(), device=x.device).view(x.shape)
    linear_position = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, size in zip(positions, global_shape, strict=True):
        linear_position = linear_position.unsqueeze(-1) * size + index
    return linear_position


def positions(size: int, *splits: tuple[int, int, int], device: torch.device | str | None = None) -> Tensor:
    """The global indices that a rank holds of a dim of `size`.

    Each split is (the rank's coordinate, the size of the axis, outer stripes), in the order in which they apply
    (`autopar.sharding`).
    """
    index = torch.arange(size, device=device)
    for coordinate, axis_size, outer in splits:
        index = index.view(outer, axis_size, -1)[:, coordinate].reshape(-1)
    return index


# ------------------------------------------------------------------------------------------------------- registration


def _fake_attention(q: Tensor, k: Tensor, v: Tensor, mask: Any, is_causal: bool, scale: float) -> tuple[Tensor, Tensor]:
    batch, heads, queries, _ = q.shape
    out = q.new_empty((batch, queries, heads, v.shape[-1])).transpose(1, 2)
    return out, q.new_empty((batch, heads, queries), dtype=_wide_dtype(q.dtype))


def _fake_attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))


_register(
    "linear(Tensor x, Tensor w, Tensor? b=None) -> Tensor",
    linear,
    lambda x, w, b=None: x.new_empty((*x.shape[:-1], w.shape[0])),
)
_register(
    "linear_grad_input(Tensor g, Tensor w) -> Tensor",
    linear_grad_input,
    lambda g, w: g.new_empty((*g.shape[:-1], w.shape[1])),
)
_register(
    "linear_grad_weight(Tensor g, Tensor x) -> Tensor",
    linear_grad_weight,
    lambda g, x: g.new_empty((g.shape[-1], x.shape[-1])),
)
_register(
    "embedding(Tensor weight, Tensor ids, int start=0) -> Tensor",
    embedding,
    lambda weight, ids, start=0: weight.new_empty((*ids.shape, weight.shape[1])),
)
_register(
    "embedding_grad(Tensor g, Tensor ids, int num_rows, int start=0, int padding_idx=-1) -> Tensor",
    embedding_grad,
    lambda g, ids, num_rows, start=0, padding_idx=-1: g.new_empty((num_rows, g.shape[-1])),
)
_register(
    "take_label(Tensor x, Tensor target, int start=0) -> Tensor",
    take_label,
    lambda x, target, start=0: x.new_empty(target.shape),
)
_register(
    "sum_exp(Tensor x, Tensor m) -> Tensor",
    sum_exp,
    lambda x, m: x.new_empty(m.shape, dtype=_wide_dtype(x.dtype)),
)
_register(
    "cross_entropy_grad(Tensor g, Tensor x, Tensor target, Tensor lse, int start=0) -> Tensor",
    cross_entropy_grad,
    lambda g, x, target, lse, start=0: x.new_empty(x.shape),
)
_register(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? mask, bool is_causal, float scale) -> (Tensor out, Tensor lse)",
    attention,
    _fake_attention,
)
_register(
    "attention_backward(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? mask, Tensor out, Tensor lse, bool is_causal, "
    "float scale) -> (Tensor dq, Tensor dk, Tensor dv)",
    attention_backward,
    _fake_attention_backward,
)
_register(
    "dropout(Tensor x, float p, Tensor seed, int salt, Tensor[] positions, int[] global_shape) -> Tensor",
    dropout,
    lambda x, p, seed, salt, positions, global_shape: x.new_empty(x.shape),
)

# ----------------------------------------------------------------------------------------------------------- autograd

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
    def forward(ctx: Any, x: Tensor, w: Tensor) -> Tensor:
        ctx.save_for_backward(x, w)
        return _ops.linear(x, w)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, w = ctx.saved_tensors
        grad_x = _ops.linear_grad_input(g, w) if ctx.needs_input_grad[0] else None
        return grad_x, _ops.linear_grad_weight(g, x) if ctx.needs_input_grad[1] else None


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
        out, lse = _ops.attention(q, k, v, mask, is_causal, scale)
        ctx.save_for_backward(q, k, v, mask, out, lse)
        ctx.options = (is_causal, scale)
        return out

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        return *_ops.attention_backward(g, *ctx.saved_tensors, *ctx.options), None, None, None


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


def _trace_linear(x: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """The bias is added apart, so that the product may be a partial sum, and the bias counts once."""
    out = _Linear.apply(x, weight)
    return out if bias is None else out + bias


def _trace_addmm(bias: Tensor, mat1: Tensor, mat2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.mm(mat1, mat2) if alpha == 1 else torch.mm(mat1, mat2) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _trace_baddbmm(bias: Tensor, batch1: Tensor, batch2: Tensor, *, beta: float = 1, alpha: float = 1) -> Tensor:
    product = torch.bmm(batch1, batch2) if alpha == 1 else torch.bmm(batch1, batch2) * alpha
    return product if beta == 0 else product + (bias if beta == 1 else bias * beta)


def _trace_embedding(
    weight: Tensor, indices: Tensor, padding_idx: int = -1, scale_grad_by_freq: bool = False, sparse: bool = False
) -> Tensor:
    if scale_grad_by_freq or sparse:
        return _aten.embedding.default(weight, indices, padding_idx, scale_grad_by_freq, sparse)
    return _Embedding.apply(weight, indices, padding_idx)


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
        k, v = (x.unsqueeze(-3).expand(*x.shape[:-2], repeats, *x.shape[-2:]).flatten(-4, -3) for x in (k, v))
    scores = torch.matmul(q * scale, k.mT)
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(keep, scores, -math.inf)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    probabilities = scores.softmax(-1) if mask is None else _aten._safe_softmax.default(scores, -1)
    return torch.matmul(_trace_dropout(probabilities, dropout_p, True), v)


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


AUTOGRAD: dict[Any, Callable[..., Any]] = {
    _aten.linear.default: _trace_linear,
    _aten.addmm.default: _trace_addmm,
    _aten.baddbmm.default: _trace_baddbmm,
    _aten.embedding.default: _trace_embedding,
    _aten.cross_entropy_loss.default: _trace_cross_entropy,
    _aten.scaled_dot_product_attention.default: _trace_attention,
    _aten.dropout.default: _trace_dropout,
}
