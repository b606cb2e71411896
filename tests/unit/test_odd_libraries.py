"""What models of other libraries found (benchmarks/coverage/libraries.py), each shown by a small module of its own."""

from __future__ import annotations

import torch
from torch import Tensor, nn

import autopar

MESH = autopar.Mesh({"dp": 2}, hardware="cpu")


class Layers(nn.Module):
    """Each layer a list of its own, in which None stands for what it lacks (as x-transformers keeps its layers)."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(
            [nn.ModuleList([nn.LayerNorm(8) if number else None, nn.Linear(8, 8)]) for number in range(2)]
        )
        self.ends = nn.ModuleList([None, nn.Linear(8, 4)])

    def forward(self, x: Tensor) -> Tensor:
        for norm, linear in self.layers:
            x = x + linear(x if norm is None else norm(x))
        return self.ends[1](x)


def test_lists_of_modules_may_hold_none() -> None:
    """Breaks if what looks through the elements of lists takes each for a module."""
    plan = autopar.plan(Layers(), MESH, example_inputs=torch.randn(4, 8), strategy="ddp")
    assert plan.verify().ok
