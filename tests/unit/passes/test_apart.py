"""Blocks whose parameters are used outside of them, each of another block or of none."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

WIDTH = 12


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.mix = nn.Linear(4, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, time: Tensor) -> Tensor:
        return hidden + self.mix(hidden * self.embed(time).tanh())


class Reaching(nn.Module):
    """Its last layer takes the embedding of block `again`, as a diffusion transformer's does of the first."""

    def __init__(self, blocks: int, again: int) -> None:
        super().__init__()
        self.blocks, self.again = nn.ModuleList(Block() for _ in range(blocks)), again
        self.head = nn.Linear(WIDTH, WIDTH)

    def forward(self, hidden: Tensor, time: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            hidden = block(hidden, time)
        return {"loss": (self.head(hidden) * self.blocks[self.again].embed(time)).pow(2).mean()}


class Paired(nn.Module):
    """Every other block has the same embedding."""

    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(Block() for _ in range(6))
        for number, block in enumerate(self.blocks):
            block.embed = self.blocks[number % 2].embed

    def forward(self, hidden: Tensor, time: Tensor) -> dict[str, Tensor]:
        for block in self.blocks:
            hidden = block(hidden, time)
        return {"loss": hidden.pow(2).mean()}


def plan(model: nn.Module, mesh: dict[str, int], strategy: Any) -> autopar.Plan:
    torch.manual_seed(0)
    batch = {"hidden": torch.randn(8, WIDTH), "time": torch.randn(8, 4)}
    return autopar.plan(model, autopar.Mesh(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy)


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
@pytest.mark.parametrize(("blocks", "again"), [(3, 0), (5, 3), (5, 4)])
def test_a_block_that_the_model_reaches_into(blocks: int, again: int, strategy: str) -> None:
    """Breaks if all blocks are run with the parameters of the one that is used elsewhere, too, or the others'
    gradients are lost.
    """
    found = plan(Reaching(blocks, again), {"dp": 4}, strategy)
    assert sorted(found.program.num_calls(region.name) for region in found.program.regions) == [1, 1, blocks - 1]
    found.verify().raise_on_failure()


@pytest.mark.moderate
@pytest.mark.parametrize(("mesh", "strategy"), [({"dp": 4}, "zero3"), ({"pp": 2, "dp": 2}, {"pp": "pipeline"})])
def test_blocks_in_groups_that_share(mesh: dict[str, int], strategy: Any) -> None:
    """Breaks if blocks that share parameters with some others are run with the parameters of one group."""
    plan(Paired(), mesh, strategy).verify().raise_on_failure()
