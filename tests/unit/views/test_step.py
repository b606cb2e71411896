"""The predicted step as data: it takes as long, sends as much and holds as much as the plan says."""

from __future__ import annotations

import json
from dataclasses import replace
from functools import cache
from itertools import pairwise

import pytest

import autopar
from autopar.base.trace import Span
from autopar.cli.models import catalogue
from autopar.cost.estimate import estimate
from autopar.cost.memory.step import step_peak_bytes
from autopar.ir.placement import Overlap
from autopar.planner.plan import packed
from autopar.planner.plan.drawn import Views
from autopar.views.step import spans_of
from autopar.views.step_memory import step_views
from tests.unit.tiers import mostly_slow

pytestmark = pytest.mark.unit

PLANS: dict[str, tuple[object, ...]] = {
    "ddp": ("gpt2", "dp=4", "ddp", 1),
    "zero3": ("llama", "dp=4", "zero3", 1),
    "zero3, 4 microbatches": ("llama", "dp=4", "zero3", 4),
    "zero3 and tensor, 64 microbatches": ("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}, 64),
    "kept parameters, 5 microbatches": ("gpt2", "dp=4", "zero3+keep", 5),
    "hsdp, 2 microbatches": ("gpt2", "node=2,dp=2", "hsdp", 2),
    "reductions at the end": ("gpt2", "node=2,dp=2", "zero1", 4),
    "sequence": ("llama", "tp=4", "tensor+sequence", 1),
    "ring": ("llama", "dp=2,cp=2", {"dp": "zero3", "cp": "ring"}, 1),
    "bf16": ("bert", "dp=4", "zero3", 1),
    "inference": ("llama", "dp=2,tp=2", {"dp": "zero3", "tp": "tensor"}, 1),
    "one rank": ("mlp", "dp=1", "ddp", 1),
}

FIRST = ("ddp", "zero3", "inference")
"""Of the first tier."""


@cache
def planned(case: str, hardware: str = "h100") -> autopar.Plan:
    name, mesh, strategy, microbatches = PLANS[case]
    loaded = catalogue.load(str(name), tiny=True, batch=(16 * int(str(microbatches)), 32))
    return autopar.plan(
        loaded.model,
        autopar.Mesh.parse(str(mesh), hardware=hardware),
        example_inputs=loaded.batch,
        strategy=strategy,  # type: ignore[arg-type]
        microbatches=int(str(microbatches)),
        precision="bf16" if case == "bf16" else None,
        inference=case == "inference",
    )


def views_of(plan: autopar.Plan) -> Views:
    assert plan.views is not None
    return plan.views


@pytest.mark.moderate
@pytest.mark.sampled(8)
@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@pytest.mark.parametrize("case", mostly_slow(PLANS, *FIRST))
def test_spans_are_the_plans_step(case: str, hardware: str) -> None:
    """Breaks if the timeline ends before or after the predicted step, or lacks a collective or counts one twice."""
    plan = planned(case, hardware)
    spans = views_of(plan).spans
    assert max(span.end_s for span in spans) == pytest.approx(plan.cost.step_time_s, rel=1e-8)
    assert all(0 <= span.start_s <= span.end_s for span in spans)
    sent = sum(span.bytes_sent * span.times for span in spans)
    assert sent == pytest.approx(sum(row.bytes_sent for row in plan.collectives), rel=1e-8)
    for lane in ("node", "network"):
        names = {span.name for span in spans if span.track == lane and span.times == 1 and span.phase != "repeated"}
        assert names <= {f"{row.kind} {row.axis}" for row in plan.collectives}


@pytest.mark.sampled(5)
@pytest.mark.moderate
@pytest.mark.parametrize("case", mostly_slow(PLANS, *FIRST))
def test_calls_come_one_after_the_other(case: str) -> None:
    """Breaks if a call is missing, overlaps the one before, or does not hold its own collectives."""
    plan = planned(case)
    spans, program = views_of(plan).spans, plan.program
    computed = [span for span in spans if span.track == "compute"]
    near = 1e-7 * plan.cost.step_time_s
    assert all(after.start_s >= before.end_s - near for before, after in pairwise(computed))
    calls = [span for span in computed if span.call >= 0]
    each = len(program.calls) * (1 + program.training)
    assert len(calls) == each * min(3, program.microbatches)
    assert sum(span.times for span in computed if span.phase == "repeated") == max(0, program.microbatches - 3)
    numbers = list(range(len(program.calls)))
    assert [span.call for span in calls[:each]] == numbers + numbers[::-1] * program.training
    if plan.strategy == "tensor+sequence":
        for call in calls:
            if program.calls[call.call].path.startswith("model.layers."):
                own = [span.name for span in spans if span.track != "compute" and _within(span, call, near)]
                assert {"all_gather tp", "reduce_scatter tp"} <= set(own) and len(own) >= 4


def _within(span: Span, call: Span, near: float) -> bool:
    return call.start_s - near <= span.start_s and span.end_s <= call.end_s + near


@pytest.mark.moderate
@pytest.mark.parametrize("case", mostly_slow(PLANS, *FIRST))
def test_the_fullest_time_is_the_plans_peak(case: str) -> None:
    """Breaks if the curve counts other things than the prediction, or ends elsewhere than the step."""
    plan = planned(case)
    (curve,) = views_of(plan).memory
    assert curve.peak_bytes == pytest.approx(plan.cost.memory.peak, rel=1e-5)
    assert plan.program is not None
    assert curve.peak_bytes == pytest.approx(step_peak_bytes(plan.program), rel=1e-5)
    if plan.training:
        assert curve.series["optimizer states"][0] == pytest.approx(plan.cost.memory.optimizer_states, rel=1e-5)
        assert max(curve.series["gradients"]) >= plan.cost.memory.gradients * (1 - 1e-5)
    assert curve.times_s[0] == 0.0 and list(curve.times_s) == sorted(set(curve.times_s))
    assert curve.times_s[-1] <= plan.cost.step_time_s * (1 + 1e-8)  # times have nine digits
    assert {len(values) for values in curve.series.values()} == {len(curve.times_s)}


@pytest.mark.moderate
def test_activations_grow_forward_and_shrink_backward() -> None:
    (curve,) = views_of(planned("ddp")).memory
    held = curve.series["activations"]
    top = held.index(max(held))
    assert 0 < top < len(held) - 1
    assert list(held[: top + 1]) == sorted(held[: top + 1]) and held[-1] == 0.0
    gradients = curve.series["gradients"]
    assert gradients[0] == 0.0 and list(gradients[:top]) == [0.0] * top


@pytest.mark.moderate
@pytest.mark.parametrize(
    "strategy", mostly_slow(["pipeline(1f1b)", "pipeline(zbv)", "pipeline(interleaved)"], "pipeline(1f1b)")
)
def test_every_rank_of_a_pipeline_has_its_own_curve(strategy: str) -> None:
    """Breaks if the kinds do not add up to what the simulated timeline holds."""
    loaded = catalogue.load("gpt2", tiny=True, batch=(16, 32))
    mesh = autopar.Mesh.parse("pp=2,dp=2", hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy={"pp": strategy, "dp": "zero2"})
    views = views_of(plan)
    assert plan.pipeline is not None and views.spans == ()
    timeline = plan.pipeline.timeline
    assert [curve.rank for curve in views.memory] == [0, 1]
    for curve, peak, (times, held) in zip(views.memory, timeline.peak_bytes, timeline.memory, strict=True):
        assert curve.peak_bytes == pytest.approx(peak, rel=1e-5)
        last = sum(values[-1] for values in curve.series.values())
        assert last == pytest.approx(held[-1], rel=1e-5) and curve.times_s[-1] <= times[-1] * (1 + 1e-8)
        assert curve.series["optimizer states"][0] == pytest.approx(2 * curve.series["parameters"][0], rel=1e-5)


@pytest.mark.moderate
def test_views_are_saved_with_the_plan() -> None:
    """Breaks if a loaded plan draws something else, or the file grows by more than the program it describes."""
    plan = planned("zero3 and tensor, 64 microbatches")
    assert autopar.Plan.from_json(plan.to_json()).views == plan.views
    views = replace(views_of(plan), regions=(), calls=())
    assert len(json.dumps(packed.pack(views))) < len(json.dumps(views.to_data())) / 2
    empty = Views((), (), ())
    assert packed.unpack(packed.pack(empty)) == empty


@pytest.mark.slow
def test_views_of_a_deep_model_are_small() -> None:
    loaded = catalogue.load("llama", tiny=True, batch=(32, 32), overrides={"num_hidden_layers": 126})
    strategy = {"dp": "zero3", "tp": "tensor+sequence"}
    mesh = autopar.Mesh.parse("dp=4,tp=2", hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, microbatches=4)
    assert plan.program is not None
    spans, memory = step_views(plan.program, plan.cost, None)
    assert len(json.dumps(packed.pack(Views((), (), (), spans, memory)))) < 500_000


@pytest.mark.sampled(5)
@pytest.mark.slow
@pytest.mark.parametrize("hardware", ["h100", "cpu"])
@pytest.mark.parametrize("case", mostly_slow(PLANS, *FIRST))
def test_spans_are_the_step_where_nothing_overlaps(case: str, hardware: str) -> None:
    """Breaks if time is stretched, or cut, where the walk is longer than all one after the other."""
    program = planned(case, hardware).program
    assert program is not None
    for prefetch in (False, True):
        for at_end in (False, True):
            changed = replace(program, overlap=Overlap(prefetch, at_end, 0))
            cost, rows = estimate(changed, 0.0)
            spans = spans_of(changed, cost)
            assert max(span.end_s for span in spans) == pytest.approx(cost.step_time_s, rel=1e-8)
            assert sum(s.bytes_sent * s.times for s in spans) == pytest.approx(sum(row.bytes_sent for row in rows))
            assert all(span.start_s <= span.end_s for span in spans)
