"""The two halves of a lowered backward: what inputs' gradients need, and the rest."""

from __future__ import annotations

import operator
from collections.abc import Mapping
from typing import Literal

from torch import fx

from autopar.ir.graphs import ancestors, is_view, parameter_only
from autopar.ir.reads import reads_in_half
from autopar.ir.region import Region

Half = Literal["forward", "input", "weight"]


INPUT_HALF, WEIGHT_HALF = "backward_input", "backward_weight"
"""Their names in `Region.lowered`."""


def half_of(region: Region) -> Mapping[str, Half]:
    """The half in which each operator of a differentiated region runs, by its name; in graph order."""
    output = next(node for node in region.graph.nodes if node.op == "output")
    first = len(region.outputs) + len(region.trainable_slots)
    before = ancestors(list(output.args[0])[first:])
    found: dict[str, Half] = {}
    for node in region.graph.nodes:
        if node.op == "call_function" and node.target is not operator.getitem:
            backward: Half = "input" if node in before else "weight"
            found[node.name] = "forward" if node.name in region.forward_nodes else backward
    return found


def operators_of_half(region: Region, half: Half) -> list[fx.Node]:
    """The operators that run in a half, in graph order."""
    halves = half_of(region)
    return [node for node in region.graph.nodes if halves.get(node.name) == half]


def weight_half_reads_parameters(region: Region) -> bool:
    """Whether the weight half reads anything from `p`, parameter or buffer; if not, nothing is to be gathered for it.
    False where the region has no backward.
    """
    if WEIGHT_HALF not in region.lowered:
        return False
    return any(reads_in_half(region, slot, WEIGHT_HALF) for slot in range(len(region.slots)))


def remade_by_weight_half(region: Region) -> set[fx.Node]:
    """What the weight half may make again: slots, what is made of them alone, and views of what it has.

    Whatever the forward made comes to it saved.
    """
    forward = region.forward_nodes
    again = {n for n in region.graph.nodes if n.op == "call_function" and n.name not in forward and is_view(n)}
    return again | {node for node in parameter_only(region, region.graph) if node.name not in forward}
