"""What pictures show of a program: its numbers are the plan's, its references lead somewhere, and it is saved."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

import autopar
from autopar.api.plan import Plan
from autopar.cli.models import catalogue
from autopar.cost.accumulation import accumulation_seconds
from autopar.cost.collectives import calls_on, collectives
from autopar.cost.operator_time import region_seconds
from tests.unit.tiers import mostly_slow

Case = tuple[str, str, Mapping[str, str] | str, int | None]
CASES: dict[str, Case] = {
    "llama": ("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor+sequence"}, 2),
    "kept": ("llama", "dp=4", {"dp": "zero3+keep"}, 2),
    "gpt2, tied": ("gpt2", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}, 2),
    "t5, shared bias": ("t5", "dp=2,tp=2", {"dp": "zero2", "tp": "tensor"}, 2),
    "clip": ("clip", "dp=2,tp=2", "auto", None),
    "ring": ("llama", "dp=2,cp=2", {"dp": "zero3", "cp": "ring"}, None),
    "pipeline": ("gpt2", "pp=2,dp=2", {"pp": "pipeline(1f1b)", "dp": "zero3"}, 4),
}


PARAMS = mostly_slow(CASES, "ring")


@pytest.fixture(scope="module", params=PARAMS)
def plan(request: pytest.FixtureRequest) -> Plan:
    name, mesh, strategy, microbatches = CASES[request.param]
    loaded = catalogue.load(name, tiny=True)
    parsed = autopar.Mesh.parse(mesh, hardware="h100")
    options: dict[str, Any] = {"strategy": strategy, "microbatches": microbatches}
    return autopar.plan(loaded.model, parsed, example_inputs=loaded.batch, **options)


@pytest.mark.moderate
def test_numbers_are_those_of_the_plan(plan: Plan) -> None:
    """Breaks if an operator or a collective is left out, counted twice, or gets another's seconds or bytes."""
    views, program = plan.views, plan.program
    assert views is not None and program is not None and program.mesh is not None
    uses = plan.interface.microbatches
    compute_s = sent = taken_s = 0.0
    for region in views.regions:
        assert region.calls == sum(call.region == region.name for call in views.calls)
        times = region.calls * uses
        compute_s += times * sum(op.compute_seconds if op.kind == "collective" else op.seconds for op in region.ops)
        moved = [op for op in region.ops if op.kind == "collective"]
        sent += times * sum(op.bytes_sent for op in moved)
        taken_s += times * sum(op.seconds for op in moved)
        for move in region.moves:
            each = (1 if move.shared else region.calls) * (1 if move.once else uses)
            sent, taken_s = sent + each * move.bytes_sent, taken_s + each * move.seconds
    rows = list(collectives(program))
    assert math.isclose(sent, sum(row.bytes_sent for row in rows), rel_tol=1e-12)
    assert math.isclose(taken_s, sum(row.seconds for row in rows), rel_tol=1e-12)
    wanted_s = uses * sum(
        sum(region_seconds(program.region(call.region), program.mesh).values()) for call in program.calls
    )
    assert math.isclose(compute_s, wanted_s, rel_tol=1e-12)
    if plan.pipeline is None:
        assert rows == list(plan.collectives)
        added_s = uses * sum(accumulation_seconds(program, program.region(call.region)) for call in program.calls)
        assert math.isclose(compute_s + added_s, plan.cost.compute_s, rel_tol=1e-12)


@pytest.mark.moderate
def test_references_lead_to_what_makes_the_value(plan: Plan) -> None:
    """Breaks if an op reads what comes after it, or a saved value, a gradient, a slot or a call has no maker."""
    for region in plan.views.regions:
        forward = {op.name for op in region.ops if op.phase == "forward"}
        known = {f"in:{port.name}" for port in region.inputs} | {"in:seed"}
        known |= {f"p:{slot.name}" for slot in region.slots}
        made = {op.name for op in region.ops}
        assert len(made) == len(region.ops)
        for phase in ("forward", "backward"):
            seen: set[str] = set()
            for op in (op for op in region.ops if op.phase == phase):
                for read in op.reads:
                    kind, _, name = read.rpartition(":")
                    if kind in ("saved", "grad"):
                        assert phase == "backward" and name in forward
                    else:
                        assert read in known or read in seen, f"{region.name}.{op.name} reads {read}"
                seen.add(op.name)
        assert all(port.name in forward | known for port in region.outputs)
        slots = {slot.name for slot in region.slots}
        assert all(slots.issuperset(move.slots) for move in region.moves)
        for of, maker in region.gradients:
            assert of in known and (maker in made or ":" in maker)
    calls = [f"{number}." for number in range(len(plan.views.calls))]
    for call in plan.views.calls:
        assert len(call.reads) == len(plan.views.region(call.region).inputs)
    for _, ref in plan.views.outputs:
        assert ref.startswith(("in:", *calls))


def test_a_saved_plan_keeps_them(plan: Plan) -> None:
    """Breaks if a field is lost on the way through JSON, or plans of older versions no longer load."""
    assert Plan.from_json(plan.to_json()).views == plan.views == plan.without_model().views
    assert Plan.from_json(replace(plan, views=None).to_json()).views is None


def test_stages_are_those_of_the_pipeline(plan: Plan) -> None:
    """Breaks if a call is said to run on another stage than it does."""
    stages = plan.program.pipeline
    if stages is None:
        assert {call.stage for call in plan.views.calls} == {0}
        return
    for rank in range(stages.schedule.num_ranks):
        of_rank = set(stages.schedule.stages_of(rank))
        for number in calls_on(plan.program, rank):
            again = any(number in stages.stages[stage].recomputed for stage in of_rank)
            assert again or plan.views.calls[number].stage in of_rank
