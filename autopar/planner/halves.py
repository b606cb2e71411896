"""Two microbatches that go through the program together, where the step is predicted shorter by it.

Over the stages of a pipeline a schedule's microbatches are pairs then: half as many are in the pipeline one after the
other, so more of the step is waited for its ends, and twice as much is in flight. What is asked for is planned so from
the beginning.
"""

from __future__ import annotations

import logging
from dataclasses import replace

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.passes.pair import TOGETHER, why_not
from autopar.planner.assembly import check_fits
from autopar.planner.plan.record import PlanRecord
from autopar.planner.programs import Programs
from autopar.strategies.pipelining.asked import refusal
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar")


def in_halves(programs: Programs, attempt: Attempt, found: PlanRecord) -> PlanRecord:
    """The best plan, or the same decisions with two microbatches at a time, if that is faster and fits, or asked for.

    Raises:
        DoesNotFit: it is asked for, and takes more than the memory limit.
        AutoparError: it is asked for, and cannot be had.
    """
    asked = programs.asked.halves
    if asked is False:
        return found
    reason = "passes has no pair" if not programs.phases.have("pair") else why_not(programs.placed(attempt)[0])
    if reason:
        if asked:
            raise AutoparError(
                f"halves=True: two microbatches cannot go through the program together: {reason}",
                where="halves",
                remedy="plan without halves, or with a strategy of experts and an even number of microbatches",
            )
        return found
    if attempt.together > 1 or not _admits(attempt):
        return found
    try:
        plan = programs.plan(replace(attempt, together=TOGETHER))
        check_fits(plan)
    except DoesNotFit:
        if asked:
            raise
        return found
    logger.info(
        "two microbatches at a time: %.3g s a step, %.3g in turn", plan.cost.step_time_s, found.cost.step_time_s
    )
    if plan.interface.together < TOGETHER or (not asked and plan.cost.step_time_s >= found.cost.step_time_s):
        return found
    return replace(plan, solved=found.solved, notes=found.notes)


def _admits(attempt: Attempt) -> bool:
    """Whether the schedule that is asked for takes half as many microbatches."""
    asked = attempt.pipeline
    return asked is None or refusal(asked, attempt.num_stage_ranks, attempt.microbatches // TOGETHER) is None
