"""Layers that a program leaves out, where others of their kind are in it."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar


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
