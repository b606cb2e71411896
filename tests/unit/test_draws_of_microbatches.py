"""With dropout, a step in microbatches is compared with the model: its weights, and what it reads of the batch."""

from __future__ import annotations

import re
from functools import lru_cache

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.api.draws import Draw, Joined


class Dropped(nn.Module):
    """An average over labels; mixed: beside a mean. Draws are of rows, and of rows and heads."""

    def __init__(self, is_mixed: bool) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, dropout=0.2, batch_first=True)
        self.dropout, self.is_mixed = nn.Dropout(0.3), is_mixed

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        y = self.dropout(x + self.attention(x, x, x)[0])
        y = y + 0.1 * torch.randn_like(y)
        loss = F.cross_entropy(y.flatten(0, 1), labels.flatten())
        return {"loss": loss + y.square().mean() if self.is_mixed else loss}


@lru_cache(maxsize=4)
def planned(is_mixed: bool, strategy: str) -> autopar.Plan:
    labels = torch.randint(4, (8, 3), generator=torch.Generator().manual_seed(0))
    labels[1] = labels[2, 1:] = labels[5, :1] = -100
    axis = "pp" if strategy.startswith("pipeline") else "dp"
    batch = {"x": torch.randn(8, 3, 4), "labels": labels}
    return autopar.plan(Dropped(is_mixed), {axis: 2}, strategy=strategy, example_inputs=batch, microbatches=2)


@pytest.mark.parametrize("is_mixed", [False, True])
def test_a_step_that_draws(is_mixed: bool) -> None:
    """Breaks if the model has other draws than the program's microbatches, or their rows in another order."""
    proof = planned(is_mixed, "ddp").verify()
    assert proof.ok and proof.dropout, str(proof)


@pytest.mark.parametrize(
    ("is_mixed", "pattern", "replacement"),
    [(False, r"    return (\w+)\.to", r"    return \1.square().to"), (True, r"!= -100", "!= 0")],
)
def test_a_wrong_weight_of_microbatches(is_mixed: bool, pattern: str, replacement: str) -> None:
    """Breaks if what a program says of its microbatches is taken for what the model says, where both draw."""
    plan = planned(is_mixed, "ddp")
    text = re.sub(pattern, replacement, str(plan.source), count=1)
    assert text != plan.source
    proof = plan.with_source(text).verify()
    assert not proof.ok and proof.dropout
    assert any(each.name == "loss" and not each.ok for each in proof.comparisons)


@pytest.mark.parametrize(
    ("part", "whole", "dim"),
    [
        ((2, 3), (8, 3), 0),
        ((3, 2), (3, 8), 1),
        ((2, 5, 3, 3), (40, 3, 3), 0),
        ((2, 3, 4), (8, 12), 0),
        ((2, 3), (2, 3), None),
        ((2, 3), (4, 6), None),
    ],
)
def test_along_which_dim_draws_are_joined(part: tuple[int, ...], whole: tuple[int, ...], dim: int | None) -> None:
    """Breaks if rows of microbatches are put beside each other along what is no dim of rows."""
    assert Joined((Draw(0, 0, part, 0.1),) * 4, 1).dim_in(whole) == dim
