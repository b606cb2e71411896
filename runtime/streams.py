"""Streams of a device, as far as what runs on several of them has to order itself; tests put others in their place."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeVar

import torch
from torch import Tensor

from autopar.base.torch_compat.devices import sleep_on

T = TypeVar("T")


class Event(Protocol):
    """A place in a stream's work."""

    def record(self, stream: Any) -> None: ...


class Stream(Protocol):
    """Work that a device does in order."""

    @property
    def cuda_stream(self) -> int: ...

    def wait_event(self, event: Any) -> None: ...

    def wait_stream(self, stream: Any) -> None: ...

    def synchronize(self) -> None: ...


class Streams(Protocol):
    """What a device offers."""

    def new(self) -> Stream: ...

    def current(self) -> Stream: ...

    def on(self, stream: Stream) -> AbstractContextManager[Any]: ...

    def event(self) -> Event: ...

    def keep(self, tensor: Tensor, stream: Stream) -> None:
        """The tensor's memory is not given out again before the stream has done what it was told until it is freed."""

    def sleep(self, seconds: float) -> None:
        """The current stream does nothing for so long."""


@dataclass(slots=True)
class Side:
    """A stream beside the one that computes. readers: the streams that have waited for any of it, by their number."""

    stream: Stream
    readers: dict[int, Stream] = field(default_factory=dict)

    def run(self, streams: Streams, work: Callable[[], T]) -> tuple[T, Event]:
        """Queue work behind all that the current stream, and those that read what was made here, were told before; what
        it gives, and the place to wait for.
        """
        current = streams.current()
        for stream in {current.cuda_stream: current, **self.readers}.values():
            self.stream.wait_stream(stream)
        with streams.on(self.stream):
            found = work()
            event = streams.event()
            event.record(self.stream)
        return found, event

    def wait(self, streams: Streams, places: Sequence[Event]) -> None:
        """The current stream, not the host, waits for what was queued."""
        current = streams.current()
        for place in places:
            current.wait_event(place)
        self.readers[current.cuda_stream] = current


class CudaStreams:
    """Those of a CUDA device."""

    def __init__(self, device: torch.device) -> None:
        self.device = device

    def new(self) -> Stream:
        return torch.cuda.Stream(self.device)

    def current(self) -> Stream:
        return torch.cuda.current_stream(self.device)

    def on(self, stream: Any) -> AbstractContextManager[Any]:
        return torch.cuda.stream(stream)

    def event(self) -> Event:
        return torch.cuda.Event()

    def keep(self, tensor: Tensor, stream: Any) -> None:
        tensor.record_stream(stream)

    def sleep(self, seconds: float) -> None:
        sleep_on(self.device, seconds)


def streams_of(device: torch.device) -> Streams | None:
    """None where a device has none."""
    return CudaStreams(device) if device.type == "cuda" else None
