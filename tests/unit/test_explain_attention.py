"""`plan.explain` of attention: what each axis does to it, what was found, which strategy asks, what others cost."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
import torch

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.base.text import format_bytes
from autopar.cli.models import catalogue
from autopar.ir.choices import NONE, Choice
from autopar.ir.program import AttentionSite
from autopar.ir.sharding import Replicate, Shard
from autopar.machine.mesh import Mesh
from autopar.strategies.names import Strategy
from autopar.views.explain.alternatives import Alternatives
from autopar.views.explain.subjects import find

pytestmark = pytest.mark.slow

ROWS, TOKENS, HEADS, KEY_HEADS, SIZE = 4, 64, 8, 4, 8
SDPA = "(a call of scaled_dot_product_attention)"
HEADS_ON_CP = Choice("factor", "h")


def plan_of(
    name: str, mesh: str, strategy: Strategy, *, rows: int = ROWS, padded: bool = False, rematerialize: str = "auto"
) -> Plan:
    loaded = catalogue.load(name, tiny=True, batch=(rows, TOKENS))
    extra = {"attention_mask": torch.ones(rows, TOKENS, dtype=torch.int64)} if padded else {}
    inputs = {**loaded.batch, **extra}
    return autopar.plan(
        loaded.model, Mesh.parse(mesh), example_inputs=inputs, strategy=strategy, rematerialize=rematerialize
    )


@pytest.fixture(scope="module")
def ring() -> Plan:
    return plan_of("mistral-7b", "cp=4", "ring")


@pytest.fixture(scope="module")
def ulysses() -> Plan:
    return plan_of("mistral-7b", "dp=2,cp=2", "ulysses")


def test_a_ring_says_how_far_it_goes(ring: Plan) -> None:
    """Breaks if the window seems lost, the ring to go all round, or the bytes not to be those of the collectives."""
    found = ring.explain("model.layers.0.self_attn")
    assert (found.kind, found.chosen.stored) == ("attention", "cp: ring")
    assert found.members == ("model.layers.0.self_attn", "model.layers.1.self_attn")
    facts = dict(found.facts)
    assert facts["found"] == f"causal, window 6, 8 heads on 4 {SDPA}"
    block = format_bytes(2 * ROWS * KEY_HEADS * SIZE * TOKENS / 4 * 4)  # keys and values, a quarter of the tokens, f32
    assert facts["on cp"] == (
        "queries and keys split; keys and values go round 4 ranks, to 1 of 3 others: the mask hides the rest; "
        f"each layer a rank sends: forward 1 step of {block}, backward 1 step of {block} and 2 of {block} of gradients"
    )
    sent = {row.phase: row.bytes_sent / row.times for row in found.collectives}
    assert block == format_bytes(sent["forward"]) == format_bytes(sent["backward"] / 3)
    assert found.why[0] == "ring on cp splits attention's queries and keys, which go round"
    assert found.why[1:] == ("the strategies leave nothing else",)


def test_the_strategy_is_named_that_forbids_another(ring: Plan) -> None:
    """Breaks if heads seem not to divide under a ring, where it is the ring that does not let them be split."""
    found = ring.explain("layer.attention_backward")
    assert found.name == "model.layers.*.self_attn (layer.attention)"  # the gradient is decided with it
    reasons = {row.sharding: row for row in found.excluded}
    asked = "ring on cp splits attention's queries and keys, which go round"
    assert reasons["cp: heads"].reason == f"{asked}; this would be ulysses"
    assert reasons["cp: queries"].reason == f"{asked}; this would be allgather_kv"
    assert reasons["cp: whole"].reason == asked
    assert {row.kind for row in found.excluded} == {"strategy"} and not found.alternatives


def test_neighbours_of_attention_name_it_too(ring: Plan, ulysses: Plan) -> None:
    """Breaks if what stands next to attention is not put down to the strategy that says what attention does."""
    assert ring.program is not None and ulysses.program is not None
    near = Alternatives(ring, find(ring.program, "layer.value_states_1"))
    assert near.why_not((Shard(1),)).reason == "ring on cp splits attention's queries and keys, which go round"
    far = Alternatives(ulysses, find(ulysses.program, "layer.q_proj")).why_not((Shard(0), Replicate()))
    assert far.reason.startswith("ulysses lets activations inside blocks on cp use slice alone"), far
    other = Alternatives(ulysses, find(ulysses.program, "layer.attention")).why_not((NONE, HEADS_ON_CP))
    assert other.reason.startswith("ddp lets activations on dp use") and "ulysses" not in other.reason


def test_heads_are_turned_by_all_to_alls(ulysses: Plan) -> None:
    """Breaks if moves beyond a view are left out: the result's, or the values', which are turned before it."""
    found = ulysses.explain("model.layers.*.self_attn", time_limit_s=0)
    sent = format_bytes(2 * (HEADS + KEY_HEADS) * SIZE * 4 * (ROWS // 2) * TOKENS // 2 * 1 // 2)  # docs/attention.md
    assert dict(found.facts)["on dp"] == "batch split; nothing is sent"
    assert dict(found.facts)["on cp"] == (
        "heads split; all-to-alls turn tokens to heads and back; each layer a rank sends: "
        f"forward 4 all-to-alls ({sent}), backward 4 all-to-alls ({sent})"
    )
    assert [(row.kind, row.axis) for row in found.collectives] == [("all_to_all", "cp")] * 8
    assert found.why[:2] == ("ddp on dp splits the batch", "ulysses on cp splits attention by heads, of keys too")
    assert json.loads(json.dumps(found.to_dict()))["kind"] == "attention"
    text = str(found)
    assert "found      causal, window 6" in text and "on cp      heads split" in text
    assert max(map(len, text.splitlines())) <= 120


def test_padding_is_not_lost() -> None:
    """Breaks if a user cannot see that the padding of the batch is still there, or keys are not told to be gathered."""
    plan = plan_of("bert-base", "cp=2", "allgather_kv", padded=True)
    found = plan.explain("bert.encoder.layer.1")
    assert dict(found.facts)["found"] == f"padding, dropout 0.1 {SDPA}"
    gathered = format_bytes(2 * 64 * 4 * ROWS * TOKENS // 2)
    assert dict(found.facts)["on cp"] == (
        "queries split; keys and values gathered; each layer a rank sends: "
        f"forward 2 all-gathers ({gathered}), backward 2 reduce-scatters ({gathered})"
    )
    assert f"context cp=allgather_kv: {dict(found.facts)['on cp']}" in " ".join(str(plan).split())


def test_auto_says_what_the_others_cost() -> None:
    """Breaks if the choice of the solver seems a strategy's, or an alternative is of the forward alone."""
    plan = plan_of("llama-3.1-8b", "cp=2", "auto", rows=1)
    assert plan.program is not None
    found = plan.explain("layer.attention")
    assert found.why[0] == "cp: chosen by the solver (auto)"
    assert {row.stored for row in (found.chosen, *found.alternatives)} == {
        "cp: whole", "cp: heads", "cp: query heads", "cp: queries", "cp: ring"
    }  # fmt: skip
    (out,) = found.excluded
    assert (out.sharding, out.kind, out.reason) == ("cp: batch", "size", "1 row, which cp=2 does not divide")
    alternatives = Alternatives(plan, find(plan.program, "layer.attention"))
    placed = alternatives.place(plan.program, (Choice("ring", "s"),), None)
    nodes = alternatives.subject.nodes
    assert len(nodes) == 2 and all(placed.region("layer").strategies[node].choices[0].kind == "ring" for node in nodes)


