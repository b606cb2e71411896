"""Whether a schedule runs to its end: each computation once and in order, each message sent and received, no deadlock.

Deadlocks are found by running the actions symbolically. A rank goes on after it posts a send or a receive, but its
transfers are made one after the other in the order in which it posts them, and a message is through when both its ranks
have come to it. Backends are freer than that, each in its own way (gloo matches the messages of one direction of a pair
of ranks in order, NCCL those of both, and all of a rank's where its communicators were connected eagerly), so what runs
to its end here runs to its end on each of them.
"""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import NamedTuple, NoReturn

from autopar.base.errors import AutoparError
from autopar.ir.schedule import COMPUTE, PARAMETERS, TRANSFERS, Action, Kind, Schedule

_BACKWARDS = (Kind.BACKWARD, Kind.BACKWARD_INPUT)
_ROWS = "Write every microbatch's F and B (or I and W) of each stage once, in the row of one rank"
_COMPUTE_ONLY = "Write computations only (F, B, I, W): the other actions are then added"
_SHOWN = 8
_MADE_BY = {Kind.SEND_F: Kind.FORWARD, Kind.SEND_B: Kind.BACKWARD}


class Message(NamedTuple):
    """What a stage sends of a microbatch: kind is SEND_F, to stage + 1, or SEND_B, to stage − 1."""

    kind: Kind
    stage: int
    microbatch: int


def check(schedule: Schedule, *, backward: bool = True) -> None:
    """Nothing for a schedule that runs to its end. backward: it has backwards too; else forwards only, as evaluation.

    Raises:
        AutoparError: names the rank and the action, and for a deadlock every rank that stands, with what it waits for.
    """
    check_computations(schedule, backward=backward)
    _check_parameters(schedule, backward)
    _check_transfers(schedule)
    run(schedule, transfers=True)


def check_computations(schedule: Schedule, *, backward: bool = True) -> None:
    """Every computation is there once, on its stage's rank, after what it needs of the same rank.

    Raises:
        AutoparError: one is not.
    """
    _check_stages(schedule)
    places: set[tuple[int, Kind, int]] = set()
    for rank, actions in enumerate(schedule.order):
        for action in _leaves(actions):
            _check_place(schedule, rank, action)
            if action.kind in COMPUTE:
                assert action.microbatch is not None
                key = (action.stage, action.kind, action.microbatch)
                if key in places:
                    _refuse(schedule, f"{action} is done twice", f"Rank {rank} does it again", _ROWS)
                places.add(key)
    for stage in range(schedule.num_stages):
        for microbatch in range(schedule.num_microbatches):
            _check_once(schedule, places, stage, microbatch, backward)
    for actions in schedule.order:
        _check_sequence(schedule, actions)


def _check_sequence(schedule: Schedule, actions: Sequence[Action]) -> None:
    """Every computation of a rank comes after those of the same rank that it needs."""
    done: set[tuple[int, Kind, int | None]] = set()
    for action in actions:
        for part in action.leaves:
            for needed in _needs_here(schedule, part):
                if not any((stage, kind, part.microbatch) in done for stage, kind in needed):
                    stage, kind = needed[0]
                    _refuse(
                        schedule,
                        f"{action} comes without {stage}{kind}{part.microbatch} before it",
                        f"Rank {schedule.rank_of[part.stage]} computes both",
                        "Do first what the other needs",
                    )
        done |= {(part.stage, part.kind, part.microbatch) for part in action.leaves}


def _check_stages(schedule: Schedule) -> None:
    for rank, actions in enumerate(schedule.order):
        if not actions:
            _refuse(schedule, f"Rank {rank} has nothing to do", None, "Give every rank at least one stage")
    for stage, rank in enumerate(schedule.rank_of):
        if not 0 <= rank < schedule.num_ranks:
            _refuse(schedule, f"Stage {stage} is nowhere computed", f"There are {schedule.num_stages} stages", _ROWS)


def _check_place(schedule: Schedule, rank: int, action: Action) -> None:
    if not 0 <= action.stage < schedule.num_stages:
        _refuse(
            schedule,
            f"{action} is of a stage that is not there",
            f"Rank {rank} does it; there are {schedule.num_stages} stages, from 0",
            _ROWS,
        )
    if schedule.rank_of[action.stage] != rank:
        _refuse(
            schedule,
            f"{action} is in the row of rank {rank}, but stage {action.stage} is on another rank",
            f"Rank {schedule.rank_of[action.stage]} computes stage {action.stage}",
            "Leave each stage to one rank",
        )
    if action.microbatch is not None and action.microbatch >= schedule.num_microbatches:
        _refuse(
            schedule,
            f"{action} is of a microbatch that is not there",
            f"There are {schedule.num_microbatches}, from 0",
            f"Leave it out, or ask for {action.microbatch + 1} microbatches",
        )


