"""Two microbatches that go through the program together: the same numbers, and tokens that travel meanwhile."""

from __future__ import annotations

import re
from dataclasses import replace
from functools import lru_cache
from typing import Any

import pytest
import torch
import transformers
from torch import Tensor

import autopar
from autopar import pipeline
from autopar.api import interpret
from autopar.api.plan import Plan
from autopar.api.planning import written
from autopar.base.errors import AutoparError
from autopar.cost.under_way import step_hidden_s
from autopar.ir.program import Program
from autopar.ir.rings import SEND, TAKE, is_exchange
from autopar.planner.family import Family
from autopar.planner.programs import Programs
from autopar.runtime.checker.program import check_types
from autopar.runtime.loader import load_program
from autopar.runtime.microbatches import make_batch
from autopar.runtime.simulate import simulate
from autopar.runtime.simulated_comm import SimulatedMesh
from autopar.runtime.simulation import shard_state
from autopar.runtime.step import Step
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt
from autopar.views.content import Findings, content_of
from autopar.views.picture import dot_source
from autopar.views.words import in_words
from tests.unit.passes.test_interleave import Alone, Deep, Qwen, planned, program_of
from tests.unit.test_mixtures import model_of
from tests.unit.test_mixtures import planned as of_model

pytestmark = pytest.mark.unit
HALVES: dict[str, Any] = {"microbatches": 2, "halves": True}


@pytest.mark.sampled(1)
@pytest.mark.moderate
@pytest.mark.parametrize(
    ("kind", "strategy", "mesh"),
    [
        ("deepseek", {"dp": "zero3+expert"}, "dp=2"),
        ("deepseek", {"dp": "expert", "tp": "tensor"}, "dp=2,tp=2"),
        ("qwen3", {"dp": "zero3", "ep": "expert"}, "dp=2,ep=2"),
    ],
)
def test_numbers_are_the_same(kind: str, strategy: Any, mesh: str) -> None:
    """Breaks if a statement reads the other microbatch's value, or comes before what it reads; if gradients of one are
    lost, or counted twice.
    """
    plan = of_model(model_of(kind), strategy, mesh, rows=8, **HALVES)
    assert plan.interface.together == 2 and plan.interface.microbatches == 2
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
@pytest.mark.parametrize("model", [Alone, Qwen])
def test_of_four_microbatches(model: Any) -> None:
    """Breaks if gradients of two pairs are not added up, or a pair gets other rows."""
    torch.manual_seed(0)
    x = torch.randn(8, 5, 16)
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(model(), mesh, strategy="zero2+expert", example_inputs={"x": x}, microbatches=4, halves=True)
    assert program_of(plan).microbatches == 2 and plan.interface.microbatches == 4
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
def test_recomputed() -> None:
    """Breaks if what the backward computes again of one microbatch is taken for the other's."""
    plan = of_model(model_of("deepseek", num_hidden_layers=3), "expert", "dp=2", rows=8, rematerialize="full", **HALVES)
    assert plan.rematerialize == "full" and plan.source is not None and plan.source.count("comm.send_tokens(") == 4
    assert plan.verify(rtol=1e-9).ok


