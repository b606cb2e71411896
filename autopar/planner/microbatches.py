"""How many microbatches a pipeline takes: planned once, predicted for the other numbers, planned again where one is
better.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

from torch import Tensor

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.text import plural
from autopar.base.torch_compat import tracing
from autopar.ir.schedule import Schedule
from autopar.machine.mesh import Mesh
from autopar.passes.batching import RowsTogether
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import is_tensor_axis
from autopar.strategies.pipelining import greedy, schedules
from autopar.strategies.pipelining.asked import check_asked, refusal
from autopar.strategies.pipelining.costs import StageCost, update_seconds
from autopar.strategies.pipelining.simulate import peak_bytes, simulate
from autopar.strategies.pipelining.spec import PipelineSpec
from autopar.strategies.pipelining.summary import PipelineSummary, StageSummary
from autopar.strategies.request import Attempt, Request

logger = logging.getLogger("autopar")

FIRST_PER_RANK = 4
"""Microbatches for each rank of the pipeline in the first plan: a bubble of a fifth of 1F1B's step or less."""
WORTH = 0.98
"""Another number is planned when it is predicted to take less than this fraction of the step. Fewer microbatches are
better than predicted: that larger products fill a device better is left out.
"""
MOST_PLANS = 3
"""That are made for it."""
NEAR, WORSE = 1.15, 1.1
"""Schedules that took up to so many times as long as the best are predicted for other numbers; where the step is so
many times the shortest one, larger numbers, or smaller ones, are not.
"""
UNDIVIDED = "the batch is one microbatch"
"""How the note begins."""
MOST_PER_RANK = 32
"""Microbatches for each rank, of those that are predicted: the bubble is 3% then."""


def best_microbatches(request: Attempt, make: Callable[[Attempt], PlanRecord]) -> PlanRecord:
    """The plan with the number of microbatches whose simulated step is shortest.

    The first plan has several for each rank; what it costs is scaled to the others (operators by their rows, launches
    as they are), and the best of these is planned, too, as long as one is predicted better. Where the batch cannot be
    taken apart, it is one microbatch, and a note says why and what that costs.

    Raises:
        AutoparError: as `make`; where no number fits the memory, the error of the largest.
    """
    assert request.pipeline is not None
    counts = possible(request)
    try:
        found = _first_that_fits(request, make, counts)
    except RowsTogether as error:
        return _undivided(request, make, counts, error)
    tried = {found.interface.microbatches}
    while len(tried) < MOST_PLANS:
        assert found.pipeline is not None
        predicted = predictions(found.pipeline, request, counts, found.interface.together)
        best = min(predicted, key=lambda count: (predicted[count], count), default=found.interface.microbatches)
        if best in tried or predicted[best] >= WORTH * found.cost.step_time_s:
            break
        logger.info("%d microbatches are predicted better than %d", best, found.interface.microbatches)
        tried.add(best)
        try:
            other = make(replace(request, microbatches=best, explain=False))
        except DoesNotFit:
            break
        if other.cost.step_time_s >= found.cost.step_time_s:
            break
        found = other
    return _in_halves(request, make, counts, found)


def _in_halves(
    request: Attempt, make: Callable[[Attempt], PlanRecord], counts: Sequence[int], found: PlanRecord
) -> PlanRecord:
    """The plan, or where that is faster one whose microbatches are cut in two that go through the program together: its
    schedule and what it holds are the same.
    """
    twice = 2 * found.interface.microbatches
    if not found.interface.experts or found.interface.together > 1 or request.halves is False or twice not in counts:
        return found
    try:
        other = make(replace(request, microbatches=twice, explain=False))
    except DoesNotFit:
        return found
    return other if other.cost.step_time_s < found.cost.step_time_s else found


