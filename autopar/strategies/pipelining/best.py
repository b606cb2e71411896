"""Which schedule takes least time within memory: every known one that is admitted, and the greedy one, simulated."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from autopar.base.errors import AutoparError
from autopar.ir.schedule import Schedule
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.greedy import greedy, there_and_back
from autopar.strategies.pipelining.simulate import Timeline, Wire, peak_bytes, simulate

CostsOf = Callable[[tuple[int, ...]], Sequence[StageCost]]
"""Stage -> rank to the costs of these stages."""


def best_schedule(
    num_ranks: int,
    num_microbatches: int,
    num_calls: int,
    costs_of: CostsOf,
    memory_bytes: float = float("inf"),
    link: Wire | None = None,
    launch_s: float = 0.0,
) -> Timeline:
    """The shortest step of all schedules whose stages have a call each and whose ranks hold at most memory_bytes.

    Of equally short ones the first known one. costs_of: asked once for each arrangement of stages on ranks.

    Raises:
        AutoparError: none fits; it names the one that comes nearest.
    """
    costs: dict[tuple[int, ...], Sequence[StageCost]] = {}
    best: Timeline | None = None
    nearest: tuple[float, str] = (float("inf"), "")
    for schedule in _all(num_ranks, num_microbatches, num_calls, costs, costs_of, memory_bytes, link):
        own = costs.get(schedule.rank_of) or costs.setdefault(schedule.rank_of, costs_of(schedule.rank_of))
        peak = max(peak_bytes(schedule, own))
        if peak > memory_bytes:
            nearest = min(nearest, (peak, schedule.name))
            continue
        timeline = simulate(schedule, own, link, launch_s)
        if best is None or timeline.makespan_s < best.makespan_s * (1 - 1e-9):
            best = timeline
    if best is None:
        raise AutoparError(
            f"No schedule of {num_ranks} ranks and {num_microbatches} microbatches fits in memory",
            values=f"There are {memory_bytes:.4g} bytes a rank; {nearest[1]} comes nearest with {nearest[0]:.4g}"
            if nearest[1]
            else f"There are {num_calls} calls",
            remedy="Take more ranks or more, smaller microbatches, or recompute activations",
        )
    return best


def _all(
    num_ranks: int,
    num_microbatches: int,
    num_calls: int,
    costs: dict[tuple[int, ...], Sequence[StageCost]],
    costs_of: CostsOf,
    memory_bytes: float,
    link: Wire | None,
) -> Iterator[Schedule]:
    for candidate in schedules.candidates(num_ranks, num_microbatches, num_calls):
        yield schedules.build(candidate.name, num_ranks, num_microbatches, candidate.stages_per_rank)
    for rank_of in (tuple(range(num_ranks)), there_and_back(num_ranks)):
        if len(rank_of) <= num_calls:
            own = costs.get(rank_of) or costs.setdefault(rank_of, costs_of(rank_of))
            try:
                yield greedy(rank_of, num_microbatches, own, memory_bytes, link)
            except AutoparError:
                continue  # not one microbatch fits on these stages