class Masked(Alone):
    """An average over the tokens that a mask leaves: of none of them it is 0 / 0."""

    def forward(self, x: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
        mixed = self.layer(x)
        y = mixed[0] if isinstance(mixed, tuple) else mixed
        return (y.square().mean(-1) * mask).sum() / mask.sum(), y


@pytest.mark.moderate
def test_a_microbatch_without_weight() -> None:
    """Breaks if what one microbatch computes as 0 / 0 gets into the gradients by way of the other, if one that goes
    alone counts twice, or its part of the outputs is another one's.
    """
    torch.manual_seed(0)
    model, mask = Masked().double(), torch.ones(8, 5).double()
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    mask[[2, 3, 6, 7]] = 0  # of each rank's four rows the second microbatch's
    batch = {"x": torch.randn(8, 5, 16).double(), "mask": mask}
    plan = autopar.plan(
        model, autopar.Mesh.parse("dp=2", hardware="cpu"), strategy="expert", example_inputs=batch, **HALVES
    )
    assert [each.combine for each in plan.interface.outputs] == ["weighted", "concat"]
    assert plan.interface.together == 2 and plan.source is not None
    found = simulate(plan.interface, plan.source, interpret.state_of(model, program_of(plan)), batch)
    loss, made = model(**batch)
    loss.backward()
    torch.testing.assert_close(found.outputs, (loss.detach(), made.detach()))
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(found.gradients[name], parameter.grad)


@pytest.mark.moderate
def test_a_saved_plan() -> None:
    """Breaks if a plan forgets that microbatches go together, or what is written from it afresh is another program."""
    plan = two()
    loaded = Plan.from_json(plan.to_json())
    assert loaded.interface == plan.interface and loaded.decisions == plan.decisions
    torch.manual_seed(0)
    model, x = Deep(), {"x": torch.randn(4, 5, 16)}
    from autopar.api.again import replan

    assert replan(loaded, model, x, plan.mesh).source == plan.source


@pytest.mark.moderate
def test_a_step_that_trains_at_once() -> None:
    """Breaks if a step whose microbatches go forward and backward in turn adds other gradients than one that goes
    forward first, or tells other outputs.
    """
    torch.manual_seed(0)
    model, x = Qwen(), torch.randn(8, 5, 16)
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    options: dict[str, Any] = {"microbatches": 4, "halves": True}
    plan = autopar.plan(model, mesh, strategy="expert", example_inputs={"x": x}, **options)
    source, interface, state = str(plan.source), plan.interface, interpret.state_of(model, program_of(plan))
    wanted = simulate(interface, source, state, {"x": x})

    def run(comm: Any) -> Any:
        with torch.no_grad():
            step = Step(make_batch(load_program(source, "<in turn>"), interface, comm, {"x": x}), 0)
            done, gradients, _ = step.in_turn(shard_state(comm, interface, state), lambda _: 0)
        return done.outputs, gradients

    for outputs, gradients in SimulatedMesh(interface.axes, interface.sizes, 60.0).run(run):
        torch.testing.assert_close(outputs, wanted.outputs)
        torch.testing.assert_close(gradients["last.weight"], wanted.gradients["last.weight"])


@pytest.mark.moderate
def test_another_batch() -> None:
    """Breaks if a batch of other sizes, for which decisions stay, runs its microbatches one after the other."""
    torch.manual_seed(0)
    model, batch = Deep(), {"x": torch.randn(8, 7, 16)}
    plan = written(Family.of(two()).plan(model, batch))
    source, interface = str(plan.source), plan.interface
    assert interface.together == 2 and interface.inputs[0].shape == (4, 7, 16)
    check_types(source, interface)
    for parameter in model.parameters():
        torch.nn.init.normal_(parameter, std=0.3)
    found = simulate(interface, source, interpret.state_of(model, program_of(plan)), batch)
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(found.outputs[0], loss.detach())
    assert model.one.gate.weight.grad is not None
    torch.testing.assert_close(found.gradients["one.gate.weight"], model.one.gate.weight.grad, rtol=1e-4, atol=1e-5)


# ------------------------------------------------------------------------------------------------- when, and when not


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("options", "says"),
    [
        ({"strategy": "zero3"}, "no tokens travel to experts"),
        ({"microbatches": 1}, "a step has 1 microbatch"),
    ],
)
def test_refused(options: dict[str, Any], says: str) -> None:
    """Breaks if what was asked for is left out silently."""
    torch.manual_seed(0)
    with pytest.raises(AutoparError, match=says):
        planned(Deep(), options.pop("strategy", "expert"), **{**HALVES, **options})


@pytest.mark.moderate
def test_a_forward_alone_has_no_microbatches() -> None:
    """Breaks if a model that is compiled for pairs cannot be evaluated, or cannot generate."""
    torch.manual_seed(0)
    plan = planned(Deep(), "expert", **HALVES, inference=True)
    assert plan.interface.together == 1
    assert plan.verify(rtol=1e-9).ok


