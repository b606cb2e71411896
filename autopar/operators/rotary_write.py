"""What a token does before its attention, as one operator: queries and keys rotated, keys and values written.

    q' = rotary(q)    keys' = keys, at positions `at` rotary(k)    values' = values, there v

Caches may hold codes with scales (`base/codes.py`): what is written is then encoded. Shape suffixes: B batch, H query
heads, G key heads, S new positions, T positions of the cache, D head size, E of the values, R of a head what is
rotated: as wide as the tables are.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.rotary import rotary


def rotary_write(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    storage: str = "",
) -> list[Tensor]:
    """Queries as attention takes them, and the caches behind the token; what comes in stays as it is.

    Args:
        q, k, v: [B, H, S, D], [B, G, S, D], [B, G, S, E], not rotated.
        cos, sin: [B, S, R] or [1, S, R]; R even, at most D: what stands behind it in a head is not rotated.
        keys, values: [B, G, T, D], [B, G, T, E], or codes of them.
        at: int64[S], distinct positions.
        key_scales, value_scales: [B, G, T, 1], of codes.
        storage: a name of `STORAGES`; "" where numbers are kept.

    Returns:
        q' like q, keys', values', and of codes key_scales' and value_scales'.

    Raises:
        ValueError: codes without scales.
    """
    caches, new = _written((keys, values, key_scales, value_scales), _rotated(k, cos, sin), v, storage)
    return [_rotated(q, cos, sin), *(x.index_copy(2, at, own) for x, own in zip(caches, new, strict=True))]


def rotary_write_(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    cos: Tensor,
    sin: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    storage: str = "",
) -> Tensor:
    """The same, written into the caches that are given: q'."""
    caches, new = _written((keys, values, key_scales, value_scales), _rotated(k, cos, sin), v, storage)
    for cache, own in zip(caches, new, strict=True):
        cache.index_copy_(2, at, own)
    return _rotated(q, cos, sin)


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x[B, H, S, D] with the first R of each head rotated; laid out like x."""
    wide = cos.shape[-1]
    if wide == x.shape[-1]:
        return rotary(x, cos, sin)
    y = x.clone()
    y[..., :wide] = rotary(x[..., :wide], cos, sin)
    return y


def _written(caches: Sequence[Tensor | None], k: Tensor, v: Tensor, storage: str) -> tuple[list[Tensor], list[Tensor]]:
    """The caches that there are, and what is written into each of them."""
    held = [x for x in caches if x is not None]
    if not storage:
        return held[:2], [k, v]
    if len(held) < 4:
        raise ValueError(f"caches that are stored as {storage} come with scales")
    (keys, key_scales), (values, value_scales) = (STORAGES[storage].encode(x) for x in (k, v))
    return held, [keys, values, key_scales, value_scales]


def fake_rotary_write(q: Tensor, *given: Tensor | None, storage: str = "") -> list[Tensor]:
    """What `rotary_write` gives, without values."""
    caches: Sequence[Tensor | None] = (*given[4:6], *(given[7:9] if storage else ()))
    return [torch.empty_like(x) for x in (q, *caches) if x is not None]
