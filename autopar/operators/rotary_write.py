"""What a token does before its attention, as one operator: queries and keys rotated, keys and values written.

    q' = rotary(q)    keys' = keys, at positions `at` rotary(k)    values' = values, there v

Of models that rotate nothing, or in a way of their own, keys and values are written by one operator (`cache_write`).

Caches may hold codes with scales (`base/codes.py`): what is written is then encoded. Shape suffixes: B batch, H query
heads, G key heads, S new positions, T positions of the cache, D head size, E of the values, R of a head what is
rotated: its first part.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.pieces import write_piece
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
    interleaved: bool = False,
    half_tables: bool = False,
    in_float32: bool = False,
) -> list[Tensor]:
    """Queries as attention takes them, and the caches behind the token; what comes in stays as it is.

    Args:
        q, k, v: [B, H, S, D], [B, G, S, D], [B, G, S, E], not rotated.
        cos, sin: [B, S, R] or [1, S, R]; R even, at most D: what stands behind it in a head is not rotated.
        keys, values: [B, G, T, D], [B, G, T, E], or codes of them.
        at: int64[S], distinct positions.
        key_scales, value_scales: [B, G, T, 1], of codes.
        storage: a name of `STORAGES`; "" where numbers are kept.
        interleaved: neighbours (2i, 2i + 1) are the pairs that are rotated; else (i, i + R / 2).
        half_tables: cos and sin are R / 2 wide, one element a pair.
        in_float32: rotated in float32 and rounded once, where q and k are of a half type; cos and sin may be either.

    Returns:
        q' like q, keys', values', and of codes key_scales' and value_scales'.

    Raises:
        ValueError: codes without scales.
    """
    said = (interleaved, half_tables, in_float32)
    held, new = _written((keys, values, key_scales, value_scales), turned(k, cos, sin, *said), v, storage)
    return [turned(q, cos, sin, *said), *(x.index_copy(2, at, own) for x, own in zip(held, new, strict=True))]


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
    interleaved: bool = False,
    half_tables: bool = False,
    in_float32: bool = False,
) -> Tensor:
    """The same, written into the caches that are given: q'."""
    said = (interleaved, half_tables, in_float32)
    cache_write_(turned(k, cos, sin, *said), v, keys, values, at, key_scales, value_scales, storage=storage)
    return turned(q, cos, sin, *said)


def cache_write(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    storage: str = "",
    start: int | None = None,
) -> list[Tensor]:
    """Keys and values as they are, written as `rotary_write` does: the caches behind the token.

    start: caches are the piece that begins at this position of longer ones, whose positions `at` are; None: are whole.
    """
    held, new = _written((keys, values, key_scales, value_scales), k, v, storage)
    if start is None:
        return [x.index_copy(2, at, own) for x, own in zip(held, new, strict=True)]
    return [write_piece(x, 2, at, own, start) for x, own in zip(held, new, strict=True)]


def cache_write_(
    k: Tensor,
    v: Tensor,
    keys: Tensor,
    values: Tensor,
    at: Tensor,
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    *,
    storage: str = "",
    start: int | None = None,
) -> None:
    """The same, written into the caches that are given."""
    held, new = _written((keys, values, key_scales, value_scales), k, v, storage)
    for cache, own in zip(held, new, strict=True):
        if start is None:
            cache.index_copy_(2, at, own)
        else:
            cache.copy_(write_piece(cache, 2, at, own, start))


def turned(
    x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool = False, half_tables: bool = False, in_float32: bool = False
) -> Tensor:
    """x[B, H, S, D] with the first R of each head rotated, as `rotary_write` says; laid out like x."""
    if half_tables:
        cos, sin = ((x.repeat_interleave(2, -1) if interleaved else torch.cat([x, x], -1)) for x in (cos, sin))
    wide, is_plain = cos.shape[-1], not interleaved and not in_float32
    if is_plain and wide == x.shape[-1]:
        return rotary(x, cos, sin)
    part = x[..., :wide]
    if is_plain:
        part = rotary(part, cos, sin)
    else:
        part = _rotated(part.float() if in_float32 else part, cos.unsqueeze(1), sin.unsqueeze(1), interleaved)
    y = x.clone()
    y[..., :wide] = part
    return y


def _rotated(x: Tensor, cos: Tensor, sin: Tensor, interleaved: bool) -> Tensor:
    """In the type of x, as models write it."""
    if interleaved:
        across = torch.stack([-x[..., 1::2], x[..., ::2]], -1).flatten(-2)
    else:
        half = x.shape[-1] // 2
        across = torch.cat([-x[..., half:], x[..., :half]], -1)
    return x * cos + across * sin


def _written(caches: Sequence[Tensor | None], k: Tensor, v: Tensor, storage: str) -> tuple[list[Tensor], list[Tensor]]:
    """The caches that there are, and what is written into each of them."""
    held = [x for x in caches if x is not None]
    if not storage:
        return held[:2], [k, v]
    if len(held) < 4:
        raise ValueError(f"caches that are stored as {storage} come with scales")
    (keys, key_scales), (values, value_scales) = (STORAGES[storage].encode(x) for x in (k, v))
    return held, [keys, values, key_scales, value_scales]


def fake_rotary_write(q: Tensor, *given: Tensor | None, storage: str = "", **_: object) -> list[Tensor]:
    """What `rotary_write` gives, without values."""
    return [torch.empty_like(q), *fake_cache_write(*given[:2], *given[4:], storage=storage)]


def fake_cache_write(*given: Tensor | None, storage: str = "", **_: object) -> list[Tensor]:
    """What `cache_write` gives, without values."""
    caches: Sequence[Tensor | None] = (*given[2:4], *(given[5:7] if storage else ()))
    return [torch.empty_like(x) for x in caches if x is not None]
