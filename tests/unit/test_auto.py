"""`auto` against the named strategies: never predicted slower than one that fits in memory."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.sharding import Replicate, Shard
from autopar.machine.mesh import Mesh
from autopar.passes.place import try_place
from autopar.passes.placement.choices import objective_of
from autopar.passes.placement.problem import build_problem
from autopar.planner.candidates import named_candidates
from autopar.planner.plan.record import PlanRecord
from autopar.planner.programs import Programs
from autopar.strategies.names import Strategy, resolve
from autopar.strategies.request import Attempt, Request

pytestmark = pytest.mark.slow

CASES = [
    ("mlp", "dp=4,tp=2", "h100", (64, 1), False, None),
    ("cnn", "dp=8", "a100", (64, 1), False, None),
    ("gpt2", "dp=8,tp=4", "h100", (32, 512), False, None),
    ("llama", "tp=2", "cpu", (8, 16), True, None),
    ("mlp", "dp=2,tp=2", "cpu", (8, 1), True, 110_000.0),
    ("bert-base", "node=2,dp=8", "a100", (64, 128), False, None),
]
NAMED: tuple[Strategy, ...] = ("ddp", "zero3", "tensor", {"dp": "zero3", "tp": "tensor"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("name", "mesh_text", "hardware", "batch", "tiny", "limit"), CASES)
def test_auto_is_never_predicted_slower(
    name: str, mesh_text: str, hardware: str, batch: tuple[int, int], tiny: bool, limit: float | None
) -> None:
    """Breaks if the solver stops too early, counts a move twice, or forbids what a named strategy does."""
    mesh = Mesh.parse(mesh_text, hardware=hardware)
    loaded = catalogue.load(
        name, tiny=tiny, batch=batch, overrides=None if name in catalogue.PLAIN else _two_layers(name)
    )
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, memory_limit=limit)
    assert limit is None or plan.cost.peak_memory_bytes <= limit
    compared = 0
    for strategy in NAMED:
        try:
            named = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, memory_limit=limit)
        except AutoparError:
            continue
        compared += 1
        assert plan.cost.step_time_s <= named.cost.step_time_s * (1 + 1e-9), named.strategy
    assert compared >= (1 if limit else 2)
    assert 0 <= plan.gap < 0.01


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh_text", ["dp=8", "dp=4,tp=2"])
def test_auto_of_a_mixture_is_never_predicted_slower(mesh_text: str) -> None:
    """Breaks if `auto` is not held against what sends tokens to their experts by name, or that is no candidate where
    another axis is for tensors.
    """
    transformers = pytest.importorskip("transformers")
    sizes = {"vocab_size": 512, "hidden_size": 256, "intermediate_size": 512, "num_hidden_layers": 2}
    config = transformers.OlmoeConfig(
        **sizes, num_attention_heads=4, num_key_value_heads=4, num_experts=16, num_experts_per_tok=2, use_cache=False,
        bos_token_id=None, eos_token_id=None, pad_token_id=None,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.OlmoeForCausalLM(config)
    tokens = torch.zeros(16, 64, dtype=torch.long)
    mesh, batch = Mesh.parse(mesh_text, hardware="h100"), {"input_ids": tokens, "labels": tokens}
    plan = autopar.plan(model, mesh, example_inputs=batch)
    for strategy in ("expert", "zero2+expert", "zero3+expert"):
        named = autopar.plan(model, mesh, example_inputs=batch, strategy=strategy)
        assert plan.cost.step_time_s <= named.cost.step_time_s * (1 + 1e-9), strategy
    asked = Request(model, batch, mesh, resolve("auto", mesh))
    names = [[each.name for each in found] for found in named_candidates(asked, mixture=True)]
    assert ["expert"] in names if mesh_text == "dp=8" else ["zero3+expert", "tensor"] in names


def test_what_hides_behind_compute_is_not_hopeless() -> None:
    """Breaks if a named strategy is passed over for gathers and reductions that would run beside the compute."""
    loaded = catalogue.load("llama-3.1-8b", batch=(128, 1024))
    mesh = Mesh.parse("node=8,dp=8", hardware="a100:8xinfiniband-200")
    auto, hybrid = (
        autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, precision="bf16")
        for strategy in ("auto", "hsdp")
    )
    assert auto.cost.step_time_s <= hybrid.cost.step_time_s * (1 + 1e-9)


@pytest.mark.sampled(1)
@pytest.mark.parametrize("mesh", ["dp=16", "node=2,dp=8"])
def test_auto_is_as_fast_as_any_named_strategy_within_any_limit(mesh: str) -> None:
    """Breaks if the one or the other recomputes less, has what it gathers run beside the compute, or fits alone."""
    strategies: tuple[Strategy, ...] = ("ddp", "zero1", "zero2", "zero3", "tensor")

    def planned(strategy: Strategy, limit: float | None) -> Plan | None:
        try:
            return _plan(2048, 32768, mesh, num=6, limit=limit, strategy=strategy)
        except AutoparError:
            return None

    most, least = planned("ddp", None), planned("zero3", None)
    assert most is not None and least is not None
    fitting = 0
    for limit in [0.5e9, *(least.cost.peak_memory_bytes * part for part in (0.6, 0.8, 1.001)), 3.5e9]:
        found = planned("auto", limit)
        named = [plan for plan in (planned(strategy, limit) for strategy in strategies) if plan is not None]
        assert found is not None or not named
        if found is not None:
            assert found.cost.peak_memory_bytes <= limit and 0 <= found.gap < 0.01
            fitting += len(named)
            for plan in named:
                assert found.cost.step_time_s <= plan.cost.step_time_s * (1 + 1e-9), (limit, plan.strategy)
    assert fitting


def test_memory_for_what_is_in_flight_is_walked() -> None:
    """Breaks if gathers that would fit beside the compute are waited for: most of a step's gathers are hidden here."""
    zero3 = _plan(4096, 32768, "dp=16", strategy="zero3")
    found = _plan(4096, 32768, "dp=16", limit=zero3.cost.peak_memory_bytes * 1.02)
    assert zero3.decisions.overlap is not None and zero3.decisions.overlap.prefetch
    assert found.decisions.overlap is not None and found.decisions.overlap.prefetch
    assert found.cost.step_time_s <= zero3.cost.step_time_s * (1 + 1e-9)


