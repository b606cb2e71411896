"""The predicted step of a plan without a pipeline, as what a rank does from when to when.

    program, cost ─ call_times.overlapped_walk ─► what runs beside what ─ _Clock ─► Span, Span, …

The walk is the one that the step's seconds come from. The predicted step is longer: collectives run on multiprocessors
too, so that a part of what they hide is taken from the compute (`Hardware.collective_busy`). Where k things run at
once, time is therefore stretched by 1 + c (k − 1), with the c that makes the whole as long as predicted: what runs
alone keeps its seconds, and what runs beside something else takes longer, on either side.

Collectives inside a call wait for its operators, in the order of the graph: they lie where the sum of the seconds of
what comes before them says, on the track of their link, while the call's own span goes on.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import getitem

from autopar.base.trace import Span
from autopar.cost.call_times import call_time, lane_of, overlapped_walk
from autopar.cost.collectives import Collective, phase_collectives
from autopar.cost.estimate import Cost
from autopar.cost.operator_time import region_seconds
from autopar.cost.step_time import Event, Walk
from autopar.cost.under_way import moving
from autopar.ir.placement import Overlap
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.rings import NO_COLLECTIVES, is_beside, sends_inside

DIGITS = 9
"""Significant digits of a span's numbers."""


def spans_of(program: Program, cost: Cost) -> tuple[Span, ...]:
    """What a rank does in the step that `cost` predicts, by track and time; the last span ends with it.

    Of many microbatches the first two and the last have spans of their own. Those between them are as the second one:
    one span on each track stands for all of them, with the bytes of one, and says how many they are (`times`).
    """
    assert program.pipeline is None
    overlap = program.overlap or Overlap(prefetch=False, at_end=False, extra_bytes=0)
    walk, through_s = overlapped_walk(program, overlap), cost.step_time_s - cost.optimizer_s
    clock = _Clock(walk, through_s)
    inside = _inside(program)
    found = [
        *_computed(program, walk, clock, inside),
        *_travelled(walk, clock),
        *_repeated(program, walk, clock, inside),
    ]
    if cost.optimizer_s:
        found.append(Span("compute", "optimizer", "optimizer", -1, through_s, cost.step_time_s))
    found.sort(key=lambda span: (span.start_s, -span.end_s, span.track))
    return tuple(
        replace(
            span,
            start_s=rounded(span.start_s, DIGITS),
            end_s=rounded(span.end_s, DIGITS),
            bytes_sent=rounded(span.bytes_sent, DIGITS),
        )
        for span in found
    )


def rounded(value: float, digits: int) -> float:
    """With so many significant digits."""
    return float(f"{value:.{digits}g}")


def call_name(program: Program, number: int) -> str:
    """A call's module, as in the generated program: `model.layers.3`, or the region's name where it has no path."""
    call = program.calls[number]
    return call.path or call.region


@dataclass(frozen=True, slots=True)
class _Inside:
    """A collective inside a call: from which part of the call's phase to which."""

    row: Collective
    lane: str
    start: float
    end: float


_InsideOf = Mapping[tuple[str, str], Sequence[_Inside]]


def _computed(program: Program, walk: Walk, clock: _Clock, inside: _InsideOf) -> Iterator[Span]:
    """The calls, and the collectives inside them."""
    names = [call_name(program, number) for number in range(len(program.calls))]
    for event in walk.events:
        phase = event.phase
        if event.message is not None:
            continue
        begin, length, shift = event.start_s, event.end_s - event.start_s, clock.shift(event)
        start, end = clock.at(begin) + shift, clock.at(event.end_s) + shift
        name = f"{names[phase.call]} {phase.name}"
        yield Span("compute", name, phase.name, phase.call, start, end)
        for each in inside[program.calls[phase.call].region, phase.name]:
            start, end = (clock.at(begin + part * length) + shift for part in (each.start, each.end))
            row = each.row
            name = f"{row.kind} {row.axis}"
            yield Span(each.lane, name, phase.name, phase.call, start, end, row.bytes_sent, why=row.why)


