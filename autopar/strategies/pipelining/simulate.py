"""When every rank of a pipeline does what, and what it holds meanwhile: a discrete-event simulation of a schedule.

The model. A rank does its actions in order. A computation starts once what it waits for has arrived: a message from
another rank, or at the first of a stage the UNSHARD. SEND and RECV are posted and not waited for; a transfer starts
when both its ends are posted (gloo moves nothing before, and NCCL's kernels wait for the computations posted before
them) and the transfer before it from the same rank to the same rank is through; it takes latency + bytes / bandwidth.
UNSHARD and REDUCE_GRAD run beside the computations, one after the other on each rank; the step ends after them.

What waits for what does not depend on the costs. So the events are put in order once for a schedule, and each
simulation is one pass over them.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Protocol

import numpy as np

from autopar.base.errors import AutoparError
from autopar.ir.schedule import COMPUTE, TRANSFERS, Action, Kind, Schedule
from autopar.strategies.pipelining.check import check
from autopar.strategies.pipelining.costs import StageCost

_KINDS = tuple(Kind)
_NUMBER = {kind: number for number, kind in enumerate(_KINDS)}
_COMPUTE, _WAIT, _POST, _TRANSFER, _BESIDE, _MARK = range(6)
_CODES = [_COMPUTE if kind in COMPUTE else _POST if kind in TRANSFERS else _BESIDE for kind in _KINDS]
_CODES[_NUMBER[Kind.RESHARD]] = _MARK


class Wire(Protocol):
    """What carries messages between neighbours of the pipeline; `autopar.machine.hardware.Link` is one."""

    @property
    def bandwidth_bytes_per_s(self) -> float: ...
    @property
    def latency_s(self) -> float: ...
    @property
    def wire_bandwidth_bytes_per_s(self) -> float | None: ...


@dataclass(frozen=True, slots=True)
class Event:
    """One action as it ran: a computation, a transfer (on both its ranks), a gather or reduction beside them."""

    rank: int
    action: Action
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Timeline:
    """A simulated step.

    starts, ends: seconds from the step's start, of every leaf action of rank 0, then of rank 1, … in order; posts: when
    its rank came to it.
    """

    schedule: Schedule
    costs: tuple[StageCost, ...]
    makespan_s: float
    posts: Sequence[float] = field(repr=False)
    starts: Sequence[float] = field(repr=False)
    ends: Sequence[float] = field(repr=False)

    @cached_property
    def events(self) -> tuple[Event, ...]:
        """Every rank's, in the order of its actions."""
        program = _program(self.schedule)
        return tuple(map(Event, program.ranks, program.actions, self.starts, self.ends))

    @cached_property
    def busy_s(self) -> tuple[float, ...]:
        """Seconds that each rank computes."""
        program = _program(self.schedule)
        lengths = np.subtract(self.ends, self.starts)
        return tuple(float(lengths[slots].sum()) for slots in program.computing)

    @property
    def bubble_shares(self) -> tuple[float, ...]:
        """The share of the step in which each rank computes nothing."""
        # Sums in another order may come out above the makespan by a rounding error.
        return tuple(max(0.0, 1 - busy / self.makespan_s) if self.makespan_s else 0.0 for busy in self.busy_s)

    @property
    def bubble_share(self) -> float:
        """The same over all ranks."""
        return sum(self.bubble_shares) / self.schedule.num_ranks

    @cached_property
    def memory(self) -> tuple[tuple[list[float], list[float]], ...]:
        """Per rank, times and the bytes held from each of them on.

        Bytes of `StageCost`: static, held, saved of each microbatch in flight, kept and working. Messages under way are
        not counted.
        """
        program, changes = _program(self.schedule), _changes(self.schedule, self.costs)
        # What is gathered or freed counts from when the rank comes to it, a computation's from its start to its end.
        begins = np.where(program.computes, self.starts, self.posts)
        times = np.stack([begins, np.where(program.computes, self.ends, self.posts)], axis=1)
        return tuple(
            ([0.0, *times[slots].reshape(-1).tolist()], change.cumsum().tolist())
            for slots, change in zip(program.holding, changes)
        )

    @property
    def peak_bytes(self) -> tuple[float, ...]:
        """The most that each rank holds."""
        return peak_bytes(self.schedule, self.costs)

    @property
    def peak(self) -> tuple[int, float, float]:
        """The rank that holds most, the first time at which it does, and the bytes."""
        rank = int(np.argmax(self.peak_bytes))
        times, held = self.memory[rank]
        at = held.index(max(held))
        return rank, times[at], held[at]


