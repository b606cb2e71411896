"""What really ran, as a trace: every call and collective of a step without a pipeline, beside the predicted ones."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from tests.dist import recording
from tests.dist.launch import launch
from tests.unit.pipelining.test_trace import check_format

pytestmark = pytest.mark.dist

PLANS: dict[str, tuple[dict[str, int], Any, int]] = {
    "zero3": ({"dp": 2}, "zero3", 1),
    "zero3 and tensor, 4 microbatches": ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"}, 4),
    "ring": ({"dp": 2, "cp": 2}, {"dp": "zero3", "cp": "ring"}, 1),
}


def events_of(path: Path) -> tuple[list[dict[str, Any]], dict[int, str]]:
    """The events, and the names of processes."""
    events = json.loads(path.read_text())["traceEvents"]
    check_format(events)
    return events, {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}


@pytest.mark.sampled(2)
@pytest.mark.parametrize("case", PLANS)
def test_a_recorded_step_lies_beside_the_predicted_one(case: str, tmp_path: Path) -> None:
    """Breaks if a rank, a step, a call or a collective is missing, or bytes are not those that the plan says."""
    sizes, strategy, microbatches = PLANS[case]
    path, num_ranks = tmp_path / "run.perfetto.json", len(sizes) * 2
    answers = launch(recording.record, num_ranks, str(path), sizes, strategy, microbatches, timeout_s=120.0)
    assert all("no step ran" in answer["nothing"] for answer in answers)
    events, names = events_of(path)
    groups = ("predicted", "measured step 0", "measured step 1")
    assert sorted(names.values()) == sorted(f"{group}: rank {rank}" for group in groups for rank in range(num_ranks))
    slices = [(names[event["pid"]], event) for event in events if event["ph"] == "X"]
    calls = {f"{path} {phase}" for path in answers[0]["calls"] if path for phase in ("forward", "backward")}
    for rank in range(num_ranks):
        for step in (0, 1):
            own = [event for name, event in slices if name == f"measured step {step}: rank {rank}"]
            computed = [event for event in own if "axis" not in event["args"]]
            assert calls <= {event["name"] for event in computed}
            done = {(event["name"], event["args"]["microbatch"]) for event in computed}
            assert len(done) == len(computed)  # each call once for each microbatch
            assert {microbatch for _, microbatch in done} == set(range(microbatches))
            sent = sum(event["args"].get("bytes", 0.0) for event in own)
            assert sent == pytest.approx(answers[0]["sent"])
    predicted = [event for name, event in slices if name == "predicted: rank 0"]
    end_s = max(event["ts"] + event["dur"] for event in predicted) / 1e6
    assert end_s == pytest.approx(answers[0]["seconds"], rel=1e-5)
    if case == "ring":
        assert any(event["name"] == "exchange cp" for _, event in slices)


def test_a_recorded_evaluation_has_no_backward(tmp_path: Path) -> None:
    path = tmp_path / "run.perfetto.json"
    launch(recording.evaluate, 2, str(path), timeout_s=120.0)
    events, names = events_of(path)
    measured = [event for event in events if event["ph"] == "X" and names[event["pid"]] == "measured: rank 1"]
    assert measured and not any("backward" in event["name"] for event in measured)
