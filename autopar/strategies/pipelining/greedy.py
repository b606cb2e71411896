"""A schedule of our own, for stages that the known ones do not suit: list scheduling within each rank's memory.

The ranks are run in time. One that is free does the most urgent computation that can start: a backward input, the one
of the latest stage first; else a forward, of the latest stage first; else a weight half. The first stage of a rank
admits a microbatch while what its stages will save of it fits beside what was admitted before, so that whatever has
been admitted can always be finished. Several such runs differ in whether backwards are split, whether a weight half may
delay what is known to come, and in how many microbatches may be in flight; the shortest is the schedule.

After Qi et al., Zero Bubble Pipeline Parallelism (arXiv:2401.10241), section 3.1, whose automatic search it simplifies.
Over stages that go there and back again, like those of their arXiv:2405.15362, it needs less memory than zbv: with that
of 1f1b, 16 ranks and 64 microbatches take 208 units where 1f1b takes 237; a rank's work is 192 (F = I = W = 1).
"""

from __future__ import annotations

import heapq
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from autopar.base.errors import AutoparError
from autopar.ir.schedule import Action, Kind, Schedule
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.schedules import compute_only
from autopar.strategies.pipelining.simulate import Wire, peak_bytes

NAME = "greedy"


@dataclass(frozen=True, slots=True)
class _Policy:
    """split: backwards into their halves. patient: no weight half that would delay what is known to arrive. in_flight:
    the most microbatches that a rank admits.
    """

    split: bool
    patient: bool
    in_flight: int


def there_and_back(num_ranks: int) -> tuple[int, ...]:
    """Stage -> rank with two stages a rank, the last one on the first rank: as in zbv and dualpipev."""
    return (*range(num_ranks), *reversed(range(num_ranks)))


def greedy(
    rank_of: Sequence[int],
    num_microbatches: int,
    costs: Sequence[StageCost],
    memory_bytes: float = float("inf"),
    link: Wire | None = None,
) -> Schedule:
    """The shortest of several list schedules of these stages. rank_of: stage -> rank. memory_bytes: of each rank.

    Deterministic. Raises:
        AutoparError: some rank cannot hold one microbatch.
    """
    found: list[tuple[float, float, list[list[Action]]]] = []
    for policy in _policies(rank_of, num_microbatches, costs):
        run = _Run(rank_of, num_microbatches, costs, memory_bytes, link, policy)
        order = run.run()
        found.append((run.makespan, sum(run.most), order))
    _, _, order = min(found, key=lambda each: each[:2])
    schedule = compute_only(NAME, num_microbatches, order)
    assert max(peak_bytes(schedule, costs)) <= memory_bytes * (1 + 1e-9), "greedy went over its memory"
    return schedule