def simulate(
    schedule: Schedule, costs: Sequence[StageCost], link: Wire | None = None, launch_s: float = 0.0
) -> Timeline:
    """Run a schedule of stages with these costs. link: between ranks; None for messages that take no time.

    launch_s: of its rank's time that every action takes beyond its costs.

    Raises:
        AutoparError: not one cost a stage, or a schedule that deadlocks. Others must have passed `check`.
    """
    _check_costs(schedule, costs)
    program = _program(schedule)
    seconds = [value for cost in costs for value in _seconds(cost, launch_s, link)]
    slots = range(len(program.actions))
    posts, starts, ends = [0.0 for _ in slots], [0.0 for _ in slots], [0.0 for _ in slots]
    now = [0.0] * schedule.num_ranks
    beside = [0.0] * schedule.num_ranks
    free = [0.0] * program.num_pairs
    for code, rank, slot, other, cost in zip(*program.nodes):
        if code == _COMPUTE:
            start = now[rank]
            starts[slot] = start
            now[rank] = ends[slot] = start + seconds[cost]
        elif code == _WAIT:
            if ends[other] > now[rank]:
                now[rank] = ends[other]
        elif code == _POST:
            posts[slot] = now[rank] = now[rank] + launch_s
        elif code == _TRANSFER:  # rank: the directed pair; slot, other: send and receive
            start = max(posts[slot], posts[other], free[rank])
            starts[slot] = starts[other] = start
            free[rank] = ends[slot] = ends[other] = start + seconds[cost]
        elif code == _BESIDE:
            posts[slot] = now[rank] = now[rank] + launch_s
            starts[slot] = max(now[rank], beside[rank])
            beside[rank] = ends[slot] = starts[slot] + seconds[cost]
        else:
            posts[slot] = starts[slot] = ends[slot] = now[rank]
    return Timeline(schedule, tuple(costs), max(*now, *ends), posts, starts, ends)


def peak_bytes(schedule: Schedule, costs: Sequence[StageCost]) -> tuple[float, ...]:
    """The most that each rank holds, as `Timeline.peak_bytes`: the order alone decides it, no simulation is needed.

    Raises:
        AutoparError: as `simulate`.
    """
    _check_costs(schedule, costs)
    return tuple(float(changes.cumsum().max()) for changes in _changes(schedule, costs))


def _check_costs(schedule: Schedule, costs: Sequence[StageCost]) -> None:
    if len(costs) != schedule.num_stages:
        raise AutoparError(
            "A simulation needs one cost for each stage",
            where=f"pipeline schedule {schedule.name}",
            values=f"There are {len(costs)} costs and {schedule.num_stages} stages",
        )


def _seconds(cost: StageCost, launch_s: float, link: Wire | None) -> Iterator[float]:
    """What each kind of action takes of one stage, by the kind's number."""
    bandwidth = (link.wire_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s) if link else float("inf")
    latency = link.latency_s if link else 0.0
    for kind in _KINDS:
        match kind:
            case Kind.FORWARD:
                yield cost.forward_s + launch_s
            case Kind.BACKWARD:
                yield cost.backward_s + launch_s
            case Kind.BACKWARD_INPUT:
                yield cost.input_s + launch_s
            case Kind.BACKWARD_WEIGHT:
                yield cost.weight_s + launch_s
            case Kind.SEND_F:
                yield latency + cost.forward_bytes / bandwidth
            case Kind.SEND_B:
                yield latency + cost.backward_bytes / bandwidth
            case Kind.UNSHARD:
                yield cost.unshard_s
            case Kind.REDUCE_GRAD:
                yield cost.reduce_s
            case _:
                yield 0.0


