"""`plan.explain("cost")`: the parts of a prediction add up to it."""

from __future__ import annotations

import json
import math
from dataclasses import replace

import pytest

import autopar
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.ir.region import Call
from autopar.ir.sharding import local_shape
from autopar.machine import profiles
from autopar.views.explain.breakdown import ACCUMULATION, Breakdown
from tests.unit.tiers import mostly_slow


def plan_of(mesh: str, strategy: object, **options: object) -> autopar.Plan:
    loaded = catalogue.load("llama", tiny=True, batch=(8, 64), device="meta", overrides={"num_hidden_layers": 4})
    return autopar.plan(
        loaded.model, autopar.Mesh.parse(mesh, hardware="h100"), example_inputs=loaded.batch,
        strategy=strategy, **options,  # type: ignore[arg-type]
    )  # fmt: skip


@pytest.mark.sampled(5)
@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("dp=4", "zero3"),
        ("dp=2,tp=2", {"dp": "ddp", "tp": "tensor+sequence"}),
        ("pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "zero2"}),
        ("cp=4", "ring"),
    ],
)
@pytest.mark.parametrize("microbatches", mostly_slow([None, 2], None))
def test_parts_add_up(mesh: str, strategy: object, microbatches: int | None) -> None:
    plan = plan_of(mesh, strategy, **({} if microbatches is None else {"microbatches": microbatches}))
    found = plan.explain("cost")
    assert isinstance(found, Breakdown)
    assert found.step_time_s == pytest.approx(plan.cost.step_time_s, rel=1e-12)
    assert sum(row.seconds for row in found.operators) == pytest.approx(plan.cost.compute_s, rel=1e-9)
    assert sum(row.seconds for row in found.collectives) == pytest.approx(plan.cost.communication_s, rel=1e-9)
    assert sum(size for _, size in found.memory) == plan.cost.peak_memory_bytes
    assert {row.op_class for row in found.operators} >= {"matmul", "attention"}
    for row in found.operators:
        assert 0 <= row.memory_bound_s <= row.seconds * (1 + 1e-9)
        assert row.launch_s <= row.seconds * (1 + 1e-9) or row.op_class.startswith("attention")
    assert "Operators" in str(found) and "optimizer" in str(found)
    assert json.loads(json.dumps(found.to_dict()))["step_time_s"] == found.step_time_s


@pytest.mark.moderate
def test_a_saved_plan_needs_its_model(tmp_path: object) -> None:
    plan = plan_of("dp=2", "ddp")
    path = f"{tmp_path}/plan.json"
    plan.save(path)
    loaded = autopar.Plan.load(path)
    with pytest.raises(autopar.AutoparError, match="no program"):
        loaded.explain("cost")
    again = loaded.explain("cost", model=plan.model, example_inputs=dict(plan.inputs or {}))
    assert again.step_time_s == pytest.approx(plan.cost.step_time_s)


@pytest.mark.moderate
def test_views_that_the_host_takes_time_for_are_counted() -> None:
    """Breaks if operators do not add up to the compute where views have a price."""
    cpu = replace(profiles.load("cpu"), view_s=2e-6)
    loaded = catalogue.load("llama", tiny=True, batch=(8, 64), device="meta")
    plan = autopar.plan(
        loaded.model, autopar.Mesh({"dp": 2}, hardware=cpu), example_inputs=loaded.batch, strategy="ddp"
    )
    found = plan.explain("cost")
    assert sum(row.seconds for row in found.operators) == pytest.approx(plan.cost.compute_s, rel=1e-9)
    assert any(row.op_class == "view" and row.seconds > 0 for row in found.operators)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ("dp=2", "zero2"),
        ("dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}),
        ("pp=2,dp=2", {"pp": "pipeline(zero_bubble)", "dp": "zero2"}),
    ],
)
@pytest.mark.parametrize(("precision", "each"), [(None, 12), ("bf16", 10)])
def test_gradients_of_microbatches_are_added_up(mesh: str, strategy: object, precision: str | None, each: int) -> None:
    """Read the sum and the gradient, write the sum: every trained element of a rank's, in every microbatch."""
    alone, found = (
        plan_of(mesh, strategy, precision=precision, microbatches=number).explain("cost") for number in (1, 4)
    )
    assert isinstance(alone, Breakdown) and isinstance(found, Breakdown)
    if "pp" not in mesh:
        assert not any(row.op_class == ACCUMULATION for row in alone.operators)
    (row,) = [row for row in found.operators if row.op_class == ACCUMULATION]
    plan = plan_of(mesh, strategy, precision=precision, microbatches=4)
    program = plan.program
    used = {slot for _, call in _calls_of_a_rank(program) for slot in call.slots}
    elements = sum(
        math.prod(local_shape(v.seen.shape, program.placement.parameters[v.name].gradient, program.mesh.sizes))
        for v in program.variables
        if v.name in used and v.trainable
    )
    assert row.moved_bytes == 4 * each * elements
    assert row.seconds > 4 * each * elements / profiles.load("h100").memory_bandwidth_bytes_per_s


def _calls_of_a_rank(program: Program) -> list[tuple[int, Call]]:
    """Of all ranks, or of the rank of a pipeline that is busiest: the one with the head, with all of its stages."""
    calls = list(enumerate(program.calls))
    if program.pipeline is None:
        return calls
    rank_of = program.pipeline.schedule.rank_of
    own = [stage for stage, rank in zip(program.pipeline.stages, rank_of, strict=True) if rank == rank_of[-1]]
    return [(number, call) for number, call in calls if any(number in stage.calls for stage in own)]
