"""Models with fewer blocks than a pipeline has stages: calls of modules, and operators with parameters, are pieces."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, fx, nn

import autopar
from autopar.passes.capture import capture
from autopar.passes.outline import outline
from autopar.passes.outlining.finer import finer

WIDTH = 8


class Attributes(nn.Module):
    """A stem, a list with one block, a module that is called twice, parameters of the model's own."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh(), nn.Linear(WIDTH, WIDTH), nn.GELU())
        self.blocks = nn.ModuleList([nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)])
        self.scale, self.bias = nn.Parameter(torch.ones(WIDTH)), nn.Parameter(torch.zeros(WIDTH))
        self.again, self.last = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.last.bias = self.bias  # its own name is the model's

    def forward(self, x: Tensor) -> Tensor:
        x = self.stem(x * 2)
        for block in self.blocks:
            x = block(x)
        x = self.again(self.again(x).tanh())
        return self.last(x * self.scale).square().mean()


class Chain(nn.Sequential):
    """A bare chain; its own forward has a loss."""

    def __init__(self) -> None:
        super().__init__(nn.Dropout(0.0), *(nn.Linear(WIDTH, WIDTH) for _ in range(3)), nn.ReLU())

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).square().mean()


class Blocks(nn.Module):
    """Two blocks of two modules each."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.LayerNorm(WIDTH)) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


SHALLOW = ["stem", "blocks.0", "blocks.1", "again", "again", "", ""]
DEEP = ["stem.0", "stem.2", *SHALLOW[1:]]
INSIDE = ["layers.0.0", "layers.0.1", "layers.1.0", "layers.1.1"]


@pytest.mark.parametrize(
    ("model", "pieces", "names", "paths"),
    [
        (Attributes, 0, (), [""]),
        (Attributes, 2, (), SHALLOW),
        (Attributes, 4, (), DEEP),
        (Attributes, 2, ("stem.2",), DEEP),
        (Attributes, 2, ("nothing",), SHALLOW),
        (Attributes, 99, (), DEEP),
        (Chain, 2, (), ["1", "2", "3"]),
        (Blocks, 3, (), ["layers.0", "layers.1", ""]),
        (Blocks, 4, (), INSIDE),
        (Blocks, 2, ("layers.1.1",), INSIDE),
    ],
)
def test_pieces_begin_with_calls_of_modules(
    model: type[nn.Module], pieces: int, names: tuple[str, ...], paths: list[str]
) -> None:
    """Breaks if a model without blocks is one piece, blocks are opened without need, or named modules are no pieces."""
    program = outline(capture(model(), {"x": torch.randn(4, WIDTH)}), pieces=pieces, names=names)
    assert [call.path for call in program.calls] == paths


def test_nothing_is_cut_between_what_is_no_tensor_and_who_reads_it() -> None:
    """Breaks if a tuple, or what is written in place, would have to travel from a stage to the next."""
    graph = fx.Graph()
    x, weight = graph.placeholder("x"), graph.placeholder("weight")
    parts = graph.call_function(torch.ops.aten.split.Tensor, (x, 1))
    first = graph.call_function(torch.ops.aten.mul.Tensor, (x, weight))
    last = graph.call_function(torch.ops.aten.add.Tensor, (first, parts))
    own = graph.call_function(torch.ops.aten.mul.Tensor, (last, weight))
    for node in (x, weight, first, last, own):
        node.meta["val"] = torch.ones(2)
    parts.meta["val"] = (torch.ones(1), torch.ones(1))
    pieces = finer([("", [parts, first, last, own])], {weight}, 2, ())
    assert [nodes for _, nodes in pieces] == [[parts, first, last, own]]


@pytest.mark.moderate
def test_stages_of_a_model_without_blocks_give_its_numbers() -> None:
    """Breaks if a value, or the gradient of a module that two stages call, is lost between pieces."""
    mesh = autopar.Mesh({"pp": 4}, hardware="cpu")
    batch = {"x": torch.randn(8, WIDTH)}
    plan = autopar.plan(Attributes(), mesh, example_inputs=batch, strategy="pipeline(zero_bubble)", microbatches=4)
    assert plan.verify().ok
