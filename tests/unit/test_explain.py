"""`plan.explain`: the choice, what else there was and costs, what is excluded and why, names, files, the command."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.cli.models.catalogue import LoadedModel
from autopar.ir.sharding import Replicate, Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.names import Strategy
from autopar.views.explain.explanation import Explanation, Row
from tests.unit.commands import run

pytestmark = pytest.mark.slow

DOWN = "layers.*.down.weight"
PRODUCT: Strategy = {"dp": "zero3", "tp": "tensor"}


@pytest.fixture(scope="module")
def mlp() -> LoadedModel:
    return catalogue.load("mlp", tiny=True, batch=(8, 1))


def plan_of(loaded: LoadedModel, mesh: str = "dp=2,tp=2", **options: object) -> Plan:
    return autopar.plan(loaded.model, Mesh.parse(mesh), example_inputs=loaded.batch, **options)  # type: ignore[arg-type]


@pytest.fixture(scope="module")
def auto(mlp: LoadedModel) -> Plan:
    return plan_of(mlp)


@pytest.fixture(scope="module")
def product(mlp: LoadedModel) -> Plan:
    return plan_of(mlp, strategy=PRODUCT)


@pytest.fixture(scope="module")
def explained(product: Plan) -> Explanation:
    return product.explain(DOWN)


def test_auto_chose_the_best(auto: Plan) -> None:
    """Breaks if an alternative is priced by other rules than the plan, or sharding the search has is left out."""
    found = auto.explain(DOWN)
    assert found.kind == "parameter" and found.members == ("layers.0.down.weight", "layers.1.down.weight")
    assert found.chosen.step_time_s == auto.cost.step_time_s and not found.excluded and not found.unsolved
    assert len({row.stored for row in (found.chosen, *found.alternatives)}) == 9  # two dims or none, on two axes
    assert found.alternatives[0].step_delta_s >= -1e-9 * found.chosen.step_time_s
    times = [row.step_time_s for row in found.alternatives]
    assert times == sorted(times)


def test_an_alternative_costs_what_planning_with_its_pin_predicts(mlp: LoadedModel, auto: Plan) -> None:
    """Breaks if the numbers of a row are not those that a user gets who follows it."""
    for row in auto.explain(DOWN).alternatives[::3]:
        pin = eval(row.pin, {"autopar": autopar, "Shard": Shard, "Replicate": Replicate})
        cost = plan_of(mlp, constraints=[pin]).cost
        assert math.isclose(row.step_time_s, cost.step_time_s, rel_tol=1e-9), row
        assert math.isclose(row.communication_s, cost.communication_s, rel_tol=1e-9, abs_tol=1e-15), row
        assert row.peak_bytes == cost.peak_memory_bytes
        assert math.isclose(row.step_delta_s, cost.step_time_s - auto.cost.step_time_s, abs_tol=1e-12)


def test_the_choice_and_its_collectives(product: Plan, explained: Explanation) -> None:
    """Breaks if layouts lose their notation, or the sum behind a row-split matrix is not put down to it."""
    assert explained.chosen.layouts == {
        "stored": "f32[32/dp, 64/tp]", "held": "f32[32/dp, 64/tp]", "compute": "f32[32, 64/tp]",
        "gradient": "f32[32, 64/tp] +dp",
    }  # fmt: skip
    assert explained.bytes_a_rank == 2 * 32 * 64 * 4 // 4
    kinds = {(row.why, row.kind, row.axis) for row in explained.collectives}
    assert kinds == {
        ("gather parameter", "all_gather", "dp"), ("reduce gradient", "reduce_scatter", "dp"),
        ("sum", "all_reduce", "tp"),
    }  # fmt: skip
    assert all(row in product.collectives for row in explained.collectives)
    for row, share in zip(explained.collectives, explained.shares, strict=True):
        assert 0 < share <= 1 and (share == 1 or " and " in row.tensor)
    assert 0 < explained.collective_s < product.cost.communication_s
    up = product.explain("layers.0.up.weight")
    sums = [row for row in up.collectives if row.why == "sum"]
    assert [(row.axis, row.phase) for row in sums] == [("tp", "backward")]  # columns: the gradient of the input
    norm = product.explain("layers.1.norm.bias")
    assert {row.why for row in norm.collectives} <= {"gather parameter", "reduce gradient"}


def test_what_a_strategy_asks_for_is_marked(explained: Explanation) -> None:
    """Breaks if a sharding that only a pin gives passes for one the strategy would have considered."""
    rows = {row.stored: row for row in explained.alternatives}
    assert rows["f32[32, 64/tp]"].note == "against zero3 on dp"
    assert any("zero3 stores parameters in pieces on dp" in line for line in explained.why)


def test_exclusions_name_the_strategy(mlp: LoadedModel, product: Plan, explained: Explanation) -> None:
    """Breaks if a forbidden sharding is left out without a word, or for the wrong reason."""
    reasons = {row.sharding: row for row in explained.excluded}
    assert "they cannot both cut dim 0" in reasons["f32[32/dp/tp, 64]"].reason
    operator = {row.sharding: row for row in product.explain("layer.down").excluded}
    pieces = operator["f32[8/dp, 32/tp]"]
    assert pieces.kind == "strategy" and pieces.reason.startswith("tensor lets activations on tp use all_reduce alone")
    assert operator["f32[8/dp, 32]"].reason.startswith("what tensor splits on tp: weight matrices")
    ddp = plan_of(mlp, "dp=2", strategy="ddp")
    found = ddp.explain(DOWN)
    assert {row.reason for row in found.excluded} == {"ddp keeps parameters whole on dp"} and not found.alternatives
    inputs = ddp.explain("x")
    assert inputs.kind == "input" and inputs.chosen.stored == "f32[8/dp, 32]"
    assert inputs.excluded[0].reason == "ddp splits the batch, dim 0 of every input, over dp"


def test_exclusions_name_the_numbers(mlp: LoadedModel) -> None:
    """Breaks if a dim that does not divide is tried, or an even one is hidden behind an uneven one."""
    found = plan_of(mlp, "dp=3,tp=2", inference=True).explain(DOWN)
    assert ("f32[32/dp, 64]", "size", "dim 0 is 32, which dp=3 does not divide") in {
        (row.sharding, row.kind, row.reason) for row in found.excluded
    }
    assert {row.stored for row in found.alternatives} | {found.chosen.stored} == {
        "f32[32, 64]", "f32[32/tp, 64]", "f32[32, 64/tp]"
    }  # fmt: skip
    twice = plan_of(mlp, "dp=8,tp=8").explain("x")  # 8 rows: over either axis, not over both
    rows = {row.stored for row in (twice.chosen, *twice.alternatives)}
    assert {"f32[8/dp, 32]", "f32[8/tp, 32]"} <= rows
    assert "dim 0 is 8, over dp=8 1, which tp=8 does not divide" in {row.reason for row in twice.excluded}


def test_exclusions_name_the_pin_and_the_memory_limit(mlp: LoadedModel) -> None:
    """Breaks if the plan's own pin is overruled, or a plan too large for the limit is offered."""
    pinned = plan_of(mlp, constraints=[autopar.pin("layers.*.down.weight", tp=Shard(1))]).explain(
        "layers.0.down.weight"
    )
    assert pinned.why[0] == 'asked for: autopar.pin("layers.*.down.weight", tp=Shard(1))'
    reason = 'the plan was asked for autopar.pin("layers.*.down.weight", tp=Shard(1))'
    assert {row.reason for row in pinned.excluded if row.kind == "pin"} == {reason}
    assert all("/tp]" in row.stored or "/dp/tp]" in row.stored for row in pinned.alternatives)

    limit = 120_000.0
    tight = plan_of(mlp, "dp=2", memory_limit=limit)
    found = tight.explain(DOWN)
    assert all(row.peak_bytes <= limit for row in found.alternatives)
    (out,) = (row for row in found.excluded if row.sharding == "f32[32, 64]")
    assert out.kind == "memory" and out.bytes_over is not None and f"{out.bytes_over} bytes over" in out.reason
    bigger = plan_of(mlp, "dp=2", memory_limit=limit + out.bytes_over * 1.01).explain(DOWN)
    assert "f32[32, 64]" in {row.stored for row in (bigger.chosen, *bigger.alternatives)}


