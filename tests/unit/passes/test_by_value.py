"""Inputs whose values decide what a forward does: the program is for these values, and equal to eager."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError
from autopar.passes.capture import capture
from tests.dist.by_value import Tiles


class Lengths(nn.Module):
    """Rows in segments, masks and repetitions by how long each is."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, lengths: Tensor) -> Tensor:
        ends = torch.zeros(len(lengths) + 1, dtype=torch.int64)
        ends[1:] = lengths.cumsum(0)
        owner = torch.repeat_interleave(torch.arange(len(lengths)), lengths)
        first = torch.zeros(int(ends[-1]), dtype=torch.bool)
        first[ends[:-1]] = True
        y = self.linear(x)
        parts = [y[ends[i] : ends[i + 1]].cumsum(0) for i in range(len(lengths))]
        starts = y[first].repeat_interleave(lengths, dim=0)
        return (torch.cat(parts) * starts + owner[:, None].to(y.dtype)).square().mean()


class Branch(nn.Module):
    """A branch on the sum of an input, drawn noise beside it."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.linear(x)
        if sizes.sum() > 6:
            return y.square().mean()
        return y.abs().mean()


class Tokens(nn.Module):
    """A branch on what is looked up in a table."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Embedding(16, 4)

    def forward(self, tokens: Tensor) -> Tensor:
        y = self.table(tokens)
        return y.square().mean() if tokens.max() > 7 else y.abs().mean()


class Drawn(nn.Module):
    """A branch on a random draw of a known size."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.linear(x)
        return y.square().mean() if torch.rand_like(sizes.float()).sum() > 1 else y.abs().mean()


class Overwritten(nn.Module):
    """A branch on a known tensor into which something unknown was written."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
        y = self.linear(x)
        seen = sizes.float()
        seen[0] = y.detach().sum()
        return y.square().mean() if seen.view(-1).sum() > 1 else y.abs().mean()


X = torch.randn(8, 4, generator=torch.Generator().manual_seed(0))
CASES: list[tuple[type[nn.Module], dict[str, Any], tuple[str, ...]]] = [
    (Lengths, {"x": X, "lengths": torch.tensor([3, 5])}, ("lengths",)),
    (Lengths, {"x": X, "lengths": torch.tensor([1, 6, 1])}, ("lengths",)),
    (Branch, {"x": X, "sizes": torch.tensor([3, 5])}, ("sizes",)),
    (Branch, {"x": X, "sizes": torch.tensor([1, 2])}, ("sizes",)),
    (Tiles, {"x": X, "grid": torch.tensor([[2, 2], [1, 4]])}, ("grid",)),
]


@pytest.mark.moderate
@pytest.mark.parametrize(("kind", "batch", "names"), CASES)
def test_values_that_decide_are_part_of_what_a_program_is_for(
    kind: type[nn.Module], batch: dict[str, Any], names: tuple[str, ...]
) -> None:
    """Breaks if a known value is not followed through views, writes, sizes and masks, or is another than eager has."""
    torch.manual_seed(0)
    model = kind()
    assert capture(model, batch).by_value == names
    plan = autopar.plan(model, autopar.Mesh.parse("dp=2", hardware="cpu"), example_inputs=batch, strategy="ddp")
    assert plan.interface.by_value == (() if kind is Branch else names)
    assert len(plan.interface.branches) == (kind is Branch), "which has a program for each way, for any values"
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_a_saved_plan_keeps_which_values_decide() -> None:
    """Breaks if the names get lost on the way to the other ranks: they would run one program on all values."""
    kind, batch, names = CASES[0]
    plan = autopar.plan(kind(), autopar.Mesh.parse("dp=2", hardware="cpu"), example_inputs=batch, strategy="ddp")
    assert type(plan).from_json(plan.without_model().to_json()).interface.by_value == names


@pytest.mark.parametrize(
    ("model", "batch"),
    [
        (Tokens(), {"tokens": torch.tensor([[1], [9]])}),
        (Drawn(), {"x": X, "sizes": torch.tensor([3, 5])}),
        (Overwritten(), {"x": X, "sizes": torch.tensor([3, 5])}),
        (Branch(), {"x": X, "sizes": torch.ones(8, 16, dtype=torch.int64)}),
        (Branch(), {"x": X, "sizes": torch.ones(2, dtype=torch.int64, device="meta")}),
    ],
)
def test_what_differs_in_every_batch_decides_nothing(model: nn.Module, batch: dict[str, Any]) -> None:
    """Breaks if a program is made for one batch's tokens, for one draw, for what was overwritten, for rows of many
    numbers, or for values that are not there.
    """
    with pytest.raises(AutoparError, match=r"chooses what to do by the value.*test_by_value\.py:\d+"):
        capture(model, batch)


def test_values_that_decide_nothing_are_no_part_of_it() -> None:
    """Breaks if every batch with other labels becomes a program of its own."""

    class Labelled(Branch):
        def forward(self, x: Tensor, sizes: Tensor) -> Tensor:
            return (self.linear(x)[:2] * sizes[:, None]).mean()

    assert capture(Labelled(), {"x": X, "sizes": torch.tensor([3, 5])}).by_value == ()
