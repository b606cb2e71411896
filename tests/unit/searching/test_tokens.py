"""`autopar.search(…, generate=…)`: the frontier is one, and estimates are what plans of both phases then say."""

from __future__ import annotations

import math
from dataclasses import replace
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import autopar
from autopar.base.errors import AutoparError
from autopar.cost.under_way import step_hidden_s
from autopar.machine.mesh import Mesh
from autopar.planner.search.token_search import default_batches
from autopar.planner.search.tokens import (
    TokenCandidate,
    TokenPoint,
    other_ways,
    spread_over,
    token_frontier,
    token_points,
    trace_rows,
)

WANTED = autopar.Generation(batch=4, prompt=24, new_tokens=8)


@lru_cache
def model_of(kind: str) -> nn.Module:
    """Two blocks on meta."""
    import transformers

    sizes: dict[str, Any] = {
        "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "vocab_size": 128,
        "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 8,
    }  # fmt: skip
    with torch.device("meta"):
        if kind == "mixture":
            config: Any = transformers.Qwen2MoeConfig(
                **sizes, num_experts=4, num_experts_per_tok=2, moe_intermediate_size=32, decoder_sparse_step=1,
                shared_expert_intermediate_size=64,
            )  # fmt: skip
            made: Any = transformers.Qwen2MoeForCausalLM(config)
        else:
            made = transformers.LlamaForCausalLM(transformers.LlamaConfig(**sizes))
    return made.eval().to(torch.bfloat16)


def candidate(first_s: float, then_s: float, batch: int, size: float = 1.0, *, fits: bool = True) -> TokenCandidate:
    return TokenCandidate(TokenPoint(1, 1, 1, 8), batch, 64, first_s, then_s, size, 0.5, fits)


numbers = st.integers(1, 6)


@given(st.lists(st.tuples(numbers, numbers, numbers, st.booleans()), max_size=14))
def test_the_frontier_is_what_nothing_beats(rows: list[tuple[int, int, int, bool]]) -> None:
    """Breaks if a point stays that another beats in both, one goes that none beats, or one stays that does not fit."""
    found = [candidate(a, b, c, fits=fits) for a, b, c, fits in rows]
    frontier = token_frontier(found)

    def beats(one: TokenCandidate, other: TokenCandidate) -> bool:
        better = one.time_per_token_s <= other.time_per_token_s
        return better and one.tokens_per_s_per_device >= other.tokens_per_s_per_device

    assert all(each.fits for each in frontier)
    for each in found:
        assert not each.fits or any(beats(other, each) for other in frontier)
    for number, each in enumerate(frontier):
        assert not any(beats(other, each) for other in frontier[:number] + frontier[number + 1 :])
    assert [each.time_per_token_s for each in frontier] == sorted(each.time_per_token_s for each in frontier)


def test_a_candidate_counts_its_prompt() -> None:
    """Breaks if tokens a second leave the prompt out, or count what all devices make as one's."""
    each = candidate(2.0, 0.5, 4)
    assert each.total_s == 2.0 + 63 * 0.5
    assert each.tokens_per_s_per_device == pytest.approx(4 * 64 / each.total_s / 8)


def test_what_is_compared() -> None:
    """Breaks if a mesh has other devices than the cluster, or experts are cut into parts that are none."""
    found = list(token_points(8, {"pp": 2, "dp": 8, "tp": 8}, 4))
    assert all(each.num_devices == 8 and each.pp <= 2 and 4 % each.ep == 0 for each in found)
    assert len(set(found)) == len(found) == 15
    assert {each.ep for each in token_points(8, {"pp": 2, "dp": 8, "tp": 8}, 1)} == {1}
    assert TokenPoint(2, 1, 4, 1).axes == {"pp": 2, "ep": 4} and TokenPoint(1, 1, 1, 1).axes == {"dp": 1}
    assert TokenPoint(2, 2, 1, 2).strategy == {"pp": "pipeline(1f1b)", "dp": "ddp", "tp": "tensor"}
    assert trace_rows((1, 64, 8, 100, 50)) == {100: 100, 64: 64, 50: 100, 8: 64, 1: 100}
    assert default_batches(1) == (1,) and default_batches(100) == (1, 4, 16, 64, 100)


@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 9])
def test_what_is_planned_spreads_over_the_frontier(count: int) -> None:
    """Breaks if one end is left out, or a point is planned twice."""
    frontier = [candidate(1.0, 1.0, batch) for batch in range(1, 6)]
    found = spread_over(frontier, count)
    assert len(found) == min(count, 5) == len({each.batch for each in found})
    assert count < 1 or found[-1] is frontier[-1]
    assert count < 2 or found[0] is frontier[0]
    assert spread_over([], 3) == []


