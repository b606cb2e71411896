"""A cache in pieces along its length: tokens written where they belong, attention to each piece, what that gives.

Keys t are `count` pieces of c positions each, t = p c. Attention to a piece is that of `scaled_dot_product.py`, with
the log-sum-exp of its scores; results over disjoint keys merge exactly (Dao et al., Flash-Decoding, 2023; Milakov and
Gimelshein, 2018, 1805.02867):

    packed[p] = out[p] | lse[p]                      attention_pieces, each from its own keys alone
    top = max_p lse[p]                               pieces_top
    total = Σ_p exp(lse[p] - top) · (out[p] | 1)     pieces_total
    out = total[:-1] / (total[-1] + exp(sink - top)) pieces_merged; sinks: only where given, once for all pieces

Pieces may lie on different ranks: the maximum and the sum are then taken over them.

Shape suffixes: P pieces, B batch, H query heads, G key/value heads, S queries, T keys, D head size, E of the values.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.attention_math import finite
from autopar.operators.basic import wide_dtype
from autopar.operators.scaled_dot_product import heads_inside


def write_piece(x: Tensor, dim: int, at: Tensor, source: Tensor, start: int = 0) -> Tensor:
    """`x.index_copy(dim, at, source)` of the piece of the whole that begins at `start` along `dim`: what belongs to
    others is not written.

    at: int64[n], distinct positions in the whole. source: as x, with n elements along `dim`.
    """
    length, count = x.shape[dim], source.shape[dim]
    local = at - start
    is_here = (local >= 0) & (local < length)
    view = [-1 if each == dim else 1 for each in range(x.dim())]
    if count == 1:
        place = local.clamp(0, length - 1)
        value = torch.where(is_here.view(view), source, x.index_select(dim, place))
        return x.index_copy(dim, place, value)
    # Which of the new elements each place gets; those of others go to a place behind the last.
    numbers = torch.full((length + 1,), -1, dtype=torch.int64, device=x.device)
    numbers = numbers.index_copy(0, torch.where(is_here, local, length), torch.arange(count, device=x.device))[:length]
    return torch.where((numbers >= 0).view(view), source.index_select(dim, numbers.clamp(min=0)), x)


def attention_pieces(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    *,
    count: int,
    start: int = 0,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    **options: Any,
) -> Tensor:
    """Attention to each of `count` pieces of the keys by itself, and its log-sum-exp.

    Args:
        q, k, v, bias, keys: as of `attention`; of T keys each piece has T / count.
        start: the number of the first piece that is here.
        key_scales, value_scales: of codes, as of `attention`; of T keys, too.
        options: those of `attention`, without dropout and places of keys.

    Returns:
        packed[P, B, H, S, E + 1] in float32 (float64 for float64): the result, and behind it the log-sum-exp.

    Raises:
        ValueError: keys that are not as many pieces.
    """
    if k.shape[2] % count:
        raise ValueError(f"{k.shape[2]} keys are not {count} equal pieces")
    size = k.shape[2] // count
    documents = options.pop("key_documents", None)
    limited = any(options.get(name) is not None for name in ("left", "right"))
    found = []
    for piece in range(count):
        begin, own = piece * size, dict(options)
        if limited:
            own["key_starts"] = [(start + piece) * size]
        if documents is not None:
            own["key_documents"] = documents.narrow(1, begin, size)
        if key_scales is not None and value_scales is not None:
            own["key_scales"], own["value_scales"] = (x.narrow(2, begin, size) for x in (key_scales, value_scales))
        mask = bias if bias is None or bias.shape[-1] == 1 else bias.narrow(-1, begin, size)
        padding = None if keys is None else keys.narrow(1, begin, size)
        out, lse = torch.ops.autopar.attention(
            q, k.narrow(2, begin, size), v.narrow(2, begin, size), mask, padding, **own
        )
        found.append(torch.cat([out.to(lse.dtype), lse.unsqueeze(-1)], -1))
    return torch.stack(found)


def pieces_top(packed: Tensor) -> Tensor:
    """The largest log-sum-exp [B, H, S] of all pieces; -inf where a query sees nothing at all."""
    return packed[..., -1].amax(0)


def pieces_total(packed: Tensor, top: Tensor) -> Tensor:
    """The weighted sum of the pieces' results, and behind it that of the weights: [B, H, S, E + 1]."""
    weights = (packed[..., -1] - finite(top)).exp().unsqueeze(-1)
    return torch.cat([(packed[..., :-1] * weights).sum(0), weights.sum(0)], -1)


def pieces_merged(total: Tensor, top: Tensor, sinks: Tensor | None = None) -> Tensor:
    """Attention to all keys [B, H, S, E], laid out as [B, S, H, E]; zeros where a query sees nothing.

    total, top: of all pieces. sinks: [H], as of `attention`.
    """
    weight = total[..., -1:]
    if sinks is not None:
        sink = sinks.to(total.dtype).view(1, -1, 1)
        both = finite(torch.maximum(top, sink))
        shrink = (top - both).exp().unsqueeze(-1)
        total, weight = total * shrink, weight * shrink + (sink - both).exp().unsqueeze(-1)
    return heads_inside(total[..., :-1] / weight.masked_fill(weight == 0, 1))


def fake_attention_pieces(
    q: Tensor, k: Tensor, v: Tensor, *_: Any, count: int, storage: str = "", **__: Any
) -> Tensor:  # fmt: skip
    """What `attention_pieces` gives, without values."""
    return q.new_empty((count, *q.shape[:3], numbers_in(v, storage) + 1), dtype=wide_dtype(q.dtype))


def numbers_in(x: Tensor, storage: str) -> int:
    """Elements of a row of x, or of the numbers whose codes it has."""
    return x.shape[-1] * (STORAGES[storage].per_byte if storage else 1)


def fake_pieces_merged(total: Tensor, *_: Any) -> Tensor:
    """What `pieces_merged` gives, without values."""
    batch, heads, queries, size = total.shape
    return total.new_empty((batch, queries, heads, size - 1)).transpose(1, 2)
