"""How unevenly routers spread tokens: measured from loads, a field of the request, and what plans make of it."""

from __future__ import annotations

import functools
import warnings
from dataclasses import replace

import pytest
import torch
import transformers

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.cost.roofline import Work, compute_time_s
from autopar.machine import profiles

pytestmark = pytest.mark.unit


def test_measured_of_loads() -> None:
    """Breaks if loads are not summed by rank, an average is taken over experts, or empty steps count."""
    assert autopar.expert_imbalance([3, 3, 3, 3], 2) == 1.0
    assert autopar.expert_imbalance(torch.tensor([[4, 0, 0, 0], [1, 1, 1, 1], [0, 0, 0, 0]]), 4) == (4.0 + 1.0) / 2
    assert autopar.expert_imbalance([[4, 0, 4, 0]], 2) == 1.0  # hot experts, one of each rank
    assert autopar.expert_imbalance([[9, 3, 0, 0]], 1) == 1.0


@pytest.mark.parametrize("loads", [[1, 2, 3], [[1, 2], [1, 2, 3, 4]], [], [0, 0], [3, -1], [float("nan"), 1.0]])
def test_loads_that_are_none(loads: list[object]) -> None:
    """Breaks if what counts no tokens gives a number."""
    with pytest.raises(AutoparError, match="loads"):
        autopar.expert_imbalance(loads, 2)


@functools.cache
def planned(imbalance: float | None, strategy: str) -> Plan:
    """Of a mixture with a wide layer, over eight devices of a node."""
    config = transformers.Qwen3MoeConfig(
        vocab_size=512, hidden_size=2048, intermediate_size=4096, moe_intermediate_size=768, num_hidden_layers=2,
        num_attention_heads=16, num_key_value_heads=4, num_experts=64, num_experts_per_tok=4,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen3MoeForCausalLM(config).bfloat16()
        ids = torch.zeros(8, 2048, dtype=torch.int64)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        return autopar.plan(
            model, autopar.Mesh.parse("dp=8", hardware="h100"), strategy=strategy,
            example_inputs={"input_ids": ids, "labels": ids}, expert_imbalance=imbalance,
        )  # fmt: skip


@pytest.mark.moderate
def test_an_exchange_takes_as_long_as_its_busiest_rank() -> None:
    """Breaks if the request's number is lost on the way to costs, or is another one than the profile's by default."""
    usual, same, more = (planned(each, "expert").cost.step_time_s for each in (None, 1.25, 4.0))
    assert usual == same < more
    assert planned(4.0, "expert").mesh.hardware.expert_imbalance == 4.0
    loaded = Plan.from_json(planned(4.0, "expert").to_json())
    assert loaded.mesh.hardware.expert_imbalance == 4.0


@pytest.mark.moderate
def test_imbalance_changes_plans() -> None:
    """Breaks if what is chosen does not depend on it: tokens go to their experts where ranks get about as many, and
    stay where one rank would get all of them.
    """
    even, uneven = planned(1.0, "auto"), planned(8.0, "auto")
    assert "comm.exchange_experts(" in (even.source or "")
    assert "comm.exchange_experts(" not in (uneven.source or "")


def test_less_than_an_average_is_refused() -> None:
    """Breaks if a number that cannot be is believed."""
    for wrong in (0.5, float("nan"), float("inf")):
        with pytest.raises(AutoparError, match="the busiest rank gets at least as many"):
            autopar.Mesh.parse("dp=2", hardware="cpu").with_experts(wrong)


def test_small_groups_of_rows_take_longer() -> None:
    """Breaks if experts of few rows each are priced as one product of all rows, where a profile has a curve."""
    h100 = profiles.load("h100")
    assert h100.matmul, "a profile with curves"
    one = Work("matmul", torch.bfloat16, 2.0 * 4096 * 1024 * 1024, 1.0, (4096.0, 1024.0, 1024.0, 1.0))
    many = replace(one, dims=(4096.0 / 64, 1024.0, 1024.0, 64.0))
    assert compute_time_s(many, h100) > 1.2 * compute_time_s(one, h100)
