"""A step as a trace that https://ui.perfetto.dev and chrome://tracing open: predicted, and measured beside it.

Trace Event Format (JSON): a process for each rank, its tracks, more than one of a name where things overlap, and
counters of what it holds. Without a pipeline all ranks do the same: there is a process for each of up to 8 ranks, and
one for all of more. Plans with a pipeline:
autopar/strategies/pipelining/trace.py.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from autopar.base.errors import AutoparError
from autopar.base.trace import MemoryCurve, Span

MOST_RANKS = 8
"""Of more, one process stands for all."""

TRACKS = ("compute", "node", "network")
_NEAR = 2e-9
"""What starts so much of the whole before another one's end starts with it: numbers have nine digits."""


@dataclass(frozen=True, slots=True)
class Slice:
    """Something with a beginning and an end. category: what Perfetto filters by. args: what it shows of it."""

    track: str
    name: str
    category: str
    start_s: float
    end_s: float
    args: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Process:
    """One rank, or ranks that do the same. order: processes lie by it. memory: what it holds, where that is known.
    origin_s: the time that the trace calls 0.
    """

    name: str
    order: int
    slices: Sequence[Slice]
    memory: MemoryCurve | None = None
    origin_s: float = 0.0


Arrow = tuple[tuple[int, int, float], tuple[int, int, float]]
"""From where to where: each the order of a process, the place of one of its slices, a time."""


def predicted(spans: Sequence[Span], memory: MemoryCurve | None, num_ranks: int, step: int = 1) -> list[Process]:
    """The predicted step of a plan without a pipeline. step: of the processes' order, from 0.

    Raises:
        AutoparError: the plan's file is of a version that did not save this.
    """
    if not spans:
        raise AutoparError("the plan has no timeline to trace", remedy="make it again: older versions saved none")
    slices = list(_slices(spans))
    if num_ranks > MOST_RANKS:
        return [Process(f"predicted: ranks 0-{num_ranks - 1}", 0, slices, memory)]
    return [Process(f"predicted: rank {rank}", rank * step, slices, memory) for rank in range(num_ranks)]


def write(path: str | Path, events: Iterable[Mapping[str, Any]]) -> Path:
    """Write events as a trace."""
    trace = {"traceEvents": list(events), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")
    return Path(path)


def events_of(
    processes: Iterable[Process], tracks: Sequence[str] = TRACKS, arrows: Iterable[Arrow] = ()
) -> Iterator[dict[str, Any]]:
    """The events of processes, and of arrows between their slices. The same processes give the same events."""
    origins: dict[int, float] = {}
    numbers: dict[int, list[int]] = {}
    for process in processes:
        pid = process.order + 1  # not 0, which is the idle process
        yield _metadata("process_name", pid, name=process.name)
        yield _metadata("process_sort_index", pid, sort_index=pid)
        origins[pid] = process.origin_s
        events, numbers[pid] = _placed(pid, process.origin_s, process.slices, tracks)
        yield from events
        if process.memory is not None:
            yield from _counters(pid, process.memory)
    for flow, arrow in enumerate(arrows):
        for phase, (order, place, at_s) in zip("sf", arrow, strict=True):
            pid = order + 1
            where = {"pid": pid, "tid": numbers[pid][place], "ts": _microseconds(at_s - origins[pid])}
            event = {"ph": phase, "name": "message", "cat": "message", "id": flow, **where}
            yield event | ({"bp": "e"} if phase == "f" else {})


def _slices(spans: Sequence[Span]) -> Iterator[Slice]:
    calls = {s.call: s.name.removesuffix(f" {s.phase}") for s in spans if s.track == "compute" and s.call >= 0}
    for span in spans:
        args: dict[str, Any] = {"phase": span.phase}
        if span.call >= 0:
            args |= {"module": calls[span.call], "call": span.call}
        if span.bytes_sent:
            args |= {"bytes": span.bytes_sent * span.times}
        if span.phase == "repeated":
            args |= {"microbatches": span.times}
        elif span.track != "compute":
            args |= {"axis": span.name.partition(" ")[2]}
        yield Slice(span.track, span.name, _category(span), span.start_s, span.end_s, args)


def _category(span: Span) -> str:
    if span.phase == "repeated" or span.track == "compute":
        return span.phase
    return span.name.partition(" ")[0]


def _placed(
    pid: int, origin_s: float, slices: Sequence[Slice], tracks: Sequence[str]
) -> tuple[list[dict[str, Any]], list[int]]:
    """The events of slices, each on the first track of its name that is free, and the tracks' numbers in the order of
    the slices. Slices of one track never overlap: Perfetto drops those that do.
    """
    events: list[dict[str, Any]] = []
    numbers = [0] * len(slices)
    near = round(_NEAR * max((each.end_s - origin_s for each in slices), default=0.0) * 1e9) + 1
    # Perfetto takes the threads 0 and `pid` for the main thread of a process.
    tid = 1000 * pid + 1
    for track in tracks:
        free: list[int] = []  # when each track of the name is, in nanoseconds
        for place in sorted(range(len(slices)), key=lambda at: (slices[at].start_s, slices[at].end_s)):
            each = slices[place]
            if each.track != track:
                continue
            start, end = (round((time - origin_s) * 1e9) for time in (each.start_s, each.end_s))
            lane = next((lane for lane, at in enumerate(free) if at <= start + near), len(free))
            start = max(start, free[lane]) if lane < len(free) else start
            end = max(start, end)
            free[lane : lane + 1] = [end]
            numbers[place] = tid + lane
            events.append(
                {
                    "ph": "X",
                    "name": each.name,
                    "cat": each.category,
                    "pid": pid,
                    "tid": tid + lane,
                    "ts": start / 1e3,
                    "dur": (end - start) / 1e3,
                    "args": dict(each.args),
                }
            )
        for lane in range(len(free)):
            label = track if lane == 0 else f"{track} {lane + 1}"
            events.append(_metadata("thread_name", pid, tid + lane, name=label))
            events.append(_metadata("thread_sort_index", pid, tid + lane, sort_index=tid + lane))
        tid += len(free)
    return events, numbers


def _counters(pid: int, curve: MemoryCurve) -> Iterator[dict[str, Any]]:
    """`memory`: all bytes that a rank holds; `memory by kind`: each category's."""
    for place, time in enumerate(curve.times_s):
        held = {kind: float(values[place]) for kind, values in curve.series.items()}
        at = {"ph": "C", "pid": pid, "ts": _microseconds(time)}
        yield {**at, "name": "memory", "args": {"bytes": sum(held.values())}}
        if len(held) > 1:
            yield {**at, "name": "memory by kind", "args": held}


def _metadata(kind: str, pid: int, tid: int | None = None, **args: Any) -> dict[str, Any]:
    """An event that names or sorts a process or a track."""
    return {"ph": "M", "name": kind, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _microseconds(seconds: float) -> float:
    """To the nanosecond."""
    return round(float(seconds) * 1e9) / 1e3