def _travelled(walk: Walk, clock: _Clock) -> Iterator[Span]:
    """Gathers and reductions; what of one call travels alike, one right after the other, is one span."""
    open_: dict[str, Span] = {}
    near_s = 1e-9 * clock.through_s
    for event in walk.events:
        if event.message is None or event.message.row is None:
            continue
        lane, _, row = event.message
        assert row is not None
        shift, phase = clock.shift(event), event.phase
        start, end = clock.at(event.start_s) + shift, clock.at(event.end_s) + shift
        name, sent = f"{row.kind} {row.axis}", row.bytes_sent / row.times
        kind = "backward" if phase.name == "reduce" else phase.name
        last = open_.get(lane)
        follows = last is not None and start <= last.end_s + near_s
        own = name, kind, phase.call, row.why
        if last is not None and follows and (last.name, last.phase, last.call, last.why) == own:
            open_[lane] = replace(last, end_s=end, bytes_sent=last.bytes_sent + sent)
            continue
        if last is not None:
            yield last
        open_[lane] = Span(lane, name, kind, phase.call, start, end, sent, why=row.why)
    yield from open_.values()


def _repeated(program: Program, walk: Walk, clock: _Clock, inside: _InsideOf) -> Iterator[Span]:
    """One span on each track for the microbatches that are as the second one."""
    if not walk.repeated:
        return
    sent: dict[str, float] = {}
    for event in walk.events:
        if event.phase.microbatch != walk.simulated - 2:
            continue
        if event.message is not None and event.message.row is not None:
            lane, _, row = event.message
            assert row is not None
            sent[lane] = sent.get(lane, 0.0) + row.bytes_sent / row.times
        elif event.message is None:
            for each in inside[program.calls[event.phase.call].region, event.phase.name]:
                sent[each.lane] = sent.get(each.lane, 0.0) + each.row.bytes_sent
    name = f"{walk.repeated} more microbatches" if walk.repeated > 1 else "1 more microbatch"
    start = clock.at(clock.cut_s)
    for track, num_bytes in {"compute": 0.0, **sent}.items():
        yield Span(track, name, "repeated", -1, start, start + clock.stretch_s, num_bytes, walk.repeated)


def _inside(program: Program) -> dict[tuple[str, str], list[_Inside]]:
    """By region and phase, the collectives inside a call, in the order of the graph."""
    found = {}
    for region in program.regions:
        whole = call_time(program, region)
        seconds = region_seconds(region, program.on_mesh)
        for phase, total in (("forward", whole.forward_s), ("backward", whole.backward_s)):
            if phase in region.lowered and is_beside(region.lowered[phase]):
                found[region.name, phase] = [
                    _Inside(each.row, lane_of(program.on_mesh, each.row.axis), *_parts(each.start_s, each.end_s, total))
                    for each in moving(program, region, phase, seconds)
                ]
                continue
            rows = list(phase_collectives(program, region, phase, 1)) if phase in region.lowered else []
            places = _places(region, phase, seconds) if rows else []
            now, own = 0.0, []
            for before, row in zip(places, rows, strict=True):
                start = before + now
                now += row.seconds
                own.append(_Inside(row, lane_of(program.on_mesh, row.axis), *_parts(start, before + now, total)))
            found[region.name, phase] = own
    return found


def _parts(start: float, end: float, total: float) -> tuple[float, float]:
    return (start / total, min(1.0, end / total)) if total else (0.0, 0.0)


def _places(region: Region, phase: str, seconds: Mapping[str, float]) -> Iterator[float]:
    """Before each collective of a phase, the seconds of the operators that come first (a ring's are its own)."""
    order = [name for name in seconds if (name in region.forward_nodes) == (phase == "forward")]
    place = {name: number for number, name in enumerate(order)}
    reached, now = 0, 0.0
    for node in region.lowered[phase].graph.nodes:
        ring = sends_inside(node)
        if ring or (node.op == "call_function" and node.target is not getitem and "origin" in node.meta):
            # What is not found under its name comes with the next that is.
            until = place.get(node.meta["operator"] if ring else node.name, -1) + 1
            now += sum(seconds[name] for name in order[reached:until])
            reached = max(reached, until)
        if ring or (node.op == "call_method" and node.target not in NO_COLLECTIVES):
            yield now


