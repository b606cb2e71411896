"""What a rank does over the predicted step, and what it holds meanwhile: data for traces and reports, saved with plans.

    program, cost ─ spans_of ─► spans ─┐
    program ─ step_memory.Step ────────┴─► one curve             a plan without a pipeline
    summary.timeline, program ───────────► a curve for each rank of the pipeline

The fullest time of a curve is the peak that the plan predicts. Numbers have few digits, so that plans stay small.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import numpy as np

from autopar.base.trace import MemoryCurve, Span
from autopar.cost.estimate import OPTIMIZER_STATES, Cost
from autopar.cost.memory.calls import CallCosts, parameter_costs
from autopar.cost.memory.step import Kind, Sample, Step
from autopar.ir.program import Program
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.summary import PipelineSummary
from autopar.views.step import DIGITS, rounded, spans_of

SAMPLES = 4000
"""Times of all curves together, about: of more, neighbours become one, which has what the fullest of them holds."""
DIGITS_BYTES = 6
"""Significant digits of bytes."""

KINDS: tuple[Kind, ...] = (
    "parameters", "optimizer states", "gradients", "activations", "gathered", "working", "inputs and outputs"
)  # fmt: skip

_Held = Mapping[Kind, float]


def step_views(
    program: Program, cost: Cost, summary: PipelineSummary | None
) -> tuple[tuple[Span, ...], tuple[MemoryCurve, ...]]:
    """The spans of the predicted step, none where there is a pipeline, and a memory curve of each of its ranks (of rank
    0 alone without one). program: lowered. cost, summary: as `pipeline.price` gives them.
    """
    if summary is not None:
        return (), pipeline_curves(program, summary)
    spans = spans_of(program, cost)
    return spans, (memory_curve(program, spans),)


# -- without a pipeline


def memory_curve(program: Program, spans: Sequence[Span]) -> MemoryCurve:
    """What a rank holds over the step of these spans.

    Of several things that it holds at one time the fullest moment counts, up to the next time. In inference there is
    the forward alone.
    """
    step = _Step(program)
    times = [0.0]
    levels: list[_Held] = [step.always]
    num, calls = program.microbatches, len(program.calls)
    computed = [span for span in spans if span.track == "compute" and span.phase in ("forward", "backward")]
    repeated = next((span for span in spans if span.phase == "repeated"), None)
    passes = 2 * calls if program.training else calls
    for place in range(0, len(computed), passes):
        own = computed[place : place + passes]
        is_last = place + passes >= len(computed)
        if is_last and repeated is not None:
            times.append(repeated.start_s)
            levels.append(step.fullest(num - 2))
        before = num - 1 if is_last else place // passes
        for samples, during in ((step.forward, own[:calls]), (step.backward, own[calls:])):
            if not during:
                continue
            times += _times(samples, during)
            levels += step.levels(samples, before)
    if program.training:
        times.append(max((span.end_s for span in computed), default=0.0))
        levels.append(step.walk.update())
    return _curve(0, times, {kind: [held.get(kind, 0.0) for held in levels] for kind in KINDS}, SAMPLES)


def _times(samples: Sequence[Sample], spans: Sequence[Span]) -> Iterator[float]:
    """When each sample begins to count: what has arrived from the end of the call before."""
    for sample in samples:
        place = min(sample.place, len(spans) - 1)
        if sample.moment == "computes" or (sample.moment == "arrived" and not place):
            yield spans[place].start_s
        else:
            yield spans[place - (sample.moment == "arrived")].end_s


class _Step:
    """What the passes of one microbatch hold, and all of them. always: beside what `forward` and `backward` say."""

    def __init__(self, program: Program) -> None:
        self.walk = walk = Step(program, CallCosts(program))
        self.forward: list[Sample] = []
        self.backward: list[Sample] = []
        walk.forwards(self.forward)
        if program.training:
            walk.backwards(self.backward)
        self.always, self.output_bytes, self.sums = walk.always(), walk.output_bytes(), walk.sums()

    def levels(self, samples: Sequence[Sample], before: int) -> list[_Held]:
        """The samples of the forward, or the backward, with what the whole step holds. before: microbatches that are
        through; they have left sums of gradients, which the first one makes call by call, and outputs.
        """
        first = [0.0] * (len(self.walk.calls) + 1)
        if samples is self.backward and self.sums:
            first = self._sums_of_first()
        found: list[_Held] = []
        for sample in samples:
            held: dict[Kind, float] = dict(self.always)
            for kind, size in sample.held.items():
                held[kind] = held.get(kind, 0.0) + size
            held["inputs and outputs"] += before * self.output_bytes
            held["gradients"] = held.get("gradients", 0.0) + (self.sums if before else first[sample.place])
            found.append(held)
        return found

    def _sums_of_first(self) -> list[float]:
        """What the first microbatch has added to the sums, before each call of its backward and at its end."""
        seen: set[str] = set()
        found = [0.0]
        for call in reversed(self.walk.calls):
            new = [self.walk.variables[name] for name in dict.fromkeys(call.slots) if name not in seen]
            seen.update(call.slots)
            found.append(found[-1] + sum(self.walk.sum_of(variable) for variable in new if variable.trainable))
        return found

    def fullest(self, before: int) -> _Held:
        """The fullest time of a microbatch."""
        levels = self.levels(self.forward, before) + self.levels(self.backward, before)
        return max(levels, key=lambda held: sum(held.values()))


# -- with a pipeline


def pipeline_curves(program: Program, summary: PipelineSummary) -> tuple[MemoryCurve, ...]:
    """What each rank of the pipeline holds, as its timeline counts it, split by kind.

    `working` has the parameters in it that are gathered for one use, `gathered` those held for the step, `activations`
    what the backward of microbatches in flight needs.
    """
    timeline = summary.timeline
    costs = timeline.costs
    # What a rank holds is a sum over the bytes of its stages' costs, so that each kind has a timeline of its own.
    parts: dict[Kind, Sequence[StageCost]] = {
        "activations": [
            StageCost(0.0, 0.0, saved_bytes=c.saved_bytes, input_bytes=c.input_bytes, kept_bytes=c.kept_bytes)
            for c in costs
        ],
        "gathered": [StageCost(0.0, 0.0, held_bytes=c.held_bytes) for c in costs],
        "working": [
            StageCost(
                0.0, 0.0, forward_working_bytes=c.forward_working_bytes, backward_working_bytes=c.backward_working_bytes
            )
            for c in costs
        ],
    }
    memories = {kind: replace(timeline, costs=tuple(part)).memory for kind, part in parts.items()}
    static = _static(program, summary)
    samples = max(64, SAMPLES // summary.schedule.num_ranks)
    curves = []
    for rank in range(summary.schedule.num_ranks):
        times = timeline.memory[rank][0]
        varying = {kind: memory[rank][1] for kind, memory in memories.items()}
        series = {kind: [held] * len(times) for kind, held in static[rank].items()} | varying
        curves.append(_curve(rank, times, series, samples))
    return tuple(curves)


def _static(program: Program, summary: PipelineSummary) -> list[dict[Kind, float]]:
    """What each rank holds all the time: `StageCost.static_bytes` of its stages."""
    assert program.pipeline is not None
    parameters, found = parameter_costs(program), []
    for rank in range(summary.schedule.num_ranks):
        held: dict[Kind, float] = dict.fromkeys(("parameters", "optimizer states", "gradients"), 0.0)
        whole = 0.0
        for number in summary.schedule.stages_of(rank):
            whole += summary.stages[number].cost.static_bytes
            calls = program.pipeline.stages[number].calls
            for name in dict.fromkeys(slot for call in calls for slot in program.calls[call].slots):
                each = parameters[name]
                trained = each.waiting_bytes > 0
                states = (each.static_bytes - each.waiting_bytes) * OPTIMIZER_STATES / (1 + OPTIMIZER_STATES) * trained
                held["gradients"] += each.waiting_bytes
                held["optimizer states"] += states
                held["parameters"] += each.static_bytes - each.waiting_bytes - states
        kept = whole - sum(held.values())  # outputs of all microbatches, for the user
        held["inputs and outputs"] = kept if kept > 0.5 else 0.0
        found.append(held)
    return found


# -- curves


def _curve(rank: int, times: Sequence[float], series: Mapping[Kind, Sequence[float]], most: int) -> MemoryCurve:
    """A curve of at most so many times, each of which says something new."""
    at = np.maximum.accumulate(np.array([rounded(time, DIGITS) for time in times]))
    held = np.array([series[kind] for kind in KINDS if kind in series], dtype=float)
    keep = _last_or_fullest(at, held.sum(0))
    at, held = np.unique(at), held[:, keep]
    if len(at) > most:
        parts = np.array_split(np.arange(len(at)), most)
        total = held.sum(0)
        held = held[:, [part[int(total[part].argmax())] for part in parts]]
        at = at[[part[0] for part in parts]]
    new = np.append(True, (held[:, 1:] != held[:, :-1]).any(0))
    kinds = [kind for kind in KINDS if kind in series]
    found = {kind: tuple(rounded(x, DIGITS_BYTES) for x in row) for kind, row in zip(kinds, held[:, new].tolist())}
    return MemoryCurve(rank, tuple(at[new].tolist()), {kind: row for kind, row in found.items() if any(row)})


def _last_or_fullest(at: np.ndarray, total: np.ndarray) -> list[int]:
    """Of what is held at each time the last, unless more was held for no time at all than before it and after."""
    ends = [*np.flatnonzero(at[1:] != at[:-1]).tolist(), len(at) - 1]
    found: list[int] = []
    first = 0
    for end in ends:
        fullest = first + int(total[first : end + 1].argmax())
        before = total[found[-1]] if found else 0.0
        found.append(fullest if total[fullest] > max(before, total[end]) else end)
        first = end + 1
    return found