@pytest.mark.moderate
def test_what_all_tokens_make_together() -> None:
    """Breaks if an auxiliary loss, a product of averages over all tokens, is taken for that of each microbatch."""
    model = model_of("qwen3", output_router_logits=True, router_aux_loss_coef=0.1)
    with pytest.raises(AutoparError, match="of the whole batch does not follow from those of its microbatches"):
        of_model(model, "expert", "dp=2", rows=8, **HALVES)


@pytest.mark.moderate
class Dropped(Alone):
    """Draws numbers before and behind experts, and uses both backward."""

    def forward(self, x: Tensor) -> Tensor:
        mixed = self.layer(torch.nn.functional.dropout(x, 0.3, self.training))
        y = mixed[0] if isinstance(mixed, tuple) else mixed
        return (torch.nn.functional.dropout(y, 0.2, self.training) * (1 + torch.rand_like(y))).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(("microbatches", "rematerialize"), [(2, "none"), (4, "full")])
def test_each_draws_what_it_would_alone(microbatches: int, rematerialize: str) -> None:
    """Breaks if two microbatches draw the same numbers, or others than in turn; if a backward takes the other's."""
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 5, 16)}
    plan = autopar.plan(
        Dropped(), autopar.Mesh.parse("dp=2", hardware="cpu"), strategy="expert", example_inputs=batch,
        microbatches=microbatches, halves=True, rematerialize=rematerialize,
    )  # fmt: skip
    assert plan.interface.together == 2 and plan.source is not None and "seed[1]" in plan.source
    assert plan.verify(rtol=1e-9).ok
    for old, new in (("seed[1]", "seed[0]"), ("seed[0]", "seed[1]")):
        with pytest.raises(AutoparError):
            check_types(plan.source.replace(old, new), plan.interface)


@pytest.mark.moderate
def test_blocks_draw_what_they_would_alone() -> None:
    """Breaks if a block of several has another block's numbers, or attention the other microbatch's."""
    model = model_of("qwen3", attention_dropout=0.2, num_hidden_layers=3)
    plan = of_model(model, "expert", "dp=2", rows=8, **HALVES)
    assert plan.interface.together == 2 and plan.source is not None and "seed[1] + " in plan.source
    assert plan.verify(rtol=1e-9).ok


def layers(**options: Any) -> Plan:
    """Layers of the size of Qwen3-30B's on eight devices of two nodes' network."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=4096, hidden_size=2048, intermediate_size=6144, moe_intermediate_size=768, num_hidden_layers=3,
        num_attention_heads=32, num_key_value_heads=4, head_dim=128, num_experts=64, num_experts_per_tok=8,
        use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config)
        ids = torch.zeros((64, 4096), dtype=torch.int64)
    return autopar.plan(
        model, autopar.Mesh({"dp": 16}, hardware="h100"), strategy="zero2+expert", precision="bf16",
        example_inputs={"input_ids": ids, "labels": ids}, microbatches=2, memory_limit=1e15, rematerialize="none",
        **options,
    )  # fmt: skip


@pytest.mark.moderate
def test_where_it_is_faster() -> None:
    """Breaks if what the other microbatch hides is not in the step, or two go together where that is slower."""
    plan, in_turn = layers(), layers(halves=False)
    assert plan.interface.together == 2 and in_turn.interface.together == 1
    assert plan.cost.step_time_s < 0.97 * in_turn.cost.step_time_s
    program = program_of(plan)
    exchanged_s = sum(row.seconds for row in plan.collectives if row.kind == "exchange")
    assert 0.4 * exchanged_s < step_hidden_s(program) < exchanged_s
    assert step_hidden_s(program_of(in_turn)) < 0.1 * exchanged_s
    assert sum(row.bytes_sent for row in plan.collectives if row.kind == "exchange") == pytest.approx(
        sum(row.bytes_sent for row in in_turn.collectives if row.kind == "exchange")
    )


@pytest.mark.moderate
def test_where_it_does_not_fit() -> None:
    """Breaks if what both microbatches keep is left out of the memory limit."""
    torch.manual_seed(0)
    plain = planned(Alone(), "expert", microbatches=2, halves=False)
    peak = plain.cost.peak_memory_bytes
    assert planned(Alone(), "expert", memory_limit=peak, microbatches=2).interface.together == 1
    with pytest.raises(AutoparError, match="does not fit"):
        planned(Alone(), "expert", memory_limit=peak, **HALVES)


# ------------------------------------------------------------------------------------------------- the order


def test_pairs_are_not_taken_for_what_runs_in_turn() -> None:
    """Breaks if what was lowered without a limit, one microbatch after the other, is handed out for two at a time."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    inputs = {"x": torch.randn(4, 5, 16)}
    asked = Attempt(Alone(), inputs, mesh, resolve("expert", mesh), microbatches=2, memory_limit_bytes=None)
    programs = Programs.of(asked, pipeline.DEFAULT)
    assert programs.plan(asked).interface.together == 1
    within = replace(asked, memory_limit_bytes=1e12, checks_limit=True)
    assert programs.plan(replace(within, together=2)).interface.together == 2
    assert programs.plan(within).interface.together == 1


