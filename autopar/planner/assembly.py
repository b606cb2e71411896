"""A plan of decisions: the passes run once, the outcome checked, priced and put together."""

from __future__ import annotations

import math
from dataclasses import replace

from autopar import pipeline
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.text import format_bytes
from autopar.base.torch_compat import tracing
from autopar.ir.program import Program
from autopar.ir.sharding import local_shape
from autopar.passes.emit import interface_of
from autopar.passes.placement.mixtures import notes_of_whole_experts
from autopar.passes.placement.unsplit import (
    notes_of_idle_axes,
    notes_of_odd_tables,
    notes_of_whole_batches,
    notes_of_whole_inputs,
)
from autopar.planner.plan.decisions import Decisions
from autopar.planner.plan.record import PlanRecord, RegionSummary, Solved
from autopar.planner.price import price
from autopar.strategies.request import Attempt, Progress, Request


def redo(
    plan: PlanRecord,
    request: Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program | None = None,
    times: tuple[pipeline.PassTime, ...] = (),
) -> PlanRecord:
    """The decisions of `plan` on a model traced again (`program`: traced up to `rematerialize`). Nothing is solved.

    Raises:
        AutoparError: the plan was made for another program.
    """
    phases = pipeline.Phases.of(steps)
    first = phases.prepare if program is not None else (*phases.trace, *phases.prepare)
    together = plan.interface.together
    request = Attempt.of(request, rematerialize=plan.rematerialize, spread=plan.spread, together=together)
    program, before = pipeline.run(request, first, program=program)
    _check_border(plan, program)
    program, after = pipeline.run(request, phases.lower, program=plan.decisions.apply(program))
    again = make_plan(request, program, steps, (*times, *before, *after))
    stages = again.pipeline
    if stages is not None and plan.pipeline is not None:
        stages = replace(stages, considered=plan.pipeline.considered)
    cost = replace(again.cost, memory=plan.cost.memory)
    return replace(again, solved=plan.solved, cost=cost, pipeline=stages, notes=plan.notes, from_cache=True)


def without_padding(request: Attempt, steps: tuple[pipeline.Pass, ...], plan: PlanRecord) -> PlanRecord:
    """The same decisions without the rows that were added to vocabularies for axes to split them, where none does: then
    these rows are only computed with.
    """
    phases = pipeline.Phases.of(steps)
    assert plan.program is not None
    padded = any(variable.seen.shape != variable.type.shape for variable in plan.program.variables)
    if not padded or plan.pipeline is not None or not phases.have("pad", "rematerialize", "place"):
        return plan
    spread = replace(plan.spread or request.prepared, padded=False)
    wanted = replace(request, spread=spread)
    traced, _ = pipeline.run(wanted, phases.trace)
    try:
        other = redo(replace(plan, spread=spread), wanted, steps, traced)
    except AutoparError:  # an axis splits what it divides with these rows alone
        return plan
    if other.cost.step_time_s >= plan.cost.step_time_s:
        return plan
    return replace(other, times=plan.times, traced=traced, from_cache=False)


def _check_border(plan: PlanRecord, program: Program) -> None:
    """Decisions may well fit other sizes; what was promised of them (time, memory) would not."""
    planned = {e.name: e.shape for e in (*plan.interface.parameters, *plan.interface.inputs)}
    given = {v.name: v.type.shape for v in program.variables if v.is_parameter}
    given.update((port.name, port.type.shape) for port in program.inputs)
    for name in (*planned, *given):
        if planned.get(name) != given.get(name):
            raise AutoparError(
                "the plan was made for another model or batch",
                where=name,
                values=f"planned {planned.get(name, 'without it')}, given {given.get(name, 'without it')}",
                remedy="make the plan again for this model and batch",
            )


def plan_once(request: Attempt, steps: tuple[pipeline.Pass, ...], *, progress: Progress | None = None) -> PlanRecord:
    """The plan of one run of the passes.

    Raises:
        DoesNotFit: a rank would hold more than the memory limit.
    """
    program, times = pipeline.run(request, steps, progress=progress)
    plan = make_plan(request, program, steps, times)
    check_fits(plan)
    return plan


def check_fits(plan: PlanRecord) -> None:
    """Placement saw the step folded; here it has been walked. Of a pipeline the stages were checked when they were cut.

    Raises:
        DoesNotFit: a rank holds more than the limit at some time of the step.
    """
    peak, limit = plan.cost.peak_memory_bytes, plan.memory_limit_bytes
    if plan.pipeline is not None or limit is None or peak <= limit:
        return
    error = DoesNotFit(
        f"strategy {plan.strategy} on {plan.mesh} does not fit",
        values=f"the fullest time of a step takes {format_bytes(peak)} a rank, the memory limit is "
        f"{format_bytes(int(limit))}",
        remedy=f"set memory_limit to {peak} or more, use more ranks or a smaller batch",
    )
    error.ratio = peak / limit
    raise error


def make_plan(
    request: Attempt, program: Program, steps: tuple[pipeline.Pass, ...], times: tuple[pipeline.PassTime, ...]
) -> PlanRecord:
    """The plan of a lowered program, as yet without the program's text."""
    result = program.result
    cost, rows, summary = price(program)
    solved = Solved(0, 0, 0, cost.step_time_s, 0.0, float("inf"), 0.0)
    if result is not None:
        solved = Solved(
            result.num_nodes, result.num_choices, result.num_edges, result.cost_s, result.bound_s, result.gap,
            result.memory_price_s_per_byte, result.overlap_price, result.hides_exchanges,
        )  # fmt: skip
    return PlanRecord(
        type(request.model).__name__,
        request.whole_mesh,
        request.strategies,
        interface_of(program),
        "",
        cost,
        tuple(rows),
        tuple(_summary(program, region.name) for region in program.regions),
        solved,
        Decisions.of(program),
        tracing.dump_treespec(program.output_spec),
        program.output_leaves,
        times,
        request.pins,
        request.memory_limit_bytes,
        _notes(program, request),
        precision=request.precision,
        training=request.training,
        rematerialize=request.rematerialize,
        spread=request.spread,
        model=request.model,
        inputs=request.inputs,
        program=program,
        passes=steps,
        asked=request.pipeline,
        pipeline=summary,
        attention=program.attention,
    )


def _notes(program: Program, request: Request) -> tuple[str, ...]:
    strategies = request.strategies
    whole = (*notes_of_whole_batches(program), *notes_of_whole_inputs(program, strategies))
    idle = (*notes_of_idle_axes(program, strategies), *notes_of_odd_tables(program, strategies))
    return (*program.notes, *notes_of_whole_experts(program, strategies), *idle, *whole)


def _summary(program: Program, name: str) -> RegionSummary:
    region = program.region(name)
    operators = [node.name for node in region.graph.nodes if node.name in region.ops]
    forward = sum(operator in region.forward_nodes for operator in operators)
    size = 0
    if "backward" in region.lowered:
        lowered = region.lowered["forward"]
        output = next(node for node in lowered.graph.nodes if node.op == "output")
        assert program.mesh is not None
        for node in list(output.args[0])[lowered.num_results :]:
            type_, sharding = node.meta["type"], node.meta["sharding"]
            size += math.prod(local_shape(type_.shape, sharding, program.mesh.sizes)) * type_.dtype.itemsize
    return RegionSummary(name, region.module, program.num_calls(name), forward, len(operators) - forward, size)
