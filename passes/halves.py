"""The backward of a region in two halves, for pipelines that fill their bubbles (Qi et al., 2401.10241).

The input half is what the gradients of the region's inputs are made of, the stages before wait for it; the weight half
is the rest, and gives the gradients of the slots whenever there is time. Between them the values that the weight half
reads are kept, each in the last sharding to which the input half moved it on the way to its reader, so that the halves
together send what the whole backward sends. The price: what is gathered for both lies gathered until the weight half
has run. Views, and what is made of parameters alone, are made again rather than kept, unless collectives moved them.

    dx = g·w; dw = gᵀ·x   →   input: dx = g·w, kept = (g, x)  |  weight: g, x = kept; dw = gᵀ·x
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.graphs import ancestors, operands_of, source_of
from autopar.ir.halves import remade_by_weight_half
from autopar.ir.sharding import Sharding
from autopar.passes.lowering import Form, PhaseBuilder


@dataclass(frozen=True, slots=True)
class Crossing:
    """kept: what the weight half gets from the input half. operators: what it computes, in order: its own, and what
    it makes again.
    """

    kept: tuple[Form, ...]
    operators: tuple[fx.Node, ...]


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
    free = remade_by_weight_half(phase.region)
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