@lru_cache(maxsize=1)
def two() -> Plan:
    torch.manual_seed(0)
    return planned(Deep(), "expert", **HALVES)


def order_of(program: Program, phase: str) -> list[str]:
    (region,) = program.regions
    kinds = {SEND: "send", TAKE: "take"}
    nodes = (node for node in region.lowered[phase].graph.nodes if node.target in kinds or is_exchange(node))
    return [kinds.get(str(node.target), "experts") for node in nodes]


@pytest.mark.moderate
def test_both_leave_before_experts_of_one() -> None:
    """Breaks if one microbatch's tokens leave when the other's are back: nothing would run beside them."""
    for phase in ("forward", "backward"):
        order = order_of(program_of(two()), phase)
        assert order[:2] == ["send", "send"] and sorted(order[2:]) == ["experts"] * 2 + ["take"] * 2


@pytest.mark.parametrize(
    ("old", "new", "says"),
    [
        (r"return \((\w+), (\w+_b)\), ", r"return (\2, \1), ", "output"),
        (r"sent=(\w+), later=True", "sent=sent_1, later=True", "another exchange"),
        (r"take_tokens\(experts_b\)", "take_tokens(experts)", None),
        (r'(g\["[\w.]*gate_up_proj"\] = \w+) \+ \w+', r"\1", "gradient"),
        (r'(g\["[\w.]*first.weight"\] = )(\w+) \+ \w+', r"\1\2 + \2", "gradient"),
        (r"ops\.linear\(x_b, ", "ops.linear(x, ", "output"),
        (r"(\w+) = comm\.take_tokens\(experts\)", r'\1 = comm.index("dp") == 0 and comm.take_tokens(experts)', "rank"),
    ],
)
def test_wrong_edits(old: str, new: str, says: str | None) -> None:
    """Breaks if a program passes in which microbatches are swapped, one stands for both, one waits for what the other
    sent, gradients of one are lost, or ranks go in other orders.
    """
    source = two().source
    assert source is not None and re.search(old, source)
    with pytest.raises(AutoparError, match=says):
        check_types(re.sub(old, new, source, count=1), two().interface)


@pytest.mark.moderate
def test_experts_may_still_be_placed() -> None:
    """Breaks if layers whose experts are moved between steps are others where two microbatches read them."""
    torch.manual_seed(0)
    alone = planned(Deep(), "expert", microbatches=2, halves=False)
    assert two().interface.experts == alone.interface.experts and all(
        each.parameters for each in alone.interface.experts
    )


def test_what_people_look_at() -> None:
    """Breaks if pictures and tables do not find the second microbatch's inputs and outputs, or count calls twice."""
    plan = two()
    assert all("x_b" in dot_source(plan, detail=detail) for detail in ("overview", "region"))
    rows = content_of(plan, Findings(), (), {})["experts"]
    assert isinstance(rows, list) and [row["times"] for row in rows] == [1, 1]
    for phase in ("forward", "backward"):
        sent = sum(each.bytes_sent for each in plan.collectives if (each.kind, each.phase) == ("exchange", phase))
        assert sum(row["times"] * row[f"{phase}_bytes"] for row in rows) == pytest.approx(sent)
    assert any("two at a time" in line for line in in_words(plan))
