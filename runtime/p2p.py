"""Messages from one rank to another: what the stages of a pipeline hand to each other.

Between two ranks, messages of one direction arrive in the order in which they were sent, and are received in the order
in which receives were posted; nothing but the tensors travels. Neither side waits for the other before `Pending.wait`.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event, Message, Pending


class Departures:
    """Sent tensors, each kept until it has left.

    gloo tells this only to one who waits: a thread does, as long as there is something on its way.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._queue: deque[_Departure] = deque()
        self._is_running = False

    def add(self, departure: _Departure) -> None:
        """Keep the tensor of `departure` until its `work` is done."""
        with self._lock:
            self._queue.append(departure)
            if self._is_running:
                return
            self._is_running = True
        threading.Thread(target=self._run, name="autopar-departures", daemon=True).start()

    def _run(self) -> None:
        while True:
            with self._lock:
                if not self._queue:
                    self._is_running = False
                    return
                departure = self._queue.popleft()
            departure.finish()


class _Departure:
    """One tensor that is being sent by gloo."""

    def __init__(self, work: Any, tensor: Tensor, timeout_s: float) -> None:
        self.work, self.tensor, self.timeout_s = work, tensor, timeout_s
        self.error: RuntimeError | None = None
        self.is_done = threading.Event()

    def finish(self) -> None:
        try:
            self.work.wait(timedelta(seconds=self.timeout_s))
        except RuntimeError as error:  # for whoever waits
            self.error = error
        del self.work, self.tensor
        self.is_done.set()


def connect(comm: Communicator, group: dist.ProcessGroup, axis: str, peers: Sequence[int]) -> None:
    """Have the backend connect this rank to these places of the axis, of which each does the same.

    NCCL gives every pair whose messages are not batched a communicator of its own, and two ranks make it at their first
    message: each then waits for the other, whatever else it could do. In the order of the pairs, which is the same for
    all ranks, no such waits close a circle. (Where process groups were connected eagerly there is nothing to make.)
    """
    here = comm.index(axis)
    for low, high in sorted((min(here, peer), max(here, peer)) for peer in peers):
        x = torch.zeros(1, device=comm.device)
        if here == low:
            work: Any = dist.isend(x, group=group, group_dst=high)
        else:
            work = dist.irecv(x, group=group, group_src=low)
        work.wait()


def issue(comm: Communicator, group: dist.ProcessGroup, messages: Sequence[Message], departures: Departures) -> Pending:
    """Start messages over a process group. Their peers are places along its axis.

    Of two ranks that exchange, the lower one sends first: NCCL runs the messages of a pair one after the other.
    """
    place = comm.index(messages[0].event.axis) if messages else 0
    waits: dict[int, Callable[[], Tensor | None]] = {}
    have_left: list[Callable[[], bool]] = []
    numbered = enumerate(messages)
    for number, message in sorted(numbered, key=lambda m: (m[1].peer, (m[1].tensor is None) == (place < m[1].peer))):
        if 0 in message.event.shape:
            waits[number] = _nothing(comm, message)
        elif message.tensor is None:
            waits[number] = _begin_receive(comm, group, message.event, message.dtype)
        else:
            waits[number], left = _begin_send(comm, group, message.event, as_sendable(message.tensor), departures)
            have_left.append(left)
    return Pending([waits[number] for number in range(len(messages))], have_left)


def issue_together(comm: Communicator, group: dist.ProcessGroup, messages: Sequence[Message]) -> Pending:
    """Start messages as one NCCL group, in which nothing waits for anything else. All ranks of `group` must do so."""
    sent = [None if m.tensor is None else as_sendable(m.tensor) for m in messages]
    tensors = [_room_for(comm, message) if x is None else x for x, message in zip(sent, messages, strict=True)]
    started = [
        dist.P2POp(dist.irecv if m.tensor is None else dist.isend, x, group=group, group_peer=m.peer)
        for x, m in zip(tensors, messages, strict=True)
        if 0 not in m.event.shape
    ]
    works: list[Any] = _started(comm, messages[0].event, lambda: dist.batch_isend_irecv(started)) if started else []

    def wait_for(message: Message, tensor: Tensor) -> Callable[[], Tensor | None]:
        def wait() -> Tensor | None:
            while works:
                works.pop().wait()
            return tensor.view(message.dtype) if message.tensor is None else None

        return wait

    return Pending([wait_for(message, x) for message, x in zip(messages, tensors, strict=True)])


