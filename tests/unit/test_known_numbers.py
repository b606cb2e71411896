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


@pytest.mark.moderate
def test_a_branch_on_known_numbers_is_taken() -> None:
    """Breaks if a model that asks how long its sequence is, by a tensor of positions, is refused."""
    plan(by_values=False).verify().raise_on_failure()


def test_a_branch_on_values_is_refused() -> None:
    """Breaks if numbers that depend on the inputs are taken for known ones."""
    with pytest.raises(AutoparError, match="by the value of a tensor"):
        plan(by_values=True)


class LeavesOut(nn.Module):
    """Leaves layers out by a draw, as often as `share` says."""

    def __init__(self, share: float, how: str) -> None:
        super().__init__()
        self.layers, self.share, self.how = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), share, how

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            drawn = torch.rand([])
            if self.how == "less" and drawn < self.share:
                continue
            if self.how == "at most" and drawn <= self.share:
                continue
            if self.how == "kept" and drawn >= self.share:
                x = torch.relu(layer(x))
            elif self.how == "more" and drawn > self.share:
                x = torch.tanh(layer(x))
            elif self.how in ("less", "at most"):
                x = torch.relu(layer(x))
        return (x + self.layers[0](x)).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize(
    ("how", "share"),
    [("less", 0.0), ("less", -1.0), ("less", 1.0), ("at most", -0.5), ("at most", 1.0), ("kept", 0.0), ("kept", 1.0)]
    + [("more", -0.1), ("more", 1.0)],
)
def test_what_a_draw_always_says_is_known(how: str, share: float) -> None:
    """Breaks if a layer that is never left out is a branch by value, or a draw says what it never says."""
    torch.manual_seed(0)
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(LeavesOut(share, how), mesh, example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")
    assert plan.verify().ok


@pytest.mark.parametrize(("how", "share"), [("less", 0.1), ("at most", 0.0), ("kept", 0.5), ("more", 0.0)])
def test_what_a_draw_says_at_times_is_not_known(how: str, share: float) -> None:
    """Breaks if a draw that may be either is taken for one: it is told to the program in each step."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(LeavesOut(share, how), mesh, example_inputs={"x": torch.randn(4, 8)}, strategy="ddp")
    assert any("is told in each step: torch.rand (test_known_numbers.py:57)" in note for note in plan.notes)


class Slices(nn.Module):
    """Scales pieces whose ends are counted as tensors."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        ends = torch.tensor([2, 3, 3]).cumsum(0)
        starts = torch.cat((torch.zeros(1, dtype=torch.long), ends[:-1]))
        x, scale = self.linear(x), torch.zeros(8, 8)
        for number, (start, end) in enumerate(zip(starts, ends, strict=True)):
            scale[start:end, start:end] = number + 1
            x = x + x[:, start:end].sum(1, keepdim=True)
        return (x @ scale).square().mean()


@pytest.mark.moderate
def test_slices_between_known_tensors() -> None:
    """Breaks if the ends of a slice that Python's own numbers say are taken for unknown, or for others."""
    torch.manual_seed(0)
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    plan = autopar.plan(Slices(), mesh, example_inputs={"x": torch.randn(4, 8)}, strategy="zero3")
    assert plan.verify().ok