def test_operators_and_outputs(product: Plan) -> None:
    """Breaks if a name of the generated program is not known, or an operator's terms are not among its shardings."""
    down = product.explain("layer.down")
    assert (down.kind, down.chosen.stored) == ("operator", "f32[8/dp, 32] +tp")
    assert [(row.kind, row.axis) for row in down.collectives] == [("all_reduce", "tp")]
    assert product.explain("layer.down_sum", time_limit_s=0).name == "layer.down"
    assert product.explain("layer.down_weight", time_limit_s=0).name == DOWN
    hidden = product.explain("layer.x_bf")
    assert hidden.kind == "value" or hidden.kind == "input"
    logits = product.explain("logits", time_limit_s=0)
    assert logits.kind == "output" and logits.unsolved and not logits.alternatives


def test_an_operator_costs_what_the_solver_finds_for_it(auto: Plan) -> None:
    """Breaks if an operator's strategies are not really cut down: then all rows would cost the same."""
    found = auto.explain("layer.up", max_alternatives=3)
    assert len(found.alternatives) == 3 and found.more > 0
    assert found.alternatives[0].step_delta_s >= -1e-9 and found.alternatives[-1].step_delta_s > 0


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("layers.0.down.wieght", "close names: layers.*.down.weight"),
        ("layers.*.weight", "matches 3 things that are placed apart"),
        ("classifer.weight", "close names: classifier.weight"),
        ("layer.dwon", "layer.down"),
    ],
)
def test_unknown_names_have_close_ones(product: Plan, name: str, message: str) -> None:
    """Breaks if a typing error is a KeyError, or is not told what there is."""
    with pytest.raises(AutoparError) as caught:
        product.explain(name)
    assert message in str(caught.value)


