"""A model whose repeated blocks are traced once gives the program that tracing all of them gives."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.cli.models import catalogue
from autopar.passes.capture import capture
from tests.unit.passes.repeated import Asking, Block, Row, Scaled, Stack, texts
from tests.unit.tiers import mostly_slow

REPEATS = {
    "llama-3.1-8b": 1, "gpt2": 1, "bert-base": 1, "phi-3-mini": 1, "qwen3-0.6b": 1, "gemma-2-2b": 2, "t5-base": 2,
    "whisper-small": 2, "clip-vit-base-patch32": 2,
}  # fmt: skip


@pytest.mark.moderate
@pytest.mark.sampled(4)
@pytest.mark.parametrize("name", mostly_slow(REPEATS, "gpt2", "bert-base"))
def test_shipped_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a shipped model is another program where equal blocks are traced once, or more of them are traced."""
    fields = {"gemma-2-2b": {"num_hidden_layers": 4}, "t5-base": {"num_layers": 3, "num_decoder_layers": 3}}
    loaded = catalogue.load(name, tiny=True, device="meta", overrides=fields.get(name))
    once, whole, repeats = texts(loaded.model, loaded.batch, monkeypatch)
    assert once == whole
    assert repeats == REPEATS[name]


class Counting(Block):
    def act(self, x: Tensor) -> Tensor:
        self.number += 1
        return x * 2


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


class Taking(Block):
    """Takes away a number that differs in all blocks."""

    def act(self, x: Tensor) -> Tensor:
        self.__dict__.pop("number")
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
    "state through the dictionary": (lambda: [Resetting(i) for i in range(3)], 2),
    "an attribute that is taken away": (lambda: [Taking(i) for i in range(3)], 0),
    "a buffer that is set": (lambda: [Filling(i) for i in range(3)], 0),
    "deep inside": (deep, 0),
    "hooks": (hooked, 0),  # such a model is traced whole
    "tied": (tied, 0),
    "dropout in some": (evaluated, 2),
    "frozen": (frozen, 2),
}


@pytest.mark.moderate
@pytest.mark.parametrize("case", CASES)
def test_only_what_is_the_same_is_repeated(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a block that does something else counts as a repetition, or one that does the same is traced again."""
    make, expected = CASES[case]
    model = Stack(make())
    once, whole, repeats = texts(model, {"x": torch.randn(2, 4).abs()}, monkeypatch)
    assert once == whole
    assert repeats == expected
    assert not any("forward" in vars(block) for block in model.blocks)


class Unread(Row):
    """Two blocks of three whose results nobody reads, of which the tracer keeps nothing."""

    def forward(self, x: Tensor) -> Tensor:
        first, *others = self.blocks
        for block in others:
            block(x)
        return (first(x) + 1).sum()


def test_blocks_that_nobody_reads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a model is traced again, whole, because nothing is left of a block whose result it drops."""
    model = Unread([Block(), Scaled(1), Scaled(1)])
    once, whole, repeats = texts(model, {"x": torch.randn(2, 4)}, monkeypatch)
    assert once == whole and repeats == 1


@pytest.mark.parametrize(("count", "traces"), [(2, 1), (4, 3)])
def test_few_blocks_are_shown(count: int, traces: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if few blocks are not shown to the tracer, where one that repeats no other, as by its number here, costs
    another trace; or if many are.
    """
    seen = list[int]()
    export = torch.export.export
    monkeypatch.setattr(torch.export, "export", lambda *args, **named: seen.append(1) or export(*args, **named))
    capture(Stack([Scaled(number) for number in range(count)]), {"x": torch.randn(2, 4)})
    assert len(seen) == traces