def _first_that_fits(request: Attempt, make: Callable[[Attempt], PlanRecord], counts: Sequence[int]) -> PlanRecord:
    """The plan with the wanted number of microbatches, or where that does not fit, with more: a rank then holds the
    activations of fewer rows.
    """
    wanted = FIRST_PER_RANK * request.num_stage_ranks * request.together
    start = next((place for place, count in enumerate(counts) if count >= wanted), len(counts) - 1)
    for count in counts[start:-1]:
        try:
            return make(replace(request, microbatches=count, explain=False))
        except DoesNotFit:
            logger.info("%d microbatches do not fit the memory", count)
    return make(replace(request, microbatches=counts[-1]))


def _undivided(
    request: Attempt, make: Callable[[Attempt], PlanRecord], counts: Sequence[int], error: RowsTogether
) -> PlanRecord:
    """The plan of the whole batch as one microbatch.

    Raises:
        RowsTogether: the schedule does not admit that.
    """
    if counts[0] != 1 or request.together > 1:
        remedy = f"{request.pipeline} does not take one microbatch: use pipeline(1f1b), which does"
        raise RowsTogether(error.what, where=error.where, values=error.values, remedy=remedy) from error
    plan = make(replace(request, microbatches=1))
    assert plan.pipeline is not None
    waits = f"so that the ranks of the pipeline wait for {plan.pipeline.timeline.bubble_share:.0%} of the step"
    why = str(AutoparError(error.what, where=error.where, values=error.values)).removesuffix(".")
    return replace(plan, notes=(*plan.notes, f"{UNDIVIDED}, {waits}: {why}"))


