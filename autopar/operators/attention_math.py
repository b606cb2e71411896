"""Attention step by step, in tensors of all scores: the reference of every kernel, and what runs where none serves.

Shape suffixes: B batch, H query heads, G key/value heads, S queries, T keys, D head size, E of the values.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions
from autopar.operators.basic import wide
from autopar.operators.positional import dropout_factors
from autopar.operators.visibility import hidden_keys, positions_of

SWALLOWED, FLOOR = -1e30, -16384.0
"""Biased scores below the first, of which a large negative bias has left nothing, count as the second: no visible key
is near it, and where none is visible, the log of a sum of equal ones does not vanish beside it, as it does beside
-3e38.
"""


def attention_math(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keys: Tensor | None,
    seed: Tensor | None,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor]:
    """`attention` without sinks; H is a multiple of G, and query heads read key heads in equal groups."""
    scores, _ = _scores(q, k, bias, keys, options)
    top = finite(scores.amax(-1, keepdim=True)) if k.shape[2] else scores.new_zeros((*scores.shape[:-1], 1))
    terms = _exp_(scores.sub_(top))
    total = terms.sum(-1, keepdim=True)
    probabilities = terms.div_(total.masked_fill(total == 0, 1))
    factors = _dropout_factors(probabilities, seed, options)
    kept = probabilities if factors is None else probabilities.mul_(factors)
    return (kept @ per_query_head(wide(v), q)).to(q.dtype), (top + total.log()).squeeze(-1)


def attention_backward_math(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keys: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    options: AttentionOptions,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """The gradients to q[B, H, S, D], to k and v once for each query head [B, H, T, D], and to the biased scores
    [B, H, S, T].
    """
    g, out = wide(g), wide(out)
    scores, slope = _scores(q, k, bias, keys, options)
    probabilities = _exp_(scores.sub_(finite(lse).unsqueeze(-1)))
    delta = (g * out).sum(-1, keepdim=True)
    received = g @ per_query_head(wide(v), q).mT
    factors = _dropout_factors(probabilities, seed, options)
    if factors is not None:
        received.mul_(factors)
    biased_grad = received.sub_(delta).mul_(probabilities)
    kept = probabilities if factors is None else probabilities.mul_(factors)
    score_grad = biased_grad * (options.scale if slope is None else slope * options.scale)
    dq, dk = score_grad @ per_query_head(wide(k), q), score_grad.mT @ wide(q)
    return dq.to(q.dtype), dk.to(k.dtype), (kept.mT @ g).to(v.dtype), biased_grad


def _scores(
    q: Tensor, k: Tensor, bias: Tensor | None, keys: Tensor | None, options: AttentionOptions
) -> tuple[Tensor, Tensor | None]:
    """The scores [B, H, S, T] that softmax takes, and the slope of the soft-cap at each."""
    scores, slope = (wide(q) * options.scale) @ per_query_head(wide(k), q).mT, None
    if options.softcap:
        capped = torch.tanh(scores / options.softcap)
        scores, slope = capped * options.softcap, 1 - capped * capped
    hidden = hidden_keys(options, bias, keys, q, k.shape[2])
    if bias is not None and bias.dtype != torch.bool:
        scores = scores + bias.to(scores.dtype)
        scores = torch.where((scores < SWALLOWED) & (scores > -math.inf), FLOOR, scores)
    return (scores if hidden is None else scores.masked_fill_(hidden, -math.inf)), slope


def _exp_(x: Tensor) -> Tensor:
    """e to the x, in place, as a power of two: for e to the -inf, or to what is nearly 0, MKL takes many times as long
    as for other numbers, and masked scores are such.
    """
    return x.mul_(1 / math.log(2)).exp2_()


def finite(lse: Tensor) -> Tensor:
    """0 where a query sees nothing: its scores, all -inf, then give exp(-inf) = 0 instead of NaN."""
    return lse.masked_fill(lse == -math.inf, 0)


def _dropout_factors(x: Tensor, seed: Tensor | None, options: AttentionOptions) -> Tensor | None:
    """Of x[B, H, S, T], by its elements' places in the whole tensor of probabilities; None: nothing is dropped."""
    if not options.dropout_p:
        return None
    assert seed is not None
    if options.dropout_p >= 1:
        return torch.zeros_like(x)
    queries = positions_of(options.query_runs(x.shape[2]), x.device)
    keys = positions_of(options.key_runs(x.shape[3]), x.device)
    rows = [torch.arange(size, device=x.device) for size in x.shape[:2]]
    places = [*(options.positions[:3] if options.positions else [*rows, queries]), keys]
    return dropout_factors(x, options.dropout_p, seed, options.salt, places, options.global_shape or x.shape)


def per_query_head(x: Tensor, q: Tensor) -> Tensor:
    """[B, H, T, D] from x[B, G, T, D]: each key head for the equal group of q's heads that reads it."""
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)
