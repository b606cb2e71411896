"""Perfetto itself reads our traces, drops nothing, and finds the plan's step time, bytes and peak in them."""

from __future__ import annotations

from pathlib import Path

import pytest

import autopar
from autopar.cli.models import catalogue
from tests.unit.views import trace_processor
from tests.unit.views.test_step import planned

pytestmark = [
    pytest.mark.slow,
    pytest.mark.skipif(bool(trace_processor.missing()), reason=trace_processor.missing() or "all is there"),
]

LOST = "select name, value from stats where severity in ('error', 'data_loss') and value > 0"
END = (
    "select max(ts + dur) / 1e9 as end_s, count(distinct upid) as ranks from slice "
    "join thread_track on track_id = thread_track.id join thread using (utid)"
)
SENT = "select sum(extract_arg(arg_set_id, 'args.bytes')) as sent from slice"
HELD = "select max(value) as held from counter join counter_track t on t.id = track_id where t.name = 'memory bytes'"
KINDS = "select distinct name from counter_track where name like 'memory by kind %'"


@pytest.mark.parametrize("case", ["zero3", "zero3 and tensor, 64 microbatches", "ring", "inference"])
def test_perfetto_finds_the_plans_numbers(case: str, tmp_path: Path) -> None:
    """Breaks if Perfetto drops slices (overlapping ones, by a nanosecond), or reads other numbers than we planned."""
    plan = planned(case)
    trace = autopar.Plan.from_json(plan.to_json()).trace(tmp_path / "plan.perfetto.json")
    lost, ends, sent, held, kinds = trace_processor.ask(trace, LOST, END, SENT, HELD, KINDS)
    assert lost == []
    assert ends[0]["end_s"] == pytest.approx(plan.cost.step_time_s, rel=1e-5)
    assert ends[0]["ranks"] == plan.mesh.num_devices
    planned_bytes = sum(row.bytes_sent for row in plan.collectives) * plan.mesh.num_devices
    assert sent[0]["sent"] == pytest.approx(planned_bytes, rel=1e-5)
    assert held[0]["held"] == pytest.approx(plan.cost.memory.peak, rel=1e-5)
    found = {row["name"].removeprefix("memory by kind ") for row in kinds}
    assert found == (set(plan.views.memory[0].series) if len(plan.views.memory[0].series) > 1 else set())


def test_perfetto_follows_a_pipelines_messages(tmp_path: Path) -> None:
    """Breaks if an arrow loses an end, or the optimizer's update is left out of the step."""
    loaded = catalogue.load("gpt2", tiny=True, batch=(16, 32))
    mesh = autopar.Mesh.parse("pp=2,dp=2", hardware="h100")
    strategy = {"pp": "pipeline(zbv)", "dp": "zero2"}
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, microbatches=4)
    arrows = "select count(*) as arrows from flow"
    sends = "select count(*) as sends from slice where category in ('SEND_F', 'SEND_B')"
    lost, ends, flow, sent, held = trace_processor.ask(
        plan.trace(tmp_path / "plan.perfetto.json"), LOST, END, arrows, sends, HELD
    )
    assert lost == [] and ends[0]["ranks"] == 2
    assert ends[0]["end_s"] == pytest.approx(plan.cost.step_time_s, rel=1e-5)
    assert flow[0]["arrows"] == sent[0]["sends"] > 0
    assert held[0]["held"] == pytest.approx(plan.cost.memory.peak, rel=1e-5)
