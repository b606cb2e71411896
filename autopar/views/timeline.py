"""A step's timeline as the report's page draws it: ranks, tracks, events, arrows."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from autopar.pipelining.actions import PARAMETERS, TRANSFERS, Kind

if TYPE_CHECKING:
    from autopar.pipelining.simulate import Timeline
    from autopar.plans import Plan
    from autopar.views.data import Span

KINDS = {
    "forward": "forward", "backward": "backward", "backward_input": "backward, inputs", "backward_weight":
    "backward, weights", "send": "send to another stage", "gather": "gather parameters", "reduce": "reduce gradients",
    "collective": "collective inside a call", "optimizer": "optimizer", "repeated": "more microbatches, alike",
}  # fmt: skip
_KIND_OF = {
    Kind.FORWARD: "forward", Kind.BACKWARD: "backward", Kind.BACKWARD_INPUT: "backward_input",
    Kind.BACKWARD_WEIGHT: "backward_weight", Kind.UNSHARD: "gather", Kind.REDUCE_GRAD: "reduce",
}  # fmt: skip
_READERS = {Kind.SEND_F: (Kind.RECV_F, 1), Kind.SEND_B: (Kind.RECV_B, -1)}


def timeline_data(plan: Plan) -> dict[str, Any] | None:
    """None where the plan has neither spans nor a pipeline."""
    if plan.pipeline is not None:
        return {**_of_pipeline(plan.pipeline.timeline, plan.pipeline.axis, plan), "kinds": KINDS}
    assert plan.views is not None
    if not plan.views.spans:
        return None
    tracks: dict[str, list[Any]] = {}
    for span in plan.views.spans:
        label = span.name if span.times == 1 else f"{span.name}, {span.times} times"
        item = f"region:{plan.views.calls[span.call].region}" if span.call >= 0 else None
        kind = _kind_of(span)
        tracks.setdefault(span.track, []).append([span.start_s, span.end_s - span.start_s, label, kind, item])
    order = {"compute": 0, "node": 1, "network": 2}
    named = [{"name": name, "events": tracks[name]} for name in sorted(tracks, key=lambda each: order.get(each, 3))]
    return {
        "ranks": [{"name": "every rank", "bubble": None, "tracks": named}],
        "arrows": [], "step_s": plan.cost.step_time_s, "kinds": KINDS,
    }  # fmt: skip


def _kind_of(span: Span) -> str:
    if span.phase == "repeated":
        return "repeated"
    if span.track == "compute":
        return span.phase
    return {"gather parameter": "gather", "reduce gradient": "reduce"}.get(span.why, "collective")


def _of_pipeline(timeline: Timeline, axis: str, plan: Plan) -> dict[str, Any]:
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
