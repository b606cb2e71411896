"""How much of each collective runs while its rank computes, read off the step's timeline.

    plan.views.spans, or the events of the pipeline's timeline ─ hidden_shares ─► a share of 1 for each row

Collectives inside a call are waited for: nothing of them is hidden, but what layers of experts say of their exchanges,
which is shared by those of one region and phase. Gathers of parameters, reductions of gradients and
sends run beside the calls; the timeline tells those apart by kind, axis, phase and region (in a pipeline by what they
are for), so that rows that are alike in these have one share. Calls count as computing from their beginning to their
end.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Iterable, Sequence

from autopar.base.trace import Span
from autopar.cost.collectives import Collective
from autopar.ir.schedule import COMPUTE, Kind
from autopar.planner.plan.drawn import Views
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.simulate import Event

Interval = tuple[float, float]
_MOVES = ("gather parameter", "reduce gradient")
_SENDS = {"activation to the next stage": (Kind.SEND_F,), "gradient to the stage before": (Kind.SEND_B,)}


def hidden_shares(plan: PlanRecord) -> list[float | None]:
    """For each of the plan's collectives, in their order; None where the plan has no timeline that says it."""
    found = _in_pipeline(plan) if plan.pipeline is not None else _in_step(plan)
    rows = zip(plan.collectives, found, strict=True)
    return [share if row.kind != "exchange" else _of_exchanges(plan.drawn, row) for row, share in rows]


def _in_step(plan: PlanRecord) -> list[float | None]:
    if not plan.drawn.spans:
        return [None] * len(plan.collectives)
    shares = _of_spans(plan.drawn)
    return [shares.get(_key(plan.drawn, row)) if row.why in _MOVES else 0.0 for row in plan.collectives]


def _of_exchanges(views: Views, row: Collective) -> float | None:
    """Of a region's exchanges in one phase."""
    layers = [each for region in views.regions if row.where.startswith(f"{region.name} {row.phase}:")
              for each in region.experts if each.axis]  # fmt: skip
    is_forward = row.phase == "forward"
    whole_s = sum(each.forward_s if is_forward else each.backward_s for each in layers)
    hidden_s = sum(each.forward_hidden_s if is_forward else each.backward_hidden_s for each in layers)
    return min(1.0, hidden_s / whole_s) if whole_s else None


Key = tuple[str, str, str, str]
"""Kind and axis, phase, purpose, region."""


def _of_spans(views: Views) -> dict[Key, float]:
    computing = _joined((s.start_s, s.end_s) for s in views.spans if s.track == "compute" and s.call >= 0)
    sums: dict[Key, list[float]] = {}
    begin_s, end_s, times = _second_microbatch(views.spans)
    for span in views.spans:
        if span.track == "compute" or span.call < 0 or span.why not in _MOVES:
            continue
        weight = times if begin_s <= span.start_s < end_s else 1
        row = sums.setdefault((span.name, span.phase, span.why, views.calls[span.call].region), [0.0, 0.0])
        row[0] += weight * _beside(computing, (span.start_s, span.end_s))
        row[1] += weight * (span.end_s - span.start_s)
    return {key: min(1.0, beside_s / whole_s) for key, (beside_s, whole_s) in sums.items() if whole_s}


def _second_microbatch(spans: Sequence[Span]) -> tuple[float, float, int]:
    """From when to when it runs, and for how many it stands; spans leave out those that are as it is."""
    repeated = [span for span in spans if span.phase == "repeated"]
    if not repeated:
        return 0.0, 0.0, 1
    first = [span.start_s for span in spans if span.track == "compute" and (span.call, span.phase) == (0, "forward")]
    return sorted(first)[1], repeated[0].start_s, 1 + repeated[0].times


def _key(views: Views, row: Collective) -> Key:
    return f"{row.kind} {row.axis}", row.phase, row.why, _region_of(views, row)


def _region_of(views: Views, row: Collective) -> str:
    """What several calls use is gathered for the first of them, and for the backward by the last."""
    region, _, tensor = row.where.partition(": ")
    if region in {each.name for each in views.regions}:
        return region
    users = {each.name for each in views.regions if any(slot.tensor == tensor for slot in each.slots)}
    ordered = [call.region for call in views.calls if call.region in users]
    is_last = row.why == "gather parameter" and row.phase == "backward"
    return ordered[-1 if is_last else 0] if ordered else region


def _in_pipeline(plan: PlanRecord) -> list[float | None]:
    """Of the rank that the plan's collectives are of: the one that sends from its stages."""
    assert plan.pipeline is not None
    rank = _rank_of(plan)
    if rank is None:
        return [None] * len(plan.collectives)
    own = [event for event in plan.pipeline.timeline.events if event.rank == rank]
    computing = _joined((e.start_s, e.end_s) for e in own if e.action.kind in COMPUTE or e.action.parts)
    found: list[float | None] = []
    for row in plan.collectives:
        kinds = _actions_of(plan.drawn, row)
        found.append(0.0 if kinds is None else _share(own, kinds, computing))
    return found


def _actions_of(views: Views, row: Collective) -> Sequence[Kind] | None:
    """What a pipeline's timeline calls a collective; None where it is a part of the calls."""
    if row.kind == "send":
        return _SENDS.get(row.why, ())
    if row.why == "reduce gradient":
        return (Kind.REDUCE_GRAD,)
    if row.why != "gather parameter":
        return None
    region = _region_of(views, row)
    moves = [move for each in views.regions if each.name == region for move in each.moves]
    once = any(m.once and m.which != "reduce" and (m.kind, m.axis) == (row.kind, row.axis) for m in moves)
    return (Kind.UNSHARD,) if once else None  # what is gathered for each use is gathered inside the call


def _rank_of(plan: PlanRecord) -> int | None:
    assert plan.pipeline is not None
    sends = [row.where for row in plan.collectives if row.kind == "send" and row.where.startswith("stage ")]
    return plan.pipeline.schedule.rank_of[int(sends[0].split()[1])] if sends else None


def _share(events: Sequence[Event], kinds: Sequence[Kind], computing: Sequence[Interval]) -> float | None:
    moves = [(event.start_s, event.end_s) for event in events if event.action.kind in kinds]
    whole_s = sum(end - start for start, end in moves)
    return min(1.0, sum(_beside(computing, each) for each in moves) / whole_s) if whole_s else None


def _joined(intervals: Iterable[Interval]) -> list[Interval]:
    """Ascending, none touching another."""
    found: list[Interval] = []
    for start, end in sorted(intervals):
        if found and start <= found[-1][1]:
            found[-1] = (found[-1][0], max(end, found[-1][1]))
        else:
            found.append((start, end))
    return found


def _beside(joined: Sequence[Interval], span: Interval) -> float:
    """Seconds of `span` that lie in one of the intervals."""
    start, end = span
    found = 0.0
    for low, high in joined[max(0, bisect_right(joined, (start, start)) - 1) :]:
        if low >= end:
            break
        found += max(0.0, min(high, end) - max(low, start))
    return found
