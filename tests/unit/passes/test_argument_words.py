"""words: what a block's forward calls the tensors that it is given, however it is called and traced."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.passes import capture as capturing
from autopar.passes.blocks.words import words_of
from autopar.passes.outline import outline

T = torch.empty(1, device="meta")


def plain(hidden: Tensor, mask: Tensor | None = None, *, scale: Tensor | None = None) -> None: ...
def several(*hidden: Tensor, **options: Tensor) -> None: ...
def unlucky(input: Tensor, comm: Tensor, hidden: Tensor) -> None: ...


@pytest.mark.parametrize(
    ("forward", "args", "kwargs", "wanted"),
    [
        (plain, (T, T), {"scale": T}, ["hidden", "mask", "scale"]),
        (plain, (T, None), {"scale": T}, ["hidden", "scale"]),
        (plain, (), {"mask": T, "hidden": T}, ["mask", "hidden"]),
        (plain, ((T, T), T), {}, ["", "", "mask"]),
        (plain, ({"keys": T},), {"scale": [T]}, ["keys", ""]),
        (plain, (T, 3), {}, ["hidden"]),
        (several, (T, T), {"bias": T}, ["", "", "bias"]),
        (unlucky, (T, T, T), {}, ["", "", "hidden"]),
        (print, (T,), {}, [""]),
    ],
)
def test_words(forward: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], wanted: list[str]) -> None:
    """Breaks if a word goes to another tensor, a member of a tuple gets a number, or a word means something else."""
    assert words_of(forward, args, kwargs) == wanted


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 4)

    def forward(self, hidden: Tensor, pair: tuple[Tensor, Tensor], gate: Tensor) -> Tensor:
        return hidden + self.linear(hidden * pair[0]) * pair[1] * gate


class Counting(Block):
    """Changes a buffer: its row is traced with its writes taken out."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("count", torch.zeros(()))

    def forward(self, hidden: Tensor, pair: tuple[Tensor, Tensor], gate: Tensor) -> Tensor:
        self.count += 1
        return super().forward(hidden, pair, gate)


class Model(nn.Module):
    def __init__(self, blocks: list[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(blocks)

    def forward(self, x: Tensor) -> Tensor:
        pair, gate = (x.cos(), x.sin()), x.exp()
        for block in self.blocks:
            x = block(x, pair, gate=gate)
        return x.sum()


def hooked(count: int) -> list[nn.Module]:
    """Blocks of which some are traced one by one: calling them runs more than their forward."""
    blocks: list[nn.Module] = [Block() for _ in range(4)]
    for block in blocks[:count]:
        block.register_forward_hook(lambda module, args, output: output * 2)
    return blocks


BLOCKS: dict[str, Callable[[], list[nn.Module]]] = {
    "alike": lambda: [Block() for _ in range(7)],
    "hooked": lambda: hooked(4),
    "one is hooked": lambda: hooked(1),
    "writing": lambda: [Counting() for _ in range(3)],
}


@pytest.mark.parametrize("least", [2, 10**9])
@pytest.mark.parametrize("kind", BLOCKS)
def test_blocks_have_words_however_they_are_traced(kind: str, least: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if blocks that are traced once, one by one, or with the whole model have other words, or marks stay."""
    monkeypatch.setattr(capturing, "LEAST_BLOCKS", least)
    model = Model(BLOCKS[kind]())
    captured = capturing.capture(model, {"x": torch.randn(2, 4)})
    assert "autopar_capture" not in str(captured)
    regions = {call.region for call in outline(captured).calls if call.path}
    assert regions
    for name in regions:
        assert {port.word for port in outline(captured).region(name).inputs} == {"hidden", "", "gate"}
    assert not any(block._forward_pre_hooks for block in model.blocks)


class Pair(Block):
    def forward(self, hidden: Tensor, pair: tuple[Tensor, Tensor], gate: Tensor) -> tuple[Tensor, Tensor]:  # type: ignore[override]
        return super().forward(hidden, pair, gate), hidden.sum()


class Last(Model):
    """Reads a second value of the last block alone, which thus is a region of its own."""

    def forward(self, x: Tensor) -> Tensor:
        pair, gate = (x.cos(), x.sin()), x.exp()
        for block in self.blocks:
            x, total = block(x, pair, gate=gate)
        return x.sum() + total


def test_a_repeated_block_that_is_a_region_of_its_own() -> None:
    """Breaks if only the block that is traced has words, and not one that repeats it but gives more."""
    program = outline(capturing.capture(Last([Pair() for _ in range(3)]), {"x": torch.randn(2, 4)}))
    regions = {call.region for call in program.calls if call.path}
    assert len(regions) == 2
    assert all({port.word for port in program.region(name).inputs} == {"hidden", "", "gate"} for name in regions)
