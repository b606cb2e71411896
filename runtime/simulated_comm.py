"""All ranks of a mesh in one process, one thread each, meeting at every collective; messages go through mailboxes.

The meeting is also a check: ranks of one group that issue different collectives, or one that never comes, are an error
that names both, where real processes would hang or (gloo) silently swap data. So is a message that is received as
another one. As with gloo, messages of a directed pair keep their order, and one is sent when a receive is posted.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TypeVar

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.comm import MeshComm, reduction
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event, Message, Pending
from autopar.runtime.pieces import coordinates

T = TypeVar("T")
_Combine = Callable[[list[Tensor]], list[Tensor]]


class SimulatedMesh:
    """The meeting place of the simulated ranks.

    timeout_s: the longest a rank waits for its peers. A rank that has ended, or waits elsewhere while all others wait,
    is found at once; the timeout only catches one that computes forever.
    """

    def __init__(self, axes: Sequence[str], sizes: Sequence[int], timeout_s: float = 300.0) -> None:
        self.axes, self.sizes, self.timeout_s = tuple(axes), tuple(sizes), timeout_s
        self.num_ranks = 1
        for size in sizes:
            self.num_ranks *= size
        self._lock = threading.Lock()
        self._mail = threading.Condition(self._lock)
        self._mailboxes: dict[tuple[int, int], _Mailbox] = {}
        self._blocked: dict[int, _Blocked] = {}
        self._ended: set[int] = set()
        self._error: BaseException | None = None
        self._meetings: dict[tuple[int, ...], _Meeting] = {}

    def run(self, work: Callable[[SimulatedComm], T]) -> list[T]:
        """`work(comm)` for every rank at once; the results in rank order.

        Intra-operator threads are off meanwhile: the ranks already fill the cores, and sums stay in one order.

        Raises:
            AutoparError: ranks that disagree about a collective.
            Exception: the first one that any rank's `work` raised; the others are stopped.
        """
        self._blocked, self._ended, self._error, self._meetings, self._mailboxes = {}, set(), None, {}, {}
        results: dict[int, T] = {}

        def run_rank(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                results[rank] = work(SimulatedComm(self, rank))
            except _Stopped:
                pass
            except BaseException as error:  # carried to the caller's thread
                with self._lock:
                    self._fail(error)
            finally:
                with self._lock:
                    self._ended.add(rank)
                    self._find_deadlock()

        num_threads = torch.get_num_threads()
        threads = [threading.Thread(target=run_rank, args=(rank,), daemon=True) for rank in range(self.num_ranks)]
        try:
            torch.set_num_threads(1)
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
        finally:
            torch.set_num_threads(num_threads)
        if self._error is not None:
            raise self._error
        return [results[rank] for rank in range(self.num_ranks)]

    def meet(self, rank: int, event: Event, given: Tensor, combine: _Combine) -> Tensor:
        """Wait for the others of the group along `event.axis`; this rank's part of `combine(given, in rank order)`."""
        members, position = self.group(rank, event.axis)
        with self._lock:
            self._stop_if_failed()
            meeting = self._meetings.setdefault(members, _Meeting(threading.Condition(self._lock)))
            if meeting.given:
                other, (agreed, _) = next(iter(meeting.given.items()))
                if not agreed.agrees_with(event):
                    self._fail(_disagreement(other, agreed, rank, event))
                    raise _Stopped
            meeting.given[rank] = (event, given)
            if len(meeting.given) == len(members):
                self._finish(meeting, members, combine)
                return meeting.results[position]
            self._blocked[rank] = _Blocked(event, lambda: next(m for m in members if m not in meeting.given))
            self._find_deadlock()
            generation = meeting.generation
            if not meeting.changed.wait_for(
                lambda: self._error is not None or meeting.generation != generation, self.timeout_s
            ):
                self._fail(self._absence(rank))
            self._stop_if_failed()
            return meeting.results[position]

    def post(self, rank: int, peer: int, message: Message) -> Callable[[], Tensor | None]:
        """Send `message` to rank `peer`, or ask for it; what waits until the other side has done its part."""
        event, is_send = message.event, message.tensor is not None
        ends = (rank, peer) if is_send else (peer, rank)
        with self._lock:
            self._stop_if_failed()
            box = self._mailboxes.setdefault(ends, _Mailbox())
            mine, theirs = (box.sent, box.asked) if is_send else (box.asked, box.sent)
            ticket = len(mine)
            mine.append(event)
            if message.tensor is not None:
                box.tensors.append(message.tensor.detach().clone())
            if ticket < len(theirs):
                if not _is_same_message(box.sent[ticket], box.asked[ticket]):
                    self._fail(_other_message(*ends, box.sent[ticket], box.asked[ticket]))
                    raise _Stopped
                # Only the peer can have waited for this.
                if peer in self._blocked and self._blocked[peer].is_over():
                    del self._blocked[peer]
                self._mail.notify_all()

        def wait() -> Tensor | None:
            with self._lock:
                self._stop_if_failed()
                if ticket >= len(theirs):
                    self._blocked[rank] = _Blocked(event, lambda: peer, lambda: ticket < len(theirs))
                    self._find_deadlock()
                    came = self._mail.wait_for(lambda: self._error is not None or ticket < len(theirs), self.timeout_s)
                    if not came:
                        self._fail(self._absence(rank))
                    self._stop_if_failed()
                if is_send:
                    return None
                found, box.tensors[ticket] = box.tensors[ticket], None
                return found

        return wait

    def _finish(self, meeting: _Meeting, members: tuple[int, ...], combine: _Combine) -> None:
        try:
            meeting.results = combine([meeting.given[member][1] for member in members])
        except BaseException as error:  # carried to the caller's thread
            self._fail(error)
            raise _Stopped from None
        meeting.given = {}
        meeting.generation += 1
        for member in members:
            self._blocked.pop(member, None)
        meeting.changed.notify_all()

    def group(self, rank: int, axis: str) -> tuple[tuple[int, ...], int]:
        """The ranks that differ from `rank` only along `axis`, and its place among them."""
        which = self.axes.index(axis)
        stride = 1
        for size in self.sizes[which + 1 :]:
            stride *= size
        position = coordinates(rank, self.sizes)[which]
        first = rank - position * stride
        return tuple(first + i * stride for i in range(self.sizes[which])), position

    def _find_deadlock(self) -> None:
        """When every rank has ended or waits, nobody will come: say so now rather than after the timeout."""
        if self._error is None and self._blocked and len(self._blocked) + len(self._ended) == self.num_ranks:
            self._fail(self._absence(min(self._blocked)))

    def _absence(self, rank: int) -> AutoparError:
        event = self._blocked[rank].event
        missing = self._blocked[rank].missing()
        if missing in self._ended:
            doing = "has ended"
        elif missing in self._blocked:
            doing = f"waits in {self._blocked[missing].event}"
        else:
            doing = f"did not come within {self.timeout_s:g} s"
        return AutoparError(
            f"rank {rank} waits over axis {event.axis} for rank {missing}, which {doing}",
            where=event.where or None,
            values=f"rank {rank}: {event}",
        )

    def _fail(self, error: BaseException) -> None:
        if self._error is None:
            self._error = error
        for meeting in self._meetings.values():
            meeting.changed.notify_all()
        self._mail.notify_all()

    def _stop_if_failed(self) -> None:
        if self._error is not None:
            raise _Stopped


