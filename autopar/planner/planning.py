"""How a plan is found: what is tried, in which order, until something fits."""

from __future__ import annotations

import contextlib
import logging
import math
from collections.abc import Callable, Sequence
from dataclasses import replace

from autopar import pipeline
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.text import format_bytes
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.program import MODES, Mode, Program
from autopar.machine.mesh import Mesh
from autopar.planner import plan_cache
from autopar.planner.assembly import plan_once, redo
from autopar.planner.comparison import best_named
from autopar.planner.least_memory import too_little
from autopar.planner.plan.record import PlanRecord
from autopar.planner.prepared import Prepared
from autopar.strategies.context import splits_sequence
from autopar.strategies.names import AUTO, Strategy, pipeline_of, resolve
from autopar.strategies.pipelining.spec import AXIS
from autopar.strategies.request import Progress, Request

logger = logging.getLogger("autopar")
TIGHTER = 3
"""How often a placement is asked for less memory, or more, when what comes of it does not fit."""
OVERLAP_PRICE = 0.05
"""What a second of communication counts that may run beside the compute: the less of it, the better."""
WORTH_WAITING = 0.02
"""The part of a step that is waited for gathers and reductions from which on they are placed at their full price."""
TOGETHER = 0.995
"""What a placement gets of what should just do, as it comes in steps."""
MOST_PLACED = 1.4
"""Where a placement finds nothing within so many times the memory limit, no stages will fit it."""


def plan_point(
    request: Request,
    mesh: Mesh,
    strategy: Strategy,
    rematerialize: Mode,
    microbatches: int,
    captured: dict[object, Program],
) -> PlanRecord:
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
    phases = pipeline.Phases.of(steps)
    program, times = pipeline.run(wanted, phases.trace)
    wanted = _with_layouts(wanted, phases, program)
    try:
        found = plan_once(wanted, phases.after_trace, program=program, all_steps=steps)
    except DoesNotFit:
        # What moves least may hold too much.
        found = _plan_tighter(replace(wanted, checks_limit=False), phases.after_trace, program, steps, None)
    return replace(found, times=(*times, *found.times))


def first_fit(request: Request, steps: tuple[pipeline.Pass, ...], mode: str, progress: Progress | None) -> PlanRecord:
    """Keep activations if they fit; else recompute the cheap ones; else whole blocks. The trace is shared."""
    phases = pipeline.Phases.of(steps)
    chosen = mode if mode in MODES else "none"
    if not phases.have("rematerialize"):
        return plan_once(replace(request, rematerialize=chosen), steps, progress=progress)
    program, times = pipeline.run(request, phases.trace, progress=progress)
    if AUTO in request.strategies and request.pipeline is None and Prepared.serves(steps):
        cached = plan_cache.find(request, program) if mode == "auto" else None
        if cached is not None:
            return _again(cached, request, steps, program, times)
        fastest = _fit_auto(Prepared(request, steps, program), MODES if mode == "auto" else (chosen,), progress)
        return replace(fastest, times=(*times, *fastest.times), traced=program)
    if mode != "auto" and request.pipeline is None:
        wanted = _with_layouts(replace(request, rematerialize=chosen), phases, program)
        alone = _plan_priced(wanted, lambda each: _plan_tighter(each, phases.after_trace, program, steps, progress))
        return replace(alone, times=(*times, *alone.times), traced=program)
    modes = MODES if mode == "auto" else (chosen,)
    cached = plan_cache.find(request, program) if mode == "auto" else None
    if cached is not None:
        return _again(cached, request, steps, program, times)
    found: PlanRecord | None = None
    named = AUTO not in request.strategies
    # Where strategies leave it to memory how parameters lie, the limit takes part from the beginning.
    bends = any(splits_sequence(each) for each in request.strategies)

    def once(wanted: Request) -> PlanRecord:
        return plan_once(wanted, phases.after_trace, program=program, all_steps=steps, progress=progress)

    def tighter(wanted: Request) -> PlanRecord:
        return _plan_tighter(wanted, phases.after_trace, program, steps, progress)

    for each in modes:
        last = each == modes[-1]
        # What a named strategy moves is not to change because memory is short: until nothing else is left to try, the
        # limit decides what is recomputed, not where things lie.
        explain, checks = request.explain and last and found is None, named and not last and not bends
        staged = request.pipeline is not None
        attempt = replace(request, rematerialize=each, explain=explain and not staged, checks_limit=checks)
        attempt = _with_layouts(attempt, phases, program)
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


def _again(
    cached: PlanRecord,
    request: Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program,
    times: tuple[pipeline.PassTime, ...],
) -> PlanRecord:
    """A plan made before; traced anew where that was without padding."""
    if cached.spread is not None and not cached.spread.padded:
        return redo(cached, replace(request, spread=cached.spread), steps)
    return redo(cached, request, steps, program, times)


