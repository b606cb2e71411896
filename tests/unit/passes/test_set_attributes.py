"""Attributes that forward sets on the modules of repeated blocks: within the blocks, and from outside."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from torch import Tensor, nn

from autopar.api import interpret
from autopar.passes import capture as capturing
from autopar.passes.outline import outline
from tests.unit.passes.repeated import texts

WIDTH = 4


class Cell(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.state: Tensor | None = None
        self.seen: Tensor | None = None
        self.scale, self.sees = 2, True
        self.log: list[int] = []

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x) if self.state is None else self.linear(x) + self.state
        self.state = y.tanh()
        if self.sees:
            self.seen = x
        return y * self.scale


class Block(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.cell = number, Cell()

    def forward(self, x: Tensor) -> Tensor:
        return x + self.cell(x)


class Numbered(Block):
    """Has its states where there is something else in each block."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.cell.number = number


class Forgetting(Block):
    """Leaves no state behind."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.cell.state = None
        return x


class Unscaling(Block):
    """Sets a number back to what it was."""

    def forward(self, x: Tensor) -> Tensor:
        x = super().forward(x)
        self.cell.scale = 2
        return x


class Outer(nn.Module):
    """Blocks whose states begin anew in each forward."""

    def __init__(self, kind: type[Block] = Block) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(kind(number) for number in range(5))

    def begin(self, x: Tensor) -> None:
        for block in self.blocks:
            block.cell.state = None

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x

    def forward(self, x: Tensor) -> Tensor:
        self.begin(x)
        return self.run(x).square().mean()


class Reading(Outer):
    """Goes by what the blocks leave."""

    def forward(self, x: Tensor) -> Tensor:
        loss = super().forward(x)
        return loss + sum(block.cell.state.mean() * (block.number + 1) for block in self.blocks)


class Giving(Outer):
    """Gives each block another state."""

    def begin(self, x: Tensor) -> None:
        for number, block in enumerate(self.blocks):
            block.cell.state = x.mean(0) * (number + 1)


class GivingSome(Outer):
    def begin(self, x: Tensor) -> None:
        for number, block in enumerate(self.blocks):
            block.cell.state = x.mean(0) if number % 2 else None


class Wider(Outer):
    """States of two shapes."""

    def begin(self, x: Tensor) -> None:
        for number, block in enumerate(self.blocks):
            block.cell.state = x.mean(0) if number < 3 else x.mean(0, keepdim=True) * 2


class Rounds(Outer):
    """Blocks that run several times, each with what it left."""

    def run(self, x: Tensor) -> Tensor:
        for _ in range(3):
            x = super().run(x)
        return x


class Scaling(Outer):
    """Sets a number, of two kinds."""

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        for number, block in enumerate(self.blocks):
            block.cell.scale = 2 + number // 3


class AskingScales(Scaling):
    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * block.cell.scale
        return x


class Asking(Outer):
    """Goes by whether there is a state, and by what a block saw being what it was given."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            y = block(x)
            x = y * (2 if block.cell.state is None else 3) * (5 if block.cell.seen is x else 7)
        return x


class Running(Outer):
    """Runs a part of each block by itself."""

    def run(self, x: Tensor) -> Tensor:
        return sum((block.cell.linear(x) for block in self.blocks), super().run(x))


class Trying(Outer):
    """Reads a weight, and goes on where there is none."""

    def run(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            try:
                x = x * block.cell.linear.weight.shape[0]
            except Exception:
                x = x * 100
            x = block(x)
        return x


class Logging(Outer):
    """Adds to a list that a block has."""

    def begin(self, x: Tensor) -> None:
        super().begin(x)
        for block in self.blocks:
            block.cell.log.append(x.shape[0])


def run_before(model: Outer) -> Outer:
    """The model, with states of a step that it did, and only those."""
    for block in model.blocks:
        block.cell.sees = False
    model(torch.randn(3, WIDTH))
    return model


CASES: dict[str, tuple[Callable[[], Outer], int]] = {
    "nobody reads it": (Outer, 4),
    "read behind": (Reading, 4),
    "given from outside": (Giving, 4),
    "given to some": (GivingSome, 3),
    "of two shapes": (Wider, 3),
    "in rounds": (Rounds, 13),
    "a number": (Scaling, 3),
    "a number that is set back": (lambda: AskingScales(Unscaling), 3),
    "asked for": (Asking, 4),
    "asked for where it is gone": (lambda: Asking(Forgetting), 4),
    "beside a number": (lambda: Reading(Numbered), 4),
    "left by a step": (lambda: run_before(Reading()), 4),
    "left by a step beside a number": (lambda: run_before(Giving(Numbered)), 4),
    "a part that is run": (Running, 4),
    "a weight that is tried": (Trying, 4),
    "a list that grows": (Logging, 4),
}


@pytest.mark.moderate
@pytest.mark.parametrize("case", CASES)
def test_blocks_on_which_forward_sets_attributes_repeat(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a block is given another one's state, or a state stays what it was; or if such blocks are traced each
    for itself.
    """
    make, expected = CASES[case]
    model, batch = make(), {"x": torch.randn(3, WIDTH)}
    once, whole, repeats = texts(model, batch, monkeypatch)
    assert once == whole
    assert repeats == expected
    assert all(block.cell.log == [] for block in model.blocks)
    monkeypatch.undo()
    monkeypatch.setattr(capturing, "_whole", None)
    program = outline(capturing.capture(model, batch))
    outputs, _ = interpret.run(program, interpret.state_of(model, program), batch)
    torch.testing.assert_close(outputs[0], model(**batch))
