"""Grids of affine maps, with sides of one point among them."""

from __future__ import annotations

import itertools
import warnings

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import autopar
from autopar.operators.grids import trace_affine_grid

SIZES = [(2, 3, 4, 1), (2, 3, 1, 4), (2, 3, 1, 1), (2, 1, 3, 1, 4), (2, 1, 1, 4, 1), (2, 3, 4, 5)]


@pytest.mark.unit
@pytest.mark.parametrize(("size", "align"), itertools.product(SIZES, [False, True]))
def test_a_grid_is_torchs(size: tuple[int, ...], align: bool) -> None:
    """Breaks if sides are taken in another order, or a side of one point does not lie in the middle."""
    sides = len(size) - 2
    theta = torch.randn(2, sides, sides + 1, dtype=torch.float64)
    torch.testing.assert_close(trace_affine_grid(theta, size, align), F.affine_grid(theta, list(size), align))


class Warped(nn.Module):
    """A spatial transformer of rows of pixels."""

    def __init__(self) -> None:
        super().__init__()
        self.locate, self.read = nn.Linear(12, 6), nn.Linear(12, 2)

    def forward(self, x: Tensor, labels: Tensor) -> Tensor:
        grid = F.affine_grid(self.locate(x).view(-1, 2, 3), [x.shape[0], 3, 1, 4], align_corners=False)
        seen = F.grid_sample(x.view(-1, 3, 1, 4), grid, align_corners=False)
        return F.cross_entropy(self.read(seen.flatten(1)), labels)


@pytest.mark.slow
@pytest.mark.unit
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "auto"])
def test_a_row_of_pixels_is_planned(strategy: str) -> None:
    """Breaks if torch's grid of one row is traced: it makes a tensor behind the trace's back."""
    batch = {"x": torch.randn(8, 12), "labels": torch.randint(0, 2, (8,))}
    plan = autopar.plan(Warped(), autopar.Mesh({"dp": 2}, hardware="cpu"), example_inputs=batch, strategy=strategy)
    plan.verify().raise_on_failure()


class Masked(nn.Module):
    """An image of one pixel is read at points that depend on another input."""

    def __init__(self, mode: str) -> None:
        super().__init__()
        self.paint, self.locate, self.read, self.mode = nn.Linear(6, 4), nn.Linear(6, 6), nn.Linear(12, 1), mode

    def forward(self, x: Tensor, places: Tensor) -> Tensor:
        image, grid = self.paint(x)[..., None, None], self.locate(places).view(-1, 3, 1, 2).tanh()
        seen = F.grid_sample(image, grid, self.mode, align_corners=True)
        return self.read(seen.flatten(1)).square().mean()


@pytest.mark.moderate
@pytest.mark.unit
@pytest.mark.parametrize("mode", ["bilinear", "nearest"])
def test_a_gradient_that_is_always_zero_is_split(mode: str) -> None:
    """Breaks if the rule of a grid's gradient is to be found by trials, which tell nothing where all of it is zero."""
    batch = {"x": torch.randn(8, 6), "places": torch.randn(8, 6)}
    mesh = autopar.Mesh({"dp": 2}, hardware="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        plan = autopar.plan(Masked(mode), mesh, example_inputs=batch, strategy="ddp")
    plan.verify().raise_on_failure()
