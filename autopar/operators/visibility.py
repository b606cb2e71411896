"""Which keys a query sees, as tensors: windows over global positions, documents, padding, masks.

Shape suffixes: B batch, H query heads, S queries, T keys.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions

Runs = Sequence[tuple[int, int]]


def positions_of(runs: Runs, device: torch.device) -> Tensor:
    """The global positions (int64, one dim) of the elements that runs of (start, length) hold."""
    return torch.cat([torch.arange(start, start + length, device=device) for start, length in runs])


def visible_keys(options: AttentionOptions, queries: Tensor, keys: Tensor) -> Tensor:
    """bool[S, T]: which of the keys at these positions the queries at those see."""
    distance = keys - queries.unsqueeze(-1)
    visible = torch.ones_like(distance, dtype=torch.bool)
    if options.left is not None:
        visible &= distance >= -options.left
    if options.right is not None:
        visible &= distance <= options.right
    return visible | (keys < options.prefix) if options.prefix else visible


def sees_every_key(options: AttentionOptions, query_runs: Runs, key_runs: Runs) -> bool:
    """Whether each of these queries sees each of these keys (padding, documents and masks apart)."""
    if options.sees_all or not query_runs or not key_runs:
        return True
    first, last = min(start for start, _ in query_runs), max(start + length for start, length in query_runs) - 1
    for start, length in key_runs:
        in_prefix = start + length <= options.prefix
        left_fits = options.left is None or start >= last - options.left
        right_fits = options.right is None or start + length - 1 <= first + options.right
        if not in_prefix and not (left_fits and right_fits):
            return False
    return True


def sees_no_key(options: AttentionOptions, query_runs: Runs, key_runs: Runs) -> bool:
    """Whether none of these queries sees any of these keys."""
    for query, queries in query_runs:
        for key, keys in key_runs:
            lowest = -math.inf if options.left is None else query - options.left
            highest = math.inf if options.right is None else query + queries - 1 + options.right
            if queries and keys and (key < options.prefix or (key <= highest and key + keys - 1 >= lowest)):
                return False
    return True


def is_plainly_causal(options: AttentionOptions) -> bool:
    """Whether query s sees the keys up to s, both counted from where they lie here (documents apart)."""
    starts = (*options.query_starts, *options.key_starts)
    in_place = not any(starts) and len(options.query_starts) < 2 and len(options.key_starts) < 2
    return options.left is None and options.right == 0 and not options.prefix and in_place


def sees_plainly(options: AttentionOptions, q: Tensor, k: Tensor) -> bool:
    """Whether all of q[B, H, S, D] see all of k[B, G, T, D], or all up to their own of as many: no mask is needed."""
    plain = options.sees_all or (is_plainly_causal(options) and q.shape[2] == k.shape[2])
    return plain and options.documents is None


def additive_mask(
    options: AttentionOptions, bias: Tensor | None, keys: Tensor | None, q: Tensor, num_keys: int
) -> Tensor | None:
    """What to add to the scores of q[B, H, S, D], in its dtype: the bias, and -inf where nothing is seen; None for
    nothing. Broadcastable to [B, H, S, T]: dims along which nothing differs have size 1.
    """
    dtype, hidden = q.dtype, hidden_keys(options, bias, keys, q, num_keys)
    if bias is not None and bias.dtype == torch.bool:
        bias = None
    if hidden is None:
        return None if bias is None else bias.to(dtype)
    if bias is None:
        return torch.zeros(hidden.shape, dtype=dtype, device=hidden.device).masked_fill(hidden, -math.inf)
    return bias.to(dtype).masked_fill(hidden, -math.inf)


def hidden_keys(
    options: AttentionOptions, bias: Tensor | None, keys: Tensor | None, q: Tensor, num_keys: int
) -> Tensor | None:
    """bool, broadcastable to [B, H, S, T]: what q[B, H, S, D] does not see because of windows, documents, padding or a
    bool bias; None where it sees all.
    """
    hidden = None
    query_runs, key_runs = options.query_runs(q.shape[2]), options.key_runs(num_keys)
    if not sees_every_key(options, query_runs, key_runs):
        hidden = ~visible_keys(options, positions_of(query_runs, q.device), positions_of(key_runs, q.device))
        hidden = hidden.view(1, 1, q.shape[2], num_keys)
    if options.documents is not None and options.key_documents is not None:
        others = (options.documents.unsqueeze(-1) != options.key_documents.unsqueeze(1)).unsqueeze(1)
        hidden = others if hidden is None else hidden | others
    if keys is not None:
        padding = ~keys.view(keys.shape[0], 1, 1, keys.shape[1])
        hidden = padding if hidden is None else hidden | padding
    if bias is not None and bias.dtype == torch.bool:
        hidden = ~bias if hidden is None else hidden | ~bias
    return hidden