def _with_layouts(request: Request, phases: pipeline.Phases, program: Program) -> Request:
    """Under named strategies recomputing leaves layouts as they are without it: another layout may move less, and hold
    what the strategy is to split.
    """
    if AUTO in request.strategies or request.rematerialize == "none":
        return request
    plain = replace(request, rematerialize="none", memory_limit_bytes=None, explain=False)
    try:
        placed, _ = pipeline.run(plain, (*phases.prepare, *phases.place), program=program)
    except AutoparError:
        return request  # it will be said of the placement that is asked for
    return replace(request, alike=placed)


_Planner = Callable[[Request], PlanRecord]


def _plan_priced(request: Request, plan: _Planner, once: _Planner | None = None) -> PlanRecord:
    """What a named strategy moves least with, if the step that is walked fits; else what it does within the limit.

    Stages of a pipeline are placed at the full price of gathers and reductions first, and under `auto` at the price of
    what runs beside the compute if that fits at once (`once`).
    """
    walks = request.pipeline is None and AUTO not in request.strategies
    if walks and not request.checks_limit and not any(splits_sequence(each) for each in request.strategies):
        with contextlib.suppress(DoesNotFit):
            return plan(replace(request, checks_limit=True, explain=False))
    found = plan(request)
    if AUTO in request.strategies and once is not None and request.pipeline is not None:
        beside = replace(request, overlap_price=OVERLAP_PRICE, explain=False)
        with contextlib.suppress(DoesNotFit):
            found = min(found, once(beside), key=_step_s)
    return found


def _step_s(plan: PlanRecord) -> float:
    return plan.cost.step_time_s


def _fit_auto(prepared: Prepared, modes: Sequence[Mode], progress: Progress | None) -> PlanRecord:
    """The fastest plan of any of these modes of recomputation, but of those in which computing alone takes longer.

    Raises:
        DoesNotFit: nothing fits in any of them, nor does a named strategy.
    """
    request = prepared.request
    found: PlanRecord | None = None
    for mode in modes:
        if found is not None and prepared.least_s(mode) >= _step_s(found):
            continue
        annotated = prepared.annotated_for(mode)

        def tighter(wanted: Request, annotated: Program = annotated) -> PlanRecord:
            return _plan_tighter(wanted, prepared.phases.decide, annotated, prepared.steps, progress)

        explain = request.explain and mode == modes[-1] and found is None
        attempt = replace(request, rematerialize=mode, explain=explain)
        try:
            other = _plan_beside(attempt, tighter)
        except DoesNotFit as error:
            logger.info("recomputing %s, nothing was found that fits", mode)
            if found is not None or mode != modes[-1]:
                continue
            found = best_named(prepared, modes, math.inf, plan_once) if not request.pins else None
            if found is None:
                raise _walked(error, replace(attempt, explain=False), tighter) from None
            return found
        found = other if found is None else min(found, other, key=_step_s)
        if _beside(other) and not other.solved.memory_price_s_per_byte:
            break  # memory costs nothing: recomputing would only add work
    assert found is not None
    return replace(found, times=(*prepared.times, *found.times))


def _plan_beside(request: Request, plan: _Planner) -> PlanRecord:
    """Under `auto`, gathers and reductions cost next to nothing, as they may run beside the compute: where memory lets
    nothing run beside it, the placement gets less. Where much of them is waited for all the same, they are placed again
    at their full price.
    """
    beside = replace(request, overlap_price=OVERLAP_PRICE)
    found = other = plan(beside)
    for _ in range(TIGHTER):
        if _beside(other):
            break
        try:
            other = plan(replace(beside, placement_limit=_limit_beside(other), explain=False))
        except DoesNotFit:
            break
        found = min(found, other, key=_step_s)
    if waited_for(found) > WORTH_WAITING * _step_s(found):
        with contextlib.suppress(DoesNotFit):
            found = min(found, plan(replace(request, explain=False)), key=_step_s)
    return found


def waited_for(plan: PlanRecord) -> float:
    """Seconds of gathers and reductions that nothing hides."""
    parameters_s = sum(row.seconds for row in plan.collectives if row.why in ("gather parameter", "reduce gradient"))
    return max(0.0, parameters_s - plan.cost.hidden_s)


def _beside(plan: PlanRecord) -> bool:
    """Whether memory lets gathers and reductions run beside the compute."""
    assert plan.program is not None and plan.program.overlap is not None
    return plan.program.overlap.prefetch


def _limit_beside(plan: PlanRecord) -> float:
    """The part of the memory limit that a placement may get for gathers and reductions to run beside the compute, going
    by how much more than the limit this one then takes.
    """
    program, limit = plan.program, plan.memory_limit_bytes
    assert program is not None and program.overlap is not None and program.result is not None and limit is not None
    needed = step_peak_bytes(replace(program, overlap=replace(program.overlap, prefetch=True)))
    return program.result.peak_bytes / needed * TOGETHER


def _plan_tighter(
    request: Request,
    steps: tuple[pipeline.Pass, ...],
    program: Program,
    all_steps: tuple[pipeline.Pass, ...],
    progress: Progress | None,
) -> PlanRecord:
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


def _walked(error: DoesNotFit, request: Request, plan: Callable[[Request], PlanRecord]) -> DoesNotFit:
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
