"""A cache that an earlier `generate()` left, made fit for another call: more rows, more positions.

    conversation   the next turn has more positions than the cache has places: it is made longer
    a prefix       one row that many prompts begin with: it is repeated

What lies in pieces stays in them.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import is_by_channel
from autopar.base.errors import AutoparError
from autopar.base.huggingface.layout import COUNTED

OF_KIND: dict[str, tuple[int | None, ...]] = {
    "attention": (2, 2, None), "indexed": (2, 2, None, 1, None), "linear": (), "hybrid": (2, 2, None), "none": (),
    "cross": (None, None),
}  # fmt: skip
"""The dims of positions of what a layer keeps of attention."""


def fitting(cache: Any, rows: int, length: int) -> Any:
    """The cache, or a copy of it, with `rows` rows and at least `length` positions. The cache itself stays as it is.

    Raises:
        AutoparError: one of several rows that are not those of the batch.
    """
    have = num_rows(cache, rows)
    if rows % have:
        raise AutoparError(
            f"a cache of {have} rows was handed in for {rows} sequences",
            values="each row is repeated where their number divides that of the sequences",
            remedy="take the rows that are wanted: cache.batch_select_indices(torch.tensor([…]))",
        )
    found = cache if length <= places(cache, length) else longer(cache, length)
    if rows > have:
        found = as_it_is(found)
        found.batch_repeat_interleave(rows // have)
    return found


def num_rows(cache: Any, otherwise: int) -> int:
    """How many sequences a cache is of. otherwise: where it keeps nothing."""
    return next((x.shape[0] for x in cache.states() if x.dim()), otherwise)


def num_written(cache: Any) -> int:
    """How many positions of a cache are written; 0 of one that counts none."""
    own = cache.pair[0] if hasattr(cache, "pair") else cache
    counts = (layer.get_seq_length() for layer in own.layers if layer.layout.kind in COUNTED)
    return int(next(counts, 0))


def as_it_is(cache: Any) -> Any:
    """Another cache of the same states."""
    return type(cache).of(cache.layouts(), cache.states())


def put(cache: Any, found: Any) -> None:
    """Make a cache, whoever has it, what another one is."""
    vars(cache).update(vars(found))


def known_empty(cache: Any) -> Any:
    """A new cache, of which the first call of forward may know that nothing is written in it."""
    layouts = [replace(layout, empty=layout.kind in COUNTED) for layout in cache.layouts()]
    return type(cache).of(layouts, cache.states())


def does_not_go_back() -> AutoparError:
    """Of a cache that is to forget its last positions."""
    return AutoparError(
        "a cache whose keys have a scale a channel does not go back",
        values="what its last tokens were before they became codes is not kept",
        remedy="leave drafts and crop() out, or store it with a scale a token: cache='int8', 'int4' or 'fp8'",
    )


def places(cache: Any, otherwise: int) -> int:
    """How many positions a cache has room for, of which as many are written as it says. otherwise: where none of its
    states grows.
    """
    found = [x.shape[dim] for x, dim in zip(cache.states(), position_dims(cache), strict=True) if dim is not None]
    is_windowed = any(is_by_channel(layout.storage) for layout in cache.layouts())
    return min(found, default=otherwise) - is_windowed  # a window follows the last whole one, at its end none


def longer(cache: Any, length: int) -> Any:
    """A copy with room for `length` positions.

    Raises:
        AutoparError: keys with a scale a channel, whose codes have no room.
    """
    if any(is_by_channel(layout.storage) for layout in cache.layouts()):
        raise AutoparError(
            "a cache whose keys have a scale a channel cannot be made longer",
            values=f"{length} positions are wanted",
            remedy="make room for all turns in the first call: max_cache_len=",
        )

    def padded(x: Tensor, dim: int | None) -> Tensor:
        if dim is None or x.shape[dim] >= length:
            return x
        return torch.nn.functional.pad(x, (*(0, 0) * (x.dim() - 1 - dim), 0, length - x.shape[dim]))

    return type(cache).of(cache.layouts(), map(padded, cache.states(), position_dims(cache)))


def position_dims(cache: Any) -> list[int | None]:
    """Of each state of a cache the dim that has a place for every position; None of one that does not grow."""
    found: list[int | None] = []
    for layout in cache.layouts():
        if layout.kind in ("linear", "hybrid"):
            found += [None for part in layout.parts for has in (part.window is not None, part.recurs) if has]
        dims = OF_KIND[layout.kind]
        if is_by_channel(layout.storage):  # codes, scales, a window, which stay as long as they are
            found += (*dims[:1], None, None, *dims[1:2], None, None, *dims[2:])
        else:
            found += dims if layout.storage is None else (*dims[:1] * 2, *dims[1:2] * 2, *dims[2:])  # codes and scales
    return found


def num_marked(config: Any, mask: Any) -> int | None:
    """Positions of the whole sequence, by the mask [rows, positions] of a call of `generate()`; None: nothing says it.

    config: of this call, which knows it of a mask that marks all and was dropped.
    """
    if isinstance(mask, Tensor):
        return int(mask.shape[1]) if mask.dim() == 2 else None
    found: int | None = getattr(config, "_mask_length", None)
    return found


def needed(marked: int | None, length: int, new_tokens: int | None, written: int) -> int:
    """Positions of a call of `generate()` that goes on with a cache of so many written ones.

    Where its mask is as long as the tokens that are handed in, these are all of the sequence, and what is written is
    cut off; else all of them follow that: what is new beside a mask of the whole, or the tokens of a decoder behind an
    encoder, of which no mask says anything.

    marked: see `num_marked`. length: of what is handed in and made.
    """
    return written + length if marked is None else max(length, marked + (new_tokens or 1) - 1)
