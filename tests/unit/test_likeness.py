"""Whether a small twin has every region of the model that it stands for."""

from __future__ import annotations

import json

import pytest
import torch
from torch import Tensor, nn
from typer.testing import CliRunner

from autopar.cli.main import app
from autopar.ir.likeness import likeness, without_like
from autopar.ir.program import Program
from autopar.passes.capture import capture
from autopar.passes.outline import outline


class Block(nn.Module):
    def __init__(self, width: int, gated: bool) -> None:
        super().__init__()
        self.linear, self.gated = nn.Linear(width, width), gated

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = self.linear(x)
        return x + (y * y.sigmoid() if self.gated else y.view(len(x), -1).relu() * 0.5)


class Model(nn.Module):
    def __init__(self, width: int, gated: list[bool]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(width, each) for each in gated)

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def program(width: int, gated: list[bool]) -> Program:
    return outline(capture(Model(width, gated), {"x": torch.randn(4, width)}))


def test_sizes_make_no_difference() -> None:
    """Breaks if a twin is said to lack what it has in another size, or another number of layers."""
    assert not without_like(program(64, [False] * 6), program(8, [False] * 2))


def test_a_block_that_the_twin_lacks_is_named() -> None:
    """Breaks if blocks that do something else count as alike."""
    large, small = program(8, [False, False, True, True]), program(8, [False, False])
    missing = without_like(large, small)
    assert len(missing) == 1 and "sigmoid" in str(missing[0].graph)
    assert likeness(missing[0]) not in {likeness(region) for region in small.regions}


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("layers", "proven"), [(None, True), ("1", False)])
def test_verify_says_what_of_the_model_is_not_proven(layers: str | None, proven: bool) -> None:
    """Breaks if `--tiny` with too few layers to have each kind says nothing of it."""
    given = ["verify", "gemma2", "--tiny", "--mesh", "dp=2", "--strategy", "ddp", "--json"]
    result = CliRunner().invoke(app, [*given, *(["--layers", layers] if layers else [])])
    assert result.exit_code == 0, result.output
    said = json.loads(result.stdout)
    assert said["ok"] and bool(said["not_proven"]) is not proven
