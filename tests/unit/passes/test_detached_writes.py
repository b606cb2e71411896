"""What is detached and then written has the gradient of what is written."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError


class Positions(nn.Module):
    """Adds rows of a table to positions, in place; `how` says what these are detached from, and what is read after."""

    waves: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.kinds, self.how = nn.Embedding(8, 8), nn.Embedding(2, 8), how
        self.register_buffer("waves", torch.randn(16, 8))

    @torch.no_grad()
    def _without_gradient(self, ids: Tensor) -> Tensor:
        return self.waves[: ids.shape[1]].expand(*ids.shape, -1).contiguous()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.how == "made":
            places = self.waves.index_select(0, ids.view(-1)).view(*ids.shape, -1).detach()
        elif self.how == "without gradient":
            places = self._without_gradient(ids)
        else:
            places = x[:, 1:].detach()
        places += self.kinds.weight[0]
        read = self.table(ids) if self.how == "read before" else x
        return (read[:, : places.shape[1]] + places).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["made", "without gradient", "read before"])
def test_what_is_written_keeps_its_gradient(how: str) -> None:
    """Breaks if making a graph functional detaches what is written into what was detached."""
    ids = torch.randint(8, (4, 6))
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    assert autopar.plan(Positions(how), mesh, example_inputs={"ids": ids}, strategy="ddp").verify().ok


def test_what_is_read_after_a_write_beside_the_gradient_is_refused() -> None:
    """Breaks if the program reads what was there before, or differentiates what eager does not."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    with pytest.raises(AutoparError, match=r"what it was detached from .*test_detached_writes\.py:.*detach\(\)\.clone"):
        autopar.plan(Positions("read"), mesh, example_inputs={"ids": torch.randint(8, (4, 6))}, strategy="ddp")


def _written_twice(layer: Written, h: Tensor) -> Tensor:
    for _ in range(2):
        with torch.no_grad():
            layer.mean.lerp_(h.mean(0), 0.1)
        h = h - layer.mean
    return h


def _made_before(layer: Written, h: Tensor) -> Tensor:
    with torch.no_grad():
        scale = h * 2
    with torch.no_grad():
        scale.add_(1.0)
    return h * scale


def _copied(layer: Written, h: Tensor) -> Tensor:
    mask = h.detach().clone()
    with torch.no_grad():
        mask[0] = 1.0
    return h * mask


def _chosen(layer: Written, h: Tensor) -> Tensor:
    smooth = F.one_hot(h.argmax(-1), 4).to(h.dtype)
    with torch.no_grad():
        smooth.mul_(0.9).add_(0.025)
    return h * smooth


def _by_chunks(layer: Written, h: Tensor) -> Tensor:
    with torch.no_grad():
        h.chunk(2)[1].zero_()
    return h


def _of_another_time(layer: Written, h: Tensor) -> Tensor:
    with torch.no_grad():
        parts = h.chunk(2)
    with torch.no_grad():
        parts[1].zero_()
    return h


def _with_gradients_within(layer: Written, h: Tensor) -> Tensor:
    with torch.no_grad():
        other = h * 2
        with torch.enable_grad():
            made = h * 1.5
        other = other + made
    with torch.no_grad():
        made.mul_(2.0)
    return made + other


def _detached_before(layer: Written, h: Tensor) -> Tensor:
    with torch.no_grad():
        other = h.detach()
    other.mul_(2.0)
    return h


class Written(nn.Module):
    """Writes into something between a layer and the loss."""

    mean: Tensor

    def __init__(self, way: Callable[[Written, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.way = nn.Linear(4, 4), way
        self.register_buffer("mean", torch.zeros(4))

    def forward(self, x: Tensor) -> Tensor:
        return self.way(self, self.linear(x) * 1.0).square().mean()


def _planned(way: Callable[[Written, Tensor], Tensor]) -> autopar.Plan:
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    return autopar.plan(Written(way), mesh, example_inputs={"x": torch.randn(8, 4)}, strategy="ddp")


@pytest.mark.moderate
@pytest.mark.parametrize("way", [_written_twice, _made_before, _copied, _chosen])
def test_what_has_no_gradient_may_be_written(way: Callable[[Written, Tensor], Tensor]) -> None:
    """Breaks if a write under `torch.no_grad()` is refused though no gradient passes where it is written."""
    assert _planned(way).verify().ok


@pytest.mark.parametrize("way", [_by_chunks, _of_another_time, _with_gradients_within, _detached_before])
def test_what_has_a_gradient_may_not(way: Callable[[Written, Tensor], Tensor]) -> None:
    """Breaks if a write into a part of what has a gradient, whichever way that was taken, has another gradient than
    eager gives it, without a word.
    """
    with pytest.raises(AutoparError, match=r"through which a gradient passes|writes into what it has detached"):
        _planned(way)