def test_rows_that_no_axis_splits_are_not_added(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Breaks if `auto` computes with a padded vocabulary that it leaves whole, or a saved plan is read back with it."""
    loaded = catalogue.load("bert-large", batch=(64, 512), dropout=0.0)
    mesh = Mesh.parse("dp=8", hardware="a100")
    monkeypatch.setenv("AUTOPAR_CACHE", str(tmp_path))

    def planned(strategy: Strategy) -> Plan:
        return autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, precision="bf16")

    plan = planned("auto")
    assert plan.spread is not None and not plan.spread.padded
    assert plan.program is not None and all(v.seen == v.type for v in plan.program.variables)
    assert plan.cost.step_time_s <= planned("zero2").cost.step_time_s * (1 + 1e-9)
    again = replan(Plan.from_json(plan.to_json()), loaded.model, loaded.batch, mesh)
    assert again.source == plan.source and again.collectives == plan.collectives
    cached = planned("auto")
    assert cached.from_cache and cached.source == plan.source


def test_a_placement_is_charged_as_the_solver_said() -> None:
    """Breaks if a named strategy's decisions are read as other choices than those that were placed."""
    loaded, mesh = catalogue.load("llama", tiny=True), Mesh.parse("dp=2,tp=2", hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch)
    assert plan.program is not None
    annotated = replace(plan.program, phase="annotated", placement=None)
    for strategy in ("zero3", "tensor"):
        strategies = resolve(strategy, mesh)
        placed = try_place(annotated, strategies=strategies, memory_limit_bytes=None)
        own, any_ = (build_problem(annotated, each, (), None) for each in (strategies, resolve("auto", mesh)))
        assert objective_of(placed, own) == pytest.approx(placed.result.cost_s, rel=1e-12)
        least = try_place(annotated, strategies=resolve("auto", mesh), memory_limit_bytes=None)
        charged = objective_of(placed, any_)
        assert least is not None and charged is not None and charged >= least.result.bound_s


def test_what_the_first_call_gathers_costs_its_whole_time() -> None:
    """Breaks if the embedding's gather, before which nothing computes, is thought to run beside the compute: with much
    memory `auto` then took slower plans than with little.
    """
    loaded, mesh = catalogue.load("llama", tiny=True), Mesh.parse("dp=4", hardware="h100")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="zero3")
    annotated = replace(plan.program, phase="annotated", placement=None)
    whole, beside = (build_problem(annotated, resolve("zero3", mesh), (), None, price) for price in (1.0, 0.1))
    costs = [{node.name: node.costs.max() for node in built.problem.nodes} for built in (whole, beside)]

    def hidden_s(name: str, count: int) -> float:
        """An element's seconds that count as hidden."""
        full, part = (each[f"parameter:{name}"] for each in costs)
        return (full - part) / (count * plan.program.variable(name).type.num_elements)

    layers = sum(call.region == "layer" for call in plan.program.calls)
    # Two gathers of a layer's, one of which is the backward's; of the embedding only that one.
    of_layer = hidden_s("model.layers.0.mlp.up_proj.weight", layers)
    assert hidden_s("model.embed_tokens.weight", 1) == pytest.approx(of_layer / 2, rel=1e-9)


