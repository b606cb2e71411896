"""What models of other libraries found (benchmarks/coverage/libraries.py), each shown by a small module of its own."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture

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


@pytest.mark.moderate
def test_lists_of_modules_may_hold_none() -> None:
    """Breaks if what looks through the elements of lists takes each for a module."""
    plan = autopar.plan(Layers(), MESH, example_inputs=torch.randn(4, 8), strategy="ddp")
    assert plan.verify().ok


class Recycled(nn.Module):
    """Goes through its layer once, or twice, as chance has it (as x-transformers' recycling does)."""

    def __init__(self, *, numpy: bool, counts: bool) -> None:
        super().__init__()
        self.linear, self.numpy, self.counts = nn.Linear(8, 8), numpy, counts

    def forward(self, x: Tensor) -> Tensor:
        times = 1 + (np.random.randint(2) if self.numpy else random.randrange(2))
        for _ in range(times if self.counts else 1):
            x = self.linear(x).relu()
        return x


@pytest.mark.moderate
@pytest.mark.parametrize("numpy", [False, True])
@pytest.mark.parametrize("counts", [False, True])
def test_what_is_chosen_by_chance_is_refused_by_no_chance(numpy: bool, counts: bool) -> None:
    """Breaks if a draw that comes to the same in two traces passes for one that does nothing, or one that does nothing
    is refused.
    """
    model, batch = Recycled(numpy=numpy, counts=counts), {"x": torch.randn(4, 8)}
    states = random.getstate(), np.random.get_state()
    try:
        for seed in range(4):
            random.seed(seed)
            np.random.seed(seed)
            if counts:
                with pytest.raises(AutoparError, match=r"draws from .* generator in forward"):
                    capture(model, batch)
            else:
                capture(model, batch)
    finally:
        random.setstate(states[0])
        np.random.set_state(states[1])


class Sampled(nn.Module):
    """Draws from whatever generator it is given, which is none (as diffusers' autoencoders do)."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor, generator: torch.Generator | None = None) -> Tensor:
        mean = self.linear(x)
        return mean * torch.randn(mean.shape, generator=generator, dtype=mean.dtype).abs()


def test_no_generator_is_the_default_one() -> None:
    """Breaks if a draw that names no generator is taken for one from the process's own."""
    plan = autopar.plan(Sampled(), MESH, example_inputs=torch.randn(4, 8), strategy="ddp")
    assert plan.verify().ok
