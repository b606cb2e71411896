"""Attention of prompts to a cache, as serving engines run it: kernels know how many positions are written, and that a
token sees those before it.

A program of autopar's has a mask there, over the whole length of the cache, as numbers of positions are values, but
where the cache is known to be empty. An engine multiplies half of the prompt's square, and reads the new keys and
values, not the codes that it just wrote.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import fx

from autopar.cost.fusion import hands_on
from autopar.cost.local_work import FEW_QUERIES
from autopar.cost.roofline import Work
from autopar.ir.region import Region

_ATTENTION = "autopar.attention.default"
_WRITES = (
    torch.ops.aten.index_copy.default, torch.ops.autopar.rotary_write.default, torch.ops.autopar.cache_write.default
)  # fmt: skip


def prompt_seconds(region: Region, work: Callable[[str], Work], time_of: Callable[[Work], float]) -> dict[str, float]:
    """Seconds of attention of more than a few queries whose keys are a cache that their own tokens are written into, by
    the first call for them, where a mask says what these see; and of what reads such a cache for it: nothing.

    work: of an operator by itself, by its name.
    """
    found: dict[str, float] = {}
    for node in region.graph.nodes:
        if node.name not in region.strategies or region.ops[node.name][0].name != _ATTENTION:
            continue
        call = region.ops[node.name][0]
        queries, keys = call.operands[0].shape[2], call.operands[1].shape[2]
        read = [_read_of_write(region, each, node) for each in node.args[1:3]]
        if queries <= FEW_QUERIES or any(each is None for each in read):
            continue
        own = work(node.name)
        assert own.dims is not None
        seen = (queries + 1) / 2
        dims = (own.dims[0], seen, own.dims[2], 0.0)
        told = "" if own.variant == "masked" else own.variant
        found |= {each.name: 0.0 for nodes in read for each in nodes or () if each.name in region.strategies}
        if call.arg("right") is not None:  # of an empty cache, and priced as that
            continue
        found[node.name] = time_of(replace(own, flops=own.flops * seen / keys, dims=dims, variant=told))
    return found


def _read_of_write(region: Region, value: object, reader: fx.Node) -> list[fx.Node] | None:
    """What makes numbers for a reader alone of a cache that was just written, from behind the write on; None where it
    is no such cache.
    """
    made: list[fx.Node] = []
    node = value
    while isinstance(node, fx.Node) and node.op == "call_function":
        if node.target in _WRITES:
            return [each for each in made if set(each.users) <= {reader, *made}]
        if not (hands_on(region, node) or _decodes(region, node)):
            return None
        made.append(node)
        node = next((each for each in node.all_input_nodes if each.op == "call_function"), None)
    return None


def _decodes(region: Region, node: fx.Node) -> bool:
    return node.name in region.strategies and region.ops[node.name][1].op_class == "elementwise"
