"""Exchanges priced with what may run beside them: bounds before anything is placed, and what `auto` makes of them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import autopar
from autopar.api.plan import Plan
from autopar.cost.beside import with_work_beside
from autopar.cost.exchanges import exchange_axis
from autopar.cost.operator_time import ways_of
from autopar.cost.under_way import step_hidden_s
from autopar.planner import attempts
from tests.unit.passes.test_interleave import Alone, large, planned, program_of

pytestmark = pytest.mark.unit


@pytest.mark.moderate
def test_what_may_be_hidden_of_an_exchange() -> None:
    """Breaks if an exchange is cheaper by more than it travels or than others compute, if what tells the numbers of
    rows counts as hidden, or if anything but an exchange is priced otherwise.
    """
    program = program_of(large(True))
    priced = with_work_beside(program)
    mesh, changed = program.on_mesh, set[str]()
    for region, other in zip(program.regions, priced.regions, strict=True):
        for name, options in region.options.items():
            call, rule = region.ops[name]
            of_others = sum(min(each.seconds) for each in region.options.values())
            found = zip(options.strategies, options.seconds, other.options[name].seconds, strict=True)
            for strategy, before, after in found:
                ways = ways_of(call, rule, strategy, mesh)
                if exchange_axis(strategy.choices) is None:
                    assert after == before
                    continue
                assert 0 < before - after <= min(ways.there_s + ways.back_s, of_others) + 1e-15
                changed.add(call.name)
    assert changed == {"autopar.experts.default", "autopar.experts_grad.default"}


def test_what_is_hidden_is_no_more_than_was_thought() -> None:
    """Breaks if what is independent of an exchange is not seen before it is placed: no compute is slower here, and
    every axis splits all of it.
    """
    program = program_of(large(True))
    less = 0.0
    for region, other in zip(program.regions, with_work_beside(program).regions, strict=True):
        for name, strategy in region.strategies.items():
            at = region.options[name].strategies.index(strategy)
            less += region.options[name].seconds[at] - other.options[name].seconds[at]
    assert 0.5 * less < step_hidden_s(program) <= less * (1 + 1e-9)


@pytest.mark.moderate
def test_nothing_beside_an_exchange() -> None:
    """Breaks if an exchange beside which nothing can run is priced as if something did."""
    assert with_work_beside(program := program_of(planned(Alone().requires_grad_(False).eval()))) is program


def qwen(strategy: Any, **options: Any) -> Plan:
    config = transformers.Qwen2MoeConfig(
        vocab_size=8192, hidden_size=2048, intermediate_size=5632, moe_intermediate_size=1408,
        shared_expert_intermediate_size=5632, num_hidden_layers=4, num_attention_heads=16, num_key_value_heads=16,
        num_experts=64, num_experts_per_tok=4, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen2MoeForCausalLM(config)
        ids = torch.zeros((16, 2048), dtype=torch.int64)
    return autopar.plan(
        model, autopar.Mesh({"dp": 8}, hardware="h100"), strategy=strategy, precision="bf16",
        example_inputs={"input_ids": ids, "labels": ids}, **options,
    )  # fmt: skip


@pytest.mark.moderate
def test_auto_sees_what_exchanges_hide(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if the objective knows nothing of what runs beside an exchange: then `auto` has to take a name's word for
    it, and what else it would do better it does not find. If a saved plan forgets how it was priced.
    """
    plan = qwen("auto")
    monkeypatch.setattr(attempts, "may_exchange", lambda programs: False)
    blind = qwen("auto")
    assert plan.cost.step_time_s < 0.999 * blind.cost.step_time_s
    assert plan.program is not None and step_hidden_s(plan.program) > 0.05 * plan.cost.step_time_s
    assert plan.solved.hides_exchanges and not blind.solved.hides_exchanges
    assert plan.solved.objective_s < blind.solved.objective_s
    assert Plan.from_json(plan.to_json()).solved == plan.solved
