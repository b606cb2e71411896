"""How many microbatches a pipeline takes: planned once, predicted for the other numbers, planned again where one is
better.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor

from autopar.errors import AutoparError, DoesNotFit
from autopar.pipelining import greedy, schedules
from autopar.pipelining.actions import Schedule
from autopar.pipelining.costs import StageCost
from autopar.pipelining.simulate import simulate
from autopar.pipelining.spec import PipelineSpec
from autopar.pipelining.summary import PipelineSummary, StageSummary
from autopar.strategies import AxisStrategy, is_tensor_axis
from autopar.torch_compat import tracing

if TYPE_CHECKING:
    from autopar.mesh import Mesh
    from autopar.pipeline import Request
    from autopar.plans import Plan

logger = logging.getLogger("autopar")

FIRST_PER_RANK = 4
"""Microbatches for each rank of the pipeline in the first plan: a bubble of a fifth of 1F1B's step or less."""
WORTH = 0.97
"""Another number is planned when it is predicted to take less than this fraction of the step."""


def best_microbatches(request: Request, make: Callable[[Request], Plan]) -> Plan:
    """The plan with the number of microbatches whose simulated step is shortest.

    The first plan has several for each rank; what it costs is scaled to the others (operators by their rows, launches
    as they are), and the best of these is planned, too.

    Raises:
        AutoparError: as `make`; of a batch that no number fits, the error of the first.
    """
    assert request.pipeline is not None
    counts = possible(request)
    wanted = FIRST_PER_RANK * request.num_stage_ranks
    start = next((count for count in counts if count >= wanted), counts[-1])
    found: Plan | None = None
    error: DoesNotFit | None = None
    for count in (start, *(each for each in counts if each > start)):
        try:
            found = make(replace(request, microbatches=count))
            break
        except DoesNotFit as each:
            error = error or each
    if found is None:
        assert error is not None
        raise error
    assert found.pipeline is not None
    predicted = predictions(found.pipeline, request, counts)
    best = min(predicted, key=lambda count: (predicted[count], count), default=start)
    now = found.interface.microbatches
    if best != now and predicted[best] < WORTH * found.pipeline.timeline.makespan_s:
        logger.info("%d microbatches are predicted better than %d: planning them", best, now)
        try:
            other = make(replace(request, microbatches=best))
        except DoesNotFit:
            return found
        if other.cost.step_time_s < found.cost.step_time_s:
            return other
    return found


def possible(request: Request) -> list[int]:
    """The numbers of microbatches that the batch and the schedule admit, ascending.

    Raises:
        AutoparError: none is.
    """
    assert request.pipeline is not None
    rows = num_rows(request.inputs)
    ways = _data_ways(request.strategies, request.mesh)
    divisors = [count for count in range(1, rows + 1) if rows % count == 0]
    even = [count for count in divisors if rows // count % ways == 0]
    error: AutoparError | None = None
    found = []
    for count in even or divisors:
        try:
            _schedule(request.pipeline, request.num_stage_ranks, count)
            found.append(count)
        except AutoparError as each:
            error = each
    if not found:
        raise AutoparError(
            f"no number of microbatches suits {request.pipeline}",
            values=f"a batch of {rows} rows over {ways} data-parallel ranks can be cut into "
            f"{', '.join(map(str, even or divisors))}; {error}",
            remedy="use a larger batch, or another schedule",
        )
    return found


def num_rows(inputs: Mapping[str, Any]) -> int:
    """The size of the batch: that of the first dim of most inputs."""
    leaves, _ = tracing.tree_flatten(dict(inputs))
    sizes = [leaf.shape[0] for leaf in leaves if isinstance(leaf, Tensor) and leaf.dim()]
    return max(set(sizes), key=sizes.count, default=1)


def predictions(summary: PipelineSummary, request: Request, counts: list[int]) -> dict[int, float]:
    """The simulated step with each number of microbatches that fits, on the same stages."""
    now = summary.schedule.num_microbatches
    limit = request.memory_limit_bytes
    found: dict[int, float] = {}
    for count in counts:
        costs = [scaled(stage, now / count) for stage in summary.stages]
        try:
            schedule = _again(summary, count, costs, limit)
        except AutoparError:
            continue
        timeline = simulate(schedule, costs, summary.link)
        if limit is None or max(timeline.peak_bytes) <= limit:
            found[count] = timeline.makespan_s
    return found


def _again(summary: PipelineSummary, count: int, costs: Sequence[StageCost], limit: float | None) -> Schedule:
    """The plan's schedule with another number of microbatches."""
    schedule = summary.schedule
    if schedule.name == greedy.NAME:
        return greedy.greedy(schedule.rank_of, count, costs, math.inf if limit is None else limit, summary.link)
    spec = PipelineSpec(schedule.name, schedule.num_stages // schedule.num_ranks)
    return _schedule(spec, schedule.num_ranks, count)


def scaled(stage: StageSummary, rows: float) -> StageCost:
    """What a stage takes for microbatches with `rows` times as many rows: all but launches and parameters grows."""
    cost = stage.cost

    def seconds(whole: float, share: float = 1.0) -> float:
        fixed = min(whole, stage.launch_s * share)
        return fixed + (whole - fixed) * rows

    backward = cost.backward_s / max(cost.forward_s, 1e-30)
    return replace(
        cost,
        forward_s=seconds(cost.forward_s),
        backward_s=seconds(cost.backward_s, backward),
        input_s=seconds(cost.input_s, backward / 2),
        weight_s=seconds(cost.weight_s, backward / 2),
        forward_bytes=cost.forward_bytes * rows,
        backward_bytes=cost.backward_bytes * rows,
        saved_bytes=cost.saved_bytes * rows,
        input_bytes=cost.input_bytes * rows,
        kept_bytes=cost.kept_bytes * rows,
        forward_working_bytes=cost.forward_working_bytes * rows,
        backward_working_bytes=cost.backward_working_bytes * rows,
    )


def _schedule(asked: PipelineSpec, num_ranks: int, count: int) -> Schedule:
    if asked.is_file:
        return schedules.from_csv(Path(asked.schedule), num_ranks, count)
    name = "1f1b" if asked.schedule in ("auto", greedy.NAME) else asked.schedule
    return schedules.build(name, num_ranks, count, asked.stages_per_rank if name == asked.schedule else None)


def _data_ways(strategies: tuple[AxisStrategy, ...], mesh: Mesh) -> int:
    """Over how many ranks the batch is expected to be split."""
    pairs = zip(strategies, mesh.axes, strict=True)
    return math.prod(
        size
        for strategy, (axis, size) in pairs
        if strategy.inputs == "batch" or (strategy.inputs == "free" and not is_tensor_axis(axis))
    )