def _check_once(
    schedule: Schedule, places: set[tuple[int, Kind, int]], stage: int, microbatch: int, backward: bool
) -> None:
    """One F, and one B or one I and one W; each was found to be there at most once."""
    rank = schedule.rank_of[stage]
    forward, whole, first, second = (
        (stage, kind, microbatch) in places
        for kind in (Kind.FORWARD, Kind.BACKWARD, Kind.BACKWARD_INPUT, Kind.BACKWARD_WEIGHT)
    )
    if not forward:
        _refuse(schedule, f"{stage}F{microbatch} is missing", f"It belongs in the row of rank {rank}", _ROWS)
    if not backward:
        if whole or first or second:
            _refuse(schedule, f"Stage {stage} has a backward of microbatch {microbatch}", "Only forwards run", None)
        return
    if whole and (first or second):
        _refuse(
            schedule,
            f"Stage {stage} has B and {'I' if first else 'W'} of microbatch {microbatch}",
            "B is both halves at once",
            "Write B, or I and W",
        )
    if first != second:
        have, lack = ("I", "W") if first else ("W", "I")
        _refuse(
            schedule,
            f"Stage {stage} has {have} of microbatch {microbatch}, but no {lack}",
            f"Rank {rank} computes stage {stage}",
            "Write I and W, or B",
        )
    if not (whole or first):
        _refuse(
            schedule,
            f"Stage {stage} has no backward of microbatch {microbatch}",
            f"It belongs in the row of rank {rank}",
            _ROWS,
        )


def _needs_here(schedule: Schedule, action: Action) -> list[list[tuple[int, Kind]]]:
    """What a computation needs that its own rank computes: lists of stages and kinds, one of each list will do."""
    stage, rank = action.stage, schedule.rank_of[action.stage]
    needs: list[list[tuple[int, Kind]]] = []
    if action.kind is Kind.FORWARD:
        if stage > 0 and schedule.rank_of[stage - 1] == rank:
            needs.append([(stage - 1, Kind.FORWARD)])
    elif action.kind is Kind.BACKWARD_WEIGHT:
        needs.append([(stage, Kind.BACKWARD_INPUT)])
    elif action.kind in _BACKWARDS:
        needs.append([(stage, Kind.FORWARD)])
        if stage < schedule.num_stages - 1 and schedule.rank_of[stage + 1] == rank:
            needs.append([(stage + 1, kind) for kind in _BACKWARDS])
    return needs


def _check_parameters(schedule: Schedule, backward: bool) -> None:
    """UNSHARD before the first computation of a stage, RESHARD and REDUCE_GRAD after its last; each once."""
    for rank, actions in enumerate(schedule.order):
        leaves = list(_leaves(actions))
        counts = Counter((action.stage, action.kind) for action in leaves if action.kind in PARAMETERS)
        computes: dict[int, list[int]] = defaultdict(list)
        for at, action in enumerate(leaves):
            if action.kind in COMPUTE:
                computes[action.stage].append(at)
        for stage in schedule.stages_of(rank):
            for kind in (Kind.UNSHARD, Kind.RESHARD, Kind.REDUCE_GRAD):
                due = 1 if backward or kind is not Kind.REDUCE_GRAD else 0
                if counts[stage, kind] != due:
                    _refuse(
                        schedule,
                        f"Rank {rank} has {stage}{kind} {counts[stage, kind]} times",
                        f"It is due {due} times a step: the runtime gathers a stage's parameters once",
                        "Leave out UNSHARD, RESHARD and REDUCE_GRAD: they are then added, once for each stage",
                    )
        for at, action in enumerate(leaves):
            first, last = computes[action.stage][0], computes[action.stage][-1]
            if action.kind is Kind.UNSHARD:
                wrong = f"{action} comes after {leaves[first]}" if at > first else ""
            else:
                wrong = f"{action} comes before {leaves[last]}" if action.kind in PARAMETERS and at < last else ""
            if wrong:
                remedy = "Gather before a stage's first computation, reshard and reduce after its last"
                _refuse(schedule, wrong, f"Both are in the row of rank {rank}", remedy)


