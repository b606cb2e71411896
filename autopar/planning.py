"""How a plan is found: what is tried, in which order, until something fits; then priced and put together."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable
from dataclasses import replace

from autopar import pipeline, plan_cache
from autopar.attention_axes import context_rows
from autopar.context_strategies import splits_sequence
from autopar.decisions import Decisions
from autopar.errors import AutoparError, DoesNotFit
from autopar.ir import Mode, Program
from autopar.mesh import Mesh
from autopar.passes.emit import emit, interface_of
from autopar.passes.overlap import in_flight_bytes
from autopar.passes.rematerialize import MODES
from autopar.pipelining.least_memory import too_little
from autopar.pipelining.spec import AXIS
from autopar.plans import Plan, RegionSummary, Solved
from autopar.report import format_bytes
from autopar.sharding import local_shape
from autopar.strategies import AUTO, Strategy, pipeline_of, resolve
from autopar.torch_compat import tracing

logger = logging.getLogger("autopar")
TIGHTER = 3
"""How often a placement is asked for less memory, or more, when a stage of a pipeline does not fit."""
OVERLAP_PRICE = 0.05
"""What a second of communication counts that may run beside the compute: the less of it, the better."""
WORTH_WAITING = 0.02
"""The part of a step that is waited for gathers and reductions from which on they are placed at their full price."""
MOST_PLACED = 1.4
"""Where a placement finds nothing within so many times the memory limit, no stages will fit it."""


def plan_point(
    request: pipeline.Request,
    mesh: Mesh,
    strategy: Strategy,
    rematerialize: Mode,
    microbatches: int,
    captured: dict[object, Program],
) -> Plan:
    """The plan of one point of a search: everything is given but the cut and the order of its stages.

    captured: programs of the whole batch, shared by the points.

    Raises:
        DoesNotFit: it takes more than the memory limit.
    """
    asked = pipeline_of(strategy, mesh)
    asked = asked.read() if asked is not None else None
    own = mesh if asked is None else mesh.without(AXIS)
    wanted = replace(
        request,
        mesh=own,
        strategies=resolve(strategy, mesh),
        microbatches=microbatches,
        pipeline=asked,
        rematerialize=rematerialize,
        explain=False,
        checks_limit=True,
        captured=captured,
    )
    steps = pipeline.DEFAULT
    cut = [step.name for step in steps].index("rematerialize")
    program, times = pipeline.run(wanted, steps[:cut])
    wanted = _with_layouts(wanted, steps[cut:], program)
    try:
        found = plan_once(wanted, steps[cut:], program=program, all_steps=steps)
    except DoesNotFit:
        # What moves least may hold too much.
        found = _plan_tighter(replace(wanted, checks_limit=False), steps[cut:], program, steps, None)
    return with_source(replace(found, times=(*times, *found.times)))


def first_fit(
    request: pipeline.Request, steps: tuple[pipeline.Pass, ...], mode: str, progress: pipeline.Progress | None
) -> Plan:
    """Keep activations if they fit; else recompute the cheap ones; else whole blocks. The trace is shared."""
    names = [step.name for step in steps]
    chosen = mode if mode in MODES else "none"
    if "rematerialize" not in names:
        return plan_once(replace(request, rematerialize=chosen), steps, progress=progress)
    cut = names.index("rematerialize")
    program, times = pipeline.run(request, steps[:cut], progress=progress)
    if mode != "auto" and request.pipeline is None:
        wanted = _with_layouts(replace(request, rematerialize=chosen), steps[cut:], program)
        alone = _plan_tighter(wanted, steps[cut:], program, steps, progress)
        return replace(alone, times=(*times, *alone.times), traced=program)
    modes = MODES if mode == "auto" else (chosen,)
    cached = plan_cache.find(request, program) if mode == "auto" else None
    if cached is not None:
        return redo(cached, request, steps, program, times)
    found: Plan | None = None
    named = AUTO not in request.strategies
    # Where strategies leave it to memory how parameters lie, the limit takes part from the beginning.
    bends = any(splits_sequence(each) for each in request.strategies)

    def once(wanted: pipeline.Request) -> Plan:
        return plan_once(wanted, steps[cut:], program=program, all_steps=steps, progress=progress)

    def tighter(wanted: pipeline.Request) -> Plan:
        return _plan_tighter(wanted, steps[cut:], program, steps, progress)

    for each in modes:
        last = each == modes[-1]
        # What a named strategy moves is not to change because memory is short: until nothing else is left to try, the
        # limit decides what is recomputed, not where things lie.
        explain, checks = request.explain and last and found is None, named and not last and not bends
        staged = request.pipeline is not None
        attempt = replace(request, rematerialize=each, explain=explain and not staged, checks_limit=checks)
        attempt = _with_layouts(attempt, steps[cut:], program)
        try:
            other = _plan_priced(attempt, tighter, once)
        except DoesNotFit as error:
            if found is None and last:
                if not (explain and staged):
                    raise _walked(error, replace(attempt, explain=False), tighter) from None
                raise too_little(attempt, tighter) from None
            if found is not None:
                break
            logger.info(
                "keeping %s does not fit: recomputing more", "all activations" if each == "none" else "products"
            )
            continue
        if found is None or other.cost.step_time_s < found.cost.step_time_s:
            found = other
        if named or found is not other or not found.solved.memory_price_s_per_byte:
            break  # memory costs nothing: recomputing would only add work
    assert found is not None
    return replace(found, times=(*times, *found.times), traced=program if mode == "auto" else found.traced)


def _with_layouts(request: pipeline.Request, steps: tuple[pipeline.Pass, ...], program: Program) -> pipeline.Request:
    """Under named strategies recomputing leaves layouts as they are without it: another layout may move less, and hold
    what the strategy is to split.
    """
    if AUTO in request.strategies or request.rematerialize == "none":
        return request
    names = [step.name for step in steps]
    plain = replace(request, rematerialize="none", memory_limit_bytes=None, explain=False)
    try:
        placed, _ = pipeline.run(plain, steps[: names.index("place") + 1], program=program)
    except AutoparError:
        return request  # it will be said of the placement that is asked for
    return replace(request, alike=placed)


_Planner = Callable[[pipeline.Request], Plan]


def _plan_priced(request: pipeline.Request, plan: _Planner, once: _Planner) -> Plan:
    """Under `auto`, gathers and reductions cost next to nothing, as they may run beside the compute. Where much of them
    does not, they are placed again at their full price; where memory lets nothing run beside it, within what is left.
    Stages of a pipeline are placed at the full price first, and at the other one if that fits at once (`once`).
    """
    if AUTO not in request.strategies:
        return plan(request)
    beside = replace(request, overlap_price=OVERLAP_PRICE)
    if request.pipeline is not None:
        found = plan(request)
        with contextlib.suppress(DoesNotFit):
            found = min(found, once(replace(beside, explain=False)), key=lambda each: each.cost.step_time_s)
        return found
    found = plan(beside)
    others: list[pipeline.Request] = []
    if waited_for(found) > WORTH_WAITING * found.cost.step_time_s:
        others.append(request)
    limit = request.memory_limit_bytes
    over = found.cost.peak_memory_bytes + in_flight(found) - (limit or math.inf)
    if limit and over > 0:
        others.append(replace(beside, placement_limit=1 - over / limit))
    for other in others:
        with contextlib.suppress(DoesNotFit):
            found = min(found, plan(replace(other, explain=False)), key=lambda each: each.cost.step_time_s)
    return found


def waited_for(plan: Plan) -> float:
    """Seconds of gathers and reductions that nothing hides."""
    parameters_s = sum(row.seconds for row in plan.collectives if row.why in ("gather parameter", "reduce gradient"))
    return max(0.0, parameters_s - plan.cost.hidden_s)


def in_flight(plan: Plan) -> int:
    """Bytes that gathers and reductions beside the compute would take, where memory did not allow for them."""
    assert plan.program is not None and plan.program.overlap is not None
    return 0 if plan.program.overlap.prefetch else in_flight_bytes(plan.program)


def _plan_tighter(
    request: pipeline.Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program,
    all_steps: tuple[pipeline.Pass, ...],
    progress: pipeline.Progress | None,
) -> Plan:
    """The placement sees the step folded, and the stages of a pipeline on average: where what then is needed does not
    fit, or no stages are found, it is given less or more memory, a few times.
    """
    low, high, limit = 0.0, math.inf, request.placement_limit
    walked: DoesNotFit | None = None
    for attempt in range(TIGHTER + 1):
        try:
            return plan_once(
                replace(request, placement_limit=limit), steps, program=program, all_steps=all_steps, progress=progress
            )
        except DoesNotFit as error:
            if request.pipeline is None:
                walked = walked or (error if error.ratio is not None else None)
                if error.ratio is None or attempt == TIGHTER:
                    raise walked or error from None
            if request.checks_limit or attempt == TIGHTER:
                raise
            low, high = (limit, high) if error.ratio is None else (low, limit)
            if low > MOST_PLACED:
                raise
            limit = limit * 1.2 if error.ratio is None else limit / error.ratio * 0.97
            if not low < limit < high:
                limit = math.sqrt(low * high)
            logger.info("what was placed does not fit: placing within %.3g of the memory limit", limit)
    raise AssertionError("unreachable")


def _walked(error: DoesNotFit, request: pipeline.Request, plan: Callable[[pipeline.Request], Plan]) -> DoesNotFit:
    """The error with the limit that will do once the step is walked, where the placement thought of a smaller one."""
    if error.needed_bytes is None:
        return error
    try:
        plan(replace(request, memory_limit_bytes=float(error.needed_bytes)))
    except DoesNotFit as other:
        if other.ratio is None:
            return error
        needed = math.ceil(other.ratio * error.needed_bytes)
        return DoesNotFit(
            error.what,
            where=error.where,
            values=f"the smallest limit that would do is {format_bytes(needed)} ({needed} bytes)",
            remedy=f"set memory_limit to {needed} or more, use more ranks, a smaller batch, or strategy='auto'",
        )
    return error


def redo(
    plan: Plan,
    request: pipeline.Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program | None = None,
    times: tuple[pipeline.PassTime, ...] = (),
) -> Plan:
    """The decisions of `plan` on a model traced again (`program`: traced up to `rematerialize`). Nothing is solved.

    Raises:
        AutoparError: the plan was made for another program.
    """
    names = [step.name for step in steps]
    start = names.index("rematerialize") if program is not None else 0
    place = names.index("place")
    request = replace(request, rematerialize=plan.rematerialize, spread=plan.spread)
    program, before = pipeline.run(request, steps[start:place], program=program)
    _check_border(plan, program)
    program, after = pipeline.run(request, steps[place + 1 :], program=plan.decisions.apply(program))
    again = make_plan(request, program, steps, (*times, *before, *after))
    stages = again.pipeline
    if stages is not None and plan.pipeline is not None:
        stages = replace(stages, considered=plan.pipeline.considered)
    cost = replace(again.cost, memory=plan.cost.memory)
    done = replace(again, solved=plan.solved, cost=cost, pipeline=stages, notes=plan.notes, from_cache=True)
    return with_source(done)


def _check_border(plan: Plan, program: Program) -> None:
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


def plan_once(
    request: pipeline.Request,
    steps: tuple[pipeline.Pass, ...],
    *,
    program: Program | None = None,
    progress: pipeline.Progress | None = None,
    all_steps: tuple[pipeline.Pass, ...] = (),
) -> Plan:
    """The plan of one run of the passes; `program`: the outcome of those of `all_steps` that come before `steps`."""
    first = len(all_steps) - len(steps) if all_steps else 0
    program, times = pipeline.run(request, steps, program=program, progress=progress, first=first)
    plan = make_plan(request, program, all_steps or steps, times)
    _check_fits(plan)
    return plan


def _check_fits(plan: Plan) -> None:
    """Placement saw the step folded; here it has been walked. Of a pipeline the stages were checked when they were cut.

    Raises:
        DoesNotFit: a rank holds more than the limit at some time of the step.
    """
    peak, limit = plan.cost.peak_memory_bytes, plan.memory_limit_bytes
    if plan.pipeline is not None or not plan.training or limit is None or peak <= limit:
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
    request: pipeline.Request, program: Program, steps: tuple[pipeline.Pass, ...], times: tuple[pipeline.PassTime, ...]
) -> Plan:
    """The plan of a lowered program, as yet without the program's text."""
    result = program.result
    cost, rows, summary = pipeline.price(program)
    solved = Solved(0, 0, 0, cost.step_time_s, 0.0, float("inf"), 0.0)
    if result is not None:
        solved = Solved(
            result.num_nodes, result.num_choices, result.num_edges, result.cost_s, result.bound_s, result.gap,
            result.memory_price_s_per_byte, result.overlap_price,
        )  # fmt: skip
    return Plan(
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
        program.notes,
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
        context=context_rows(program, request.strategies),
    )


def with_source(plan: Plan) -> Plan:
    """The plan with its program's text, which is not written of plans that are only compared."""
    if plan.source or plan.program is None:
        return plan
    return replace(plan, source=emit(plan.program, strategies=plan.strategies, title=plan.title))


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
