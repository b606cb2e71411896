"""A step's timeline as the report's page draws it: ranks, tracks, events, arrows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from autopar.base.trace import Span
from autopar.ir.schedule import PARAMETERS, TRANSFERS, Kind
from autopar.planner.plan.drawn import Views
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.simulate import Timeline

KINDS = {
    "forward": "forward", "backward": "backward", "backward_input": "backward, inputs", "backward_weight":
    "backward, weights", "send": "send to another stage", "gather": "gather parameters", "reduce": "reduce gradients",
    "collective": "collective inside a call", "optimizer": "optimizer", "repeated": "more microbatches, alike",
}  # fmt: skip
_KIND_OF = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight", Kind.UNSHARD: "gather", Kind.REDUCE_GRAD: "reduce",
}  # fmt: skip
BESIDE = (
    "What runs at the same time slows the other, here as in the predicted step; "
    "the collectives' table gives each by itself."
)
_READERS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def timeline_data(plan: PlanRecord) -> dict[str, Any] | None:
    """None where the plan has neither spans nor a pipeline."""
    if plan.pipeline is not None:
        return {**_of_pipeline(plan.pipeline.timeline, plan.pipeline.axis, plan), "kinds": KINDS}
    if not plan.drawn.spans:
        return None
    tracks: dict[str, list[Any]] = {}
    inside = _inside(plan.drawn)
    for span in plan.drawn.spans:
        label = span.name if span.times == 1 else f"{span.name}, {span.times} times"
        region = plan.drawn.calls[span.call].region if span.call >= 0 else ""
        item, kind = f"region:{region}" if region else None, _kind_of(span)
        if kind == "backward":
            item = f"backward:{region}"
        elif kind == "collective":
            item = inside[span.call, span.phase].keys.get(span.start_s, item)
        pieces = [(span.start_s, span.end_s)]
        if span.track == "compute" and (span.call, span.phase) in inside:
            pieces = _between(span, inside[span.call, span.phase].spans)
        for start_s, end_s in pieces:
            tracks.setdefault(span.track, []).append([start_s, end_s - start_s, label, kind, item])
    order = {"compute": 0, "node": 1, "network": 2}
    named = [{"name": name, "events": tracks[name]} for name in sorted(tracks, key=lambda each: order.get(each, 3))]
    return {
        "ranks": [{"name": "every rank", "bubble": None, "tracks": named}],
        "arrows": [], "step_s": plan.cost.step_time_s, "kinds": KINDS, "note": BESIDE if plan.cost.hidden_s else None,
    }  # fmt: skip


@dataclass(slots=True)
class _Inside:
    """Collectives that one call waits for, in order; keys: of their items, by when they start."""

    spans: list[Span] = field(default_factory=list)
    keys: dict[float, str] = field(default_factory=dict)


def _inside(views: Views) -> dict[tuple[int, str], _Inside]:
    """By call and phase. Spans and the program's collectives come in one order, once for each microbatch."""
    found: dict[tuple[int, str], _Inside] = {}
    for span in sorted(views.spans, key=lambda each: each.start_s):
        if span.call >= 0 and span.track != "compute" and _kind_of(span) == "collective":
            found.setdefault((span.call, span.phase), _Inside()).spans.append(span)
    for (call, phase), own in found.items():
        region = views.region(views.calls[call].region)
        ops = [op for op in region.ops if op.kind == "collective" and op.phase == phase]
        for number, span in enumerate(own.spans):
            op = ops[number % len(ops)] if ops else None
            if op is not None and span.name == f"{op.op} {op.axis}":
                own.keys[span.start_s] = f"op:{region.name}.{op.name}"
    return found


def _between(span: Span, waits: Sequence[Span]) -> list[tuple[float, float]]:
    """When a call computes: not while it waits for a collective of its own."""
    found, at = [], span.start_s
    for wait in waits:
        if span.start_s <= wait.start_s and wait.end_s <= span.end_s * (1 + 1e-9):
            found.append((at, wait.start_s))
            at = wait.end_s
    found.append((at, span.end_s))
    return [(start, end) for start, end in found if end > start]


def _kind_of(span: Span) -> str:
    if span.phase == "repeated":
        return "repeated"
    if span.track == "compute":
        return span.phase
    return {"gather parameter": "gather", "reduce gradient": "reduce"}.get(span.why, "collective")


def _of_pipeline(timeline: Timeline, axis: str, plan: PlanRecord) -> dict[str, Any]:
    ranks: list[dict[str, list[Any]]] = [{} for _ in range(timeline.schedule.num_ranks)]
    received: dict[tuple[Kind, int, int | None], tuple[int, float]] = {}
    sends = []
    for event in timeline.events:
        action = event.action
        length = event.end_s - event.start_s
        if action.kind in TRANSFERS:
            if action.kind in _READERS:
                sends.append(event)
                row = [event.start_s, length, str(action), "send", f"stage:{action.stage}"]
                ranks[event.rank].setdefault("communication", []).append(row)
            else:
                received[(action.kind, action.stage, action.microbatch)] = event.rank, event.end_s
            continue
        if action.kind not in _KIND_OF or not length:
            continue
        track = "parameters" if action.kind in PARAMETERS else "compute"
        row = [event.start_s, length, str(action), _KIND_OF[action.kind], f"stage:{action.stage}"]
        ranks[event.rank].setdefault(track, []).append(row)
    arrows = []
    for event in sends:
        kind, step = _READERS[event.action.kind]
        end = received.get((kind, event.action.stage + step, event.action.microbatch))
        if end is not None:
            arrows.append([event.rank, event.start_s, *end])
    order = ("compute", "communication", "parameters")
    return {
        "ranks": [
            {
                "name": f"{axis} rank {number}", "bubble": timeline.bubble_shares[number],
                "tracks": [{"name": name, "events": tracks[name]} for name in order if name in tracks],
            }
            for number, tracks in enumerate(ranks)
        ],
        "arrows": arrows, "step_s": max(timeline.makespan_s, plan.cost.step_time_s),
    }  # fmt: skip
