"""All ranks of a mesh in one process, one thread each, meeting at every collective; messages go through mailboxes.

The meeting is also a check: ranks of one group that issue different collectives, or one that never comes, are an error
that names both, where real processes would hang or (gloo) silently swap data. So is a message that is received as
another one. As with gloo, messages of a directed pair keep their order, and one is sent when a receive is posted.
"""

from __future__ import annotations

import math
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.comm import MeshComm, reduction
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event, Message, Pending
from autopar.runtime.pieces import coordinates
from autopar.runtime.streams import Stream, Streams, streams_of

T = TypeVar("T")
_Combine = Callable[[list[Tensor]], list[Tensor]]
_NOTHING = {torch.bool: False, torch.uint8: 255, torch.int32: 2**30, torch.int64: 2**62}
"""What memory holds before a result comes, of dtypes without NaN."""


class SimulatedMesh:
    """The meeting place of the simulated ranks.

    timeout_s: the longest a rank waits for its peers. A rank that has ended, or waits elsewhere while all others wait,
    is found at once; the timeout only catches one that computes forever.

    device: that all ranks share. Where it has streams, each rank computes on one of its own and moves tensors on
    another, as processes do. late_s: what is moved on that comes so much later (seconds), into memory that holds NaN
    until then: who does not wait for it computes something else. streams: instead of the device's own.
    """

    def __init__(
        self,
        axes: Sequence[str],
        sizes: Sequence[int],
        timeout_s: float = 300.0,
        *,
        device: torch.device | str = "cpu",
        late_s: float = 0.0,
        streams: Streams | None = None,
    ) -> None:
        self.axes, self.sizes, self.timeout_s = tuple(axes), tuple(sizes), timeout_s
        self.device, self.late_s = torch.device(device), late_s
        self.streams = streams or streams_of(self.device)
        self.num_ranks = 1
        for size in sizes:
            self.num_ranks *= size
        self._computing = threading.local()
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
        before = self.streams.current() if self.streams is not None else None

        def run_rank(rank: int) -> None:
            torch.set_num_threads(1)
            try:
                with self._own_stream(before):
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

    @contextmanager
    def _own_stream(self, before: Stream | None) -> Iterator[None]:
        """A stream of this rank's own, behind what the caller's has been told; ended before it is left."""
        if self.streams is None or before is None:
            yield
            return
        if self.device.type == "cuda":
            torch.cuda.set_device(self.device)
        own = self.streams.new()
        own.wait_stream(before)
        self._computing.stream = own
        with self.streams.on(own):
            yield
        own.synchronize()
        before.wait_stream(own)

    def meet(self, rank: int, event: Event, given: Tensor, combine: _Combine) -> Tensor:
        """Wait for the others of the group along `event.axis`; this rank's part of `combine(given, in rank order)`."""
        if self.streams is None:
            return self._meet(rank, event, given, combine, None)[0]
        current, own = self.streams.current(), self._computing.stream
        if self.late_s and current.cuda_stream != own.cuda_stream:
            self.streams.sleep(self.late_s)
        found, done = self._meet(rank, event, given, combine, self._mark())
        # Memory of this rank's alone. It is filled before anyone can read it.
        filling = self.streams.new()
        with self.streams.on(filling):
            arrived = torch.full(
                found.shape, _NOTHING.get(found.dtype, math.nan), dtype=found.dtype, device=found.device
            )
        filling.synchronize()
        current.wait_stream(filling)
        current.wait_event(done)
        arrived.copy_(found)
        for tensor in (arrived, found):
            self.streams.keep(tensor, current)
        self.streams.keep(arrived, own)
        return arrived

    def _mark(self) -> Any:
        """An event behind all that the current stream has been told; None where there are no streams."""
        if self.streams is None:
            return None
        event = self.streams.event()
        event.record(self.streams.current())
        return event

    def _meet(self, rank: int, event: Event, given: Tensor, combine: _Combine, ready: Any) -> tuple[Tensor, Any]:
        """`meet` for the host. ready: behind which `given` is there; and the event behind which the result is."""
        members, position = self.group(rank, event.axis)
        with self._lock:
            self._stop_if_failed()
            meeting = self._meetings.setdefault(members, _Meeting(threading.Condition(self._lock)))
            if meeting.given:
                other, (agreed, _, _) = next(iter(meeting.given.items()))
                if not agreed.agrees_with(event):
                    self._fail(_disagreement(other, agreed, rank, event))
                    raise _Stopped
            meeting.given[rank] = (event, given, ready)
            if len(meeting.given) == len(members):
                self._finish(meeting, members, combine)
                return meeting.results[position], meeting.done
            self._blocked[rank] = _Blocked(event, lambda: next(m for m in members if m not in meeting.given))
            self._find_deadlock()
            generation = meeting.generation
            if not meeting.changed.wait_for(
                lambda: self._error is not None or meeting.generation != generation, self.timeout_s
            ):
                self._fail(self._absence(rank))
            self._stop_if_failed()
            return meeting.results[position], meeting.done

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
                box.tensors.append((message.tensor.detach().clone(), self._mark()))
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
                posted, box.tensors[ticket] = box.tensors[ticket], None
                assert posted is not None
                found, ready = posted
                if self.streams is not None:
                    self.streams.current().wait_event(ready)
                    self.streams.keep(found, self.streams.current())
                return found

        return wait

    def _finish(self, meeting: _Meeting, members: tuple[int, ...], combine: _Combine) -> None:
        try:
            given = [meeting.given[member][1] for member in members]
            if self.streams is not None:
                current = self.streams.current()
                for member in members:
                    _, tensor, ready = meeting.given[member]
                    current.wait_event(ready)
                    self.streams.keep(tensor, current)
            meeting.results = combine(given)
            meeting.done = self._mark()
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
        super().__init__(*(view or (mesh.axes, mesh.sizes, rank)), mesh.device)
        self.streams = mesh.streams
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

    def _exchange_rows(self, x: Tensor, event: Event, rows: list[list[int]]) -> Tensor:
        def deal(given: list[Tensor]) -> list[Tensor]:
            pieces = [sent.split(counts) for sent, counts in zip(given, rows, strict=True)]
            return [torch.cat([each[to] for each in pieces]) for to in range(len(given))]

        return self._mesh.meet(self._thread, event, x, deal)


class _Meeting:
    """The ranks of one group at their next collective. `generation` counts the finished ones."""

    def __init__(self, changed: threading.Condition) -> None:
        self.changed = changed
        self.given: dict[int, tuple[Event, Tensor, Any]] = {}
        self.results: list[Tensor] = []
        self.done: Any = None
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
    tensors: list[tuple[Tensor, Any] | None] = field(default_factory=list)


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