class SimulatedComm(MeshComm):
    """One rank of a `SimulatedMesh`. Reductions accumulate in rank order, so results are the same in every run.

    view: the axes, sizes and rank that it shows, where that is only a part of the mesh.
    """

    def __init__(
        self, mesh: SimulatedMesh, rank: int, view: tuple[tuple[str, ...], tuple[int, ...], int] | None = None
    ) -> None:
        super().__init__(*(view or (mesh.axes, mesh.sizes, rank)))
        self.log = []
        self._mesh, self._thread = mesh, rank

    def _within(self, axes: tuple[str, ...]) -> Communicator:
        return SimulatedComm(self._mesh, self._thread, (axes, *self._inner(axes)))

    def _exchange(self, axis: str, messages: Sequence[Message], together: bool) -> Pending:
        members, _ = self._mesh.group(self._thread, axis)
        return Pending([self._mesh.post(self._thread, members[message.peer], message) for message in messages])

    def _all_gather(self, x: Tensor, event: Event) -> Tensor:
        return self._mesh.meet(self._thread, event, x, lambda given: [torch.stack(given) for _ in given])

    def _all_reduce(self, x: Tensor, event: Event) -> Tensor:
        combine = reduction(event.op, _COMBINE, self.where)

        def reduce(given: list[Tensor]) -> list[Tensor]:
            total = combine(given)
            return [total.clone() for _ in given]

        return self._mesh.meet(self._thread, event, x, reduce)

    def _begin(self, x: Tensor, event: Event, owned: bool) -> Callable[[], Tensor]:
        """What is owned is overwritten, as processes do: whoever still reads it shows in a proof."""
        wait = super()._begin(x, event, owned)
        if owned and event.kind == "all_reduce":
            x.copy_(wait())
        return wait

    def _reduce_scatter(self, pieces: Tensor, event: Event) -> Tensor:
        combine = reduction(event.op, _COMBINE, self.where)
        return self._mesh.meet(self._thread, event, pieces, lambda given: list(combine(given).clone().unbind(0)))

    def _all_to_all(self, pieces: Tensor, event: Event) -> Tensor:
        return self._mesh.meet(
            self._thread,
            event,
            pieces,
            lambda given: [torch.stack([sent[to] for sent in given]) for to in range(len(given))],
        )


