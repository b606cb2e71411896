"""A model whose repeated blocks are traced once gives the program that tracing all of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import interpret
from autopar.cli.models import catalogue
from autopar.passes import capture as capturing
from autopar.passes.blocks.trace import Blocks
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.outline import outline
from tests.unit.tiers import mostly_slow


def texts(model: nn.Module, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, int]:
    """The outlined program with blocks traced once, and whole, with all that it says of its model; how many blocks were
    not traced again.
    """
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


REPEATS = {
    "llama-3.1-8b": 1, "gpt2": 1, "bert-base": 1, "phi-3-mini": 1, "qwen3-0.6b": 1, "gemma-2-2b": 2, "t5-base": 2,
    "whisper-small": 2, "clip-vit-base-patch32": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", mostly_slow(REPEATS, "gpt2", "bert-base"))
def test_shipped_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"gemma-2-2b": {"num_hidden_layers": 4}, "t5-base": {"num_layers": 3, "num_decoder_layers": 3}}
    loaded = catalogue.load(name, tiny=True, device="meta", overrides=fields.get(name))
    once, whole, repeats = texts(loaded.model, loaded.batch, monkeypatch)
    assert once == whole
    assert repeats == REPEATS[name]


DEEP = {
    "llama-3.1-8b": ({"num_hidden_layers": 9}, 5),
    "gemma-2-2b": ({"num_hidden_layers": 11}, 4),  # windows in every second layer
    "t5-base": ({"num_layers": 7, "num_decoder_layers": 6}, 2 + 1),
    "gpt2": ({"n_layer": 8}, 4),
    "whisper-small": ({"encoder_layers": 6, "decoder_layers": 7}, 2 + 3),
}  # fmt: skip
"""Models, their depths, and how many blocks are left out of the captured graph."""


@pytest.mark.parametrize("name", mostly_slow(DEEP, "gpt2"))
def test_long_rows_are_folded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields, count = DEEP[name]
    loaded = catalogue.load(name, tiny=True, device="meta", overrides=fields)
    assert left_out(loaded.model, loaded.batch) == count
    once, whole, _ = texts(loaded.model, loaded.batch, monkeypatch)
    assert once == whole


def left_out(model: nn.Module, batch: dict[str, Any]) -> int:
    captured = capturing.capture(model, batch)
    return sum(len(paths) for row in captured.folded for paths in row.left_out)


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


class Counting(Block):
    def act(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * self.number


class InPlace(Block):
    def act(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        x.mul_(2)
        return x + y


class Viewing(Block):
    def forward(self, x: Tensor) -> Tensor:
        self.linear(x)
        return x.view(-1, 2).view(-1, 4)


class Unusual(Block):
    """Reads its own dictionary, where nothing tells what of it."""

    def act(self, x: Tensor) -> Tensor:
        return x * self.__dict__["number"]


class Fetching(Block):
    def act(self, x: Tensor) -> Tensor:
        return x * vars(self).get("number", 1)


class Listing(Block):
    def act(self, x: Tensor) -> Tensor:
        return x * sum(value for name, value in self.__dict__.items() if name == "number")


class Copied(Block):
    def act(self, x: Tensor) -> Tensor:
        return x * copy.copy(self).number


class Named(Block):
    """Asks what it is."""

    def act(self, x: Tensor) -> Tensor:
        return x * self.number if type(self) is not Named or self.__class__ is not Named else x.relu()


class Shadowing(Block):
    """Has an attribute of its class too."""

    number = 7

    def act(self, x: Tensor) -> Tensor:
        return x * self.number


class Slotted(nn.Module):
    """Keeps a number outside of its dictionary."""

    __slots__ = ("factor",)

    def __init__(self, number: int) -> None:
        super().__init__()
        self.linear, self.factor = nn.Linear(4, 4), number

    def __getstate__(self) -> dict[str, Any]:
        return {**super().__getstate__(), "factor": self.factor}

    def __setstate__(self, state: dict[str, Any]) -> None:
        object.__setattr__(self, "factor", state.pop("factor"))
        super().__setstate__(state)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.factor


class Dynamic(Block):
    """Finds attributes in a way of its own."""

    def __getattr__(self, name: str) -> Any:
        return vars(self)["number"] if name == "dynamic" else super().__getattr__(name)

    def act(self, x: Tensor) -> Tensor:
        return x * self.dynamic


class Computing(Block):
    @property
    def doubled(self) -> int:
        return 2 * self.number

    def act(self, x: Tensor) -> Tensor:
        return x * self.doubled


class Resetting(Block):
    """Leaves a number that differs in all blocks the same in each."""

    def act(self, x: Tensor) -> Tensor:
        self.__dict__["number"] = 5
        return x.relu()


class Filling(Block):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.register_buffer("last", torch.zeros(()), persistent=False)

    def act(self, x: Tensor) -> Tensor:
        self.last = x.mean()
        return x.relu()


class Inner(nn.Module):
    def __init__(self, number: int) -> None:
        super().__init__()
        self.number, self.linear = number, nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.linear(x) * self.number


def deep() -> list[nn.Module]:
    """The number lies in a module of a module."""
    return [nn.Sequential(nn.Sequential(Inner(i), nn.ReLU()), nn.Tanh()) for i in range(3)]


def asking() -> list[nn.Module]:
    blocks: list[nn.Module] = [Asking(i) for i in range(4)]
    blocks[1].twice = blocks[3].twice = True  # type: ignore[assignment]
    return blocks


def hooked() -> list[nn.Module]:
    blocks: list[nn.Module] = [Block(i) for i in range(3)]
    blocks[1].register_forward_hook(lambda module, args, output: output * 2)
    return blocks


def tied() -> list[nn.Module]:
    blocks = [Block(i) for i in range(3)]
    blocks[2].linear.weight = blocks[0].linear.weight
    return list(blocks)


def evaluated() -> list[nn.Module]:
    blocks: list[nn.Module] = [nn.Sequential(nn.Linear(4, 4), nn.Dropout(0.5)) for _ in range(4)]
    blocks[2].eval()
    return blocks


def frozen() -> list[nn.Module]:
    blocks = [Block(i) for i in range(4)]
    for block in blocks[2:]:
        block.requires_grad_(False)
    return list(blocks)


CASES: dict[str, tuple[Callable[[], list[nn.Module]], int]] = {
    "alike": (lambda: [Block(i) for i in range(4)], 3),
    "a number that counts": (lambda: [Scaled(i) for i in range(4)], 0),
    "attributes that some have": (asking, 2),
    "state": (lambda: [Counting(i) for i in range(3)], 0),
    "input changed in place": (lambda: [InPlace(i) for i in range(3)], 0),
    "a view of the input": (lambda: [Viewing(i) for i in range(3)], 0),
    "reads everything": (lambda: [Unusual(i) for i in range(3)], 0),
    "reads with a default": (lambda: [Fetching(i) for i in range(3)], 0),
    "lists its attributes": (lambda: [Listing(i) for i in range(3)], 0),
    "copies itself": (lambda: [Copied(i) for i in range(3)], 0),
    "asks for its type": (lambda: [Named(i) for i in range(4)], 3),
    "attributes of the class": (lambda: [Shadowing(i) for i in range(3)], 0),
    "slots": (lambda: [Slotted(i) for i in range(3)], 0),
    "finds attributes itself": (lambda: [Dynamic(i) for i in range(3)], 0),
    "properties": (lambda: [Computing(i) for i in range(3)], 0),
    "state through the dictionary": (lambda: [Resetting(i) for i in range(3)], 0),
    "a buffer that is set": (lambda: [Filling(i) for i in range(3)], 0),
    "deep inside": (deep, 0),
    "hooks": (hooked, 1),
    "tied": (tied, 0),
    "dropout in some": (evaluated, 2),
    "frozen": (frozen, 2),
}


@pytest.mark.parametrize("case", CASES)
def test_only_what_is_the_same_is_repeated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = CASES[case]
    model = Stack(make())
    once, whole, repeats = texts(model, {"x": torch.randn(2, 4).abs()}, monkeypatch)
    assert once == whole
    assert repeats == expected
    assert not any("forward" in vars(block) for block in model.blocks)


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


class ReadsAll(Row):
    def end(self, given: list[Tensor]) -> Tensor:
        return torch.stack(given).sum()


class ReadsOne(Row):
    """Somebody reads the seventh block, which thus stays in the graph."""

    def end(self, given: list[Tensor]) -> Tensor:
        return given[-1].sum() + given[7].sum()


class Skips(Row):
    """Each block reads the one before the last, too."""

    def forward(self, x: Tensor) -> Tensor:
        before, last = x, x + 1
        for block in self.blocks:
            before, last = last, block((last, before))
        return last.sum()


class Both(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, x: tuple[Tensor, Tensor]) -> Tensor:
        return self.linear(x[0]).tanh() + x[1]


class Nested(Block):
    """Blocks of blocks."""

    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.inner = nn.ModuleList([Block(i) for i in range(6)])

    def act(self, x: Tensor) -> Tensor:
        for block in self.inner:
            x = block(x)
        return x


def alternating() -> list[nn.Module]:
    return [Block(i) if i % 3 else Asking(i) for i in range(14)]


def with_odd_one() -> list[nn.Module]:
    blocks: list[nn.Module] = [Block(i) for i in range(13)]
    blocks[6] = Asking(6)
    return blocks


ROWS: dict[str, tuple[Callable[[], nn.Module], int]] = {
    "all alike": (lambda: Row([Block(i) for i in range(9)]), 5),
    "the shortest": (lambda: Row([Block(i) for i in range(5)]), 1),
    "too short": (lambda: Row([Block(i) for i in range(4)]), 0),
    "periods": (lambda: Row(alternating()), 3),
    "one that is different": (lambda: Row(with_odd_one()), 2 + 3),
    "all are read": (lambda: ReadsAll([Block(i) for i in range(9)]), 0),
    "one is read": (lambda: ReadsOne([Block(i) for i in range(14)]), 4 + 4),
    "two before": (lambda: Skips([Both() for _ in range(12)]), 4),
    "other work between": (lambda: Stack([Block(i) for i in range(9)]), 0),
    "blocks of blocks": (lambda: Row([Nested(i) for i in range(7)]), 3),
}


@pytest.mark.parametrize("case", ROWS)
def test_only_rows_that_do_the_same_are_folded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    make, expected = ROWS[case]
    model, batch = make(), {"x": torch.randn(2, 4).abs()}
    assert left_out(model, batch) == expected
    once, whole, _ = texts(model, batch, monkeypatch)
    assert once == whole


class Looking(Row):
    """Asks a block for a part of it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if hasattr(block, "linear") else 3)
        return x.sum()