def _room_for(comm: Communicator, message: Message) -> Tensor:
    """Where a message is received."""
    dtype = torch.uint8 if _is_refused(message.dtype) else message.dtype
    return torch.empty(message.event.shape, dtype=dtype, device=comm.device)


def as_sendable(x: Tensor) -> Tensor:
    """Contiguous, and as bytes where the backends refuse the dtype (bool, float8)."""
    return x.contiguous().view(torch.uint8) if _is_refused(x.dtype) else x.contiguous()


def _is_refused(dtype: torch.dtype) -> bool:
    return dtype == torch.bool or (dtype.is_floating_point and dtype.itemsize == 1)


def _nothing(comm: Communicator, message: Message) -> Callable[[], Tensor | None]:
    """A tensor without elements needs no message."""
    if message.tensor is not None:
        return lambda: None
    return lambda: torch.empty(message.event.shape, dtype=message.dtype, device=comm.device)


def _begin_send(
    comm: Communicator, group: dist.ProcessGroup, event: Event, tensor: Tensor, departures: Departures
) -> tuple[Callable[[], Tensor | None], Callable[[], bool]]:
    """What waits for a send, and what tells whether it is done. Only `departures` keep the tensor, or its work."""
    work: Any = _started(comm, event, lambda: dist.isend(tensor, group=group, group_dst=event.peer))
    if comm.device.type == "cuda":
        return _wait_on_stream(work, tensor, None), work.is_completed
    departure = _Departure(work, tensor, comm.timeout_s)
    departures.add(departure)

    def wait() -> None:
        # The thread waits for one after the other, each of which has its time.
        with comm.trail.waiting(event):
            departure.is_done.wait()
        if departure.error is not None:
            raise _lost(comm, event, departure.error, 0.0) from departure.error

    return wait, departure.is_done.is_set


def _begin_receive(
    comm: Communicator, group: dist.ProcessGroup, event: Event, wanted: torch.dtype
) -> Callable[[], Tensor | None]:
    tensor = _room_for(comm, Message(event, event.peer, None, wanted))
    work: Any = _started(comm, event, lambda: dist.irecv(tensor, group=group, group_src=event.peer))
    if comm.device.type == "cuda":
        return _wait_on_stream(work, tensor, wanted)

    def wait() -> Tensor:
        begun = time.monotonic()
        try:
            with comm.trail.waiting(event):
                work.wait(timedelta(seconds=comm.timeout_s))
        except RuntimeError as error:
            raise _lost(comm, event, error, time.monotonic() - begun) from error
        return tensor.view(wanted)

    return wait


def _wait_on_stream(work: Any, tensor: Tensor, dtype: torch.dtype | None) -> Callable[[], Tensor | None]:
    """The current stream waits, not the host; the process group's watchdog ends what never comes."""

    def wait() -> Tensor | None:
        work.wait()
        return None if dtype is None else tensor.view(dtype)

    return wait


def _started(comm: Communicator, event: Event, start: Callable[[], Any]) -> Any:
    try:
        return start()
    except RuntimeError as error:
        raise _lost(comm, event, error, 0.0) from error


def tells_of_time(error: RuntimeError) -> bool:
    """Whether it is about waiting too long: gloo's "Timed out waiting", "Application timeout caused pair closure"."""
    return any(text in str(error).lower() for text in ("timed out", "timeout"))


def _lost(comm: Communicator, event: Event, error: RuntimeError, waited_s: float) -> AutoparError:
    peer = comm.rank_at(event.axis, event.peer)
    is_late = waited_s >= comm.timeout_s or tells_of_time(error)
    other = "send" if event.kind == "receive" else "receive"
    return AutoparError(
        f"rank {comm.rank} waited {comm.timeout_s:g} s for rank {peer} to {other}"
        if is_late
        else f"rank {comm.rank} lost rank {peer}",
        where=event.where or None,
        values=str(event) if is_late else f"{event}: {str(error).splitlines()[0]}",
        remedy=f"see what rank {peer} does, or the error that it ended with",
    )
