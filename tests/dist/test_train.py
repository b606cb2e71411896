"""Ten AdamW steps with clipping on real gloo processes follow the one-process curve."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import training
from tests.dist.launch import launch

CASES = [
    ("llama", ("dp", "tp"), (2, 2), {"dp": "zero3", "tp": "tensor"}),
    ("llama", ("dp",), (2,), "ddp"),
    ("llama", ("dp", "tp"), (2, 2), "zero3"),
    ("gpt2", ("dp", "tp"), (2, 2), "tensor"),
    ("gpt2", ("tp",), (4,), "tensor"),
    ("gpt2", ("dp", "tp"), (2, 2), {"dp": "zero3", "tp": "tensor"}),
    ("bert", ("dp", "tp"), (2, 2), "ddp"),
    ("bert", ("tp",), (4,), "tensor"),
    ("bert", ("dp", "tp"), (2, 2), "auto"),
]


@pytest.mark.parametrize("name, axes, sizes, strategy", CASES, ids=str)
def test_training_follows_one_process(name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any) -> None:
    """A collective in the wrong place, a gradient scaled by the ranks, a clip that counts replicas twice: the curves part."""
    num_ranks = 1
    for size in sizes:
        num_ranks *= size
    model, batch = training.model_and_batch(name, torch.float32, 0.0)
    losses, norms = training.train(model, batch, training.STEPS)
    results = launch(training.train_compiled, num_ranks, name, axes, sizes, strategy, torch.float32, timeout_s=240.0)
    for result in results:
        assert result["losses"] == pytest.approx(losses, rel=2e-4)
        assert result["norms"] == pytest.approx(norms, rel=2e-3)
        assert result["sent"] == pytest.approx(result["predicted"], rel=1e-9)
        for kind in ("parameter", "gradient", "state"):
            assert result[f"{kind}_bytes"] == result[f"planned_{kind}_bytes"]
        assert result["parameter_bytes"] + result["gradient_bytes"] + result["state_bytes"] <= result["peak_bytes"]
        assert result["peak_bytes"] <= result["limit_bytes"]
    assert losses[-1] < losses[0]
