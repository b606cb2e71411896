"""A pipeline whose stages sleep instead of computing, over real gloo processes: what pipeline.py measures.

Processes that sleep do not contend for cores, so eight of them run on two cores as they would on eight. Everything else
is real: torch's schedule runtime through `make_runtime`, tensors through isend and irecv.
"""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, field, replace

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.torch_compat.pipelining import PipelineRuntime, make_runtime
from autopar.base.trace import Recorded
from autopar.ir.schedule import TRANSFERS, Action, Kind, Schedule
from autopar.machine.links import Link
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import Timeline, simulate
from benchmarks.training.ranks import launch, progress

NUMBERS = 256
"""Of a message, float32: small, so that what is measured is the order and not the wire."""
WARM_UP = 1
START_S = 0.02
"""From the moment that ranks agree on to the step's start."""


@dataclass(frozen=True, slots=True)
class Job:
    """A schedule to run: its order as text, stage -> rank, costs of its stages, microbatches."""

    order: list[list[str]]
    rank_of: list[int]
    costs: list[StageCost]
    num_microbatches: int


@dataclass(slots=True)
class Stage:
    """What torch's runtime asks of a stage. waits: of receives, by direction and microbatch."""

    job: Job
    stage_index: int
    group_rank: int
    submod: None = None
    has_backward: bool = True
    stage_index_to_group_rank: dict[int, int] = field(default_factory=dict)
    output_chunks: list[Tensor] = field(default_factory=list)
    waits: dict[tuple[bool, int], dist.Work] = field(default_factory=dict)
    sent: list[tuple[dist.Work, Tensor]] = field(default_factory=list)

    @property
    def num_stages(self) -> int:
        return len(self.job.rank_of)

    @property
    def group_size(self) -> int:
        return len(self.job.order)

    @property
    def is_first(self) -> bool:
        return self.stage_index == 0

    @property
    def is_last(self) -> bool:
        return self.stage_index == self.num_stages - 1

    def clear_runtime_states(self) -> None:
        self.waits.clear()
        self.sent.clear()

    def _send(self, to: int) -> list[dist.P2POp]:
        tensor = torch.zeros(NUMBERS)
        work = dist.isend(tensor, self.job.rank_of[to])
        assert work is not None
        self.sent.append((work, tensor))
        return []

    def _receive(self, source: int, forward: bool, microbatch: int) -> list[dist.P2POp]:
        work = dist.irecv(torch.empty(NUMBERS), self.job.rank_of[source])
        assert work is not None
        self.waits[forward, microbatch] = work
        return []

    def get_fwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        return self._send(self.stage_index + 1)

    def get_bwd_send_ops(self, microbatch: int) -> list[dist.P2POp]:
        return self._send(self.stage_index - 1)

    def get_fwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        return self._receive(self.stage_index - 1, True, microbatch)

    def get_bwd_recv_ops(self, microbatch: int) -> list[dist.P2POp]:
        return self._receive(self.stage_index + 1, False, microbatch)


class Sleeper:
    """One rank of a job: its runtime, and when each computation of the last step began and ended.

    late: of all steps, how much longer than asked for each computation slept.
    """

    def __init__(self, job: Job, rank: int, *, napping: bool = True) -> None:
        self.job = job
        self.napping = napping
        self.stages = {stage: Stage(job, stage, rank) for stage, owner in enumerate(job.rank_of) if owner == rank}
        functions = {kind: self.act for kind in Kind if kind not in TRANSFERS and kind is not Kind.OVERLAP_F_B}
        stages = list(self.stages.values())
        self.runtime: PipelineRuntime = make_runtime(stages, job.num_microbatches, job.order, rank, functions)
        self.records: list[tuple[str, float, float]] = []
        self.late: list[float] = []

    def act(self, action: Action) -> None:
        stage, cost = self.stages[action.stage], self.job.costs[action.stage]
        assert action.microbatch is not None or action.kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD)
        match action.kind:
            case Kind.FORWARD:
                work, seconds = stage.waits.pop((True, action.microbatch or 0), None), cost.forward_s
            case Kind.BACKWARD:
                work, seconds = stage.waits.pop((False, action.microbatch or 0), None), cost.backward_s
            case Kind.BACKWARD_INPUT:
                work, seconds = stage.waits.pop((False, action.microbatch or 0), None), cost.input_s
            case Kind.BACKWARD_WEIGHT:
                work, seconds = None, cost.weight_s
            case _:
                return
        if work is not None:
            work.wait()
        start = time.perf_counter()
        if self.napping:
            time.sleep(seconds)
        end = time.perf_counter()
        self.records.append((str(action), start, end))
        self.late.append(end - start - seconds)

    def step(self) -> tuple[float, float]:
        """Run once. The moment at which all ranks began, and when this one was through, its sends too."""
        self.records.clear()
        moment = torch.tensor([time.perf_counter() + START_S], dtype=torch.float64)
        dist.broadcast(moment, 0)
        start = float(moment.item())
        time.sleep(max(0.0, start - time.perf_counter()))
        self.runtime.run()
        for stage in self.stages.values():
            for work, _ in stage.sent:
                work.wait()
        return start, time.perf_counter()


@dataclass(frozen=True, slots=True)
class Overheads:
    """Seconds on this machine while it was measured, of what a rank does beside sleeping.

    message: on its way. post: an isend or irecv. launch: an action in torch's runtime. late: of a sleep's end.
    """

    message: float
    post: float
    launch: float
    late: float = 0.0

    def __str__(self) -> str:
        return (
            f"{1e6 * self.message:.0f} µs a message, {1e6 * self.post:.0f} µs to post it, {1e6 * self.launch:.0f} µs "
            f"an action, {1e6 * self.late:.0f} µs that a sleep ended late"
        )

    def link(self) -> Link:
        return Link(1e12, self.message)

    def costs(self, costs: Sequence[StageCost]) -> list[StageCost]:
        """With them. Every action of the simulation takes what a post does; a computation's cost has the rest."""
        more = self.late + self.launch - self.post
        return [
            replace(
                cost,
                forward_s=cost.forward_s + more,
                backward_s=cost.backward_s + more,
                input_s=cost.input_s + more,
                weight_s=cost.weight_s + more,
            )
            for cost in costs
        ]


