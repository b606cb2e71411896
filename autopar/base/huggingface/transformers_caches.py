"""transformers' own caches, which a script made and hands to a compiled model: they become caches of ours, in place.

Imports nothing of transformers.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.huggingface.kept import Kept
from autopar.base.huggingface.reuse import known_empty, put
from autopar.base.huggingface.unmade import Unmade

IMPLEMENTATIONS = frozenset({"static", "dynamic", "sliding_window", "hybrid", "hybrid_chunked"})
"""What `cache_implementation=` may say: all that differ in how they keep the same numbers, which is ours to decide."""


def check_implementation(name: str) -> None:
    """Raises an AutoparError for a `cache_implementation=` that keeps other numbers, or elsewhere."""
    if name.removeprefix("sliding_").removesuffix("_static") == "offloaded":
        raise AutoparError(
            f"a compiled model has no cache_implementation={name!r}: caches stay on their devices",
            remedy="leave it out, and split the cache: strategy 'tensor' (heads) or 'split_kv' (positions)",
        )
    if name not in IMPLEMENTATIONS:
        raise AutoparError(
            f"a compiled model has no cache_implementation={name!r}",
            remedy="leave it out; autopar.compile(…, cache='int8') (or 'int4', 'fp8') keeps codes",
        )


def take_over(cache: Any, make: Callable[[int], Any], length: Callable[[int], int]) -> None:
    """Make a cache of transformers, empty or filled by the plain model, one of ours.

    make: an empty one of ours, of a length. length: how long it is to be where so many positions are written.

    Raises:
        AutoparError: a cache of another kind, or one that holds what cannot be taken over.
    """
    if isinstance(cache, Unmade):
        cache.become()
        return
    pair = [cache.self_attention_cache, cache.cross_attention_cache] if _is(cache, "EncoderDecoderCache") else [cache]
    for each in pair:
        if not (_is(each, "DynamicCache") or _is(each, "StaticCache")):
            raise AutoparError(
                f"a compiled model cannot take a cache of type {type(each).__name__}",
                remedy="hand in none (it makes its own), a DynamicCache or a StaticCache; "
                "autopar.compile(…, cache='int8') (or 'int4', 'fp8') keeps codes",
            )
        if each.offloading:
            check_implementation("offloaded")
    layers = [layer for each in pair for layer in each.layers]
    filled = [layer for layer in layers if _is_written(layer)]
    room = max((layer.get_max_length() for layer in layers if not getattr(layer, "is_sliding", True)), default=-1)
    written = max(map(_count, filled), default=0)
    found = make(max(room, length(written)))
    if filled:
        behind = found.pair if hasattr(found, "pair") else (found,)
        ours = [layer for each in behind for layer in each.layers]
        for number, (ours_, theirs) in enumerate(zip(ours, _one_each(pair, behind), strict=True)):
            if theirs is not None and ours_.layout.kind != "none":
                _fill(ours_, theirs, number)
    else:
        found = known_empty(found)
    cache.__class__ = type(found)
    vars(cache).clear()
    put(cache, found)


def _one_each(theirs: list[Any], ours: Any) -> list[Any]:
    """transformers' layers, one for each of ours; None for those that it has not made."""
    return [
        each.layers[number] if number < len(each.layers) else None
        for each, own in zip(theirs, ours, strict=True)
        for number in range(len(own.layers))
    ]


def _is(cache: Any, name: str) -> bool:
    return type(cache).__name__ == name and type(cache).__module__ == "transformers.cache_utils"


def _count(layer: Any) -> int:
    """How many positions are written."""
    return int(layer.get_seq_length()) if getattr(layer, "keys", None) is not None else 0


def _is_written(layer: Any) -> bool:
    states = (getattr(layer, f"is_{kind}_states_initialized", {}) for kind in ("conv", "recurrent"))
    return _count(layer) > 0 or any(is_there for each in states for is_there in each.values())


def _fill(ours: Any, theirs: Any, number: int) -> None:
    """Put what a layer of transformers keeps of keys and values into one of ours."""
    kind, storage = ours.layout.kind, ours.layout.storage
    if kind not in ("attention", "cross") or storage is not None:
        raise AutoparError(
            "a cache that the plain model filled cannot be taken over",
            where=f"layer {number}",
            values="its keys are codes here" if storage is not None else f"it keeps more than keys and values ({kind})",
            remedy="let the compiled model read the prompt: hand in an empty cache, or none",
        )
    count = _count(theirs)
    kept = [_at(x, count, like.stored) for x, like in zip((theirs.keys, theirs.values), ours.kept, strict=True)]
    ours.kept = (Kept(None, kept[0]), Kept(None, kept[1]))
    if kind == "cross":
        ours.is_written = True
    else:
        ours.cumulative_length = torch.full_like(ours.cumulative_length, count)
        ours.is_empty = False


def _at(x: Tensor, count: int, like: Tensor) -> Tensor:
    """Zeros of the length of `like`, with the last of `count` positions that x [rows, heads, some, dim] has in them."""
    some = min(x.shape[2], count)  # of a window the last ones alone; of a static one what follows is not written
    found = like.new_zeros(x.shape[0], *like.shape[1:])
    found[:, :, count - some : count] = x[:, :, :some].to(like.device, like.dtype)
    return found
