"""What memory a pipeline would need, where the limit is too small for any: found by planning with other limits."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable
from dataclasses import replace

from autopar.base.errors import DoesNotFit
from autopar.base.text import format_bytes, plural
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.spec import AXIS
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar")
PLANS = 7
"""That are made to find it."""
CLOSE = 1.08
"""The ratio of a limit that does to one that does not, at which the search ends."""


def too_little(request: Attempt, plan: Callable[[Attempt], PlanRecord]) -> DoesNotFit:
    """The error of a limit that no pipeline fits, with the smallest limit that was found to do.

    Args:
        plan: with all that saves memory; of the request's own limit it raises DoesNotFit.
    """
    limit = request.memory_limit_bytes
    assert limit is not None and request.pipeline is not None
    best = _smallest(request, plan, limit)
    what = (
        f"no pipeline over {AXIS}={request.num_stage_ranks} fits the memory limit of {_size(limit)} a rank, "
        f"with {plural(request.microbatches, 'microbatch', 'microbatches')}"
    )
    remedy = "use more ranks, more microbatches, or zero3 on an axis of the stages"
    if best is None:
        return DoesNotFit(what, values="none was found at all", remedy=remedy)
    assert best.pipeline is not None and best.memory_limit_bytes is not None
    needed, schedule = math.ceil(best.memory_limit_bytes), best.pipeline.schedule
    fullest = max(range(schedule.num_ranks), key=best.pipeline.timeline.peak_bytes.__getitem__)
    runs = "; ".join(best.pipeline.stages[number].runs for number in schedule.stages_of(fullest))
    return DoesNotFit(
        what,
        values=f"the smallest limit found to do is {_size(needed)} ({needed} bytes), with the schedule "
        f"{schedule.name}; its fullest rank is {fullest} of {AXIS}, with {runs}",
        remedy=f"set memory_limit to {needed} or more, or {remedy}",
    )


def _smallest(request: Attempt, plan: Callable[[Attempt], PlanRecord], limit: float) -> PlanRecord | None:
    """The plan with the smallest limit that a bisection finds, in `PLANS` plans."""

    def tried(bytes_: float) -> PlanRecord | None:
        try:
            return plan(replace(request, memory_limit_bytes=bytes_, explain=False))
        except DoesNotFit:
            return None

    # Where strategies or pins exclude each other, the limit is not to blame: this raises what is.
    free = plan(replace(request, memory_limit_bytes=None, explain=True))
    assert free.pipeline is not None
    # What is fastest without a limit holds much; the least of the schedules is a start, if not always a limit.
    trial = math.ceil(min([free.cost.memory.peak, *(each.peak_bytes for each in free.pipeline.considered)]))
    best, low, high = None, limit, math.inf
    for _ in range(PLANS):
        found = tried(trial)
        logger.info("a memory limit of %s %s", _size(trial), "does not do" if found is None else "would do")
        if found is None:
            low = max(low, trial)
        else:
            best, high = found, trial
        if high <= low * CLOSE:
            break
        peak = math.inf if best is None else best.cost.memory.peak
        trial = math.ceil(2 * trial if best is None else max(0.5 * high, math.sqrt(low * high)))
        trial = min(trial, int(peak)) if low < peak else trial
    return best


def _size(num_bytes: float) -> str:
    return format_bytes(num_bytes)