class Gauge:
    """Takes overheads, of all ranks at once, between the steps that they are to explain."""

    def __init__(self) -> None:
        order = schedules.build("gpipe", 1, 64).order
        self.alone = Job([[str(action) for action in order[0]]], [0], [StageCost(0.0, 0.0)], 64)
        self.idle = Sleeper(self.alone, 0, napping=False)
        self.taken: list[Overheads] = []

    def take(self) -> None:
        dist.barrier()
        message = statistics.mean([self._round_trip() for _ in range(16)][4:]) / 2
        start = time.perf_counter()
        self.idle.runtime.run()
        launch = (time.perf_counter() - start) / len(self.alone.order[0])
        self.taken.append(Overheads(message, self._post(), launch))

    def _round_trip(self) -> float:
        rank, peer = dist.get_rank(), dist.get_rank() ^ 1
        tensor = torch.zeros(NUMBERS)
        start = time.perf_counter()
        for turn in (0, 1):
            if (rank < peer) == (turn == 0):
                dist.send(tensor, peer)
            else:
                dist.recv(tensor, peer)
        return time.perf_counter() - start

    def _post(self, count: int = 16) -> float:
        peer = dist.get_rank() ^ 1
        tensors = [torch.zeros(NUMBERS) for _ in range(2 * count)]
        start = time.perf_counter()
        works = [dist.irecv(tensor, peer) for tensor in tensors[:count]]
        works += [dist.isend(tensor, peer) for tensor in tensors[count:]]
        seconds = (time.perf_counter() - start) / (2 * count)
        for work in works:
            if work is not None:
                work.wait()
        return seconds


def measure(jobs: list[Job], rounds: int) -> dict[str, object]:
    """On this rank: for every job and round, when the step began and this rank ended; what the last step recorded."""
    rank = dist.get_rank()
    with suppress(OSError):  # what else runs on the machine is not to be measured
        os.nice(-10)
    sleepers = [Sleeper(job, rank) for job in jobs]
    gauge = Gauge()
    spans: list[list[tuple[float, float]]] = [[] for _ in jobs]
    for number in range(rounds + WARM_UP):
        gauge.take()
        for job, sleeper in enumerate(sleepers):
            dist.barrier()
            span = sleeper.step()
            if number >= WARM_UP:
                spans[job].append(span)
        progress(f"  round {number + 1} of {rounds + WARM_UP}")
    taken = [asdict(each) for each in gauge.taken[WARM_UP:]]
    late = [statistics.mean(sleeper.late) for sleeper in sleepers]
    usual = _trimmed([each for sleeper in sleepers for each in sleeper.late])
    return {
        "overheads": taken,
        "usual": usual,
        "late": late,
        "spans": spans,
        "records": [sleeper.records for sleeper in sleepers],
    }


@dataclass(frozen=True, slots=True)
class Measured:
    """One job: seconds of each round's step; the simulated step, with overheads and bare; the last round's record."""

    steps: list[float]
    timeline: Timeline
    bare: Timeline
    records: list[Recorded]


def run(jobs: Sequence[tuple[Schedule, list[StageCost]]], rounds: int) -> tuple[list[Measured], Overheads, Overheads]:
    """Jobs of the same number of ranks, in the same processes, a step each in turn; overheads, trimmed too."""
    num_ranks = jobs[0][0].num_ranks
    progress(f"{num_ranks} ranks: {', '.join(schedule.name for schedule, _ in jobs)}")
    plain = [
        Job(
            [[str(action) for action in row] for row in schedule.order],
            list(schedule.rank_of),
            costs,
            schedule.num_microbatches,
        )
        for schedule, costs in jobs
    ]
    ranks = launch(measure, plain, rounds, ranks=num_ranks)
    taken = [each for rank in ranks for each in rank["overheads"]]
    means = Overheads(**{name: statistics.mean(each[name] for each in taken) for name in taken[0]})
    measured = [_measured(*job, ranks, place, means) for place, job in enumerate(jobs)]
    late = statistics.mean(each for rank in ranks for each in rank["late"])
    usual = Overheads(**{name: _trimmed([each[name] for each in taken]) for name in taken[0]})
    return measured, replace(means, late=late), replace(usual, late=_trimmed([r["usual"] for r in ranks]))


def _trimmed(values: list[float]) -> float:
    """The mean without the highest and the lowest fifth."""
    cut = len(values) // 5
    return statistics.mean(sorted(values)[cut : len(values) - cut])


def _measured(
    schedule: Schedule, costs: list[StageCost], ranks: list[dict], place: int, overheads: Overheads
) -> Measured:
    spans = [rank["spans"][place] for rank in ranks]
    steps = [max(end for _, end in ends) - min(start for start, _ in ends) for ends in zip(*spans, strict=True)]
    overheads = replace(overheads, late=statistics.mean(rank["late"][place] for rank in ranks))
    timeline = simulate(schedule, overheads.costs(costs), overheads.link(), overheads.post)
    start = spans[0][-1][0]
    records = [
        Recorded(number, text, begin - start, end - start)
        for number, rank in enumerate(ranks)
        for text, begin, end in rank["records"][place]
    ]
    return Measured(steps, timeline, simulate(schedule, costs), records)