def test_the_table_says_it(ring: Plan, ulysses: Plan) -> None:
    """Breaks if a plan does not say what its context strategy does, a saved one forgets it, or others speak of it."""
    assert "\ncontext    cp=ring: queries and keys split; keys and values go round" in str(ring)
    assert "context    cp=ulysses: heads split" in str(ulysses)
    assert str(Plan.from_json(ring.to_json())) == str(ring)
    assert not plan_of("llama-3.1-8b", "dp=2", "ddp").context


def test_what_is_computed_again_belongs_to_it() -> None:
    """Breaks if a block that is computed again in the backward hides what its attention sends there."""
    plan = plan_of("mistral-7b", "cp=2", "ring", rematerialize="full")
    found = plan.explain("layer.attention", time_limit_s=0)
    assert plan.program is not None and len(find(plan.program, "layer.attention").nodes) == 3
    assert [(row.kind, row.phase) for row in found.collectives] == [
        ("ring", "forward"), ("ring", "backward"), ("ring", "backward")
    ]  # fmt: skip


def test_names_of_attentions() -> None:
    """Breaks if a module of two kinds of attention is answered for one of them, or what was not fused is unknown."""
    plan = plan_of("gemma-2-2b", "cp=2", "ring")
    program = plan.program
    assert [row[1] for row in plan.context] == [""]  # of two ranks both kinds see each other
    with pytest.raises(AutoparError, match="holds 2 attentions that are decided apart") as caught:
        find(program, "model.layers.*.self_attn")
    assert "layer_2.attention (model.layers.1.self_attn)" in str(caught.value)
    assert find(program, "model.layers.1").name == "model.layers.*.self_attn (layer_2.attention)"
    left = AttentionSite("head.pool", "eager", "", False, "its probabilities are returned")
    with pytest.raises(AutoparError, match="stays as it is written: its probabilities are returned"):
        find(replace(program, attention=(*program.attention, left)), "head.pool")
