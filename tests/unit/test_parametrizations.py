"""Weights that a forward makes of parameters, and what models compute without gradients beside buffers."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrizations, parametrize, spectral_norm, weight_norm

import autopar
from autopar.machine.mesh import Mesh


class Symmetric(nn.Module):
    """A parametrization of a user's own."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [n, n]."""
        return x.triu() + x.triu(1).transpose(-1, -2)


def symmetric(layer: nn.Linear) -> nn.Linear:
    parametrize.register_parametrization(layer, "weight", Symmetric())
    return layer


class Net(nn.Module):
    """One of its three layers has a weight that is made in every forward."""

    def __init__(self, made: Callable[[Any], Any]) -> None:
        super().__init__()
        self.first, self.made, self.last = nn.Linear(12, 16), made(nn.Linear(16, 16)), nn.Linear(16, 4)

    def forward(self, x: Tensor, y: Tensor) -> Tensor:
        """x: [rows, 12]; y: [rows], classes."""
        return F.cross_entropy(self.last(self.made(self.first(x).tanh()).tanh()), y)


MADE: dict[str, Callable[[Any], Any]] = {
    "weight_norm": parametrizations.weight_norm,
    "spectral_norm": parametrizations.spectral_norm,
    "orthogonal": parametrizations.orthogonal,
    "householder": functools.partial(parametrizations.orthogonal, orthogonal_map="householder"),
    "weight_norm by hooks": weight_norm,
    "spectral_norm by hooks": spectral_norm,
    "a user's own": symmetric,
}
PLACES: list[tuple[str, Any]] = [
    ("dp=2", "zero3"),
    ("tp=2", "tensor"),
    ("dp=2,tp=2", {"dp": "ddp", "tp": "tensor"}),
    ("dp=2,tp=2", "auto"),
]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.filterwarnings("ignore::FutureWarning", "ignore:autopar")
@pytest.mark.parametrize("name", MADE)
def test_weights_that_are_made_of_parameters(name: str) -> None:
    """Breaks if the gradient of what a weight is made of is another (through the vectors of a power iteration, which
    are constants), or a rank iterates on its piece alone.
    """
    torch.manual_seed(0)
    model = Net(MADE[name])
    batch = {"x": torch.randn(8, 12), "y": torch.arange(8) % 4}
    for mesh, strategy in PLACES:
        plan = autopar.plan(model, Mesh.parse(mesh, hardware="h100"), example_inputs=batch, strategy=strategy)
        plan.verify().raise_on_failure()


class Beside(nn.Module):
    """With a batch norm, which writes into buffers."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.last = nn.Linear(6, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)
        self.average: Tensor
        self.register_buffer("average", torch.zeros(8))


class Target(Beside):
    """What no_grad returns is aimed at (a teacher, a codebook)."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 6]."""
        z = self.norm(self.first(x))
        with torch.no_grad():
            target = F.normalize(z, dim=-1)
        return F.mse_loss(self.last(z), target)


class Averaged(Beside):
    """What no_grad writes into a buffer is aimed at."""

    def forward(self, x: Tensor) -> Tensor:
        """x: [rows, 6]."""
        z = self.norm(self.first(x))
        with torch.no_grad():
            self.average.mul_(0.9).add_(z.mean(0), alpha=0.1)
        return F.mse_loss(self.last(z), self.average.expand_as(z))


@pytest.mark.moderate
@pytest.mark.parametrize("kind", [Target, Averaged])
def test_no_gradient_passes_where_none_does(kind: type[Beside]) -> None:
    """Breaks if what `torch.no_grad()` makes is differentiated because the model also writes into a buffer."""
    torch.manual_seed(0)
    plan = autopar.plan(
        kind(), Mesh.parse("dp=2", hardware="h100"), example_inputs={"x": torch.randn(8, 6)}, strategy="zero3"
    )
    plan.verify().raise_on_failure()


CASTS: dict[str, Callable[[Tensor, nn.Module], Tensor]] = {
    "float": lambda z, layer: z.float() * 2,
    "to": lambda z, layer: z.to(z.dtype) + 1,
    "cpu": lambda z, layer: z.cpu() * 2,
    "run again": lambda z, layer: layer(z) + z,
    "read in place": lambda z, layer: torch.zeros_like(z).copy_(z),
}


@pytest.mark.moderate
@pytest.mark.parametrize("name", CASTS)
def test_a_cast_that_casts_nothing_keeps_the_gradient(name: str) -> None:
    """Breaks if what `no_grad` makes nothing of (a cast to what it is already) has no gradient behind it, either: in
    the program, or in the proof of one, where all casts are to one dtype.
    """

    class Aimed(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.last = nn.Linear(6, 6), nn.Linear(6, 6)

        def forward(self, x: Tensor) -> Tensor:
            z = self.first(x)
            with torch.no_grad():
                target = CASTS[name](z, self.first)
            return F.mse_loss(self.last(z), target)

    torch.manual_seed(0)
    mesh = Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(Aimed(), mesh, example_inputs={"x": torch.randn(8, 6)}, strategy="ddp")
    assert plan.verify().ok and plan.source is not None
    assert 'g["first.weight"] = ops.linear_grad_weight(' in plan.source
