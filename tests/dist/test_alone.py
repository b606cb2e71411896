"""Modules of a compiled model that a script calls by themselves compute what they do in eager."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from tests.dist import alone, training
from tests.dist.launch import launch
from tests.dist.test_loss_terms import FLOAT32, check


@cache
def eager() -> alone.Found:
    return alone.steps(*training.model_and_batch("llama", torch.float64, 0.0))


@pytest.mark.sampled(1)
@pytest.mark.parametrize(
    ("strategy", "axes", "sizes"),
    [("zero3", ("dp",), (2,)), ({"dp": "zero3", "tp": "tensor"}, ("dp", "tp"), (2, 2)), ("auto", ("dp",), (2,))],
    ids=str,
)
def test_numbers_and_gradients_are_eagers(strategy: Any, axes: tuple[str, ...], sizes: tuple[int, ...]) -> None:
    """Breaks if a module computes with pieces, a gradient counts once a rank, parameters stay whole behind a call (or
    one that raised), a copy calls the model's, or nobody is told of the price.
    """
    for found, texts, again, plain in launch(alone.compiled, 2 ** len(sizes), strategy, axes, sizes, timeout_s=180.0):
        # Llama's norms, and its own loss, are in float32 in any model.
        check(found, eager(), FLOAT32)
        assert again == pytest.approx(eager()[-1][0], rel=1e-6)
        assert not plain
        names = ("model", "model.embed_tokens", "lm_head", "model.layers.1.mlp")
        assert [text.split()[1] for text in texts] == list(names), texts


def test_what_cannot_be_is_told() -> None:
    """Breaks if ranks that call a module with other inputs train apart, or one that comes alone waits for ever."""
    for rank, (other, came) in enumerate(launch(alone.refused, 2, timeout_s=60.0)):
        assert "input 0 of model differs from rank 0's" in other
        assert rank or "rank 0 came alone to call lm_head" in came


def test_stages_hand_over_what_others_lack() -> None:
    """Breaks if a module of which another stage holds parameters waits for ever, computes without them or with those of
    before a step, loses their gradients where they are held, or keeps them behind the call.
    """
    seen: set[str] = set()
    for (*found, last), kept in launch(alone.over_stages, 2, timeout_s=120.0):
        for (loss, gradients), (wanted, all_gradients) in zip(found, eager(), strict=False):
            assert loss == wanted
            for name, gradient in gradients.items():
                assert torch.equal(gradient, all_gradients[name]), name
            seen |= gradients.keys()
        assert sum(kept) == 1 and last[1] == {}
    assert seen == eager()[0][1].keys() | eager()[1][1].keys()
