"""Streams on a CPU that find races: everything runs in the host's order, and is judged by the order that streams keep.

Each operator is a step of the stream that is current in its thread. Reading a tensor that another stream wrote needs a
chain of events from that step to this one (vector clocks: Mattern, Virtual Time and Global States, 1989); so does
writing one that another stream reads or wrote.
"""

from __future__ import annotations

import threading
import weakref
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

Clock = dict[int, int]


class RacingEvent:
    """What a stream had done when it was recorded."""

    def __init__(self) -> None:
        self.clock: Clock = {}

    def record(self, stream: RacingStream) -> None:
        self.clock = dict(stream.clock)


class RacingStream:
    def __init__(self, number: int) -> None:
        self.cuda_stream = number
        self.clock: Clock = {number: 0}

    def wait_event(self, event: RacingEvent) -> None:
        for number, done in event.clock.items():
            self.clock[number] = max(done, self.clock.get(number, 0))

    def wait_stream(self, stream: RacingStream) -> None:
        event = RacingEvent()
        event.record(stream)
        self.wait_event(event)

    def synchronize(self) -> None:
        """The host waits: here it always has."""


class RacingStreams:
    """To be given to a `SimulatedMesh` in place of a device's. races: what was read or written too early."""

    def __init__(self) -> None:
        self.races: list[str] = []
        self._lock = threading.RLock()
        self._here = threading.local()
        self._num = 0
        self._first = self.new()
        self._written: dict[int, tuple[weakref.ref[Any], int, int, str]] = {}
        self._read: dict[int, dict[int, tuple[int, str]]] = {}

    def new(self) -> RacingStream:
        with self._lock:
            self._num += 1
            return RacingStream(self._num)

    def current(self) -> RacingStream:
        found: RacingStream = getattr(self._here, "stream", self._first)
        return found

    @contextmanager
    def on(self, stream: RacingStream) -> Iterator[None]:
        before, is_watched = self.current(), getattr(self._here, "is_watched", False)
        self._here.stream = stream
        try:
            if is_watched:
                yield
                return
            self._here.is_watched = True
            with _Watch(self):
                yield
            self._here.is_watched = False
        finally:
            self._here.stream = before

    def event(self) -> RacingEvent:
        return RacingEvent()

    def keep(self, tensor: Tensor, stream: RacingStream) -> None:
        """Memory is not given out again here while anyone has it."""

    def sleep(self, seconds: float) -> None:
        """Nothing is late here; what could be is told."""

    def saw(self, func: Any, reads: Sequence[Tensor], writes: Sequence[Tensor]) -> None:
        """One operator of the current stream."""
        stream = self.current()
        with self._lock:
            stream.clock[stream.cuda_stream] += 1
            now = stream.clock[stream.cuda_stream]
            for tensor in reads:
                key = self._key(tensor)
                if key in self._written:
                    _, writer, at, by = self._written[key]
                    self._check(stream, writer, at, f"{func} on stream {stream.cuda_stream} reads what {by} writes")
                self._read.setdefault(key, {})[stream.cuda_stream] = now, str(func)
            for tensor in writes:
                key = self._key(tensor)
                for reader, (at, by) in self._read.pop(key, {}).items():
                    self._check(stream, reader, at, f"{func} on stream {stream.cuda_stream} writes what {by} reads")
                text = f"{func} on stream {stream.cuda_stream}"
                self._written[key] = weakref.ref(tensor.untyped_storage()), stream.cuda_stream, now, text

    def _check(self, stream: RacingStream, other: int, at: int, what: str) -> None:
        if stream.clock.get(other, 0) < at:
            self.races.append(f"{what} (stream {other}, step {at})")

    def _key(self, tensor: Tensor) -> int:
        """Of a storage; what is known of another that lay there is forgotten."""
        key = tensor.untyped_storage()._cdata
        known = self._written.get(key)
        if known is not None and known[0]() is None:
            del self._written[key]
            self._read.pop(key, None)
        return key


class _Watch(TorchDispatchMode):
    def __init__(self, streams: RacingStreams) -> None:
        super().__init__()
        self.streams = streams

    def __torch_dispatch__(
        self, func: Any, types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        given = [x for x in tree_leaves((args, kwargs)) if isinstance(x, Tensor)]
        found = func(*args, **(kwargs or {}))
        made = [x for x in tree_leaves(found) if isinstance(x, Tensor)]
        before = {x.untyped_storage()._cdata for x in given}
        changed = _changed(func, args, kwargs or {})
        is_view = not changed and all(x.untyped_storage()._cdata in before for x in made)
        fresh = [x for x in made if x.untyped_storage()._cdata not in before]
        self.streams.saw(func, [] if is_view else given, [*fresh, *changed])
        return found


def _changed(func: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> list[Tensor]:
    """The operands that an operator writes to."""
    names = [each for each in func._schema.arguments if each.alias_info is not None and each.alias_info.is_write]
    given = dict(zip((each.name for each in func._schema.arguments), args)) | dict(kwargs)
    return [x for each in names for x in tree_leaves(given.get(each.name)) if isinstance(x, Tensor)]