def possible(request: Request) -> list[int]:
    """The numbers of microbatches that the batch and the schedule admit, ascending.

    Raises:
        AutoparError: none is.
    """
    spec, num_ranks = request.pipeline, request.num_stage_ranks
    assert spec is not None
    check_asked(spec, num_ranks)
    rows = num_rows(request.inputs)
    ways = _data_ways(request.strategies, request.mesh)
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    even = [count for count in divisors if rows // count % ways == 0]
    refusals = {count: _refusal(request, count) for count in even or divisors}
    found = [count for count, error in refusals.items() if error is None]
    if not found:
        last = list(refusals.values())[-1]
        assert last is not None
        raise AutoparError(
            f"no number of microbatches suits {spec}",
            values=f"a batch of {plural(rows, 'row', 'rows')} over {plural(ways, 'rank', 'ranks')} for data can be cut "
            f"into {', '.join(map(str, refusals))}; {str(last).rstrip('.')}",
            remedy="use a larger batch, or another schedule",
        )
    return found


def check_microbatches(request: Request) -> None:
    """The number that a user asked for, before anything is traced.

    Raises:
        AutoparError: the batch or the schedule does not admit it.
    """
    assert request.pipeline is not None
    check_asked(request.pipeline, request.num_stage_ranks)
    if error := _refusal(request, request.microbatches):
        raise error


def _refusal(request: Request, count: int) -> AutoparError | None:
    """Why a schedule does not take so many microbatches, two at a time where that is asked for; None where it does."""
    assert request.pipeline is not None
    together = request.together if isinstance(request, Attempt) else 1
    if count % together:
        return AutoparError(
            f"{plural(count, 'microbatch', 'microbatches')} cannot go through a pipeline two at a time",
            where="halves",
            remedy="use an even number of microbatches, or plan without halves",
        )
    error = refusal(request.pipeline, request.num_stage_ranks, count // together)
    if error is None or together == 1:
        return error
    turns = f"{plural(count, 'microbatch', 'microbatches')}, two at a time, are {count // together} for a schedule"
    return AutoparError(error.what, where="halves", values=f"{turns}; {error.values}", remedy=error.remedy)


def num_rows(inputs: Mapping[str, Any]) -> int:
    """The size of the batch: that of the first dim of most inputs."""
    leaves, _ = tracing.tree_flatten(dict(inputs))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return max(set(sizes), key=sizes.count, default=1)


def predictions(
    summary: PipelineSummary, request: Request, counts: Sequence[int], together: int = 1
) -> dict[int, float]:
    """The simulated step with each number of microbatches that fits, on the same stages, by the best schedule that may
    be asked for; from the plan's own number up and down as long as it does not become clearly worse. together: how many
    go through a stage at once, as in the plan.
    """
    assert request.pipeline is not None
    now, limit = summary.schedule.num_microbatches * together, request.memory_limit_bytes
    most = MOST_PER_RANK * request.num_stage_ranks * together
    counts = [count for count in counts if count % together == 0]
    found: dict[int, float] = {}
    up = [count for count in counts if now <= count <= most]
    down = [count for count in reversed(counts) if count < now]
    for way in (up, down):
        for count in way:
            costs = [scaled(stage, now / count, adds=count > together) for stage in summary.stages]
            steps = [
                simulate(schedule, costs, summary.link).makespan_s + update_seconds(schedule.rank_of, costs)
                for schedule in _schedules(summary, request.pipeline, count // together, costs, limit)
                if limit is None or max(peak_bytes(schedule, costs)) <= limit
            ]
            if steps:
                found[count] = min(steps)
                if found[count] > WORSE * min(found.values()):
                    break
    return found


def _schedules(
    summary: PipelineSummary, spec: PipelineSpec, count: int, costs: Sequence[StageCost], limit: float | None
) -> Iterator[Schedule]:
    """Those that run the same stages, as many of them, on any ranks, and were not far behind in the plan."""
    own = summary.schedule
    if spec.is_file:
        if count == own.num_microbatches:
            yield own
        return
    update_s = update_seconds(own.rank_of, [stage.cost for stage in summary.stages])
    v, step_s = own.num_stages // own.num_ranks, summary.timeline.makespan_s + update_s
    near = {each.schedule for each in summary.considered if each.stages_per_rank == v and each.step_s <= NEAR * step_s}
    for each in schedules.candidates(own.num_ranks, count, own.num_stages):
        if each.stages_per_rank == v and each.name in near | {own.name}:
            yield schedules.build(each.name, own.num_ranks, count, v)
    if own.name == greedy.NAME:
        with suppress(AutoparError):  # not even one microbatch fits
            yield greedy.greedy(own.rank_of, count, costs, math.inf if limit is None else limit, summary.link)


def scaled(stage: StageSummary, rows: float, *, adds: bool = True) -> StageCost:
    """What a stage takes for microbatches with `rows` times as many rows: all but launches and parameters grows.

    adds: whether gradients are added to those of other microbatches.
    """
    cost = stage.cost
    add_s = cost.add_s if adds else 0.0

    def seconds(whole: float, share: float = 1.0) -> float:
        fixed = min(whole, stage.launch_s * share)
        return fixed + (whole - fixed) * rows

    backward = cost.backward_s / max(cost.forward_s, 1e-30)
    return replace(
        cost,
        forward_s=seconds(cost.forward_s),
        backward_s=seconds(cost.backward_s - cost.add_s, backward) + add_s,
        input_s=seconds(cost.input_s, backward / 2),
        weight_s=seconds(max(0.0, cost.weight_s - cost.add_s), backward / 2) + add_s * (cost.weight_s > 0),
        add_s=add_s,
        forward_bytes=cost.forward_bytes * rows,
        backward_bytes=cost.backward_bytes * rows,
        saved_bytes=cost.saved_bytes * rows,
        input_bytes=cost.input_bytes * rows,
        kept_bytes=cost.kept_bytes * rows,
        forward_working_bytes=cost.forward_working_bytes * rows,
        backward_working_bytes=cost.backward_working_bytes * rows,
    )


def _data_ways(strategies: tuple[AxisStrategy, ...], mesh: Mesh) -> int:
    """Over how many ranks the batch is expected to be split."""
    pairs = zip(strategies, mesh.axes, strict=True)
    return math.prod(
        size
        for strategy, (axis, size) in pairs
        if strategy.inputs == "batch" or (strategy.inputs == "free" and not is_tensor_axis(axis))
    )
