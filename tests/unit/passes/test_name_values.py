"""name_values: the names of values, by what the model calls them, what its blocks do, and what operators give."""

from __future__ import annotations

import keyword
from collections.abc import Mapping
from functools import lru_cache
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.api import interpret
from autopar.ir.names import RESERVED
from autopar.ir.nodes import COPY_OF
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.passes.capture import capture
from autopar.passes.differentiate import differentiate
from autopar.passes.name_values import name_values
from autopar.passes.outline import outline


def named(model: nn.Module, **batch: Tensor) -> Program:
    return name_values(differentiate(outline(capture(model, batch))))


def made(region: Region, forward: bool = True) -> list[str]:
    nodes = [node.name for node in region.graph.nodes if node.op == "call_function"]
    return [name for name in nodes if (name in region.forward_nodes) is forward]


def results_of(region: Region) -> list[Any]:
    output = next(node for node in region.graph.nodes if node.op == "output")
    return list(output.args[0])


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(4), nn.Linear(4, 8), nn.Linear(8, 4)

    def forward(self, hidden: Tensor, tables: tuple[Tensor, Tensor], *, scale: Tensor) -> Tensor:
        cos, sin = tables
        heads = self.up(self.norm(hidden) * cos + sin).view(-1, 2, 4).transpose(0, 1)
        mixed = (heads * heads.exp()).transpose(0, 1).reshape(-1, 8) * scale
        return hidden + self.down(functional.silu(mixed))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.enter, self.leave = nn.Linear(4, 4, bias=False), nn.Linear(4, 4)
        self.blocks = nn.ModuleList(Block() for _ in range(3))

    def forward(self, x: Tensor, weight: Tensor) -> Tensor:
        tables = (x.cos(), x.sin())  # which has no name of its own
        x = self.enter(x)
        for block in self.blocks:
            x = block(x, tables, scale=weight)
        return self.leave(x).square().sum()


@lru_cache(maxsize=1)
def program() -> Program:
    return named(Model(), x=torch.randn(6, 4), weight=torch.randn(8))


@pytest.mark.moderate
def test_inputs_of_a_block_are_the_parameters_of_its_forward() -> None:
    """Breaks if a block's inputs are called as its caller calls them, where its forward has a word for them."""
    assert [port.name for port in program().region("block").inputs] == ["hidden", "cos", "sin", "scale"]


@pytest.mark.moderate
def test_a_block_gives_what_the_next_one_takes() -> None:
    """Breaks if what a block returns has another name than the input of the block that reads it, or its reader's."""
    (result,) = program().region("block").outputs
    assert (result.name, result.word) == ("hidden_1", "hidden")
    assert program().region("epilogue").inputs[0].name == "hidden"


def test_what_lies_around_blocks_keeps_the_models_names() -> None:
    """Breaks if the caller's own values are called as the block calls them."""
    assert [port.name for port in program().region("prologue").outputs] == ["cos", "sin", "enter"]


def test_of_several_results_each_has_its_name() -> None:
    """Breaks if mean and rstd of a norm are numbers behind its name, or its first result is not the norm itself."""
    region = program().region("block")
    assert {"norm", "norm_mean", "norm_rstd"} <= {*made(region), *made(region, forward=False)}


def test_the_last_shape_has_the_name() -> None:
    """Breaks if steps on the way to a shape take the plain name, so that the value that is used counts up."""
    nodes = {node.name: str(node.target) for node in program().region("block").graph.nodes}
    shapes = [
        nodes[name] for name in ("heads", "heads_1", "heads_2", "heads_3")
    ]  # for the forward, and for the backward
    assert shapes == ["aten.transpose.int"] * 2 + ["aten.view.default"] * 2