def _two_layers(name: str) -> dict[str, object]:
    return {"num_hidden_layers": 2}


def _modes(plan: autopar.Plan, axis: str) -> Counter[str]:
    """How many weight matrices the plan treats in which way on an axis."""
    number, found = plan.mesh.axis_names.index(axis), Counter[str]()
    shapes = {parameter.name: parameter.shape for parameter in plan.interface.parameters}
    for name, layout in plan.decisions.placement.parameters.items():
        if len(shapes.get(name, ())) == 2:
            stored, held, compute = (each[number] for each in (layout.stored, layout.held, layout.compute))
            pieces = "keep" if held == compute else "gather"
            found["replicate" if stored == Replicate() else "shard" if stored == compute else pieces] += 1
    return found


class Layers(nn.Module):
    """Blocks of two products, as wide as asked."""

    def __init__(self, width: int, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            nn.Sequential(nn.Linear(width, 4 * width, bias=False), nn.ReLU(), nn.Linear(4 * width, width, bias=False))
            for _ in range(num)
        )

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = x + layer(x)
        return x.square().mean()


def _plan(
    width: int, rows: int, mesh: str, *, num: int = 4, limit: float | None = None, strategy: Strategy = "auto"
) -> autopar.Plan:
    with torch.device("meta"):
        model, inputs = Layers(width, num), {"x": torch.empty(rows, width)}
    where = Mesh.parse(mesh, hardware="h100")
    return autopar.plan(model, where, example_inputs=inputs, memory_limit=limit, strategy=strategy)


def test_what_fits_is_replicated() -> None:
    """A large batch of a small model is data parallelism: nothing is split for good, nothing gathered twice."""
    plan = _plan(1024, 65536, "dp=8")
    assert set(_modes(plan, "dp")) <= {"replicate", "keep"}
    assert plan.interface.inputs[0].sharding == (Shard(0),)


def test_what_does_not_fit_whole_is_stored_in_pieces() -> None:
    """First pieces gathered once a step (as much sent as by replicas); with less memory, gathered for each use."""
    kept = _modes(_plan(2048, 65536, "dp=8", limit=4e9), "dp")
    assert set(kept) == {"keep"}
    least = _plan(4096, 131072, "dp=8", strategy="zero3").cost.peak_memory_bytes
    modes = _modes(_plan(4096, 131072, "dp=8", limit=least), "dp")
    assert modes["gather"] and not modes["replicate"] and not modes["shard"]


def test_between_nodes_only_gradients_move() -> None:
    """Slow links between nodes: parameters lie in pieces inside a node, copies of them across."""
    plan = _plan(2048, 262144, "node=2,dp=8", limit=6e9)
    assert set(_modes(plan, "node")) == {"replicate"}
    assert set(_modes(plan, "dp")) <= {"keep", "gather"}
    assert {row.why for row in plan.collectives if row.axis == "node"} <= {"reduce gradient", "sum"}
    largest = max(row.bytes_sent for row in plan.collectives if row.axis == "dp")
    assert sum(row.bytes_sent for row in plan.collectives if row.axis == "node") < largest


def test_few_rows_of_wide_layers_split_the_matrices() -> None:
    """Activations are small and weights large, so operators work on pieces of the weights."""
    assert set(_modes(_plan(8192, 16, "tp=8"), "tp")) == {"shard"}


def test_operators_are_split_inside_a_node() -> None:
    """A batch too small to hide gathers, two kinds of links: matrices split over the fast one, the batch over the slow.

    Four times the rows hide them, and then parameters are gathered for them.
    """
    plan = _plan(8192, 12288, "node=2,dp=8", limit=30e9)
    assert set(_modes(plan, "dp")) == {"shard"}
    assert set(_modes(plan, "node")) == {"replicate"}
    assert set(_modes(_plan(8192, 49152, "node=2,dp=8", limit=30e9), "dp")) == {"keep"}


def test_a_named_placement_is_lowered_as_auto(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if `auto` takes a named strategy's placement with its lowering: read back, it is another program."""

    def poor(programs: Programs, attempt: Attempt) -> PlanRecord:
        found = plan_of(programs, attempt)
        return found if attempt.placed_by else replace(found, cost=replace(found.cost, compute_s=1e9))

    plan_of = Programs.plan
    monkeypatch.setattr(Programs, "plan", poor)
    loaded, mesh = catalogue.load("mlp", tiny=True), Mesh.parse("dp=2,tp=2", hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch)
    assert plan.cost.compute_s < 1e9 and "strategy auto;" in plan.source.split("\n", 1)[0]
    again = replan(Plan.from_json(plan.to_json()), loaded.model, loaded.batch, mesh)
    assert again.source == plan.source and again.collectives == plan.collectives
