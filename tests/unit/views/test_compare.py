"""Two plans beside each other, and a plan under other memory limits."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.main import app
from autopar.cli.models import catalogue
from autopar.views.compare import compare
from autopar.views.whatif import with_memory


def make_plan(strategy: Any, name: str = "mlp", **options: Any) -> Plan:
    loaded = catalogue.load(name, tiny=True)
    mesh = autopar.Mesh.parse("dp=2,tp=2", hardware="h100")
    return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, **options)


@pytest.fixture(scope="module")
def zero() -> Plan:
    return make_plan({"dp": "zero3", "tp": "tensor"})


@pytest.fixture(scope="module")
def copies() -> Plan:
    return make_plan({"dp": "ddp", "tp": "tensor"})


@pytest.mark.moderate
def test_differences_are_the_plans(zero: Plan, copies: Plan) -> None:
    """Breaks if a number, a parameter that lies differently, or a collective is lost, or sides are swapped."""
    found = compare(zero, copies, names=("zero", "copies"))
    assert not found.same
    numbers = {each.what: each for each in found.numbers}
    assert (numbers["step"].left, numbers["step"].right) == (zero.cost.step_time_s, copies.cost.step_time_s)
    assert numbers["peak memory"].right == copies.cost.memory.peak
    assert {row.what: row.right for row in found.settings}["strategy"] == copies.strategy
    changed = {row.name: row for row in found.parameters}
    assert changed["layers.*.up.weight"].left.endswith("/dp]") and "dp" not in changed["layers.*.up.weight"].right
    assert sum(row.count for row in found.parameters) <= len(zero.interface.parameters)
    for side, plan in (("left", zero), ("right", copies)):
        total = sum(getattr(row, f"{side}_bytes") for row in found.collectives)
        assert total == pytest.approx(sum(row.bytes_sent for row in plan.collectives))


def test_equal_plans_are_the_same(zero: Plan) -> None:
    """Breaks if a plan differs from itself, saved and loaded."""
    found = compare(zero, Plan.from_json(zero.to_json()))
    assert found.same and not found.parameters and not found.settings
    assert "predicted as fast" in str(found) and "all parameters lie alike" in found.summary


@pytest.mark.moderate
def test_other_models_can_be_compared(zero: Plan) -> None:
    """Breaks if plans of different models or meshes end in an error, or count as the same."""
    other = make_plan({"dp": "zero3", "tp": "tensor"}, "gpt2")
    found = compare(zero, other)
    assert found.only_left and found.only_right and not found.same
    assert "GPT2" in str(found)


def test_diff_on_the_command_line(zero: Plan, copies: Plan, tmp_path: Path) -> None:
    """Breaks if `autopar diff` prints no difference, its exit code does not tell, or its data is no JSON."""
    zero.save(tmp_path / "a.json"), copies.save(tmp_path / "b.json")
    paths = [str(tmp_path / "a.json"), str(tmp_path / "b.json")]
    found = CliRunner().invoke(app, ["diff", *paths])
    assert found.exit_code == 1 and "layers.*.up.weight" in found.output and "b against a: predicted" in found.output
    data = json.loads(CliRunner().invoke(app, ["diff", *paths, "--json"]).output)
    assert data["parameters"] and not data["same"]
    assert CliRunner().invoke(app, ["diff", paths[0], paths[0]]).exit_code == 0
    assert CliRunner().invoke(app, ["diff", paths[0], str(tmp_path / "none.json")]).exit_code == 2


@pytest.mark.moderate
def test_less_memory_than_anything_takes(zero: Plan) -> None:
    """Breaks if a limit that nothing satisfies is not an answer, or its reason is lost."""
    found = with_memory(replace(zero, memory_limit_bytes=100_000), 0.01)
    assert found.plan is None and found.why and "nothing fits" in found.answer(replace(zero, memory_limit_bytes=1e5))


@pytest.mark.moderate
def test_more_memory_buys_nothing_where_it_does_not_bind(zero: Plan) -> None:
    """Breaks if the plan made again differs though its limit did not bind."""
    found = with_memory(zero, 1.2)
    assert found.plan is not None and found.comparison is not None
    assert found.plan.cost == zero.cost and found.answer(zero).startswith("Nothing in time")


@pytest.mark.slow
def test_more_memory_saves_recomputation() -> None:
    """Breaks if a limit that forces recomputation is said to cost nothing."""
    free = make_plan({"dp": "zero3", "tp": "tensor"}, "llama")
    tight = make_plan({"dp": "zero3", "tp": "tensor"}, "llama", memory_limit=0.8 * free.cost.peak_memory_bytes)
    assert tight.rematerialize != "none"
    found = with_memory(tight, 1.4)
    assert found.plan is not None and found.plan.rematerialize == "none"
    assert found.plan.cost.step_time_s < tight.cost.step_time_s
    answer = found.answer(tight)
    assert "faster" in answer and "computed again in the backward: none instead of" in answer


def test_a_loaded_plan_needs_its_model(zero: Plan) -> None:
    """Breaks if a plan without its model ends in anything but a remedy."""
    with pytest.raises(AutoparError, match="without its model"):
        with_memory(Plan.from_json(zero.to_json()), 1.2)
    with pytest.raises(AutoparError, match="no memory limit"):
        with_memory(replace(zero, memory_limit_bytes=None), 1.2)