def test_of_what_goes_on_the_first_has_the_plain_name() -> None:
    """Breaks if a product with a bias takes two numbers, so that the next of its name is `up_2`."""

    class Twice(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.one, self.other = nn.Sequential(), nn.Sequential()
            self.one.add_module("up", nn.Linear(4, 4))
            self.other.add_module("up", nn.Linear(4, 4))

        def forward(self, x: Tensor) -> Tensor:
            return self.other(self.one(x)).sum()

    (region,) = named(Twice(), x=torch.randn(2, 4)).regions
    products = [node.name for node in region.graph.nodes if str(node.target) == "autopar.linear.default"]
    assert products == ["up", "up_1"]


def test_what_the_backward_makes_again_is_known_to_be_that() -> None:
    """Breaks if a view that is made a second time does not say of which value of the forward it is a copy."""
    (region,) = [region for region in program().regions if region.name == "block"]
    copies = {n.name: n.meta[COPY_OF] for n in region.graph.nodes if n.op == "call_function" and COPY_OF in n.meta}
    assert copies and not set(copies) & region.forward_nodes
    assert set(copies.values()) <= region.forward_nodes


def test_gradients_are_those_of_something() -> None:
    """Breaks if gradients of parameters and inputs, and of values inside, are not called as what they belong to."""
    region = program().region("block")
    results = [node.name for node in results_of(region)]
    assert [name for name in results if name.startswith(("grad_up", "grad_down"))] == [
        "grad_up_weight", "grad_up_bias", "grad_down_weight", "grad_down_bias",
    ]  # fmt: skip
    assert results[-1] == "grad_hidden_1"
    assert {"grad_silu", "grad_mixed", "from_norm"} <= set(made(region, forward=False))


class Unlucky(nn.Module):
    """Its variables are called as the generated functions call things of their own, or as Python does."""

    def forward(self, comm: Tensor, g: Tensor) -> Tensor:
        p = comm + g
        saved = p * p
        sum = saved.relu()
        aten = sum * g
        return aten.sum()


def test_no_name_means_something_else() -> None:
    """Breaks if a variable of the model hides `comm`, `p`, a builtin or another value."""
    region = named(Unlucky(), comm=torch.randn(3), g=torch.randn(3)).region("model")
    names = [node.name for node in region.graph.nodes if node.op != "output"]
    assert len(names) == len(set(names))
    assert not any(name in RESERVED or keyword.iskeyword(name) or name in ("sum", "len") for name in names)
    assert {"p_1", "saved_1", "aten_1"} <= set(names)


class Twice(nn.Module):
    """Two values of a block are called alike; the next block has a word for the second."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.LayerNorm(4), nn.LayerNorm(4)

    def forward(self, hidden: Tensor) -> Tensor:
        norm = self.first(hidden) * 2
        norm = self.second(norm.tanh()) * 3
        return norm


class Row(nn.Module):
    def __init__(self, make: type[nn.Module]) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(make() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for block in self.blocks:
            x = block(x)
        return x.square().sum()


@pytest.mark.moderate
def test_a_result_gives_its_word_to_no_other_gradient() -> None:
    """Breaks if the gradient of an inner value is called as that of the result, for one word of the model's source."""
    region = named(Row(Twice), x=torch.randn(2, 4)).region("block")
    backward = made(region, forward=False)
    assert region.outputs[0].name == "hidden_1"
    assert "grad_norm" in backward
    assert [node.name for node in region.graph.nodes if node.op == "placeholder"][-1] == "grad_hidden"


@pytest.mark.moderate
def test_renaming_changes_names_alone() -> None:
    """Breaks if a region says one thing and its graph another: ports, phases, origins, or what is computed."""
    before = differentiate(outline(capture(model := Model().double(), batch := doubles())))
    after = name_values(before)
    for old, new in zip(before.regions, after.regions, strict=True):
        targets = [[str(node.target) for node in r.graph.nodes if node.op == "call_function"] for r in (old, new)]
        assert targets[0] == targets[1]
        names = {node.name for node in new.graph.nodes}
        assert new.forward_nodes <= names
        assert set(new.origins) <= names
        holders = [node.name for node in new.graph.nodes if node.op == "placeholder"]
        assert holders[len(new.slots) : len(new.slots) + len(new.inputs)] == [port.name for port in new.inputs]
    outputs, _ = interpret.run(after, interpret.state_of(model, after), batch)
    torch.testing.assert_close(outputs[0], model(**batch))


def doubles() -> Mapping[str, Tensor]:
    return {"x": torch.randn(6, 4, dtype=torch.float64), "weight": torch.randn(8, dtype=torch.float64)}


@pytest.mark.parametrize(
    ("kind", "wanted"),
    [(nn.Conv1d(4, 4, 1), "conv1d"), (nn.Softplus(), "softplus"), (nn.LeakyReLU(), "leaky_re_lu")],
)
def test_classes_become_words(kind: nn.Module, wanted: str) -> None:
    """Breaks if a module that has a number for a name gives a value a name that is not written as Python's are."""
    region = named(nn.Sequential(kind), input=torch.randn(4, 4)).region("model")
    assert wanted in made(region)


class Foreign(nn.Module):
    """Names that Python reads and torch.fx does not."""

    def __init__(self) -> None:
        super().__init__()
        self.größe = nn.Linear(4, 4)
        self.层 = nn.Linear(4, 4)

    def forward(self, größe: torch.Tensor) -> dict[str, torch.Tensor]:
        return {"loss": self.größe(getattr(self, "层")(größe)).pow(2).mean()}  # noqa: B009


@pytest.mark.moderate
def test_names_in_other_alphabets() -> None:
    """Breaks if a model whose names are not ASCII cannot be planned."""
    plan = autopar.plan(
        Foreign(),
        autopar.Mesh({"dp": 2}, hardware="cpu"),
        example_inputs={"größe": torch.randn(4, 4)},
        strategy="zero3",
    )
    plan.verify().raise_on_failure()
