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
from autopar.base.trace import MemoryCurve, Recorded
from autopar.ir.schedule import PARAMETERS, TRANSFERS, Action, Kind
from autopar.machine.mesh import Mesh
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import Timeline

_TRACKS = ("compute", "communication", "parameters")


@dataclass(frozen=True, slots=True)
class Notes:
    """What a trace says of a simulated step beyond its timeline. stands_for: by rank of the pipeline, those of the mesh
    that do the same (`mesh 0-7`; Perfetto shows no longer names). memory: a curve for each rank, by kind. together: how
    many microbatches the number of an action stands for.
    """

    stands_for: Sequence[str] = ()
    memory: Sequence[MemoryCurve] = ()
    together: int = 1


_Placed = tuple[Recorded, Action, int, int]
"""With the order of its process, and its place there."""


def recorded(timeline: Timeline) -> list[Recorded]:
    """A simulated step in the form of a recorded one."""
    return [Recorded(event.rank, str(event.action), event.start_s, event.end_s) for event in timeline.events]


def write(
    path: str | Path, groups: Mapping[str, Timeline | Iterable[Recorded]], notes: Notes = Notes()
) -> Path:  # fmt: skip
    """Write a trace of simulated and recorded steps, each from time 0. groups: by name, such as predicted, measured."""
    return trace.write(path, trace_events(groups, notes))


def notes_of(mesh: Mesh, axis: str, memory: Sequence[MemoryCurve], together: int) -> Notes:
    """The notes of a plan. mesh: the whole one; axis: the pipeline's."""
    ranks: list[list[int]] = [[] for _ in range(mesh.size(axis))]
    for rank in range(mesh.num_devices):
        ranks[mesh.coordinates(rank)[axis]].append(rank)
    texts = []
    for own in ranks:
        in_a_row = own[-1] - own[0] + 1 == len(own)
        several = f"mesh {own[0]}-{own[-1]}" if in_a_row else f"mesh {own[0]} and {len(own) - 1} more"
        texts.append(f"mesh {own[0]}" if len(own) == 1 else several)
    return Notes(texts, memory, together)


def trace_events(
    groups: Mapping[str, Timeline | Iterable[Recorded]], notes: Notes = Notes()
) -> Iterator[dict[str, Any]]:  # fmt: skip
    """The trace's events. The same groups give the same events."""
    processes: list[trace.Process] = []
    arrows: list[trace.Arrow] = []
    for number, (name, group) in enumerate(groups.items()):
        timeline = group if isinstance(group, Timeline) else None
        records = recorded(group) if isinstance(group, Timeline) else list(group)
        start = min((each.start_s for each in records), default=0.0)
        placed: list[_Placed] = []
        for rank in sorted({each.rank for each in records}):
            order = rank * len(groups) + number
            own = [(each, Action.parse(each.action)) for each in records if each.rank == rank]
            placed += [(*pair, order, place) for place, pair in enumerate(own)]
            slices = [_slice(record, action, timeline, notes.together) for record, action in own]
            stands, memory = "", None
            if timeline is not None:
                slices += _update(timeline, rank)
                stands = f" ({notes.stands_for[rank]})" if notes.stands_for else ""
                memory = _curve(timeline, rank, notes)
            processes.append(trace.Process(f"{name}: rank {rank}{stands}", order, slices, memory, start))
        arrows += _arrows(placed)
    return trace.events_of(processes, _TRACKS, arrows)


def _slice(record: Recorded, action: Action, timeline: Timeline | None, together: int) -> trace.Slice:
    parts = action.leaves
    numbers = [part.microbatch for part in parts if part.microbatch is not None]
    args: dict[str, Any] = {
        "stage": ", ".join(str(part.stage) for part in parts),
        "microbatch": ", ".join(str(together * number + turn) for number in numbers for turn in range(together)),
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


def _arrows(placed: Sequence[_Placed]) -> Iterator[trace.Arrow]:
    """From each send to what starts from it: F of the next stage, B or I of the one before."""
    readers: dict[tuple[Kind, int, int | None], _Placed] = {}
    for entry in placed:
        for leaf in entry[1].leaves:
            if leaf.kind is Kind.FORWARD:
                readers.setdefault((Kind.SEND_F, leaf.stage - 1, leaf.microbatch), entry)
            elif leaf.kind in (Kind.BACKWARD, Kind.BACKWARD_INPUT):
                readers.setdefault((Kind.SEND_B, leaf.stage + 1, leaf.microbatch), entry)
    for sent, action, order, place in placed:
        found = readers.get((action.kind, action.stage, action.microbatch))
        if found is None:
            continue
        reader, _, reader_order, reader_place = found
        # A recorded computation may take the wait for its message in; an arrow never goes back in time.
        arrives = min(max(reader.start_s, sent.start_s), reader.end_s)
        yield (order, place, sent.start_s), (reader_order, reader_place, arrives)
