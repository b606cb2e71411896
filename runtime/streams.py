"""Streams of a device, as far as what runs on several of them has to order itself; tests put others in their place."""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any, Protocol

import torch
from torch import Tensor

from autopar.base.torch_compat.devices import sleep_on


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
