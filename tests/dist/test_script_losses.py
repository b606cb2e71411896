"""Outputs behave as eager's: losses outside of the model, metrics, with no word of ours."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist import script, training
from tests.dist.launch import launch
from tests.dist.test_loss_terms import FLOAT32, check


@cache
def eager() -> tuple[list[Any], list[Any]]:
    model, batch = training.model_and_batch("gpt2", torch.float64, 0.0)
    return script.losses_outside(model, batch), script.measured(model, batch)


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("axes", "sizes", "strategy"),
    [
        (("dp",), (2,), "zero3"),
        (("tp",), (2,), "tensor"),
        (("dp", "tp"), (2, 2), {"dp": "zero2", "tp": "tensor+sequence"}),
    ],
    ids=lambda value: str(value),
)
def test_losses_and_metrics_of_the_users_own(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any) -> None:
    """Breaks if a mean over the logits is a rank's own, if what comes back of it is another gradient than eager's (a
    sum over ranks, a wrong piece), if a norm made by hand is a rank's, if what is written into the logits is lost, or
    the price is said at every step.
    """
    losses, metrics = eager()
    for found, seen, texts in launch(script.own_losses, 2 ** len(sizes), strategy, axes, sizes, timeout_s=180.0):
        # The model's own loss, of which two have a part, is computed in float32 in any model.
        check(found[:3], losses[:3])
        check(found[3:], losses[3:], FLOAT32)
        for one, other in zip(seen, metrics, strict=True):
            assert one == (pytest.approx(other, rel=1e-6) if isinstance(other, float | list) else other)
        assert len([text for text in texts if "logits" in text]) == 1 and "gathered" in texts[0]


@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_gradients_are_asked_for_as_in_eager(strategy: str) -> None:
    """Breaks if `torch.autograd.grad` and `backward(inputs=…)` find no parameter in the graph (with allow_unused a step
    trained nothing), if a second derivative is left out, or a hook of an output doubles only what comes from outside.
    """
    expected = script.gradients_asked_for(*training.model_and_batch("gpt2", torch.float64, 0.0))
    for found, penalty, hooked in launch(script.asked_for_gradients, 2, strategy, timeout_s=120.0):
        for one, other in zip(found, expected, strict=True):
            assert one.keys() == other.keys() and one
            # Logits and their gradient go through float32; what comes of it is linear in it.
            rounding = torch.finfo(torch.float32).eps * torch.stack([x.norm() for x in other.values()]).norm().item()
            for name, gradient in one.items():
                torch.testing.assert_close(gradient, other[name], rtol=0, atol=rounding)
        assert "differentiated again (create_graph=True)" in penalty
        assert "a hook of the output logits does not see what comes to it through loss" in hooked


def test_one_rank_alone_is_told() -> None:
    """Breaks if `if rank == 0: print(logits.argmax())` waits for ranks that never come."""
    (largest, whole), others = launch(script.looked_at_by_one, 2, timeout_s=120.0)
    assert "rank 0 came alone to look for the largest of logits" in largest and "on every rank" in largest
    assert "rank 0 came alone to look at the whole logits" in whole and "to_local" in whole
    assert not others
