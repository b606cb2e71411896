"""When each action of a pipeline ran, and the trace of it that `CompiledModule.record` writes."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from autopar.errors import AutoparError
from autopar.pipelining import trace
from autopar.pipelining.simulate import Timeline
from autopar.runtime.communicator import Communicator
from autopar.runtime.pieces import coordinates


@dataclass(frozen=True, slots=True)
class Recorded:
    """One action as it ran: seconds since the ranks met at the beginning of the step.

    rank: in the whole mesh. action: its text; of a RECV the time that the stage waited for it. step: from 0, of those
    that were recorded together.
    """

    rank: int
    action: str
    start_s: float
    end_s: float
    step: int = 0


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
            step = self._into[-1].step + 1 if self._into else 0
            found = [(text, self._since(a), self._since(b)) for text, a, b in self._actions]
            self._into += [Recorded(self._rank, *each, step) for each in found]

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


def measured(
    records: Iterable[Recorded], axes: Sequence[str], sizes: Sequence[int], axis: str
) -> dict[str, list[trace.Recorded]]:
    """What all ranks recorded, in groups for a trace: of each step the ranks of one pipeline.

    Named `measured`, and where there are several with what tells them apart: `measured dp=1, step 2`. Ranks are those
    of the pipeline.
    """
    found: dict[tuple[tuple[int, ...], int], list[trace.Recorded]] = {}
    for each in records:
        place = dict(zip(axes, coordinates(each.rank, sizes), strict=True))
        rank = place.pop(axis)
        entry = trace.Recorded(rank, each.action, each.start_s, each.end_s)
        found.setdefault((tuple(place.values()), each.step), []).append(entry)
    others = [name for name in axes if name != axis]
    several = len({step for _, step in found}) > 1
    groups: dict[str, list[trace.Recorded]] = {}
    for (where, step), entries in sorted(found.items()):
        which = [f"{name}={at}" for name, at in zip(others, where, strict=True) if sizes[list(axes).index(name)] > 1]
        which += [f"step {step}"] if several else []
        groups[" ".join(["measured", ", ".join(which)]).strip()] = entries
    return groups


def write(path: str | Path, groups: Mapping[str, list[trace.Recorded]], predicted: Timeline | None) -> None:
    """Write measured steps as a trace, beside the predicted one where it is known.

    Raises:
        AutoparError: the file cannot be written.
    """
    before = {} if predicted is None else {"predicted": predicted}
    try:
        trace.write(path, {**before, **groups})
    except OSError as error:
        raise AutoparError(f"cannot write the trace {path}", values=str(error)) from error
