"""Optimizers that look at whole tensors, schedules, clipping: equal to one process in float64."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import script_optimizers, training
from tests.dist.launch import launch

PLANS: list[tuple[str, Any, tuple[str, ...], tuple[int, ...]]] = [
    ("muon", "zero3", ("dp",), (2,)),
    ("adafactor", "zero3", ("dp",), (2,)),
    ("blocks", "zero3", ("dp",), (2,)),
    ("averaging", {"dp": "zero3", "tp": "tensor"}, ("dp", "tp"), (2, 2)),
    ("lamb", {"dp": "zero3", "tp": "tensor"}, ("dp", "tp"), (2, 2)),
]


@pytest.mark.sampled(2)
@pytest.mark.parametrize(("kind", "strategy", "axes", "sizes"), PLANS, ids=lambda value: str(value))
def test_whole_matrices_are_seen_whole(kind: str, strategy: Any, axes: Any, sizes: Any) -> None:
    """Breaks if an update is made of a piece's norm, mean, product or blocks (also of an optimizer that nobody knows),
    if one that treats each element by itself gathers, if a state is lost or comes back from a
    checkpoint in pieces, if a group's counter stands still, or if the price is not said, or at every step.
    """
    model, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    losses, parameters = script_optimizers.optimized(model, batch, kind)
    for found, values, texts in launch(
        script_optimizers.optimizers, 2 ** len(sizes), kind, strategy, axes, sizes, timeout_s=180
    ):
        assert found == pytest.approx(losses, rel=1e-9)
        for name, value in parameters.items():
            torch.testing.assert_close(values[name], value, rtol=1e-9, atol=1e-9)
        assert len(texts) == (kind != "averaging")