@pytest.mark.parametrize(
    ("axes", "strategy", "batch", "off"),
    [
        ({"tp": 4}, {"tp": "tensor"}, 1, 0.0),
        ({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "tensor"}, 4, 0.0),
        ({"pp": 2, "tp": 2}, {"pp": "pipeline(1f1b)", "tp": "tensor"}, 4, 0.06),
    ],
    ids=str,
)
@pytest.mark.slow
def test_estimates_are_what_plans_say(axes: dict[str, int], strategy: dict[str, str], batch: int, off: float) -> None:
    """Breaks if rows of a rank, links, stages' messages or what is shared behind them are other than a plan's: exact
    without a pipeline.
    """
    found = _found()
    each = next(each for each in found.candidates if each.point.axes == axes and each.batch == batch)
    mesh, wanted = Mesh(axes, hardware=found.cluster.hardware), replace(WANTED, batch=batch)
    plan = autopar.plan_generation(model_of("llama"), mesh, wanted, strategy=strategy)
    near = 1e-9 if off == 0.0 else off
    assert each.time_to_first_token_s == pytest.approx(plan.time_to_first_token_s, rel=near)
    assert each.time_per_token_s == pytest.approx(plan.time_per_token_s, rel=near)
    assert each.cache_bytes == plan.cache_bytes
    assert each.peak_bytes == pytest.approx(plan.peak_memory_bytes, rel=off or 0.03)


@pytest.mark.slow
def test_stages_wait_for_one_host() -> None:
    """Breaks if an estimate has a token over stages wait for all of its launches: those of later stages are queued
    while the first one computes.
    """
    found, mesh = _found(), {"pp": 2, "tp": 2}
    each = next(each for each in found.candidates if each.point.axes == mesh and each.batch == 1)
    flat = next(each for each in found.candidates if each.point.axes == {"tp": 4} and each.batch == 1)
    assert each.time_per_token_s < 0.9 * flat.time_per_token_s


@lru_cache
def _found() -> autopar.GenerationSearch:
    return autopar.search(model_of("llama"), "h100x4", generate=WANTED, batches=(1, 4), top=2)


@pytest.mark.moderate
def test_a_search_plans_what_it_found(tmp_path: Path) -> None:
    """Breaks if the ends of the frontier are not planned, or a picture, text or data of it cannot be had."""
    found = _found()
    assert [each for each, _ in found.planned] == spread_over(found.frontier, 2) and found.off_by < 0.06
    meshes = {str(each.point) for each in found.candidates}
    assert {"tp=4", "dp=2,tp=2", "pp=2,tp=2", "dp=4"} <= meshes
    data = found.to_data()
    assert len(data["candidates"]) == len(found.candidates) and len(data["plans"]) == len(found) > 0
    assert data["plans"][0]["planned"]["time_per_token_s"] == found[0].time_per_token_s
    assert "24 + 8 tokens on 1 × 4 h100" in str(found)
    assert found.plot(tmp_path / "frontier.svg").stat().st_size > 0


def test_other_ways_are_of_the_same_devices() -> None:
    """Breaks if an axis of one rank is asked for something, or ranks are lost or counted twice."""
    found = {point: other_ways(point) for point in (
        TokenPoint(2, 2, 1, 4), TokenPoint(1, 1, 1, 2), TokenPoint(1, 2, 2, 3), TokenPoint(4, 1, 1, 1),
        TokenPoint(1, 1, 1, 1),
    )}  # fmt: skip
    said = [[f"{way.mesh} {' '.join(way.strategy.values())}" for way in ways] for ways in found.values()]
    assert said == [
        ["pp=2,dp=2,tp=4 pipeline(1f1b) zero3 tensor", "pp=2,dp=2,cp=2,tp=2 pipeline(1f1b) ddp split_kv tensor",
         "pp=2,dp=2,cp=2,tp=2 pipeline(1f1b) ddp helix tensor", "pp=2,dp=2,cp=4 pipeline(1f1b) ddp split_kv",
         "pp=2,dp=2,cp=4 pipeline(1f1b) ddp helix", "pp=2,dp=2,tp=4 pipeline(1f1b) auto auto"],
        ["cp=2 split_kv", "cp=2 helix", "tp=2 auto"],
        ["dp=2,ep=2,tp=3 zero3 expert tensor", "dp=2,ep=2,cp=3 ddp expert split_kv", "dp=2,ep=2,cp=3 ddp expert helix",
         "dp=2,ep=2,tp=3 auto auto auto"],
        [], [],
    ]  # fmt: skip
    for point, ways in found.items():
        for way in ways:
            assert math.prod(way.axes.values()) == point.num_devices and way.axes.keys() == way.strategy.keys()
            assert way.ways == way.axes.get("cp", 1)


