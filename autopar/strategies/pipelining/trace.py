"""A step of a pipeline as a trace that https://ui.perfetto.dev and chrome://tracing open.

Trace Event Format (JSON): a process for each rank of each group, named `predicted: rank 0`, `measured: rank 0`, …,
those of a rank beside each other; its tracks are `compute`, `communication` and `parameters` (UNSHARD, REDUCE_GRAD),
more than one of a name where actions overlap. Arrows go from a SEND to the computation that starts from its message;
`memory` counts the bytes that a rank holds. Of a simulated step the optimizer's update comes last.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from autopar.base import perfetto as trace
from autopar.base.trace import MemoryCurve
from autopar.ir.schedule import PARAMETERS, TRANSFERS, Action, Kind
from autopar.machine.mesh import Mesh
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import Timeline

_TRACKS = ("compute", "communication", "parameters")


@dataclass(frozen=True, slots=True)
class Recorded:
    """One action of a rank as it ran; start_s, end_s on a clock that all ranks share. action: its text, such as 2F0."""

    rank: int
    action: str
    start_s: float
    end_s: float


@dataclass(frozen=True, slots=True)
class Notes:
    """What a trace says of a simulated step beyond its timeline. stands_for: by rank of the pipeline, those of the mesh
    that do the same (`mesh 0-7`; Perfetto shows no longer names). memory: a curve for each rank, by kind.
    """

    stands_for: Sequence[str] = ()
    memory: Sequence[MemoryCurve] = ()


_Placed = tuple[Recorded, Action, int]
"""With the track that it lies on."""


def recorded(timeline: Timeline) -> list[Recorded]:
    """A simulated step in the form of a recorded one."""
    return [Recorded(event.rank, str(event.action), event.start_s, event.end_s) for event in timeline.events]


def write(
    path: str | Path, groups: Mapping[str, Timeline | Iterable[Recorded]], notes: Notes = Notes()
) -> Path:  # fmt: skip
    """Write a trace of simulated and recorded steps, each from time 0. groups: by name, such as predicted, measured."""
    return trace.write(path, trace_events(groups, notes))


def notes_of(mesh: Mesh, axis: str, memory: Sequence[MemoryCurve]) -> Notes:
    """The notes of a plan. mesh: the whole one; axis: the pipeline's."""
    ranks: list[list[int]] = [[] for _ in range(mesh.size(axis))]
    for rank in range(mesh.num_devices):
        ranks[mesh.coordinates(rank)[axis]].append(rank)
    texts = []
    for own in ranks:
        in_a_row = own[-1] - own[0] + 1 == len(own)
        several = f"mesh {own[0]}-{own[-1]}" if in_a_row else f"mesh {own[0]} and {len(own) - 1} more"
        texts.append(f"mesh {own[0]}" if len(own) == 1 else several)
    return Notes(texts, memory)


def trace_events(
    groups: Mapping[str, Timeline | Iterable[Recorded]], notes: Notes = Notes()
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The trace's events. The same groups give the same events."""
    flow = 0
    for number, (name, group) in enumerate(groups.items()):
        timeline = group if isinstance(group, Timeline) else None
        records = recorded(group) if isinstance(group, Timeline) else list(group)
        start = min((each.start_s for each in records), default=0.0)
        on_tracks: dict[int, list[_Placed]] = {}
        for rank in sorted({each.rank for each in records}):
            pid = trace.pid_of(rank * len(groups) + number)
            stands = f" ({notes.stands_for[rank]})" if timeline is not None and notes.stands_for else ""
            yield from trace.named(pid, f"{name}: rank {rank}{stands}")
            own = [(each, Action.parse(each.action)) for each in records if each.rank == rank]
            slices = [_slice(record, action, timeline) for record, action in own]
            slices += [] if timeline is None else _update(timeline, rank)
            events, tids = trace.placed(pid, start, slices, _TRACKS)
            yield from events
            on_tracks[rank] = [(*pair, tid) for pair, tid in zip(own, tids, strict=False)]
            if timeline is not None:
                yield from trace.counters(pid, _curve(timeline, rank, notes))
        for arrow in _arrows(on_tracks):
            for phase, (rank, tid, at) in zip("sf", arrow, strict=True):
                pid = trace.pid_of(rank * len(groups) + number)
                place = {"pid": pid, "tid": tid, "ts": trace.microseconds(at - start)}
                event = {"ph": phase, "name": "message", "cat": "message", "id": flow, **place}
                yield event | ({"bp": "e"} if phase == "f" else {})
            flow += 1


def _slice(record: Recorded, action: Action, timeline: Timeline | None) -> trace.Slice:
    parts = action.leaves
    args: dict[str, Any] = {
        "stage": ", ".join(str(part.stage) for part in parts),
        "microbatch": ", ".join(str(part.microbatch) for part in parts if part.microbatch is not None),
    }
    if timeline is not None and action.kind in (Kind.SEND_F, Kind.SEND_B):
        cost: StageCost = timeline.costs[action.stage]
        args["bytes"] = cost.forward_bytes if action.kind is Kind.SEND_F else cost.backward_bytes
    track = "parameters" if action.kind in PARAMETERS else "compute"
    track = "communication" if action.kind in TRANSFERS else track
    return trace.Slice(track, record.action, str(action.kind), record.start_s, record.end_s, args)


def _update(timeline: Timeline, rank: int) -> list[trace.Slice]:
    """The optimizer's update of what a rank holds, when all ranks are through."""
    seconds = sum(timeline.costs[stage].update_s for stage in timeline.schedule.stages_of(rank))
    end = timeline.makespan_s + seconds
    return [trace.Slice("compute", "optimizer", "optimizer", timeline.makespan_s, end)] if seconds else []


def _curve(timeline: Timeline, rank: int, notes: Notes) -> MemoryCurve:
    """What a rank holds: by kind where that is known."""
    found = next((curve for curve in notes.memory if curve.rank == rank), None)
    if found is not None:
        return found
    times, held = timeline.memory[rank]
    # Of several changes at one time, the last.
    last = [at for at, time in enumerate(times) if at + 1 == len(times) or times[at + 1] > time]
    return MemoryCurve(rank, tuple(times[at] for at in last), {"all": tuple(held[at] for at in last)})


_End = tuple[int, int, float]
"""Of an arrow: rank, track, time."""


def _arrows(on_tracks: Mapping[int, Sequence[_Placed]]) -> Iterator[tuple[_End, _End]]:
    """From each send to what starts from it: F of the next stage, B or I of the one before."""
    readers: dict[tuple[Kind, int, int | None], _Placed] = {}
    for entries in on_tracks.values():
        for entry in entries:
            for leaf in entry[1].leaves:
                if leaf.kind is Kind.FORWARD:
                    readers.setdefault((Kind.SEND_F, leaf.stage - 1, leaf.microbatch), entry)
                elif leaf.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                    readers.setdefault((Kind.SEND_B, leaf.stage + 1, leaf.microbatch), entry)
    for entries in on_tracks.values():
        for sent, action, tid in entries:
            found = readers.get((action.kind, action.stage, action.microbatch))
            if found is None:
                continue
            reader, _, reader_tid = found
            # A recorded computation may take the wait for its message in; an arrow never goes back in time.
            arrives = min(max(reader.start_s, sent.start_s), reader.end_s)
            yield (sent.rank, tid, sent.start_s), (reader.rank, reader_tid, arrives)
