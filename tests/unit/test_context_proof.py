"""Programs of context strategies compute what the models compute, on every kind of attention; in float64."""

from __future__ import annotations

import pytest
import torch

import autopar
from autopar.api.again import replan
from autopar.api.plan import Plan
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.names import parse
from benchmarks.proofs.contexts import COLUMNS, MODELS, build, page, run

pytestmark = pytest.mark.slow

CELLS = [
    ("cp=2", "ring"),
    ("cp=4", "ulysses"),
    ("cp=4", "allgather_kv"),
    ("cp=4", "ring"),
    ("dp=2,cp=2", "dp=zero3,cp=ring"),
    ("cp=2,tp=2", "tp=tensor,cp=ring"),
    ("cp=2,tp=2", "tp=tensor,cp=ulysses"),
    ("tp=2,cp=2", "tp=tensor,cp=ulysses"),
    ("cp0=2,cp1=2", "cp0=ring,cp1=ulysses"),
]
ZIGZAG = [
    ("llama", "cp=4 long", "allgather_kv"),
    ("llama", "dp=2,cp=2 long", "ring"),
    ("llama", "cp0=2,cp1=2 long", "cp0=ring,cp1=ulysses"),
    ("mistral", "cp=4 long", "ring"),
    ("gpt2 with dropout", "dp=2,cp=2 long", "ring"),
]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("mesh", "strategy"), CELLS)
@pytest.mark.parametrize("model", MODELS)
def test_it_computes_the_same(model: str, mesh: str, strategy: str) -> None:
    """Breaks if any rank attends to keys at the wrong place, or a loss, table or mask does not follow the split."""
    assert strategy in COLUMNS[mesh]
    cell = run(model, mesh, strategy)
    assert cell.status == "ok", cell.message


@pytest.mark.parametrize(("model", "mesh", "strategy"), ZIGZAG)
def test_zigzag_computes_the_same(model: str, mesh: str, strategy: str) -> None:
    """Breaks if stripes that are dealt backwards are taken for those that are not, or stripes are not dealt so where
    attention is most of the work.
    """
    cell = run(model, mesh, strategy)
    assert cell.status == "ok", cell.message
    assert cell.message == "zigzag" or model == "mistral"  # whose window leaves little to be made equal


@pytest.mark.parametrize(("mesh", "strategy"), [
    ("pp=2,cp=2", "pp=pipeline(1f1b),cp=ring"),
    ("pp=2,cp=2", "pp=pipeline(zbv),cp=allgather_kv"),
    ("pp=2,cp=2", "pp=pipeline(interleaved),cp=ulysses"),
])  # fmt: skip
def test_stages_split_sequences(mesh: str, strategy: str) -> None:
    """Breaks if a stage sends more than its ranks' tokens, or a half of a backward asks for keys that the other had."""
    model, batch = build("gpt2", rows=8)
    plan = autopar.plan(model, Mesh.parse(mesh, hardware="cpu"), example_inputs=batch, strategy=parse(strategy))
    plan.verify().raise_on_failure()


@pytest.mark.parametrize("strategy", ["ulysses", "ring"])
def test_saved_plans_are_of_the_same_program(strategy: str) -> None:
    """Breaks if decisions are read back onto a program that repeats other heads, or keeps other views."""
    model, batch = build("llama")
    plan = autopar.plan(model, Mesh({"cp": 8}, hardware="cpu"), example_inputs=batch, strategy=strategy)
    text = plan.to_json()
    assert Plan.from_json(text).to_json() == text
    again = replan(Plan.from_json(text), model, batch, plan.mesh)
    assert again.source == plan.source and again.collectives == plan.collectives
    again.verify().raise_on_failure()


def test_the_page_names_every_cell() -> None:
    """Breaks if a column is proven and not shown."""
    results = {
        f"{model} | {mesh} | {strategy}": {"status": "ok", "error": 1e-15, "message": ""}
        for mesh, strategies in COLUMNS.items()
        for strategy in strategies
        for model in MODELS
    }
    text = page(results)
    assert text.count("1.0e-15") == len(results) + 1 and f"{len(results)} cells are equal" in text


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("dp", "cp"), [("ddp", "ulysses"), ("expert", "ring"), ("zero3+expert", "allgather_kv")])
def test_tokens_of_rows_and_sequences_leave_blocks_in_stripes(dp: str, cp: str) -> None:
    """Breaks if router logits, [rows · sequence, experts], which an auxiliary loss reads behind the blocks, have no
    layout where one axis splits rows and a later one the sequence.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4, output_router_logits=True,
    )  # fmt: skip
    batch = {name: torch.randint(0, 64, (4, 16)) for name in ("input_ids", "labels")}
    mesh = autopar.Mesh({"dp": 2, "cp": 2}, hardware="cpu")
    plan = autopar.plan(
        transformers.MixtralForCausalLM(config), mesh, example_inputs=batch, strategy={"dp": dp, "cp": cp}
    )
    lies = {each.name: each.sharding for each in plan.interface.outputs}
    assert lies["router_logits.0"] == (Shard(0), Shard(0, outer=2))
    assert ("exchange_experts" in plan.source) == ("expert" in dp)
    assert plan.verify(rtol=1e-9).ok