def _changes(schedule: Schedule, costs: Sequence[StageCost]) -> list[np.ndarray]:
    """Per rank, the bytes that it holds at first, then how the start and the end of each of its actions change them."""
    program = _program(schedule)
    table = np.zeros((schedule.num_stages, len(_KINDS), 2))
    for stage, cost in enumerate(costs):
        saved = cost.saved_bytes if schedule.has_backward else 0.0
        forward, backward, kept = cost.forward_working_bytes, cost.backward_working_bytes, cost.kept_bytes
        table[stage, _NUMBER[Kind.FORWARD]] = saved + forward, -forward
        table[stage, _NUMBER[Kind.BACKWARD]] = backward, -backward - saved
        table[stage, _NUMBER[Kind.BACKWARD_INPUT]] = backward + kept, -backward - cost.input_bytes
        table[stage, _NUMBER[Kind.BACKWARD_WEIGHT]] = backward, -backward - (saved - cost.input_bytes) - kept
        table[stage, _NUMBER[Kind.UNSHARD]] = cost.held_bytes, 0.0
        table[stage, _NUMBER[Kind.RESHARD]] = 0.0, -cost.held_bytes
    flat = table.reshape(-1, 2)
    static = [sum(costs[stage].static_bytes for stage in schedule.stages_of(r)) for r in range(schedule.num_ranks)]
    return [
        np.concatenate([[static[rank]], flat[program.costs[program.holding[rank]]].reshape(-1)])
        for rank in range(schedule.num_ranks)
    ]


@dataclass(frozen=True)
class _Program:
    """A schedule's events in an order in which each comes after what it waits for.

    nodes: columns code, rank, slot, other slot, cost; a slot is an action's place among all ranks' leaf actions, a cost
    its stage and kind. ranks, actions, costs, computes (whether it does): of every slot. computing, holding: per rank,
    the slots of computations, and of all that changes what is held.
    """

    nodes: tuple[list[int], list[int], list[int], list[int], list[int]]
    ranks: list[int]
    actions: list[Action]
    costs: np.ndarray
    computes: np.ndarray
    computing: list[np.ndarray]
    holding: list[np.ndarray]
    num_pairs: int


def _program(schedule: Schedule) -> _Program:
    if "simulate" not in schedule.tables:
        schedule.tables["simulate"] = _Builder(schedule).build()
    return schedule.tables["simulate"]


