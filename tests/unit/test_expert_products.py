"""Experts of transformers, whose rows are multiplied group by group, are proven in float64 as everything else is."""

from __future__ import annotations

import warnings

import pytest
import torch
import transformers
from transformers.integrations import moe

import autopar
from autopar.base.huggingface import experts


@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "mesh"), [("ddp", "dp=2"), ("tensor", "tp=2")])
def test_a_mixture_is_proven(strategy: str, mesh: str) -> None:
    """Breaks if the reference asks torch's grouped product for float64, which it does not know, so that no mixture as
    transformers makes it can be proven.
    """
    config = transformers.MixtralConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, num_local_experts=4,
    )  # fmt: skip
    ids = torch.arange(32).reshape(4, 8)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(
            transformers.MixtralForCausalLM(config).train(), autopar.Mesh.parse(mesh, hardware="cpu"),
            example_inputs={"input_ids": ids, "labels": ids}, strategy=strategy,
        )  # fmt: skip
    plan.verify().raise_on_failure()


def test_only_float64_takes_the_other_way_and_only_meanwhile() -> None:
    """Breaks if a model is proven by another product than its own in precisions that torch knows, or stays changed."""
    before = moe._can_use_grouped_mm
    x, w, at = torch.randn(4, 8), torch.randn(2, 8, 6), torch.tensor([2, 4], dtype=torch.int32)
    with experts.wide():
        assert moe._can_use_grouped_mm(x, w, at) == before(x, w, at)
        assert not moe._can_use_grouped_mm(x.double(), w.double(), at)
    assert moe._can_use_grouped_mm is before
