"""Twenty steps with clipping on real gloo processes follow the one-process curve, under every strategy."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import pytest
import torch

from tests.dist import training
from tests.dist.launch import launch

DP, TP, CP, PAIR, GRID, NODES = ("dp",), ("tp",), ("cp",), ("dp", "tp"), ("tp0", "tp1"), ("node", "dp")
FOUR, SQUARE = (4,), (2, 2)
CASES: dict[str, list[tuple[tuple[str, ...], tuple[int, ...], Any]]] = {
    "llama": [
        (DP, FOUR, "zero2"),
        (NODES, SQUARE, "hsdp"),
        (NODES, SQUARE, {"node": "zero2", "dp": "zero3"}),
        (PAIR, SQUARE, {"dp": "zero3", "tp": "tensor"}),
        (PAIR, SQUARE, {"dp": "zero2", "tp": "tensor+sequence"}),
        (CP, FOUR, "ring"),
    ],
    "gpt2": [
        (PAIR, SQUARE, "zero3"),
        (PAIR, SQUARE, "tensor"),
        (TP, FOUR, "tensor+sequence"),
        (PAIR, SQUARE, {"dp": "zero1", "tp": "tensor"}),
    ],
    "bert": [(PAIR, SQUARE, "ddp"), (TP, FOUR, "tensor"), (PAIR, SQUARE, "auto")],
    "mlp": [
        (DP, FOUR, "ddp"),
        (DP, FOUR, "zero1"),
        (DP, FOUR, "zero2"),
        (DP, FOUR, "zero3"),
        (DP, FOUR, "zero3+keep"),
        (NODES, SQUARE, "hsdp"),
        (NODES, SQUARE, "zero3"),
        (TP, FOUR, "tensor"),
        (GRID, SQUARE, "tensor2d"),
        (PAIR, SQUARE, "auto"),
    ],
}


@lru_cache(maxsize=8)
def one_process(name: str, optimizer: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the eager model."""
    model, batch = training.model_and_batch(name, torch.float32, 0.0)
    return training.train(model, batch, training.STEPS, optimizer, training.RATES.get(name, 1.0))


@pytest.mark.sampled(2)
@pytest.mark.parametrize("optimizer", training.OPTIMIZERS)
@pytest.mark.parametrize("name", CASES)
def test_training_follows_one_process(name: str, optimizer: str) -> None:
    """A collective in the wrong place, a gradient scaled by the ranks, replicas clipped twice: the curves part."""
    losses, norms = one_process(name, optimizer)
    cases = [
        (*case, optimizer) for case in (CASES[name] if optimizer == "adamw" or name == "mlp" else CASES[name][-1:])
    ]
    by_rank = launch(training.train_with_each, 4, name, cases, timeout_s=280.0)
    for results in by_rank:
        for (_, sizes, strategy, _), result in zip(cases, results, strict=True):
            where = f"{strategy} on {sizes}, rank {result['rank']}"
            assert result["losses"] == pytest.approx(losses, rel=2e-4), where
            assert result["norms"] == pytest.approx(norms, rel=2e-3), where
            assert result["sent"] == pytest.approx(result["predicted"], rel=1e-9), where
            for kind in ("parameter", "gradient", "state"):
                least, most = result[f"{kind}_bytes"], result[f"planned_{kind}_bytes"]
                assert least == most if result["rank"] == 0 else 0.99 * most <= least <= most, where
            assert result["parameter_bytes"] + result["gradient_bytes"] + result["state_bytes"] <= result["peak_bytes"]
            assert result["peak_bytes"] <= result["limit_bytes"]
    assert losses[-1] < losses[0]
