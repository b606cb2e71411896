"""A model whose repeated blocks are traced once gives the program that tracing all of them gives."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.models import catalogue, huggingface
from autopar.passes import capture as capturing
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.outline import outline
from autopar.passes.repeated_blocks import Blocks


def texts(model: nn.Module, batch: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> tuple[str, str, int]:
    """The outlined program with blocks traced once, and whole; how many blocks were not traced again."""
    repeats: list[int] = []
    write_out = Blocks.write_out

    def counted(self: Blocks, *args: Any) -> None:
        write_out(self, *args)
        repeats.append(self.repeats)

    monkeypatch.setattr(Blocks, "write_out", counted)
    found = []
    for least in (2, 10**9):
        monkeypatch.setattr(capturing, "LEAST_BLOCKS", least)
        with huggingface.training_capture(model):
            found.append(str(outline(fuse_attention(capturing.capture(model, batch)))))
    return found[0], found[1], sum(repeats)


REPEATS = {
    "llama-3.1-8b": 1, "gpt2": 1, "bert-base": 1, "phi-3-mini": 1, "qwen3-0.6b": 1, "gemma-2-2b": 2, "t5-base": 2,
    "whisper-small": 2, "clip-vit-base-patch32": 2,
}  # fmt: skip


@pytest.mark.parametrize("name", REPEATS)
def test_shipped_models(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    fields = {"gemma-2-2b": {"num_hidden_layers": 4}, "t5-base": {"num_layers": 3, "num_decoder_layers": 3}}
    loaded = catalogue.load(name, tiny=True, device="meta", overrides=fields.get(name))
    once, whole, repeats = texts(loaded.model, loaded.batch, monkeypatch)
    assert once == whole
    assert repeats == REPEATS[name]


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
