"""From a request to its plan: traced once, looked up, tried (`attempts.py`), and what is proven of it."""

from __future__ import annotations

import logging
import math
from collections.abc import Sequence
from dataclasses import replace

from autopar import pipeline
from autopar.base import environment
from autopar.base.errors import DoesNotFit
from autopar.base.text import format_bytes
from autopar.ir.program import MODES, Mode
from autopar.machine.mesh import Mesh
from autopar.passes.pair import TOGETHER
from autopar.planner import plan_cache
from autopar.planner.assembly import plan_once, redo, without_padding
from autopar.planner.attempts import attempts, named, tighter, tried_for
from autopar.planner.bounds import with_bound
from autopar.planner.halves import in_halves
from autopar.planner.least_memory import too_little
from autopar.planner.plan.record import PlanRecord
from autopar.planner.programs import NEEDED, Programs
from autopar.strategies.names import AUTO, Strategy, pipeline_of, resolve
from autopar.strategies.pipelining.spec import AXIS
from autopar.strategies.request import Attempt, Progress

logger = logging.getLogger("autopar")


def best_plan(
    request: Attempt, steps: Sequence[pipeline.Pass], modes: Sequence[Mode], progress: Progress | None = None
) -> PlanRecord:
    """The plan of one request, for one number of microbatches.

    modes: what the backward may compute again, least first. A plan that was made before for the same traced program and
    request is taken from the disk, where AUTOPAR_CACHE names a folder; with passes of the user's own it may be another.

    Raises:
        DoesNotFit: nothing fits the memory limit; says which would do, where that is known.
        AutoparError: what was asked cannot be had.
    """
    if not pipeline.Phases.of(steps).have(*NEEDED):
        return plan_once(replace(request, rematerialize=modes[0]), tuple(steps), progress=progress)
    programs = Programs.of(request, steps, progress)
    keeps = environment.read().cache_dir is not None and tuple(modes) == MODES and programs.steps == pipeline.DEFAULT
    cached = plan_cache.find(request, programs.traced) if keeps else None
    if cached is not None:
        return _redone(cached, programs)
    found = _fastest(programs, modes)
    if AUTO in request.strategies and not request.pins:
        found = without_padding(request, programs.steps, found)
    if keeps:
        plan_cache.keep(request, found, programs.traced)
    return found


def plan_point(
    request: Attempt,
    mesh: Mesh,
    strategy: Strategy,
    rematerialize: Mode,
    microbatches: int,
    captured: dict[object, object],
) -> PlanRecord:
    """The plan of one point of a search: everything is given but the cut and the order of its stages.

    captured: programs of the whole batch, shared by the points.

    Raises:
        DoesNotFit: it takes more than the memory limit.
    """
    asked = pipeline_of(strategy, mesh)
    asked = asked.read() if asked is not None else None
    wanted = Attempt.of(
        request,
        mesh=mesh if asked is None else mesh.without(AXIS),
        strategies=resolve(strategy, mesh),
        microbatches=microbatches,
        pipeline=asked,
        together=TOGETHER if request.halves and asked is not None else 1,
        explain=False,
        captured=captured,
    )
    programs = Programs.of(wanted, pipeline.DEFAULT)
    tried = tried_for(programs, lambda tried: named(programs, (rematerialize,), tried))
    if tried.best is None:
        raise tried.reason()[1]
    found = in_halves(programs, *tried.best)
    return replace(found, times=(*programs.times, *found.times))


def _fastest(programs: Programs, modes: Sequence[Mode]) -> PlanRecord:
    """What the loop finds."""
    asked = programs.asked
    tried = tried_for(programs, lambda tried: attempts(programs, modes, tried))
    if tried.best is None:
        attempt, error = tried.reason()
        if asked.explain and asked.pipeline is not None:
            raise too_little(attempt, lambda other: _within(programs, other)) from None
        raise _walked(programs, attempt, error) from None
    if tried.best[0].placed_by is not None and AUTO in asked.strategies:
        logger.info("auto takes the decisions of a named strategy, predicted %.3g s a step", tried.step_s)
    found = in_halves(programs, tried.best[0], with_bound(programs, tried))
    # Where one mode was asked for, explanations take no other.
    traced = programs.traced if len(modes) > 1 else None
    return replace(found, times=(*programs.times, *found.times), traced=traced)


def _within(programs: Programs, attempt: Attempt) -> PlanRecord:
    """The attempt within another memory limit than the request's.

    Raises:
        DoesNotFit: it takes more than that.
    """
    wanted = replace(attempt, placement_limit=1.0)
    programs = replace(programs, asked=replace(programs.asked, memory_limit_bytes=attempt.memory_limit_bytes))
    tried = tried_for(programs, lambda tried: tighter(wanted, tried))
    if tried.best is None:
        raise tried.reason()[1]
    return tried.best[1]


def _walked(programs: Programs, attempt: Attempt, error: DoesNotFit) -> DoesNotFit:
    """The error with the limit that will do once the step is walked, where the placement thought of a smaller one."""
    if error.needed_bytes is None:
        return error
    try:
        wanted = replace(
            attempt,
            overlap_price=1.0,
            hides_exchanges=False,
            explain=False,
            memory_limit_bytes=float(error.needed_bytes),
        )
        _within(programs, wanted)
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


def _redone(cached: PlanRecord, programs: Programs) -> PlanRecord:
    """A plan made before; traced anew where that was without padding."""
    asked, steps = programs.asked, programs.steps
    if cached.spread is not None and not cached.spread.padded:
        return redo(cached, replace(asked, spread=cached.spread), steps)
    return replace(redo(cached, asked, steps, programs.traced, tuple(programs.times)), traced=programs.traced)