class _Clock:
    """From the walk's seconds to those of the predicted step, which has `through_s` of them.

    cut_s: of the walk, where the last microbatch begins and the repeated ones come in. stretch_s: how long these take.
    """

    def __init__(self, walk: Walk, through_s: float) -> None:
        self.through_s = through_s
        self.times, counts = _running(walk.events)
        last, before = walk.simulated - 1, walk.simulated - 2
        begins = _begins(walk)
        self.cut_s, window = begins[last], (begins[before] if walk.repeated else 0.0, begins[last])
        idle, beside = _sums(self.times, counts, (0.0, float("inf")))
        again_idle, again_beside = _sums(self.times, counts, window)
        num = walk.repeated * walk.period_s / (window[1] - window[0]) if walk.repeated else 0.0
        weights = _Weights.of(through_s, walk.seconds, idle + num * again_idle, beside + num * again_beside)
        self.reached = [0.0]
        for start, end, count in zip(self.times, self.times[1:], counts, strict=False):
            self.reached.append(self.reached[-1] + (end - start) * weights.at(count))
        self.stretch_s = num * (self.at(window[1]) - self.at(window[0]))

    def at(self, time_s: float) -> float:
        """Seconds of the predicted step, without the microbatches that are repeated."""
        place = min(max(bisect_right(self.times, time_s) - 1, 0), len(self.times) - 2)
        start, end = self.times[place], self.times[place + 1]
        part = (time_s - start) / (end - start) if end > start else 0.0
        return self.reached[place] + part * (self.reached[place + 1] - self.reached[place])

    def shift(self, event: Event) -> float:
        """By how much an event comes later for the repeated microbatches."""
        return self.stretch_s if event.start_s >= self.cut_s else 0.0


@dataclass(frozen=True, slots=True)
class _Weights:
    """How much longer time gets: whatever runs, where nothing does, and for each thing more that runs at once."""

    always: float
    idle: float
    beside: float

    def at(self, count: int) -> float:
        return self.always * (self.idle if count == 0 else 1.0 + self.beside * (count - 1))

    @staticmethod
    def of(wanted_s: float, given_s: float, idle_s: float, beside_s: float) -> _Weights:
        """For a step of `given_s` to take `wanted_s`. beside_s: seconds of what runs beside something else.

        A walk that waits longer than predicted (where nothing hides, `estimate` counts all one after the other) waits
        less; otherwise what runs at once takes longer.
        """
        more = wanted_s - given_s
        less_idle = min(idle_s, max(0.0, -more))
        more += less_idle
        idle = 1.0 - less_idle / idle_s if idle_s else 1.0
        if beside_s > 0.0 and more >= 0.0:
            return _Weights(1.0, idle, more / beside_s)
        kept_s = given_s - less_idle
        return _Weights(wanted_s / kept_s if kept_s else 1.0, idle, 0.0)


def _running(events: Sequence[Event]) -> tuple[list[float], list[int]]:
    """The times at which something begins or ends, and how many things run from each of them on."""
    changes: dict[float, int] = {0.0: 0}
    for event in events:
        changes[event.start_s] = changes.get(event.start_s, 0) + 1
        changes[event.end_s] = changes.get(event.end_s, 0) - 1
    times = sorted(changes)
    counts, now = [], 0
    for time in times:
        now += changes[time]
        counts.append(now)
    return (times, counts) if len(times) > 1 else ([0.0, 0.0], [0, 0])


def _sums(times: Sequence[float], counts: Sequence[int], window: tuple[float, float]) -> tuple[float, float]:
    """Seconds of a window in which nothing runs, and of what runs beside something else."""
    idle = beside = 0.0
    for start, end, count in zip(times, times[1:], counts, strict=False):
        length = max(0.0, min(end, window[1]) - max(start, window[0]))
        idle += length * (count == 0)
        beside += length * max(0, count - 1)
    return idle, beside


def _begins(walk: Walk) -> dict[int, float]:
    """When each microbatch's first call starts."""
    found: dict[int, float] = {}
    for event in walk.events:
        if event.message is None:
            found.setdefault(event.phase.microbatch, event.start_s)
    return found