class _Meeting:
    """The ranks of one group at their next collective. `generation` counts the finished ones."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.given: dict[int, tuple[Event, Tensor]] = {}
        self.results: list[Tensor] = []
        self.generation = 0


@dataclass(frozen=True, slots=True)
class _Blocked:
    """What a rank waits in. missing: gives a rank that it waits for. is_over: whether its wait is, of a message."""

    event: Event
    missing: Callable[[], int]
    is_over: Callable[[], bool] = bool


@dataclass(slots=True)
class _Mailbox:
    """The messages of one directed pair: the n-th that is sent is the n-th that is asked for."""

    sent: list[Event] = field(default_factory=list)
    asked: list[Event] = field(default_factory=list)
    tensors: list[Tensor | None] = field(default_factory=list)


class _Stopped(Exception):
    """Unwinds a rank after another one failed."""


def _sum(given: list[Tensor]) -> Tensor:
    total = given[0].clone()
    for term in given[1:]:
        total = total + term
    return total


def _max(given: list[Tensor]) -> Tensor:
    return torch.stack(given).amax(0)


def _min(given: list[Tensor]) -> Tensor:
    return torch.stack(given).amin(0)


_COMBINE: dict[str, Callable[[list[Tensor]], Tensor]] = {"sum": _sum, "max": _max, "min": _min}


def _is_same_message(sent: Event, asked: Event) -> bool:
    return (sent.shape, sent.dtype, sent.tag) == (asked.shape, asked.dtype, asked.tag)


def _other_message(sender: int, receiver: int, sent: Event, asked: Event) -> AutoparError:
    return AutoparError(
        f"rank {receiver} receives from rank {sender} in another order than it sends",
        where=asked.where or None,
        values=f"rank {sender}: {sent}; rank {receiver}: {asked}",
        remedy="let both ranks of a pair send and receive in the same order",
    )


def _disagreement(rank: int, event: Event, other: int, other_event: Event) -> AutoparError:
    return AutoparError(
        f"ranks {rank} and {other} of one group issue different collectives over axis {event.axis}",
        where=other_event.where or event.where or None,
        values=f"rank {rank}: {event}; rank {other}: {other_event}",
    )
