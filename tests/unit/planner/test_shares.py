"""What a plan tells of those that could follow it: what is attention's, and what all ways to meet in it do alike."""

from __future__ import annotations

import pytest
import torch
import transformers

import autopar
from autopar.cli.models import catalogue
from autopar.cost.context import least_in_attention, seconds_in_attention
from autopar.machine.mesh import Mesh
from autopar.planner.plan.record import PlanRecord
from autopar.planner.shares import by_sequence_s, outside_s, seconds_in_experts, values_s, without_attention_s


def planned(strategy: str) -> PlanRecord:
    loaded = catalogue.load("llama-3.1-8b", tiny=True, batch=(4, 32))
    return autopar.plan(loaded.model, Mesh({"cp": 2}, hardware="cpu"), example_inputs=loaded.batch, strategy=strategy)


@pytest.mark.moderate
def test_outside_of_attention_all_ways_to_meet_in_it_do_the_same() -> None:
    """Breaks if what attention reads and gives counts as moved outside of it, by which other ways would be left out,
    or if its gathers are taken for the rest of the step.
    """
    plans = [planned(strategy) for strategy in ("allgather_kv", "ulysses")]
    one, other = plans
    assert values_s(one) != pytest.approx(values_s(other), rel=1e-3)
    assert outside_s(one) == pytest.approx(outside_s(other), rel=1e-3)
    for plan, way in ((one, other), (other, one)):
        in_attention_s = values_s(plan) - outside_s(plan)
        assert 0.0 < without_attention_s(plan) <= plan.cost.step_time_s - in_attention_s
        assert without_attention_s(plan) <= way.cost.step_time_s - (values_s(way) - outside_s(way))


@pytest.mark.moderate
def test_splitting_the_batch_tells_what_splitting_the_sequence_takes_at_least() -> None:
    """Breaks if a step is said to take longer than it does where the sequence is split, or if what is whole where the
    batch is split counts as if a part of it could not be saved.
    """
    rows = planned("ddp")
    outside_of_attention_s = by_sequence_s(rows, [0])
    assert rows.program is not None
    moved_s = values_s(rows) - rows.cost.compute_s
    most_s = rows.cost.step_time_s - seconds_in_attention(rows.program) - moved_s
    assert 0.0 < outside_of_attention_s < (1 - 1e-6) * most_s  # positions are whole where rows are split
    for strategy in ("ring", "allgather_kv", "ulysses"):
        plan = planned(strategy)
        assert plan.program is not None
        least_s = least_in_attention(plan.program, plan.strategies, plan.mesh)
        assert outside_of_attention_s + least_s <= plan.cost.step_time_s, strategy


@pytest.mark.moderate
def test_what_experts_compute() -> None:
    """Breaks if experts count as none, or other layers as theirs."""
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    ids = torch.randint(0, 64, (4, 8))
    plan = autopar.plan(
        transformers.MixtralForCausalLM(config), Mesh({"dp": 2}, hardware="cpu"), strategy="ddp",
        example_inputs={"input_ids": ids, "labels": ids},
    )  # fmt: skip
    assert 0.0 < seconds_in_experts(plan) < plan.cost.compute_s
    assert seconds_in_experts(planned("ddp")) == 0.0