def _policies(rank_of: Sequence[int], num_microbatches: int, costs: Sequence[StageCost]) -> Iterator[_Policy]:
    num_ranks = max(rank_of) + 1
    limits = sorted({min(limit, num_microbatches) for limit in (num_ranks, num_ranks * 3 // 2, 2 * num_ranks, 1 << 30)})
    can_split = all(cost.input_s > 0 or cost.weight_s > 0 for cost in costs)
    for split, patient in ((True, False), (True, True), (False, False)) if can_split else ((False, False),):
        for limit in limits:
            yield _Policy(split, patient, limit)


class _Run:
    """One run in time."""

    def __init__(
        self,
        rank_of: Sequence[int],
        num_microbatches: int,
        costs: Sequence[StageCost],
        memory_bytes: float,
        link: Wire | None,
        policy: _Policy,
    ) -> None:
        self.rank_of, self.num_microbatches, self.costs, self.policy = rank_of, num_microbatches, costs, policy
        self.link = link
        num_ranks, self.num_stages = max(rank_of) + 1, len(rank_of)
        self.own = [[s for s in range(self.num_stages) if rank_of[s] == rank] for rank in range(num_ranks)]
        # What a stage holds of a microbatch at most: all that it saved, or after I what is left and what I keeps.
        split = policy.split
        self.holds = [
            max(cost.saved_bytes, cost.saved_bytes - cost.input_bytes + cost.kept_bytes if split else 0.0)
            for cost in costs
        ]
        self.room = [self._room(rank, memory_bytes) for rank in range(num_ranks)]
        self.held = [0.0] * num_ranks
        self.most = [0.0] * num_ranks
        self.in_flight = [0] * num_ranks  # microbatches that the first stage of a rank is not through with
        self.parts = [0] * num_ranks  # stages of microbatches that are held
        self.forwards: list[deque[tuple[float, int]]] = [deque() for _ in range(self.num_stages)]
        self.forwards[0].extend((0.0, microbatch) for microbatch in range(num_microbatches))
        self.backwards: list[deque[tuple[float, int]]] = [deque() for _ in range(self.num_stages)]
        self.weights: list[deque[tuple[int, int]]] = [deque() for _ in range(num_ranks)]
        self.free = [0.0] * num_ranks
        self.order: list[list[Action]] = [[] for _ in range(num_ranks)]
        self.lanes: dict[tuple[int, int], float] = {}
        self.events = [(0.0, rank) for rank in range(num_ranks)]
        self.makespan = 0.0

    def _room(self, rank: int, memory_bytes: float) -> float:
        """What is left of a rank's memory for microbatches in flight."""
        costs = [self.costs[stage] for stage in self.own[rank]]
        working = max(max(cost.forward_working_bytes, self._backward_working(cost)) for cost in costs)
        there = sum(cost.static_bytes + cost.held_bytes for cost in costs)
        room, needed = memory_bytes - there - working, sum(self.holds[stage] for stage in self.own[rank])
        if needed > room:
            raise AutoparError(
                "No schedule fits in memory: a rank of the pipeline cannot hold one microbatch",
                where=f"rank {rank}, stages {', '.join(map(str, self.own[rank]))}",
                values=f"Of {memory_bytes:.4g} bytes {there + working:.4g} are taken, a microbatch needs {needed:.4g}",
                remedy="Take more microbatches, more ranks, or recompute activations",
            )
        return room

    def _backward_working(self, cost: StageCost) -> float:
        """What a backward takes beyond `holds`: while I runs, what it keeps is there beside all that was saved."""
        held = max(cost.saved_bytes, cost.saved_bytes - cost.input_bytes + cost.kept_bytes)
        beside = max(0.0, cost.saved_bytes + cost.kept_bytes - held) if self.policy.split else 0.0
        return cost.backward_working_bytes + beside

    def run(self) -> list[list[Action]]:
        """Each rank's computations in order."""
        heapq.heapify(self.events)
        while self.events:
            now, rank = heapq.heappop(self.events)
            # A rank is asked once at a time, when it is free; what arrives while it is busy waits for that.
            while self.events and self.events[0] == (now, rank):
                heapq.heappop(self.events)
            if self.free[rank] <= now:
                self.choose(rank, now)
        return self.order

    def choose(self, rank: int, now: float) -> None:
        """Start the most urgent computation of a free rank, or nothing: then what arrives next asks again."""
        later = float("inf")
        for queues, start in ((self.backwards, self.backward), (self.forwards, self.forward)):
            for stage in reversed(self.own[rank]):
                if queues[stage] and (queues is self.backwards or self.admits(rank, stage)):
                    arrives, microbatch = queues[stage][0]
                    if arrives <= now:
                        queues[stage].popleft()
                        start(rank, stage, microbatch, now)
                        return
                    later = min(later, arrives)
        if self.weights[rank]:
            stage, microbatch = self.weights[rank][0]
            if not self.policy.patient or now + self.costs[stage].weight_s <= later:
                self.weights[rank].popleft()
                self.begin(rank, Action(stage, Kind.BACKWARD_WEIGHT, microbatch), self.costs[stage].weight_s, now)
                self.release(rank, stage)

    def admits(self, rank: int, stage: int) -> bool:
        """Whether a forward has room: the first stage of a rank takes it for all of the rank's stages."""
        if stage != self.own[rank][0]:
            return True
        needed = sum(self.holds[each] for each in self.own[rank])
        if self.parts[rank] == 0:  # `room` holds one; sums of what comes and goes are not exact
            return True
        return self.in_flight[rank] < self.policy.in_flight and self.held[rank] + needed <= self.room[rank] * (1 + 1e-9)

    def forward(self, rank: int, stage: int, microbatch: int, now: float) -> None:
        if stage == self.own[rank][0]:
            self.in_flight[rank] += 1
            self.parts[rank] += len(self.own[rank])
            self.held[rank] += sum(self.holds[each] for each in self.own[rank])
            self.most[rank] = max(self.most[rank], self.held[rank])
        end = self.begin(rank, Action(stage, Kind.FORWARD, microbatch), self.costs[stage].forward_s, now)
        if stage == self.num_stages - 1:
            self.backwards[stage].append((end, microbatch))
        else:
            self.send(stage, stage + 1, self.costs[stage].forward_bytes, microbatch, end, self.forwards)

    def backward(self, rank: int, stage: int, microbatch: int, now: float) -> None:
        cost = self.costs[stage]
        # Nobody waits for the gradient of the first stage's input.
        whole = not self.policy.split or (stage == 0 and cost.backward_s <= cost.input_s + cost.weight_s)
        kind, seconds = (Kind.BACKWARD, cost.backward_s) if whole else (Kind.BACKWARD_INPUT, cost.input_s)
        end = self.begin(rank, Action(stage, kind, microbatch), seconds, now)
        if whole:
            self.release(rank, stage)
        else:
            self.weights[rank].append((stage, microbatch))
        if stage > 0:
            self.send(stage, stage - 1, cost.backward_bytes, microbatch, end, self.backwards)

    def begin(self, rank: int, action: Action, seconds: float, now: float) -> float:
        self.order[rank].append(action)
        end = now + seconds
        self.free[rank] = end
        self.makespan = max(self.makespan, end)
        heapq.heappush(self.events, (end, rank))
        return end

    def release(self, rank: int, stage: int) -> None:
        """What a stage held of a microbatch is free; it counts from the next computation on."""
        self.parts[rank] -= 1
        self.held[rank] -= self.holds[stage]
        if stage == self.own[rank][0]:
            self.in_flight[rank] -= 1

    def send(
        self, stage: int, to: int, size: float, microbatch: int, now: float, queues: list[deque[tuple[float, int]]]
    ) -> None:
        """Put what another stage waits for in its queue, with the time at which it arrives."""
        pair = self.rank_of[stage], self.rank_of[to]
        if pair[0] != pair[1] and self.link is not None:
            bandwidth = self.link.wire_bandwidth_bytes_per_s or self.link.bandwidth_bytes_per_s
            now = max(now, self.lanes.get(pair, 0.0)) + self.link.latency_s + size / bandwidth
            self.lanes[pair] = now
        queues[to].append((now, microbatch))
        heapq.heappush(self.events, (now, pair[1]))
