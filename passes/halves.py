"""The backward of a region in two halves, for pipelines that fill their bubbles (Qi et al., 2401.10241).

The input half is what the gradients of the region's inputs are made of, the stages before wait for it; the weight half
is the rest, and gives the gradients of the slots whenever there is time. Between them the values that the weight half
reads are kept, each in the last sharding to which the input half moved it on the way to its reader, so that the halves
together send what the whole backward sends. The price: what is gathered for both lies gathered until the weight half
has run. Views, and what is made of parameters alone, are made again rather than kept, unless collectives moved them.

    dx = g·w; dw = gᵀ·x   →   input: dx = g·w, kept = (g, x)  |  weight: g, x = kept; dw = gᵀ·x
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.ir import Region
from autopar.passes.annotate import operands_of, source_of
from autopar.passes.differentiate import ancestors, is_view, parameter_only
from autopar.passes.lowering import Form, PhaseBuilder
from autopar.reads import reads_in_half as reads_in_half
from autopar.sharding import Sharding

Half = Literal["forward", "input", "weight"]

INPUT_HALF, WEIGHT_HALF = "backward_input", "backward_weight"
"""Their names in `Region.lowered`."""


@dataclass(frozen=True, slots=True)
class Crossing:
    """kept: what the weight half gets from the input half. operators: what it computes, in order: its own, and what
    it makes again.
    """

    kept: tuple[Form, ...]
    operators: tuple[fx.Node, ...]


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


def kept_for_weights(
    phase: PhaseBuilder,
    returned: Sequence[fx.Node],
    operators: Iterable[fx.Node],
    results: Iterable[tuple[fx.Node, Sharding]],
) -> Crossing:
    """What crosses between the halves.

    phase: the input half, complete but for what it keeps. returned: its lowered results. operators, results: of the
    weight half.
    """
    own = set(operators)
    free = _free(phase.region)
    live = ancestors(returned)
    kept: set[Form] = set()
    needed: set[fx.Node] = set()
    reads = list(results)
    while reads:
        node, wanted = reads.pop()
        producer, _ = source_of(node)
        if producer not in own:
            forms, steps = phase.layouts.way(node, wanted, phase.name)
            last = max((i for i, form in enumerate(forms) if phase.made.get(form) in live), default=0)
            moved = any(step.kind != "slice" for step in steps[:last])
            if moved or producer not in free:
                kept.add(forms[last])
                continue
        if producer.op == "call_function" and producer not in needed:
            needed.add(producer)
            strategy = phase.region.strategies[producer.name]
            reads += zip(operands_of(producer), strategy.operands, strict=True)
    place = {node: i for i, node in enumerate(phase.region.graph.nodes)}
    ordered = sorted(kept, key=lambda form: (place[form[0]], str(form[1])))
    return Crossing(tuple(ordered), tuple(node for node in phase.region.graph.nodes if node in needed))


def _free(region: Region) -> set[fx.Node]:
    """What the weight half may make again: slots, what is made of them alone, and views of what it has.

    Whatever the forward made comes to it saved.
    """
    forward = region.forward_nodes
    again = {n for n in region.graph.nodes if n.op == "call_function" and n.name not in forward and is_view(n)}
    return again | {node for node in parameter_only(region, region.graph) if node.name not in forward}
