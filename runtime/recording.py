"""When each action of a pipeline ran."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch

from autopar.runtime.communicator import Communicator


@dataclass(frozen=True, slots=True)
class Recorded:
    """One action as it ran: seconds since the ranks met at the beginning of the step.

    rank: in the whole mesh. action: its text; of a RECV the time that the stage waited for it.
    """

    rank: int
    action: str
    start_s: float
    end_s: float


class Recorder:
    """Writes actions down into `into`; not at all where that is None.

    On CUDA the times are those of the device's stream, known when `finish` has waited for it.
    """

    def __init__(self, comm: Communicator, axis: str, into: list[Recorded] | None) -> None:
        self._into, self._rank = into, comm.rank
        self._is_cuda = comm.device.type == "cuda"
        self._actions: list[tuple[str, Any, Any]] = []
        if into is not None:
            comm.at("recording")
            comm.all_reduce(torch.zeros((), device=comm.device), axis)
            self._origin = self._now()

    @contextmanager
    def action(self, text: str) -> Iterator[None]:
        """What runs inside is the action."""
        if self._into is None:
            yield
            return
        start = self._now()
        yield
        self._actions.append((text, start, self._now()))

    def finish(self) -> None:
        """Hand over what was written down."""
        if self._into is not None:
            if self._is_cuda:
                torch.cuda.synchronize()
            self._into += [Recorded(self._rank, text, self._since(a), self._since(b)) for text, a, b in self._actions]

    def _now(self) -> Any:
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _since(self, moment: Any) -> float:
        if self._is_cuda:
            return float(self._origin.elapsed_time(moment)) / 1000
        return float(moment - self._origin)