def message_of(action: Action) -> Message:
    """The message that a send or a receive is one end of."""
    assert action.microbatch is not None
    match action.kind:
        case Kind.RECV_F:
            return Message(Kind.SEND_F, action.stage - 1, action.microbatch)
        case Kind.RECV_B:
            return Message(Kind.SEND_B, action.stage + 1, action.microbatch)
        case _:
            return Message(action.kind, action.stage, action.microbatch)


def awaited(schedule: Schedule, action: Action) -> Message | None:
    """The message from another rank that a computation starts from; None where there is none."""
    if action.kind is Kind.FORWARD:
        kind, sender = Kind.SEND_F, action.stage - 1
    elif action.kind in _BACKWARDS:
        kind, sender = Kind.SEND_B, action.stage + 1
    else:
        return None
    if not 0 <= sender < schedule.num_stages or schedule.rank_of[sender] == schedule.rank_of[action.stage]:
        return None
    assert action.microbatch is not None
    return Message(kind, sender, action.microbatch)


def _text(message: Message, *, receive: bool = False) -> str:
    if not receive:
        return f"{message.stage}{message.kind}{message.microbatch}"
    forward = message.kind is Kind.SEND_F
    kind, stage = (Kind.RECV_F, message.stage + 1) if forward else (Kind.RECV_B, message.stage - 1)
    return f"{stage}{kind}{message.microbatch}"


def _check_transfers(schedule: Schedule) -> None:
    """Each message that a computation needs is sent after it is computed and received before it is used; no others."""
    for rank, actions in enumerate(schedule.order):
        computed: set[Message] = set()
        received: set[Message] = set()
        used: set[Message] = set()
        sent: set[Message] = set()
        for action in _leaves(actions):
            if action.kind in COMPUTE:
                message = awaited(schedule, action)
                if message is not None:
                    if message not in received:
                        _refuse(
                            schedule,
                            f"{action} comes without {_text(message, receive=True)} before it",
                            f"Rank {rank} needs what rank {schedule.rank_of[message.stage]} sends",
                            _COMPUTE_ONLY,
                        )
                    used.add(message)
                made = _made(action)
                if made is not None:
                    computed.add(made)
            elif action.kind in TRANSFERS:
                message = message_of(action)
                sending = action.kind in (Kind.SEND_F, Kind.SEND_B)
                _check_message(schedule, rank, action, message, sent if sending else received)
                if sending and message not in computed:
                    _refuse(schedule, f"{action} comes before what it sends is computed", f"On rank {rank}", None)
                (sent if sending else received).add(message)
        _check_all_sent(schedule, rank, computed, sent)


def _check_message(schedule: Schedule, rank: int, action: Action, message: Message, before: set[Message]) -> None:
    to = message.stage + (1 if message.kind is Kind.SEND_F else -1)
    if not (0 <= message.stage < schedule.num_stages and 0 <= to < schedule.num_stages):
        _refuse(schedule, f"{action} has no stage at its other end", f"There are {schedule.num_stages}", _COMPUTE_ONLY)
    if schedule.rank_of[message.stage] == schedule.rank_of[to]:
        _refuse(
            schedule,
            f"{action} is between two stages of one rank",
            f"Rank {rank} computes stages {message.stage} and {to}",
            "Leave it out: what stays on a rank is not sent",
        )
    if message in before:
        _refuse(schedule, f"{action} is done twice", f"On rank {rank}", _COMPUTE_ONLY)


def _check_all_sent(schedule: Schedule, rank: int, computed: Iterable[Message], sent: set[Message]) -> None:
    for message in sorted(computed):
        to = message.stage + (1 if message.kind is Kind.SEND_F else -1)
        if not 0 <= to < schedule.num_stages or schedule.rank_of[to] == rank:
            continue
        if message not in sent:
            _refuse(
                schedule,
                f"{_text(message)} is missing",
                f"Rank {schedule.rank_of[to]} waits for it in {_text(message, receive=True)}",
                _COMPUTE_ONLY,
            )


def run(schedule: Schedule, *, transfers: bool) -> None:
    """Run the order symbolically. transfers: it has sends and receives; else a result is there once it is computed.

    Raises:
        AutoparError: nothing can move before the end is reached.
    """
    _Symbolic(schedule, transfers).run()


