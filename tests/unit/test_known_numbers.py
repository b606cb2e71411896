"""Numbers that a forward makes of Python's own are known while it is traced, and so is what it does by them."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError


class Positions(nn.Module):
    """What a rotary embedding does that grows with the sequence: it asks how long the sequence is."""

    def __init__(self, by_values: bool) -> None:
        super().__init__()
        self.linear, self.by_values = nn.Linear(8, 8), by_values

    def forward(self, x: Tensor) -> Tensor:
        at = torch.arange(x.shape[1], device=x.device)[None]
        y: Tensor = self.linear(x)
        length = (at if not self.by_values else y).max() + 1
        if length > 5:
            y = y * 2
        if at.sum() > 100:
            y = y * 3
        return (y * int(length) * float(length) / length.item()).square().mean()


def plan(by_values: bool) -> autopar.Plan:
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    return autopar.plan(Positions(by_values), mesh, example_inputs={"x": torch.randn(4, 6, 8)}, strategy="ddp")


def test_a_branch_on_known_numbers_is_taken() -> None:
    """Breaks if a model that asks how long its sequence is, by a tensor of positions, is refused."""
    plan(by_values=False).verify().raise_on_failure()


def test_a_branch_on_values_is_refused() -> None:
    """Breaks if numbers that depend on the inputs are taken for known ones."""
    with pytest.raises(AutoparError, match="by the value of a tensor"):
        plan(by_values=True)
