"""A loss of the user's that is planned with the model: numbers of eager, no logits on the way."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist import planned_loss
from tests.dist.launch import launch
from tests.dist.test_loss_terms import FLOAT32, check

STEPS = 3


@cache
def eager(name: str) -> list[Any]:
    return planned_loss.eager(name, STEPS)


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("name", "axes", "sizes", "strategy", "options"),
    [
        ("cross entropy", ("dp",), (2,), "zero3", {"microbatches": 2}),
        ("cross entropy", ("dp", "tp"), (2, 2), {"dp": "zero3", "tp": "tensor"}, {}),
        ("smoothed", ("dp", "tp"), (2, 2), "auto", {}),
        ("smoothed", ("tp",), (2,), "ring", {}),
        ("distilled", ("dp",), (2,), "zero2", {}),
        ("distilled", ("tp",), (2,), "tensor", {}),
        ("of logarithms", ("tp",), (2,), "tensor", {}),
        ("of classes", ("dp", "tp"), (2, 2), {"dp": "zero3", "tp": "tensor"}, {}),
    ],
    ids=lambda value: str(value),
)
def test_steps_are_eagers(
    name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, options: dict[str, Any]
) -> None:
    """Breaks if the loss is a rank's own, is averaged twice, or is the model's; if a batch of another length gets
    another loss, or what only the loss takes is cut otherwise than the rows it is for.
    """
    work = planned_loss.compiled
    for found in launch(work, 2 ** len(sizes), name, axes, sizes, strategy, options, STEPS, timeout_s=180.0):
        # Llama's norms, and its own loss, are in float32 in any model.
        check(found, eager(name), FLOAT32)


def test_a_model_that_takes_no_labels() -> None:
    """Breaks if inputs of the loss reach the model, tensors that it holds are lost, parameters get another name, a
    batch without labels is refused, or a number that Python changes stays as it was without a word.
    """
    model, batch, criterion = planned_loss.classifier()
    scores = model(batch["x"])
    loss = criterion(scores, batch["y"]) + 0.5 * (scores[:, :5] - batch["taught"]).pow(2).mean()
    loss.backward()
    wanted = [float(p.grad.pow(2).sum()) for p in model.parameters() if p.grad is not None]
    for value, gradients, names, texts, alone in launch(planned_loss.classified, 2, timeout_s=120.0):
        assert value == pytest.approx(float(loss.detach()), rel=1e-12)
        assert gradients == pytest.approx(wanted, rel=1e-12)
        assert names == [name for name, _ in model.named_parameters()]
        assert alone
        (text,) = texts
        assert "schedule.weight, which has changed" in text and "0.5 when it was planned, now 0.25" in text


@pytest.mark.sampled(3)
@pytest.mark.parametrize("name", list(planned_loss.LOSSES))
def test_logits_of_a_split_vocabulary_stay_where_they_are(name: str) -> None:
    """Breaks if logits travel for a loss that runs on its pieces, or the last layer is computed whole for it."""
    (planned, notes), (outside, _) = (
        max(launch(planned_loss.sent, 2, x, name, timeout_s=120.0)) for x in (True, False)
    )
    model, batch = planned_loss.training.model_and_batch("llama", torch.float32, 0.0)
    logits = 4 * batch["input_ids"].numel() * model.config.vocab_size
    assert outside - planned > 0.4 * logits
    assert not notes


def test_what_cannot_be_is_told() -> None:
    """Breaks if a loss that no program can be right for is planned, or is refused without a way that works."""
    words = [
        ("not one number", "shape (8,)", ".mean()"),
        ("teacher.first.weight", "compile that one"),
        ("asks for 'labels'", "given: x, y, taught", "hand it in"),
        ("does not depend on any parameter", ".detach()"),
        ("reads a parameter of the model, first.weight", "model(**batch).loss + "),
        ("cannot be called", "loss(outputs, batch)"),
        ("len(kept), which has changed", "0 when it was planned, now 1"),
        ("no function", "loss(outputs, batch)"),
    ]
    for texts in launch(planned_loss.refused, 2, timeout_s=120.0):
        for text, wanted in zip(texts, words, strict=True):
            assert all(word in text for word in wanted), text
