"""Models that repeat blocks, and the programs that they give traced once and traced whole."""

from __future__ import annotations

from typing import Any

import pytest
from torch import Tensor, nn

from autopar.passes import capture as capturing
from autopar.passes.blocks import trace as tracing
from autopar.passes.blocks.trace import Blocks
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.outline import outline


def texts(model: nn.Module, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, int]:
    """The outlined program with blocks traced once, and whole, with all that it says of its model; how many blocks were
    not traced again. Blocks that will likely repeat others are not shown to the tracer, however few they are.
    """
    monkeypatch.setattr(tracing, "LEAST_HIDDEN", 0)
    repeats: list[int] = []
    write_out = Blocks.write_out

    def counted(self: Blocks, *args: Any) -> Any:
        repeats.append(self.repeats)
        return write_out(self, *args)

    monkeypatch.setattr(Blocks, "write_out", counted)
    found = []
    for least in (2, 10**9):
        monkeypatch.setattr(capturing, "LEAST_BLOCKS", least)
        program = outline(fuse_attention(capturing.capture(model, batch)))
        said = (program, *program.variables, *program.attention, *program.notes, *(c.slots for c in program.calls))
        found.append("\n".join(map(str, said)))
    return found[0], found[1], sum(repeats)


class Stack(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        x = x + 1
        for block in self.blocks:
            x = block(x) + x
        return x.sum()


class Block(nn.Module):
    """What a subclass does to x after a linear layer."""

    def __init__(self, number: int = 0) -> None:
        super().__init__()
        self.number, self.width = number, 4
        self.linear = nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.act(self.linear(x) / self.width)

    def act(self, x: Tensor) -> Tensor:
        return x.relu()


class Scaled(Block):
    def act(self, x: Tensor) -> Tensor:
        return x / (1 + self.number)


class Asking(Block):
    """Looks for an attribute that only some of the blocks have."""

    def act(self, x: Tensor) -> Tensor:
        return x.relu() if hasattr(self, "twice") else x.tanh()


class Row(nn.Module):
    """Blocks one behind the other, and what a subclass makes of what they give."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        given = [x + 1]
        for block in self.blocks:
            given.append(block(given[-1]))
        return self.end(given)

    def end(self, given: list[Tensor]) -> Tensor:
        return given[-1].sum()
