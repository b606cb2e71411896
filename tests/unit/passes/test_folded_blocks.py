"""Long rows of equal blocks are folded: a few stay in the captured graph, and the program is that of all of them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.api import interpret
from autopar.cli.models import catalogue
from autopar.ir.verify import check_program
from autopar.passes import capture as capturing
from autopar.passes.fuse_attention import fuse_attention
from autopar.passes.outline import outline
from tests.unit.passes.repeated import Asking, Block, Row, Stack, texts
from tests.unit.tiers import mostly_slow


def left_out(model: nn.Module, batch: dict[str, Any]) -> int:
    captured = capturing.capture(model, batch)
    return sum(len(paths) for row in captured.folded for paths in row.left_out)


DEEP = {
    "llama-3.1-8b": ({"num_hidden_layers": 9}, 5),
    "gemma-2-2b": ({"num_hidden_layers": 11}, 4),  # windows in every second layer
    "t5-base": ({"num_layers": 7, "num_decoder_layers": 6}, 2 + 1),
    "gpt2": ({"n_layer": 8}, 4),
    "whisper-small": ({"encoder_layers": 6, "decoder_layers": 7}, 2 + 3),
}  # fmt: skip
"""Models, their depths, and how many blocks are left out of the captured graph."""


@pytest.mark.moderate
@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", mostly_slow(DEEP, "gpt2"))
def test_long_rows_are_folded(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a deep model is another program when its rows are folded, or blocks stay that could be left out."""
    fields, count = DEEP[name]
    loaded = catalogue.load(name, tiny=True, device="meta", overrides=fields)
    assert left_out(loaded.model, loaded.batch) == count
    once, whole, _ = texts(loaded.model, loaded.batch, monkeypatch)
    assert once == whole


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


class Again(Row):
    """Runs its row three times, and before that the beginning of it."""

    def forward(self, x: Tensor) -> Tensor:
        for block in list(self.blocks)[:3]:
            x = block(x)
        for _ in range(3):
            for block in self.blocks:
                x = block(x)
            x = x.tanh()
        return x.sum()


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
    "run again": (lambda: Again([Block(i) for i in range(9)]), 8 + 2 * 6),
    "blocks of blocks": (lambda: Row([Nested(i) for i in range(7)]), 3),
}


@pytest.mark.moderate
@pytest.mark.parametrize("case", ROWS)
def test_only_rows_that_do_the_same_are_folded(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if blocks are left out whose results somebody reads, or which read what others do not."""
    make, expected = ROWS[case]
    model, batch = make(), {"x": torch.randn(2, 4).abs()}
    assert left_out(model, batch) == expected
    once, whole, _ = texts(model, batch, monkeypatch)
    assert once == whole


class Weighing(Block):
    """Makes a tensor of numbers, which the tracer lifts out of each block."""

    def act(self, x: Tensor) -> Tensor:
        return x * torch.tensor(0.5, dtype=x.dtype)


@pytest.mark.moderate
def test_constants_of_repeated_blocks() -> None:
    """Breaks if blocks that were left out have no copy of a constant that the tracer lifts out of each."""
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


class Attending(Weighing):
    """Has attention, too, whose fusion drops constants that nobody reads any more."""

    def forward(self, x: Tensor) -> Tensor:
        q = self.linear(x)[:, None, None, :]
        return self.act(torch.nn.functional.scaled_dot_product_attention(q, q, q)[:, 0, 0] + q[:, 0, 0])


@pytest.mark.moderate
def test_constants_of_blocks_that_were_left_out_outlive_the_fusion_of_attention() -> None:
    """Breaks if constants of left out blocks are dropped, as no node of the graph reads them."""
    model = Row([Attending(i) for i in range(8)]).double()
    batch = {"x": torch.randn(2, 4, dtype=torch.float64)}
    captured = capturing.capture(model, batch)
    assert sum(len(paths) for row in captured.folded for paths in row.left_out) == 4
    fused = fuse_attention(captured)
    assert [site.fused for site in fused.attention] == [True] * 8
    program = outline(fused)
    check_program(program, after="outline")
    outputs, _ = interpret.run(program, interpret.state_of(model, program), batch)
    torch.testing.assert_close(outputs[0], model(**batch))
