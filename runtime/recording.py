"""When everything of a step ran, and the trace of it that `CompiledModule.record` writes.

Of a pipeline these are the actions of its schedule. Without one they are the calls of regions, from one `comm.at` of
the generated program to the next, so that a call has in it what it waits for, and the communicator's collectives.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from autopar.base.errors import AutoparError
from autopar.base.perfetto import TRACKS, Process, Slice, events_of, predicted
from autopar.base.perfetto import write as write_events
from autopar.base.trace import Recorded
from autopar.runtime.communicator import Communicator
from autopar.runtime.event import Event
from autopar.runtime.pieces import coordinates
from autopar.strategies.pipelining import trace

WAITED = "it ends when it was waited for, and may have been through before"


class Recorder:
    """Writes actions down into `into`; not at all where that is None.

    On CUDA the times are those of the device's stream, known when `finish` has waited for it. axis: over which ranks
    meet before they begin; None: over all.
    """

    def __init__(self, comm: Communicator, axis: str | None, into: list[Recorded] | None) -> None:
        self._into, self._rank = into, comm.rank
        self._is_cuda = comm.device.type == "cuda"
        self._actions: list[tuple[str, Any, Any, int, str, float, str]] = []
        self._open: tuple[str, Any] | None = None
        self._microbatch = -1
        self._step = into[-1].step + 1 if into else 0
        if into is not None:
            comm.at("recording")
            for each in comm.axes if axis is None else (axis,):
                comm.all_reduce(torch.zeros((), device=comm.device), each)
            self._origin = self.now()

    @contextmanager
    def action(self, text: str) -> Iterator[None]:
        """What runs inside is the action."""
        if self._into is None:
            yield
            return
        start = self.now()
        yield
        self._add(text, start, self.now())

    @contextmanager
    def program(self, comm: Communicator, microbatch: int) -> Iterator[None]:
        """What the generated program does inside, for one microbatch: its calls, and the collectives of `comm`."""
        comm.recorder, self._microbatch = self, microbatch
        try:
            yield
        finally:
            comm.recorder = None
            self.mark("")

    def mark(self, where: str) -> None:
        """A call begins here, and the one before ends; none begins where there is no name."""
        now = self.now()
        if self._open is not None:
            self._add(*self._open, now)
        self._open = (where, now) if where else None

    def collective(self, event: Event, start: Any, work: Any) -> Callable[[], None]:
        """Write a collective down, which was issued at `start`; call what is returned when it has been waited for.

        work: tells when it is through; None: the device's stream does.
        """
        name, sent = f"{event.kind} {event.axis}", float(event.bytes_sent)
        if work is None:
            self._add(name, start, self.now(), event.axis, sent)
            return _nothing
        ended: list[float] = []
        try:
            work.get_future().add_done_callback(lambda _: ended.append(time.perf_counter()))
        except RuntimeError:  # gloo has none of a reduce_scatter
            return lambda: self._add(name, start, self.now(), event.axis, sent, WAITED)
        return lambda: self._add(name, start, ended[0] if ended else self.now(), event.axis, sent)

    def messages(self, events: Sequence[Event], start: Any) -> Callable[[], None]:
        """The same of messages that travel together, until they have been waited for."""
        axis, sent = events[0].axis, float(sum(event.bytes_sent for event in events))
        return lambda: self._add(f"exchange {axis}", start, self.now(), axis, sent, WAITED)

    def finish(self) -> None:
        """Hand over what was written down."""
        if self._into is not None:
            if self._is_cuda:
                torch.cuda.synchronize()
            for text, start, end, microbatch, axis, sent, note in self._actions:
                times = self._since(start), self._since(end)
                self._into.append(Recorded(self._rank, text, *times, self._step, microbatch, axis, sent, note))
            self._actions = []

    def now(self) -> Any:
        """A moment of the current stream, or of the host."""
        if not self._is_cuda:
            return time.perf_counter()
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def _add(self, text: str, start: Any, end: Any, axis: str = "", sent: float = 0.0, note: str = "") -> None:
        self._actions.append((text, start, end, self._microbatch, axis, sent, note))

    def _since(self, moment: Any) -> float:
        if self._is_cuda:
            return float(self._origin.elapsed_time(moment)) / 1000
        return float(moment - self._origin)


def _nothing() -> None:
    """A collective that nobody has to wait for."""


def measured(
    records: Iterable[Recorded], axes: Sequence[str], sizes: Sequence[int], axis: str
) -> dict[str, list[Recorded]]:
    """What all ranks recorded, in groups for a trace: of each step the ranks of one pipeline.

    Named `measured`, and where there are several with what tells them apart: `measured dp=1, step 2`. Ranks are those
    of the pipeline.
    """
    found: dict[tuple[tuple[int, ...], int], list[Recorded]] = {}
    for each in records:
        place = dict(zip(axes, coordinates(each.rank, sizes), strict=True))
        rank = place.pop(axis)
        found.setdefault((tuple(place.values()), each.step), []).append(replace(each, rank=rank))
    others = [name for name in axes if name != axis]
    several = len({step for _, step in found}) > 1
    groups: dict[str, list[Recorded]] = {}
    for (where, step), entries in sorted(found.items()):
        which = [f"{name}={at}" for name, at in zip(others, where, strict=True) if sizes[list(axes).index(name)] > 1]
        which += [f"step {step}"] if several else []
        groups[" ".join(["measured", ", ".join(which)]).strip()] = entries
    return groups


def write(path: str | Path, groups: Mapping[str, list[Recorded]], plan: Any, axis: str) -> None:
    """Write measured steps of a pipeline as a trace, beside the one that the plan predicts, where there is a plan.

    Raises:
        AutoparError: the file cannot be written.
    """
    summary = getattr(plan, "pipeline", None)
    before = {} if summary is None else {"predicted": summary.timeline}
    memory = plan.views.memory if summary is not None and plan.views is not None else ()
    notes = trace.Notes()
    if summary is not None:
        notes = trace.notes_of(plan.mesh, axis, memory, plan.interface.together)
    with _writing(path):
        trace.write(path, {**before, **groups}, notes)


def write_steps(path: str | Path, records: Sequence[Recorded], plan: Any, axes: Sequence[str]) -> None:
    """The same of steps without a pipeline. axes: of the mesh.

    Raises:
        AutoparError: the file cannot be written.
    """
    links = {
        axis: "communication" if plan is None else ("network" if plan.mesh.crosses_nodes(axis) else "node")
        for axis in axes
    }
    before = []
    if plan is not None and plan.views is not None and plan.views.spans:
        before = predicted(
            plan.views.spans,
            next(iter(plan.views.memory), None),
            plan.mesh.num_devices,
            len({each.step for each in records}) + 1,
        )
    with _writing(path):
        write_events(path, events_of([*before, *measured_steps(records, links)], (*TRACKS, "communication")))


@contextmanager
def _writing(path: str | Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise AutoparError(f"cannot write the trace {path}", values=str(error)) from error


def measured_steps(records: Sequence[Recorded], links: Mapping[str, str]) -> list[Process]:
    """What all ranks recorded without a pipeline: a process for each rank and step, `measured: rank 0`, and where there
    are several steps `measured step 1: rank 0`. They lie behind the predicted one of the same rank.

    links: by axis, the track of its collectives.
    """
    num_steps = len({each.step for each in records})
    found: dict[tuple[int, int], list[Slice]] = {}
    for each in records:
        args: dict[str, Any] = {"microbatch": each.microbatch} if each.microbatch >= 0 else {}
        args |= {"note": each.note} if each.note else {}
        if each.axis:
            args |= {"axis": each.axis, "bytes": each.bytes_sent}
            track, category = links[each.axis], each.action.partition(" ")[0]
        else:
            module, _, category = each.action.rpartition(" ")
            track, args = "compute", {**args, "module": module}
        own = found.setdefault((each.rank, each.step), [])
        own.append(Slice(track, each.action, category, each.start_s, each.end_s, args))
    stride = num_steps + 1
    origins = {step: min(each.start_s for each in records if each.step == step) for _, step in found}
    processes = []
    for (rank, step), slices in sorted(found.items()):
        name = f"measured step {step}: rank {rank}" if num_steps > 1 else f"measured: rank {rank}"
        processes.append(Process(name, rank * stride + step + 1, slices, origin_s=origins[step]))
    return processes