def test_json_and_text(explained: Explanation) -> None:
    """Breaks if the data is none of JSON's, or the text loses a part or grows wider than 120."""
    assert json.loads(json.dumps(explained.to_dict()))["name"] == DOWN
    text = str(explained)
    for part in (DOWN, "f32[32/dp, 64/tp]", "Its collectives", "Alternatives", "Excluded", "against zero3 on dp"):
        assert part in text
    assert max(map(len, text.splitlines())) <= 120 and "\x1b" not in text
    assert Row({"stored": "f32[2]"}, 1.1, 0, 0, step_delta_s=0.1).relative == pytest.approx(0.1)


def test_a_loaded_plan_needs_its_model(mlp: LoadedModel, product: Plan, explained: Explanation) -> None:
    """Breaks if a plan from a file cannot be explained, or is explained for a model that is another."""
    loaded = Plan.from_json(product.to_json())
    with pytest.raises(AutoparError, match="pass the model"):
        loaded.explain(DOWN)
    assert loaded.explain(DOWN, model=mlp.model, example_inputs=mlp.batch) == explained
    other = catalogue.load("mlp", tiny=True, batch=(16, 1))
    with pytest.raises(AutoparError, match="another model or batch"):
        loaded.explain(DOWN, model=other.model, example_inputs=other.batch)


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.head = nn.Linear(8, 16, bias=False)
        self.head.weight = self.embed.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.embed(ids)).square().mean()


def test_an_alias_is_its_parameter() -> None:
    """Breaks if a tied parameter is known under one of its names alone."""
    batch = {"ids": torch.zeros(4, 4, dtype=torch.int64)}
    plan = autopar.plan(Tied(), Mesh.parse("dp=2"), example_inputs=batch)
    assert plan.explain("head.weight", time_limit_s=0) == plan.explain("embed.weight", time_limit_s=0)


def test_the_command(tmp_path: Path) -> None:
    """Breaks if a saved plan cannot be explained at once, or the exit codes do not tell the cases apart."""
    path = tmp_path / "plan.json"
    small = ["mlp", "--tiny", "--batch", "8", "--mesh", "dp=2,tp=2", "--strategy", "ddp"]
    run("plan", *small, "--save", str(path))
    out, _ = run("explain", str(path), DOWN)
    assert "ddp keeps parameters whole on dp" in out
    data = json.loads(run("explain", str(path), DOWN, "--json")[0])
    assert data["name"] == DOWN
    assert "close names" in run("explain", str(path), "layers.0.dawn.weight", code=2)[1]
    assert "cannot read the plan" in run("explain", str(tmp_path / "none.json"), DOWN, code=2)[1]
    assert "add --model" in run("explain", str(path), DOWN, "--tiny", code=2)[1]
    other = ["--model", "mlp", "--tiny", "--batch", "16"]
    assert "another model or batch" in run("explain", str(path), DOWN, *other, code=1)[1]


def test_a_file_of_before_has_no_model(tmp_path: Path, product: Plan) -> None:
    """Breaks if a plan without the model's specification no longer loads."""
    path = tmp_path / "plan.json"
    product.save(path)
    assert "model_spec" not in json.loads(path.read_text())["plan"]
    assert "does not name a model that comes with autopar" in run("explain", str(path), DOWN, code=2)[1]
    assert "f32[32/dp, 64/tp]" in run("explain", str(path), DOWN, "--model", "mlp", "--tiny", "--batch", "8")[0]


def test_a_plan_that_recomputes_knows_all_that_an_operator_could_do() -> None:
    """Breaks if what such a plan was placed from, the choices of the plan without, passes for all that there is."""
    llama = catalogue.load("llama", tiny=True)
    strategy: Strategy = {"dp": "zero3", "tp": "tensor+sequence"}
    without, again = (plan_of(llama, strategy=strategy, rematerialize=mode) for mode in ("none", "selective"))
    for region in without.program.regions:
        assert region.options.items() <= again.program.region(region.name).options.items()
    excluded = again.explain("layer.q_proj").excluded
    assert excluded and not any(each.kind == "operator" for each in excluded)