class Changing(Row):
    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.width = 1 + number % 2
            x = block(x)
        return x.sum()


class Penalized(Row):
    """Adds the squares of all parameters, among them those of blocks that a tracer is not shown."""

    def end(self, given: list[Tensor]) -> Tensor:
        return given[-1].sum() + sum(parameter.square().sum() for parameter in self.parameters())


class Penalizing(Row):
    def end(self, given: list[Tensor]) -> Tensor:
        linear = (module for module in self.modules() if isinstance(module, nn.Linear))
        return given[-1].sum() + sum(module.weight.square().sum() for module in linear)


class Saving(Row):
    def end(self, given: list[Tensor]) -> Tensor:
        return given[-1].sum() + sum(value.square().sum() for value in self.state_dict(keep_vars=True).values())


class Sorting(Row):
    """Asks what each block is."""

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x) * (2 if type(block) is Block else 3)
        return x.sum()


class Setting(Row):
    """Fills a buffer of each block with another value."""

    def forward(self, x: Tensor) -> Tensor:
        for number, block in enumerate(self.blocks):
            block.scale = x.mean() * (number + 1)
            x = block(x)
        return x.sum()


class Buffered(Block):
    def __init__(self, number: int = 0) -> None:
        super().__init__(number)
        self.register_buffer("scale", torch.ones(()), persistent=False)

    def act(self, x: Tensor) -> Tensor:
        return x * self.scale


