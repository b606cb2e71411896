"""A residual MLP with three identical blocks and a loss: the smallest model that every pass has something to do on."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from autopar.api.promote import only
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.annotate import annotate
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.name_values import name_values
from autopar.passes.outline import outline
from autopar.passes.overlap import overlap
from autopar.passes.place import place
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Strategy, resolve

MESH = Mesh({"dp": 2, "tp": 2}, hardware="cpu")
PRODUCT: Strategy = {"dp": "zero3", "tp": "tensor"}
PASSES = ("capture", "outline", "differentiate", "annotate", "place", "insert_collectives", "overlap")


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        hidden = self.down(functional.relu(self.up(x)))
        return x + hidden


class Small(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Output:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return Output((x - target).square().mean(), x)


class SmallSequence(nn.Module):
    """The same blocks on [batch, sequence, features], with norms before them."""

    def __init__(self) -> None:
        super().__init__()
        self.enter = nn.Linear(4, 4)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(4), Block()) for _ in range(3))

    def forward(self, x: Tensor, target: Tensor) -> Output:
        x = self.enter(x)
        for block in self.blocks:
            x = block(x)
        return Output((x - target).square().mean(), x)


def sequence_batch() -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randn(2, 6, 4, generator=generator, dtype=torch.float64) for name in ("x", "target")}


@dataclass(frozen=True)
class Case:
    """A model, its batch, and the program after every pass."""

    model: nn.Module
    batch: dict[str, Tensor]
    programs: dict[str, Program]
    strategies: tuple[AxisStrategy, ...]


def make(model: nn.Module | None = None, batch: dict[str, Tensor] | None = None) -> Case:
    """Everything up to `annotate`, in float64."""
    generator = torch.Generator().manual_seed(0)
    model = (model or Small()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator))
    if batch is None:
        batch = {name: torch.randn(8, 4, generator=generator, dtype=torch.float64) for name in ("x", "target")}
    programs: dict[str, Program] = {}
    with only(torch.float64):
        programs["capture"] = capture(model, batch)
        programs["outline"] = outline(programs["capture"])
        programs["differentiate"] = differentiate(programs["outline"])
    programs["annotate"] = annotate(name_values(programs["differentiate"]), mesh=MESH)
    return Case(model, batch, programs, ())


def placed(case: Case, strategy: Strategy = PRODUCT, mesh: Mesh = MESH) -> Case:
    """The same, placed and lowered with a strategy."""
    strategies = resolve(strategy, mesh)
    programs = dict(case.programs)
    if mesh != MESH:
        programs["annotate"] = annotate(name_values(programs["differentiate"]), mesh=mesh)
    programs["place"] = place(programs["annotate"], strategies=strategies)
    programs["insert_collectives"] = insert_collectives(programs["place"])
    programs["overlap"] = overlap(programs["insert_collectives"], strategies=strategies)
    return replace(case, programs=programs, strategies=strategies)
