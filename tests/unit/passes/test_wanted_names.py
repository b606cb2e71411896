"""wanted_names: what the model's source calls its values, read off nodes as the tracer describes them."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import fx

from autopar.ir.nodes import NAME
from autopar.passes.outlining.wanted_names import library_modules, name_nodes

aten = torch.ops.aten
ADD, MUL, VIEW = aten.add.Tensor, aten.mul.Tensor, aten.view.default
MODEL, OWN, TORCH = "", "models.Layer", "torch.nn.modules.linear.Linear"


class Source:
    """A graph that is written line by line. modules: of each node, (path, class) from the outside in."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.x = self.graph.placeholder("x")
        self.x.meta["val"] = torch.empty(2, 2, device="meta")

    def run(
        self, target: Any, line: str | Sequence[str], *modules: tuple[str, str], of: fx.Node | None = None
    ) -> fx.Node:
        """A node of a statement; several lines: the calls down to it, with `# function` where that is no `forward`."""
        source = of or self.x
        node = self.graph.call_function(target, (source, source) if target in (ADD, MUL) else (source, [2, 2]))
        lines = [line] if isinstance(line, str) else line
        calls = [text.partition("  # ") for text in lines]
        frames = [f'  File "/m.py", line {len(text)}, in {of or "forward"}\n    {text}\n' for text, _, of in calls]
        stack = {str(number): module for number, module in enumerate([(MODEL, "models.Model"), *modules])}
        node.meta = {"val": self.x.meta["val"], "stack_trace": "".join(frames), "nn_module_stack": stack}
        return node

    def names(self, *returned: fx.Node, updates: Sequence[fx.Node] = ()) -> dict[fx.Node, str]:
        self.graph.output(returned)
        name_nodes(self.graph.nodes, updates)
        return {node: node.meta[NAME] for node in self.graph.nodes if NAME in node.meta}


@pytest.mark.parametrize(
    ("line", "wanted"),
    [
        ("total = x + x", "total"),
        ("self.total = x + x", "total"),
        ("total: Tensor = x + x", "total"),
        ("dim=1, out=x + x", "add"),
        ("total += x", "total"),
        ("_ = x + x", "add"),
        ("if total == x + x:", "add"),
        ("return x + x", "add"),
    ],
)
def test_the_variable_of_a_statement(line: str, wanted: str) -> None:
    """Breaks if an assignment is not recognized, or a keyword or a comparison is taken for one."""
    source = Source()
    node = source.run(ADD, line)
    assert source.names(node) == {node: wanted}


def test_what_a_statement_makes_on_its_way_is_not_its_variable() -> None:
    """Breaks if the variable names a value that nothing outside of the statement reads."""
    source = Source()
    product = source.run(MUL, "heads = (x * x).view(2, 2)")
    view = source.run(VIEW, "heads = (x * x).view(2, 2)", of=product)
    assert source.names(view) == {product: "mul", view: "heads"}


def test_several_variables_name_the_results_in_order() -> None:
    """Breaks if `a, b = …` gives both values one name, or the wrong ones."""
    source = Source()
    one, other = (source.run(target, "cos, sin = x + x, x * x") for target in (ADD, MUL))
    assert source.names(one, other) == {one: "cos", other: "sin"}


def test_a_tuple_is_not_what_is_in_it() -> None:
    """Breaks if the variable of a tuple names one of its elements."""
    source = Source()
    one, other = (source.run(target, "tables = (x + x, x * x)") for target in (ADD, MUL))
    assert source.names(one, other) == {one: "add", other: "mul"}


def test_statements_of_a_function_that_is_called_are_its_own() -> None:
    """Breaks if the caller's variable is given to what the function that it calls makes for itself."""
    source = Source()
    inner = source.run(MUL, ["y = self.layer(x)", "scaled = x * x"])
    outer = source.run(ADD, ["y = self.layer(x)", "return scaled + scaled"], of=inner)
    assert source.names(outer) == {inner: "scaled", outer: "add"}


def test_a_function_that_is_no_module_has_words_of_its_own() -> None:
    """Breaks if the statements of a plain function go unread, or its result is not called as its caller calls it."""
    source = Source()
    inner = source.run(MUL, ["y = scaled(x)", "product = x * x  # scaled"])
    outer = source.run(ADD, ["y = scaled(x)", "result = product + x  # scaled"], of=inner)
    assert source.names(outer) == {inner: "product", outer: "y"}


def test_of_several_variables_for_one_value_the_functions_own_is_it() -> None:
    """Breaks if the first of several variables is taken for a value of which the function that made it says more."""
    source = Source()
    mask = source.run(MUL, ["early, mask, length = prepared(x)", "mask = x * x  # prepared"])
    assert source.names(mask) == {mask: "mask"}


def test_what_a_module_only_brings_into_shape_is_called_as_the_module() -> None:
    """Breaks if a product is called `x`, of which the module that returns it makes a view."""
    source = Source()
    product = source.run(MUL, "x = x * x", ("block.proj", OWN))
    view = source.run(VIEW, "x = x.view(2, 2)", ("block.proj", OWN), of=product)
    assert source.names(view) == {product: "proj", view: "proj"}


def test_a_module_names_what_it_returns() -> None:
    """Breaks if a projection is called by the variable, or by its operator, in place of the module."""
    source = Source()
    node = source.run(ADD, "query = self.q_proj(x)", ("layer.q_proj", TORCH))
    assert source.names(node) == {node: "q_proj"}


@pytest.mark.parametrize(("kind", "wanted"), [(TORCH, "Linear"), (OWN, "hidden")])
def test_an_element_of_a_list_has_no_name_of_its_own(kind: str, wanted: str) -> None:
    """Breaks if a value is called `3`: torch's own modules go by their class, others by the variable first."""
    source = Source()
    node = source.run(ADD, "hidden = self.layers[3](x)", ("layers.3", kind))
    assert source.names(node) == {node: wanted}


def test_a_module_with_parts_names_only_what_it_returns() -> None:
    """Breaks if what a module hands to a part of itself, in the statement that returns, is called as the module."""
    source = Source()
    line = "return self.down(x + x) * x"
    handed = source.run(ADD, line, ("mlp", OWN))
    down = source.run(ADD, line, ("mlp", OWN), ("mlp.down", TORCH), of=handed)
    made = source.run(MUL, line, ("mlp", OWN), of=down)
    assert source.names(made) == {handed: "add", down: "down", made: "mlp"}


def test_a_module_that_is_left_in_several_ways_names_none() -> None:
    """Breaks if one of two results of a module is called as the module itself."""
    source = Source()
    one, other = (source.run(target, "return x + x, x * x", ("norm", TORCH)) for target in (ADD, MUL))
    assert source.names(one, other) == {one: "add", other: "mul"}


def test_views_and_updates_have_no_name() -> None:
    """Breaks if a view without a variable is named by its operator, or what replaces a buffer as a module's result."""
    source = Source()
    view = source.run(VIEW, "return x.view(2, 2)")
    update = source.run(ADD, "self.count += 1", ("norm", TORCH))
    assert source.names(view, update, updates=[update]) == {}


def test_library_modules() -> None:
    """Breaks if the model's own modules count as torch's, or the number of a call stays in a path."""
    source = Source()
    node = source.run(ADD, "y = x + x", ("mlp", OWN), ("mlp.up@1", TORCH))
    assert library_modules([node]) == {"mlp.up"}