class _Builder:
    """Runs a schedule symbolically and writes down what happens. A message is a number."""

    def __init__(self, schedule: Schedule) -> None:
        self.schedule = schedule
        self.actions = [leaf for row in schedule.order for action in row for leaf in action.leaves]
        counts = [sum(len(action.leaves) for action in row) for row in schedule.order]
        self.ranks = [rank for rank, count in enumerate(counts) for _ in range(count)]
        self.slot = [sum(counts[:rank]) for rank in range(schedule.num_ranks)]
        self.stop = [first + count for first, count in zip(self.slot, counts)]
        self.kinds = [_NUMBER[action.kind] for action in self.actions]
        self.nodes: tuple[list[int], ...] = ([], [], [], [], [])
        self.unshard: dict[int, int] = {}
        num_messages = 2 * schedule.num_stages * schedule.num_microbatches
        self.sent, self.posted, self.arrived, self.waiting = ([-1] * num_messages for _ in range(4))
        self.lanes: dict[tuple[int, int], tuple[int, deque[int]]] = {}
        self.ready = list(range(schedule.num_ranks))[::-1]

    def build(self) -> _Program:
        first = list(self.slot)
        while self.ready:
            self.advance(self.ready.pop())
        if self.slot != self.stop or any(lane for _, lane in self.lanes.values()):
            check(self.schedule, backward=self.schedule.has_backward)
            raise AssertionError("check passed a schedule that does not end")
        kinds = np.array(self.kinds)
        computes = np.isin(kinds, [_NUMBER[kind] for kind in COMPUTE])
        holds = computes | np.isin(kinds, [_NUMBER[Kind.UNSHARD], _NUMBER[Kind.RESHARD]])
        spans = [np.arange(start, stop) for start, stop in zip(first, self.stop)]
        return _Program(
            nodes=self.nodes,  # type: ignore[arg-type]
            ranks=self.ranks,
            actions=self.actions,
            costs=np.array([action.stage for action in self.actions]) * len(_KINDS) + kinds,
            computes=computes,
            computing=[span[computes[span]] for span in spans],
            holding=[span[holds[span]] for span in spans],
            num_pairs=len(self.lanes),
        )

    def add(self, *node: int) -> None:
        for column, value in zip(self.nodes, node):
            column.append(value)

    def number(self, stage: int, microbatch: int | None, forward: bool) -> int:
        """Of the message that leaves a stage, forward or backward."""
        assert microbatch is not None
        return (stage * self.schedule.num_microbatches + microbatch) * 2 + (not forward)

    def advance(self, rank: int) -> None:
        """Let a rank do what it can."""
        while self.slot[rank] < self.stop[rank]:
            slot = self.slot[rank]
            action = self.actions[slot]
            match _CODES[self.kinds[slot]]:
                case 0:  # _COMPUTE
                    if not self.compute(rank, slot, action):
                        return
                case 2:  # _POST
                    self.post(rank, slot, action)
                case code:
                    self.add(code, rank, slot, 0, action.stage * len(_KINDS) + self.kinds[slot])
                    if action.kind is Kind.UNSHARD:
                        self.unshard[action.stage] = slot
            self.slot[rank] = slot + 1

    def compute(self, rank: int, slot: int, action: Action) -> bool:
        """A computation after what it waits for: its message, and at a stage's first the gather."""
        sender = self.sender(action)
        if sender >= 0:
            message = self.number(sender, action.microbatch, action.kind is Kind.FORWARD)
            if self.arrived[message] < 0:
                self.waiting[message] = rank
                return False
            self.add(_WAIT, rank, slot, self.arrived[message], 0)
        if action.stage in self.unshard:
            self.add(_WAIT, rank, slot, self.unshard.pop(action.stage), 0)
        self.add(_COMPUTE, rank, slot, 0, action.stage * len(_KINDS) + self.kinds[slot])
        return True

    def sender(self, action: Action) -> int:
        """The stage on another rank whose message a computation starts from, or -1."""
        if action.kind is Kind.BACKWARD_WEIGHT:
            return -1
        rank_of = self.schedule.rank_of
        sender = action.stage + (-1 if action.kind is Kind.FORWARD else 1)
        return sender if 0 <= sender < len(rank_of) and rank_of[sender] != rank_of[action.stage] else -1

    def post(self, rank: int, slot: int, action: Action) -> None:
        """One end of a transfer; those of a directed pair of ranks that have both ends now follow, in order."""
        self.add(_POST, rank, slot, 0, 0)
        forward, sends = action.kind in (Kind.SEND_F, Kind.RECV_F), action.kind in (Kind.SEND_F, Kind.SEND_B)
        step = 1 if forward else -1
        stage = action.stage if sends else action.stage - step
        message = self.number(stage, action.microbatch, forward)
        pair = self.schedule.rank_of[stage], self.schedule.rank_of[stage + step]
        number, lane = self.lanes.setdefault(pair, (len(self.lanes), deque()))
        if sends:
            self.sent[message] = slot
            lane.append(message)
        else:
            self.posted[message] = slot
        while lane and self.posted[lane[0]] >= 0:
            message = lane.popleft()
            send, receive = self.sent[message], self.posted[message]
            self.add(_TRANSFER, number, send, receive, self.actions[send].stage * len(_KINDS) + self.kinds[send])
            self.arrived[message] = receive
            if self.waiting[message] >= 0:
                self.ready.append(self.waiting[message])
                self.waiting[message] = -1
