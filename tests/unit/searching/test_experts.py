"""Searches of mixtures: an axis inside the data axis over which tokens go to their experts."""

from __future__ import annotations

from functools import lru_cache

import pytest
import torch
import transformers

import autopar
from autopar.api.search import SearchResult
from autopar.cost.under_way import step_hidden_s
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.space import EXCHANGING, Shape, Space, points

BATCH = (32, 1024)


def test_axes_for_experts_divide_them() -> None:
    """Breaks if an axis has a part of an expert, exchanges where the sequence is split, or other parameters are kept in
    another way than over the data axis around it.
    """
    cluster, sizes = Cluster("h100", 2, 8), {"pp": 1, "dp": 16, "cp": 1, "tp": 1}
    space, shape = Space({}), Shape(32, 4, 4, experts=24)

    def found(sizes: dict[str, int], shape: Shape) -> list[tuple[int, int, str, str]]:
        each = points(cluster, space, shape, sizes, 1)
        return [(p.dp, p.ep, p.data, p.exchange) for p in each if p.ep > 1]

    own = found(sizes, shape)
    assert {(dp, ep) for dp, ep, _, _ in own} == {(8, 2), (4, 4), (2, 8)}
    assert all(exchange == ("expert" if data == "ddp" else f"{data}+expert") for _, _, data, exchange in own)
    assert {(dp, ep) for dp, ep, _, _ in found(sizes, Shape(32, 4, 4, experts=16))} == {(8, 2), (4, 4), (2, 8), (1, 16)}
    assert not found({"pp": 1, "dp": 8, "cp": 2, "tp": 1}, shape) and not found(sizes, Shape(32, 4, 4))


@lru_cache(maxsize=1)
def searched() -> tuple[torch.nn.Module, dict[str, torch.Tensor], SearchResult]:
    config = transformers.Qwen2MoeConfig(
        vocab_size=1024, hidden_size=1024, intermediate_size=2048, moe_intermediate_size=1024, num_hidden_layers=2,
        shared_expert_intermediate_size=2048, num_attention_heads=8, num_key_value_heads=4, num_experts=32,
        num_experts_per_tok=2, use_cache=False,
    )  # fmt: skip
    with torch.device("meta"):
        model = transformers.Qwen2MoeForCausalLM(config)
        ids = torch.zeros(BATCH, dtype=torch.int64)
    batch = {"input_ids": ids, "labels": ids}
    limits = {"pp": 1, "cp": 1, "tp": 2}
    return model, batch, autopar.search(model, "h100x4", example_inputs=batch, limits=limits, top=1)


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("dp", "tp", "data"), [(2, 1, "ddp"), (2, 1, "zero3"), (1, 2, "zero2"), (1, 1, "zero2")])
def test_exchanges_are_estimated_as_planned(dp: int, tp: int, data: str) -> None:
    """Breaks if the exchange, what runs beside it, or what becomes of experts' and of other parameters, is priced
    otherwise than a plan does it.
    """
    model, batch, result = searched()
    ways = ("", "tensor", "tensor+sequence")
    own = [
        each for each in result.candidates
        if each.point.ep == 4 // dp // tp and each.point.dp == dp and each.point.tp == tp and each.point.tensor in ways
        and each.point.exchange == EXCHANGING[data] and each.point.rematerialize == "none"
    ]  # fmt: skip
    assert own
    each = min(own, key=lambda each: each.step_s)
    plan = autopar.plan(
        model, result.cluster.mesh(each.point.axes), example_inputs=batch, strategy=each.point.strategy,
        microbatches=each.point.microbatches, halves=False, precision="bf16", rematerialize="none",
    )  # fmt: skip
    assert plan.program is not None and step_hidden_s(plan.program) > 0.02 * each.step_s
    assert each.step_s == pytest.approx(plan.cost.step_time_s, rel=0.02)
    assert each.peak_bytes == pytest.approx(plan.cost.peak_memory_bytes, rel=0.05)