@pytest.mark.moderate
def test_other_ways_are_planned_too() -> None:
    """Breaks if a way is planned on another mesh or for another batch, one that cannot be had ends the search, or the
    best of all is not told.
    """
    found = autopar.search(
        model_of("llama"), "h100x4", generate=WANTED, batches=(2,), top=1, limits={"pp": 1, "tp": 2}, others=True
    )
    planned = {(way.name, way.mesh) for _, way, _ in found.others}
    assert {name for name, _ in planned} == {"zero3", "split_kv", "helix", "auto"}
    for each, way, plan in found.others:
        assert dict(plan.decode.mesh.axes) == dict(way.axes) and plan.generation.batch == each.batch == 2
    assert all(found.best.total_s <= plan.total_s for plan in [*found, *(plan for _, _, plan in found.others)])
    assert "other ways on these devices" in str(found)
    assert len(found.to_data()["others"]) == len(found.others)


@pytest.mark.moderate
def test_what_does_not_fit_is_not_on_the_frontier() -> None:
    """Breaks if a batch whose cache is too large is taken, or the error does not say what would do."""
    sizes = sorted(each.peak_bytes for each in _found().candidates)
    limit = (sizes[len(sizes) // 2] + sizes[len(sizes) // 2 - 1]) / 2
    found = autopar.search(model_of("llama"), "h100x4", generate=WANTED, batches=(1, 4), top=0, memory_limit=limit)
    assert any(not each.fits for each in found.candidates)
    assert all(each.peak_bytes <= limit for each in found.frontier) and len(found) == 0
    with pytest.raises(AutoparError, match=r"nothing fits(.|\n)*the least of \d+ estimates"):
        autopar.search(model_of("llama"), "h100x4", generate=WANTED, batches=(1,), memory_limit=1000.0)


@pytest.mark.slow
def test_more_ranks_than_key_heads() -> None:
    """Breaks if a mesh that does not divide the key heads is left out, though a plan keeps these whole."""
    found = autopar.search(model_of("llama"), "h100x8", generate=WANTED, batches=(1,), top=0, limits={"pp": 1})
    each = next(each for each in found.candidates if each.point.axes == {"tp": 8})
    mesh, wanted = Mesh({"tp": 8}, hardware="h100"), replace(WANTED, batch=1)
    plan = autopar.plan_generation(model_of("llama"), mesh, wanted, strategy="tensor")
    assert each.time_per_token_s == pytest.approx(plan.time_per_token_s, rel=1e-9)


@pytest.mark.slow
def test_experts_are_split() -> None:
    """Breaks if tokens that go to their experts are estimated otherwise than a plan has them, or with nothing beside
    them.
    """
    found = autopar.search(model_of("mixture"), "h100x4", generate=WANTED, batches=(4,), top=0, limits={"pp": 1})
    each = next(each for each in found.candidates if each.point.axes == {"dp": 2, "ep": 2})
    mesh = Mesh({"dp": 2, "ep": 2}, hardware="h100")
    plan = autopar.plan_generation(model_of("mixture"), mesh, WANTED, strategy={"dp": "ddp", "ep": "expert"})
    assert each.time_per_token_s == pytest.approx(plan.time_per_token_s, rel=1e-9)
    assert each.time_to_first_token_s == pytest.approx(plan.time_to_first_token_s, rel=1e-9)
    assert any(step_hidden_s(phase.program) > 0 for phase in plan.phases.values() if phase.program is not None)


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, "for training or for generate"),
        ({"generate": WANTED, "batches": (0,)}, "are none"),
        ({"generate": WANTED, "limits": {"cp": 2}}, "no axis 'cp'"),
        ({"generate": WANTED, "batches": (3,), "limits": {"pp": 1, "tp": 1}}, "no mesh of"),
        ({"example_inputs": {"input_ids": torch.zeros(4, 8, dtype=torch.int64)}, "batches": (1,)}, "are for generate"),
    ],
    ids=str,
)
def test_bad_requests_are_told(options: dict[str, Any], words: str) -> None:
    with pytest.raises(AutoparError, match=words):
        autopar.search(model_of("llama"), "h100x4", **options)


@pytest.mark.moderate
def test_one_device_is_a_graph() -> None:
    """Breaks if one GPU is estimated as if each kernel were launched, unlike its plan."""
    found = autopar.search(model_of("llama"), "h100x1", generate=WANTED, batches=(1,), top=1)
    assert found.off_by == pytest.approx(0.0, abs=1e-9) and math.isfinite(found[0].time_per_token_s)
    assert found.cluster.hardware.graphs
