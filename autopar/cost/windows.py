"""Attention of a token through a window: kernels for a few queries read what its mask shows, not all of a cache.

A program of autopar's has a mask over the whole length of the cache; how many positions of it a token is shown, layer
by layer, is known where a plan for `generate()` has made its masks (`Program.shown`, by regions `Region.shown`).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

from autopar.cost.local_work import FEW_QUERIES, bytes_of_caches
from autopar.cost.roofline import Work
from autopar.ir.graphs import placeholders
from autopar.ir.nodes import argument
from autopar.ir.region import Region
from autopar.ir.shown import origin

_ATTENTION = ("autopar.attention.default", "autopar.attention_pieces.default")
_MASKS = ((3, "bias"), (4, "keys"))
"""The arguments of attention that are masks."""


def window_seconds(
    region: Region, sizes: tuple[int, ...], work: Callable[[str], Work], time_of: Callable[[Work], float]
) -> dict[str, float]:
    """Seconds of attention of a few queries whose mask is known to show few positions of a cache.

    sizes: of the mesh's axes. work: of an operator by itself, by its name. Of a cache that ranks share along its length
    it is that of the rank that has the window.
    """
    if not any(region.shown):
        return {}
    inputs = placeholders(region.graph)[len(region.slots) :]
    shown: dict[object, tuple[float, ...]] = dict(zip(inputs, region.shown, strict=False))
    found: dict[str, float] = {}
    for node in region.graph.nodes:
        call = region.ops[node.name][0] if node.name in region.strategies else None
        if call is None or call.name not in _ATTENTION or call.operands[0].shape[2] > FEW_QUERIES:
            continue
        masks = (origin(argument(node, place, name)) for place, name in _MASKS)
        counts = next((each for mask in masks if (each := shown.get(mask))), ())
        own = work(node.name)
        if not counts or own.dims is None:
            continue
        few = sum(min(each, own.dims[1]) for each in counts) / len(counts)
        part = few / own.dims[1]
        unread = (1.0 - part) * bytes_of_caches(call, region.strategies[node.name], sizes)
        dims = (own.dims[0], few, own.dims[2], 0.0)
        found[node.name] = time_of(
            replace(own, flops=own.flops * part, moved_bytes=own.moved_bytes - unread, dims=dims)
        )
    return found