class _Symbolic:
    """The ranks on their way: at, the action that each has come to; heads, how far its transfers are."""

    def __init__(self, schedule: Schedule, transfers: bool) -> None:
        self.schedule = schedule
        self.transfers = transfers
        self.at = [0] * schedule.num_ranks
        self.queues: list[list[Message]] = [[] for _ in schedule.order]
        self.heads = [0] * schedule.num_ranks
        self.through: set[Message] = set()
        self.waiting: dict[Message, int] = {}
        self.ready = list(range(schedule.num_ranks))

    def run(self) -> None:
        while self.ready:
            self.advance(self.ready.pop())
        order = self.schedule.order
        lines = [
            self.standing(rank)
            for rank in range(len(order))
            if self.at[rank] < len(order[rank]) or self.heads[rank] < len(self.queues[rank])
        ]
        if lines:
            _refuse(
                self.schedule,
                f"The schedule deadlocks: {len(lines)} of its {len(order)} ranks cannot go on",
                "; ".join(lines[:_SHOWN]) + (f"; and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""),
                _COMPUTE_ONLY if self.transfers else "Do earlier what the others wait for",
            )

    def advance(self, rank: int) -> None:
        """Let a rank do what it can."""
        order = self.schedule.order[rank]
        while self.at[rank] < len(order):
            action = order[self.at[rank]]
            message = self.missing(action)
            if message is not None:
                self.waiting[message] = rank
                return
            self.at[rank] += 1
            if not self.transfers:
                for made in (_made(leaf) for leaf in action.leaves):
                    if made is not None:
                        self.arrive(made)
            elif action.kind in TRANSFERS:
                self.queues[rank].append(message_of(action))
                self.transfer(rank)

    def missing(self, action: Action) -> Message | None:
        for leaf in action.leaves:
            message = awaited(self.schedule, leaf)
            if message is not None and message not in self.through:
                return message
        return None

    def arrive(self, message: Message) -> None:
        self.through.add(message)
        if message in self.waiting:
            self.ready.append(self.waiting.pop(message))

    def transfer(self, rank: int) -> None:
        """Let through what both ends have come to, on this rank and on those that this sets free."""
        moved = [rank]
        while moved:
            rank = moved.pop()
            if self.heads[rank] == len(self.queues[rank]):
                continue
            message = self.queues[rank][self.heads[rank]]
            peer = _peer(self.schedule, rank, message)
            if self.heads[peer] < len(self.queues[peer]) and self.queues[peer][self.heads[peer]] == message:
                self.heads[rank] += 1
                self.heads[peer] += 1
                self.arrive(message)
                moved += [rank, peer]

    def standing(self, rank: int) -> str:
        """Where a rank stands, and what it waits for."""
        texts = []
        order = self.schedule.order[rank]
        if self.at[rank] < len(order):
            message = self.missing(order[self.at[rank]])
            assert message is not None
            made = message if self.transfers else Message(_MADE_BY[message.kind], message.stage, message.microbatch)
            peer = self.schedule.rank_of[message.stage]
            texts.append(f"rank {rank} stands at {order[self.at[rank]]}, which waits for {_text(made)} of rank {peer}")
        if self.heads[rank] < len(self.queues[rank]):
            message = self.queues[rank][self.heads[rank]]
            text = _text(message, receive=self.schedule.rank_of[message.stage] != rank)
            peer = _peer(self.schedule, rank, message)
            texts.append(f"the transfers of rank {rank} stand at {text}, to which rank {peer} has not come")
        return ", ".join(texts)


def _made(action: Action) -> Message | None:
    """What a computation leaves for the next stage, or the one before."""
    if action.kind is Kind.BACKWARD_WEIGHT or action.kind not in COMPUTE:
        return None
    assert action.microbatch is not None
    kind = Kind.SEND_F if action.kind is Kind.FORWARD else Kind.SEND_B
    return Message(kind, action.stage, action.microbatch)


def _peer(schedule: Schedule, rank: int, message: Message) -> int:
    to = message.stage + (1 if message.kind is Kind.SEND_F else -1)
    source, target = schedule.rank_of[message.stage], schedule.rank_of[to]
    return target if rank == source else source


def _leaves(actions: Sequence[Action]) -> Iterable[Action]:
    return (leaf for action in actions for leaf in action.leaves)


def _refuse(schedule: Schedule, what: str, values: str | None, remedy: str | None) -> NoReturn:
    raise AutoparError(what, where=f"pipeline schedule {schedule.name}", values=values, remedy=remedy)
