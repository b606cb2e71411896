"""Traces hold what the Trace Event Format asks for, and the same input gives the same bytes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given, settings

from autopar.base.trace import Recorded
from autopar.ir.schedule import COMPUTE, Schedule
from autopar.machine.hardware import Link
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import Timeline, simulate
from autopar.strategies.pipelining.trace import recorded, trace_events, write
from tests.unit.pipelining import orders

COST = StageCost(1e-3, 2e-3, 1e-3, 1e-3, 100.0, 100.0, saved_bytes=7.0, held_bytes=3.0, unshard_s=1e-4, reduce_s=1e-4)


def timeline_of(schedule: Schedule) -> Timeline:
    return simulate(schedule, [COST] * schedule.num_stages, Link(1e6, 1e-5))


def check_format(events: list[dict]) -> None:
    """The fields of each phase; slices of a track do not cross; arrows have two ends, each in a slice."""
    tracks: dict[tuple[int, int], list[tuple[float, float]]] = {}
    flows: dict[int, dict[str, dict]] = {}
    for event in events:
        assert isinstance(event["name"], str) and isinstance(event["pid"], int)
        match event["ph"]:
            case "M":
                assert event["name"] in {"process_name", "process_sort_index", "thread_name", "thread_sort_index"}
                assert event["args"]
            case "X":
                assert event["ts"] >= 0 and event["dur"] >= 0
                # Perfetto takes these for one thread, the main one.
                assert event["tid"] not in (0, event["pid"])
                tracks.setdefault((event["pid"], event["tid"]), []).append((event["ts"], event["ts"] + event["dur"]))
            case "s" | "f":
                assert event["ph"] not in flows.setdefault(event["id"], {})
                assert event["ph"] == "s" or event["bp"] == "e"
                flows[event["id"]][event["ph"]] = event
            case "C":
                assert all(isinstance(value, float) for value in event["args"].values())
            case other:
                raise AssertionError(other)
    for slices in tracks.values():
        for (_, end), (start, _) in zip(sorted(slices), sorted(slices)[1:]):
            assert start >= end - 0.002  # rounded to nanoseconds
    for ends in flows.values():
        assert ends["s"]["ts"] <= ends["f"]["ts"] and ends["s"]["pid"] != ends["f"]["pid"]
        for end in ends.values():
            assert any(a - 0.002 <= end["ts"] <= b + 0.002 for a, b in tracks[end["pid"], end["tid"]])


@pytest.mark.moderate
@given(orders.admitted(most_ranks=4, most_microbatches=6))
@settings(max_examples=40, deadline=None)
def test_a_simulated_step_beside_a_recorded_one(schedule: Schedule) -> None:
    timeline = timeline_of(schedule)
    later = [Recorded(e.rank, e.action, e.start_s + 100.0, e.end_s + 100.0) for e in recorded(timeline)]
    events = list(trace_events({"predicted": timeline, "measured": later}))
    check_format(events)
    names = {event["args"]["name"] for event in events if event["name"] == "process_name"}
    assert names == {
        f"{group}: rank {rank}" for group in ("predicted", "measured") for rank in range(schedule.num_ranks)
    }
    slices = [event for event in events if event["ph"] == "X"]
    assert len(slices) == 2 * len(timeline.events)
    assert min(event["ts"] for event in slices if event["pid"] % 2 == 0) == 0
    sends = sum("SEND" in event["name"] for event in slices)
    assert sends == sum(event["ph"] == "s" for event in events)
    computed = [event for event in slices if event["cat"] in COMPUTE and event["pid"] % 2]
    assert len({event["tid"] for event in computed}) == schedule.num_ranks


def test_what_a_computation_takes_includes_its_wait_in_a_recorded_run() -> None:
    records = [
        Recorded(0, "0F0", 1.0, 2.0),
        Recorded(0, "0SEND_F0", 2.0, 2.1),
        Recorded(1, "1RECV_F0", 0.5, 0.6),
        Recorded(1, "1F0", 0.6, 3.0),
        Recorded(1, "(1F1;1B0)OVERLAP_F_B", 3.0, 4.0),
    ]
    events = list(trace_events({"measured": records}))
    check_format(events)
    arrow = [event["ts"] for event in events if event["ph"] in "sf"]
    assert arrow == [1.5e6, 1.5e6]
    overlap = next(event for event in events if event["name"].startswith("("))
    assert overlap["args"] == {"stage": "1, 1", "microbatch": "1, 0"}


def test_memory_is_counted_and_files_are_equal(tmp_path: Path) -> None:
    timeline = timeline_of(schedules.build("1f1b", 2, 4))
    for name in ("a.json", "b.json"):
        write(tmp_path / name, {"predicted": timeline})
    text = (tmp_path / "a.json").read_text()
    assert text == (tmp_path / "b.json").read_text()
    events = json.loads(text)["traceEvents"]
    check_format(events)
    counters = [event["args"]["bytes"] for event in events if event["ph"] == "C" and event["pid"] == 1]
    assert max(counters) == timeline.peak_bytes[0] == 17.0 and counters[-1] == 0.0
