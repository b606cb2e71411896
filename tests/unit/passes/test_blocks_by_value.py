"""Blocks that go by values of what they are handed are traced once where those are made of Python's own numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import interpret
from autopar.passes.capture import capture
from autopar.passes.outline import outline
from tests.unit.passes.repeated import texts


class Taking(nn.Module):
    """Takes the rows that a mask chooses of what a linear layer gives, and puts their sum behind all."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        rows: Tensor = self.linear(x)[:, keep]
        return x + rows.relu().sum(1, keepdim=True) / rows.shape[1]


class Packing(Taking):
    """Has the mask beside numbers that nobody knows, in one tensor, and reads it off that again."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        packed = torch.cat([x, keep.to(x.dtype).expand(x.shape[:2])[..., None]], -1)
        return super().forward(x, packed[..., -1].bool().any(0))


class Asking(Taking):
    """Does something else where a mask chooses everything."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return self.linear(x).relu() if keep.all() else self.linear(x).tanh() + x


class Counting(Taking):
    """Is as long as a number says."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x + self.linear(x[:, : keep.sum().item()]).mean(1, keepdim=True)


class Clearing(Taking):
    """Writes into the mask that it is handed."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        keep[1] = False
        return super().forward(x, keep)


class Making(Taking):
    """Is handed nothing but the mask."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:
        return x * self.of(keep).unsqueeze(-1)

    def of(self, keep: Tensor) -> Tensor:
        return self.linear.weight.sum() * torch.arange(len(keep))[keep].sum() * keep


class Row(nn.Module):
    """Blocks that are all handed one mask of ones."""

    def __init__(self, kind: type[Taking], count: int = 4) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([kind() for _ in range(count)])

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x, self.keep(x, number))
        return x.square().sum()

    def keep(self, x: Tensor, number: int) -> Tensor:
        return self.shared(x)

    def shared(self, x: Tensor) -> Tensor:
        return torch.ones(x.shape[1], dtype=torch.bool, device=x.device)


class Some(Row):
    """Every second block is handed a mask of some, each made anew."""

    def keep(self, x: Tensor, number: int) -> Tensor:
        return torch.arange(x.shape[1]) < (3 if number % 2 else x.shape[1])


class Other(Row):
    """Each mask chooses as many, but others."""

    def keep(self, x: Tensor, number: int) -> Tensor:
        return torch.arange(x.shape[1]) != number


class Written(Row):
    """One mask, into which is written between blocks."""

    def forward(self, x: Tensor) -> Tensor:
        keep = self.shared(x)
        for number, block in enumerate(self.blocks):
            x = block(x, keep)
            keep[number] = number % 2 == 0
        return x.square().sum()


class Told(Row):
    """The last block is handed the batch's own mask."""

    def forward(self, x: Tensor, keep: Tensor) -> Tensor:  # type: ignore[override]
        for number, block in enumerate(self.blocks):
            x = block(x, keep if number + 1 == len(self.blocks) else self.shared(x))
        return x.square().sum()


CASES: dict[str, tuple[type[Row], type[Taking], int]] = {
    "rows": (Row, Taking, 3),
    "a mask that is packed": (Row, Packing, 3),
    "a branch": (Row, Asking, 3),
    "an end of a slice": (Row, Counting, 3),
    "rows of some masks": (Some, Taking, 2),
    "branches of some masks": (Some, Asking, 2),
    "as many rows, but others": (Other, Taking, 0),
    "what is written between blocks": (Written, Taking, 2),
    "what is written within a block": (Row, Clearing, 0),
    "the values alone": (Row, Making, 3),
}
"""The model, its blocks, and how many of four are not traced again."""


@pytest.mark.moderate
@pytest.mark.parametrize("case", CASES)
def test_what_holds_the_same_is_repeated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if blocks that go by a mask's values are traced whole, one of another mask counts as a repetition, or the
    program is not what eager does.
    """
    row, kind, expected = CASES[case]
    torch.manual_seed(0)
    model, batch = row(kind).double(), {"x": torch.randn(3, 6, 4, dtype=torch.float64)}
    _agrees(model, batch)
    once, whole, repeats = texts(model, batch, monkeypatch)
    # Numbers of chosen rows are another constant in each block that is traced whole.
    assert once == whole or "lifted_tensor" in once
    assert repeats == expected


def test_a_mask_of_the_batch() -> None:
    """Breaks if a block that is handed the batch's mask stands for those that are handed one of ones."""
    model = Told(Taking).double()
    keep = torch.tensor([True, False, True, True, True, False])
    batch = {"x": torch.randn(3, 6, 4, dtype=torch.float64), "keep": keep}
    _agrees(model, batch)


def _agrees(model: nn.Module, batch: dict[str, Any]) -> None:
    """Whether the program of a model gives what eager does."""
    program = outline(capture(model, batch))
    outputs, _ = interpret.run(program, interpret.state_of(model, program), batch)
    torch.testing.assert_close(outputs[0], model(**batch))