class Sharing(Row):
    """One module in two places, so that the tracer hands out proxies."""

    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__(blocks)
        self.before = nn.Tanh()
        self.after = self.before

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(self.after(self.before(x)))


WHOLE: dict[str, Callable[[], nn.Module]] = {
    "asked for a part": lambda: Looking([Block(i) for i in range(6)]),
    "changed": lambda: Changing([Block(i) for i in range(6)]),
    "parameters": lambda: Penalized([Block(i) for i in range(6)]),
    "modules": lambda: Penalizing([Block(i) for i in range(6)]),
    "saved": lambda: Saving([Block(i) for i in range(6)]),
    "types": lambda: Sorting([Block(i) for i in range(6)]),
    "buffers": lambda: Setting([Buffered(i) for i in range(6)]),
    "shared modules": lambda: Sharing([Scaled(i) for i in range(6)]),
}


@pytest.mark.parametrize("case", WHOLE)
def test_blocks_that_are_looked_into_are_traced_whole(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a model that lists what is in its blocks sees only those that the tracer is shown."""
    model, batch = WHOLE[case](), {"x": torch.randn(2, 4)}
    once, whole, _ = texts(model, batch, monkeypatch)
    assert once == whole
    monkeypatch.undo()
    program = outline(capturing.capture(model, batch))
    outputs, _ = interpret.run(program, interpret.state_of(model, program), batch)
    torch.testing.assert_close(outputs[0], model(**batch))


class Weighing(Block):
    """Makes a tensor of numbers, which the tracer lifts out of each block."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.tensor(0.5, dtype=x.dtype)


def test_constants_of_repeated_blocks() -> None:
    model = Row([Weighing(i) for i in range(8)]).double()
    batch = {"x": torch.randn(2, 4, dtype=torch.float64)}
    captured = capturing.capture(model, batch)
    assert sum(len(paths) for row in captured.folded for paths in row.left_out) == 4
    program = outline(captured)
    assert len([call for call in program.calls if call.path]) == 8
    outputs, gradients = interpret.run(program, interpret.state_of(model, program), batch)
    loss = model(**batch)
    loss.backward()
    torch.testing.assert_close(outputs[0], loss)
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(gradients[name], parameter.grad)
