"""Layers that a program leaves out, where others of their kind are in it."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.planner.family import Family


class LeavesOut(nn.Module):
    def __init__(self, used: tuple[int, ...]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(4, 4) for _ in range(3))
        self.other = nn.Linear(4, 4)
        self.used = used

    def forward(self, x: Tensor) -> Tensor:
        for place in self.used:
            x = x + self.layers[place](x).tanh()
        return x.square().mean()


def test_they_lie_as_the_others_do() -> None:
    """Breaks if a program of the same model that uses them would have them lie otherwise."""
    plan = autopar.plan(
        LeavesOut((0, 2)), autopar.Mesh({"dp": 2}), example_inputs={"x": torch.randn(4, 4)}, strategy="zero3"
    )
    stored = {each.name: str(each.sharding[0]) for each in plan.interface.parameters}
    assert stored["layers.1.weight"] == stored["layers.0.weight"] == "S(0)" and stored["other.weight"] == "R"


def test_decisions_for_some_are_not_those_for_others() -> None:
    """Breaks if a program is written by decisions that say nothing of a layer that it has."""
    batch = {"x": torch.randn(4, 4)}
    plan = autopar.plan(LeavesOut((0, 2)), autopar.Mesh({"dp": 2}), example_inputs=batch, strategy="zero3")
    assert Family.of(plan).plan(LeavesOut((0, 2)), batch).source is not None
    with pytest.raises(AutoparError, match=r"made for another program.*layers\.1"):
        Family.of(plan).plan(LeavesOut((0, 1)), batch)
