"""The shares of a plan's seconds, by which those that could follow it are judged."""

from __future__ import annotations

import math
import re
from collections.abc import Sequence

from torch import fx

from autopar.cost.collectives import inside_row, num_calls, sends_values
from autopar.cost.context import attending_regions, seconds_in_attention
from autopar.cost.operator_time import region_seconds
from autopar.cost.under_way import step_hidden_s
from autopar.ir.graphs import is_attention
from autopar.ir.program import Program
from autopar.ir.sharding import Shard
from autopar.passes.placement.context import values_of_attention
from autopar.passes.placement.mixtures import is_experts
from autopar.planner.plan.record import PlanRecord

OF_PARAMETERS = ("gather parameter", "reduce gradient")
"""Why collectives run whose seconds depend on how parameters are kept."""


def values_s(plan: PlanRecord) -> float:
    """Seconds of computing and of moving values, but for what exchanges hide; neither what parameters and gradients
    take, nor the update.
    """
    moved_s = sum(row.seconds for row in plan.collectives if row.why not in OF_PARAMETERS)
    exchanges = plan.program is not None and any(row.kind == "exchange" for row in plan.collectives)
    beside_s = step_hidden_s(plan.program) if exchanges and plan.program is not None else 0.0
    return plan.cost.compute_s + moved_s - beside_s


def outside_s(plan: PlanRecord) -> float:
    """Seconds of computing outside of attention, and of moving values that it neither reads nor gives, exchanges
    apart; over the stages of a pipeline of computing alone.
    """
    assert plan.program is not None
    moved_s = _moved_outside_s(plan.program) if plan.pipeline is None else 0.0
    return plan.cost.compute_s - seconds_in_attention(plan.program) + moved_s


def without_attention_s(plan: PlanRecord) -> float:
    """Less than is left of a step without what attention computes, and what is moved of values that it reads and gives:
    as if all computing hid gathers and reductions. Nothing over the stages of a pipeline, where others may decide.
    """
    if plan.pipeline is not None:
        return 0.0
    assert plan.program is not None
    transfers_s = sum(row.seconds for row in plan.collectives if row.why in OF_PARAMETERS)
    moved_s = sum(row.seconds for row in plan.collectives) - transfers_s - _moved_outside_s(plan.program)
    could_hide_s = max(0.0, min(plan.cost.compute_s, transfers_s) - plan.cost.hidden_s)
    return plan.cost.step_time_s - seconds_in_attention(plan.program) - moved_s - could_hide_s


def by_sequence_s(plan: PlanRecord, axes: Sequence[int]) -> float:
    """Less than is left of a step outside of attention where these axes split the sequence instead of the batch, as
    they do here: operators that they leave whole are computed in pieces, and none of their values is moved over them.
    All else is as much of the work. Nothing over the stages of a pipeline.
    """
    if plan.pipeline is not None:
        return 0.0
    assert plan.program is not None
    program, saved_s = plan.program, 0.0
    mesh, attending = program.on_mesh, attending_regions(program)
    for region in program.regions:
        times = num_calls(program, region.name) * program.microbatches
        seconds = region_seconds(region, mesh) if times else {}
        attends = region.name in attending
        attention = {node.name for node in region.graph.nodes if attends and is_attention(node)}
        for name, own_s in seconds.items():
            choices = region.strategies[name].choices
            left = math.prod(mesh.sizes[axis] for axis in axes if choices[axis].kind == "none")
            saved_s += times * own_s * (1 - 1 / left) if name not in attention else 0.0
    names = {mesh.axis_names[axis] for axis in axes}
    rows = (row for row in plan.collectives if row.why not in OF_PARAMETERS)
    saved_s += sum(row.seconds for row in rows if not names.isdisjoint(re.split(r"\W+", row.axis)))
    return plan.cost.step_time_s - seconds_in_attention(program) - saved_s


def seconds_in_experts(plan: PlanRecord) -> float:
    """Seconds that experts of mixtures compute."""
    assert plan.program is not None
    program, found = plan.program, 0.0
    for region in program.regions:
        experts = {node.name for node in region.graph.nodes if is_experts(node)}
        if experts:
            times = num_calls(program, region.name) * program.microbatches
            seconds = region_seconds(region, program.on_mesh)
            found += times * sum(seconds[name] for name in experts if name in seconds)
    return found


def _moved_outside_s(program: Program) -> float:
    """Of collectives of values that attention neither reads nor gives, in a step. What brings sequences in order again
    that are dealt zigzag is moved for attention's sake, too, which not all ways to meet in it ask for.
    """
    found, attending = 0.0, attending_regions(program)
    for region in program.regions:
        near = values_of_attention(region) if region.name in attending else frozenset[str]()
        count = num_calls(program, region.name) * program.microbatches
        for phase in region.phases if count else ():
            for node in region.lowered[phase].graph.nodes:
                if sends_values(node) and not _is_zigzag(program, node) and _moved(node).name not in near:
                    found += inside_row(program, region, phase, node, count).seconds
    return found


def _is_zigzag(program: Program, node: fx.Node) -> bool:
    """Whether a move makes or ends a zigzag of its axis."""
    axis = program.on_mesh.axis_names.index(str(node.args[2]))
    ends = (node, node.args[1])
    return any(isinstance(p := end.meta["sharding"][axis], Shard) and p.zigzag for end in ends)  # type: ignore[union-attr]


def _moved(node: fx.Node) -> fx.Node:
    """What a chain of moves is of."""
    while sends_values(node) or (node.op == "call_method" and node.target == "slice"):
        source = node.args[1]
        assert isinstance(source, fx.Node)
        node = source
    return node


def waited_for(plan: PlanRecord) -> float:
    """Seconds of gathers and reductions that nothing hides."""
    parameters_s = sum(row.seconds for row in plan.collectives if row.why in OF_PARAMETERS)
    return max(0.0, parameters_s - plan.cost.hidden_s)


def prefetches(plan: PlanRecord) -> bool:
    """Whether memory lets gathers and reductions run beside the compute; without that pass nothing would."""
    assert plan.program is not None
    return plan.program.overlap is None or plan.program.overlap.prefetch


def faster(one: PlanRecord | None, other: PlanRecord | None) -> PlanRecord | None:
    """The faster of two plans; of equal ones the first."""
    if one is None or other is None:
        return one or other
    return other if other.cost.step_time_s < one.cost.step_time_s else one


def is_priced(plan: PlanRecord) -> bool:
    """Whether the placement might be another one at a higher price of gathers and reductions: where the objective has
    none that count that price, and memory forbids nothing, it grows of others alone.
    """
    result = None if plan.program is None else plan.program.result
    return result is None or result.priced_s > 0.0 or result.memory_price_s_per_byte > 0.0
