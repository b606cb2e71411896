"""What a region's backward reads of its parameters."""

from __future__ import annotations

import operator

from autopar.ir.graphs import placeholders
from autopar.ir.region import Region


def reads_in_backward(region: Region, slot: int) -> bool:
    """Whether a region's backward reads this slot."""
    holder = placeholders(region.graph, slot + 1)[slot]
    return any(u.op == "call_function" and u.name not in region.forward_nodes for u in holder.users)


def reads_in_half(region: Region, slot: int, phase: str) -> bool:
    """Whether a half of the backward reads this slot. The region is lowered in halves."""
    name = region.slots[slot].name
    nodes = region.lowered[phase].graph.nodes
    return any(node.target is operator.getitem and node.args[1] == name for node in nodes)
