"""A step of a pipeline as a trace that https://ui.perfetto.dev and chrome://tracing open.

Trace Event Format (JSON): a process for each rank of each group, named `predicted: rank 0`, `measured: rank 0`, …,
those of a rank beside each other; its tracks are `compute`, `communication` and `parameters` (UNSHARD, REDUCE_GRAD),
more than one of a name where actions overlap. Arrows go from a SEND to the computation that starts from its message;
`memory` counts the bytes that a rank holds.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.pipelining.actions import PARAMETERS, TRANSFERS, Action, Kind
from autopar.pipelining.simulate import Timeline

_MICRO = 1e6
_TRACKS = ("compute", "communication", "parameters")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One action of a rank as it ran; start_s, end_s on a clock that all ranks share. action: its text, such as 2F0."""

    rank: int
    action: str
    start_s: float
    end_s: float


_Placed = tuple[Recorded, Action, int]
"""With the track that it lies on."""


def recorded(timeline: Timeline) -> list[Recorded]:
    """A simulated step in the form of a recorded one."""
    return [Recorded(event.rank, str(event.action), event.start_s, event.end_s) for event in timeline.events]


def write(path: str | Path, groups: Mapping[str, Timeline | Iterable[Recorded]]) -> None:
    """Write a trace of simulated and recorded steps, each from time 0. groups: by name, such as predicted, measured."""
    trace = {"traceEvents": list(trace_events(groups)), "displayTimeUnit": "ms"}
    Path(path).write_text(json.dumps(trace, separators=(",", ":")) + "\n", encoding="utf-8")


def trace_events(groups: Mapping[str, Timeline | Iterable[Recorded]]) -> Iterator[dict[str, Any]]:
    """The trace's events. The same groups give the same events."""
    flow = 0
    for number, (name, group) in enumerate(groups.items()):
        records = recorded(group) if isinstance(group, Timeline) else list(group)
        start = min((each.start_s for each in records), default=0.0)
        ranks = sorted({each.rank for each in records})
        placed: dict[int, list[_Placed]] = {}
        for rank in ranks:
            pid = rank * len(groups) + number
            yield _metadata("process_name", pid, name=f"{name}: rank {rank}")
            yield _metadata("process_sort_index", pid, sort_index=pid)
            placed[rank] = []
            own = [(each, Action.parse(each.action)) for each in records if each.rank == rank]
            yield from _slices(pid, start, own, placed[rank])
            if isinstance(group, Timeline):
                yield from _memory(pid, *group.memory[rank])
        for (sent, _, tid), (reader, _, reader_tid) in _arrows(placed):
            # A recorded computation may take the wait for its message in; an arrow never goes back in time.
            arrives = min(max(reader.start_s, sent.start_s), reader.end_s)
            arrow = {"name": "message", "cat": "message", "id": flow}
            for phase, rank, track, at in (
                ("s", sent.rank, tid, sent.start_s),
                ("f", reader.rank, reader_tid, arrives),
            ):
                place = {"pid": rank * len(groups) + number, "tid": track, "ts": _microseconds(at - start)}
                yield {"ph": phase, **arrow, **place, **({"bp": "e"} if phase == "f" else {})}
            flow += 1


def _slices(
    pid: int,
    origin: float,
    own: Sequence[tuple[Recorded, Action]],
    placed: list[_Placed],
) -> Iterator[dict[str, Any]]:
    """The actions of one rank, each on the first track of its kind that is free; placed gets them with their tracks."""
    tid = 0
    for track in _TRACKS:
        free: list[float] = []  # when each track of the kind is
        first = tid
        for record, action in sorted(own, key=lambda pair: (pair[0].start_s, pair[0].end_s)):
            if _track(action) != track:
                continue
            lane = next((lane for lane, at in enumerate(free) if at <= record.start_s), len(free))
            free[lane : lane + 1] = [record.end_s]
            placed.append((record, action, first + lane))
            parts = action.leaves
            yield {
                "ph": "X",
                "name": record.action,
                "cat": str(action.kind),
                "pid": pid,
                "tid": first + lane,
                "ts": _microseconds(record.start_s - origin),
                "dur": _microseconds(record.end_s - record.start_s),
                "args": {
                    "stage": ", ".join(str(part.stage) for part in parts),
                    "microbatch": ", ".join(str(part.microbatch) for part in parts if part.microbatch is not None),
                },
            }
        for lane in range(len(free)):
            label = track if lane == 0 else f"{track} {lane + 1}"
            yield _metadata("thread_name", pid, first + lane, name=label)
            yield _metadata("thread_sort_index", pid, first + lane, sort_index=first + lane)
        tid += len(free)


def _track(action: Action) -> str:
    if action.kind in TRANSFERS:
        return "communication"
    return "parameters" if action.kind in PARAMETERS else "compute"


def _arrows(placed: Mapping[int, Sequence[_Placed]]) -> Iterator[tuple[_Placed, _Placed]]:
    """Each send with what starts from it: F of the next stage, B or I of the one before."""
    readers: dict[tuple[Kind, int, int | None], _Placed] = {}
    for entries in placed.values():
        for entry in entries:
            for leaf in entry[1].leaves:
                if leaf.kind is Kind.FORWARD:
                    readers.setdefault((Kind.SEND_F, leaf.stage - 1, leaf.microbatch), entry)
                elif leaf.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                    readers.setdefault((Kind.SEND_B, leaf.stage + 1, leaf.microbatch), entry)
    for entries in placed.values():
        for entry in entries:
            action = entry[1]
            reader = readers.get((action.kind, action.stage, action.microbatch))
            if reader is not None:
                yield entry, reader


def _memory(pid: int, times: Sequence[float], held: Sequence[float]) -> Iterator[dict[str, Any]]:
    """A counter at every time at which what is held changes; of several changes at one time, the last."""
    for at, (time, value) in enumerate(zip(times, held)):
        if at + 1 == len(times) or times[at + 1] > time:
            yield {"ph": "C", "name": "memory", "pid": pid, "ts": _microseconds(time), "args": {"bytes": float(value)}}


def _metadata(kind: str, pid: int, tid: int | None = None, **args: Any) -> dict[str, Any]:
    return {"ph": "M", "name": kind, "pid": pid, **({} if tid is None else {"tid": tid}), "args": args}


def _microseconds(seconds: float) -> float:
    return round(float(seconds) * _MICRO, 3)
