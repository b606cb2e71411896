"""Traces of plans without a pipeline: valid events, one process for each rank, or for all of many."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import autopar
from autopar.base import perfetto as trace
from autopar.base.errors import AutoparError
from autopar.base.trace import MemoryCurve, Span
from tests.unit.pipelining.test_trace import check_format
from tests.unit.views.test_step import planned

pytestmark = pytest.mark.unit


def events_of(path: Path) -> list[dict[str, Any]]:
    found: list[dict[str, Any]] = json.loads(path.read_text())["traceEvents"]
    return found


@pytest.mark.moderate
@pytest.mark.parametrize("case", ["zero3", "zero3 and tensor, 64 microbatches", "ring"])
def test_a_plans_trace(case: str, tmp_path: Path) -> None:
    """Breaks if slices cross, or a span, its bytes or its module are lost on the way."""
    plan = planned(case)
    events = events_of(plan.trace(tmp_path / "trace.json"))
    check_format(events)
    names = [event["args"]["name"] for event in events if event["name"] == "process_name"]
    assert names == [f"predicted: rank {rank}" for rank in range(plan.mesh.num_devices)]
    first = [event for event in events if event["ph"] == "X" and event["pid"] == 1]
    assert plan.views is not None and len(first) == len(plan.views.spans)
    sent = sum(event["args"].get("bytes", 0.0) for event in first)
    assert sent == pytest.approx(sum(row.bytes_sent for row in plan.collectives))
    end_s = max(event["ts"] + event["dur"] for event in first) / 1e6
    assert end_s == pytest.approx(plan.cost.step_time_s, rel=1e-6)
    gathers = [event["args"] for event in first if event["name"] == "all_gather dp"]
    assert {each["axis"] for each in gathers} == {"dp"} and "model.layers.0" in {each["module"] for each in gathers}
    held = [event["args"]["bytes"] for event in events if event["name"] == "memory" and event["pid"] == 1]
    assert max(held) == pytest.approx(plan.cost.memory.peak, rel=1e-5)


def test_many_ranks_are_one_process() -> None:
    """Breaks if a trace for 256 ranks says the same 256 times."""
    spans = [Span("compute", "layer forward", "forward", 0, 0.0, 1.0)]
    assert [process.name for process in trace.predicted(spans, None, 256)] == ["predicted: ranks 0-255"]
    assert len(trace.predicted(spans, None, 8)) == 8


def test_what_overlaps_lies_on_tracks_of_its_own() -> None:
    spans = [
        Span("network", "all_gather dp", "forward", 0, 0.0, 1.0, 8.0),
        Span("network", "all_reduce tp", "forward", 0, 0.5, 0.75, 8.0),
        Span("network", "all_gather dp", "forward", 1, 1.0 - 1e-10, 2.0, 8.0),
        Span("compute", "layer forward", "forward", 0, 0.0, 1.0),
        Span("compute", "layer forward", "forward", 1, 1.0, 2.0),
    ]
    curve = MemoryCurve(0, (0.0, 1.0), {"activations": (1.0, 2.0), "parameters": (4.0, 4.0)})
    events = list(trace.events_of(trace.predicted(spans, curve, 1)))
    check_format(events)
    tracks = [event["args"]["name"] for event in events if event["name"] == "thread_name"]
    assert tracks == ["compute", "network", "network 2"]
    counters = [event["args"] for event in events if event["ph"] == "C"]
    assert counters[2:] == [{"bytes": 6.0}, {"activations": 2.0, "parameters": 4.0}]


@pytest.mark.moderate
def test_a_plan_of_an_older_version_says_so(tmp_path: Path) -> None:
    plan = replace(planned("zero3"), views=None)
    loaded = autopar.Plan.from_json(plan.to_json())
    assert loaded.views is None
    with pytest.raises(AutoparError, match="no timeline to trace"):
        loaded.trace(tmp_path / "trace.json")
