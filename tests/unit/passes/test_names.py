"""names: what the variables of a generated function are called, and which values are written where they are used."""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from torch import fx

from autopar.ir.nodes import COPY_OF, FORM_OF, NAME
from autopar.ir.tensor_type import TensorType
from autopar.passes.emission.names import FunctionNames

aten = torch.ops.aten
ADD, MUL, RELU = aten.add.Tensor, aten.mul.Tensor, aten.relu.default


class Function:
    """A lowered graph, made node by node. name: of the node; stem: what it says that its value is."""

    def __init__(self) -> None:
        self.graph = fx.Graph()
        self.comm, self.p = self.given("comm"), self.given("p")

    def given(self, name: str, form_of: str = "") -> fx.Node:
        return self._noted(self.graph.placeholder(name), name, form_of or name)

    def run(self, target: Any, name: str, *args: Any, stem: str = "") -> fx.Node:
        node = self.graph.create_node("call_function", target, args, name=name)
        return self._noted(node, stem or name, name)

    def move(self, kind: str, name: str, source: fx.Node, form_of: str) -> fx.Node:
        node = self.graph.create_node("call_method", kind, (self.comm, source, "tp", 0), name=name)
        return self._noted(node, form_of, form_of)

    def _noted(self, node: fx.Node, stem: str, form_of: str) -> fx.Node:
        node.meta |= {"type": TensorType((4, 4), torch.float32), NAME: stem, FORM_OF: form_of}
        return node

    def lines(self, *returned: fx.Node, given: Mapping[str, str] | None = None, owned: Sequence[str] = ()) -> list[str]:
        """The statements, and what is returned."""
        self.graph.output(returned)
        names = FunctionNames(self.graph, given=given or {}, owned=owned)
        several = {node for node in names.nodes if any(user.target is operator.getitem for user in node.users)}
        lines: list[str] = []
        for node in names.nodes:
            if node in several:
                picks = ", ".join(names.name(user) for user in node.users)
                lines.append(f"{picks} = {names.statement(node)}")
            elif not names.is_inside(node) and node.target is not operator.getitem:
                lines.append(f"{names.name(node)} = {names.statement(node)}")
        return [*lines, ", ".join(map(names.expression, returned))]


@pytest.fixture
def f() -> Function:
    return Function()


def test_a_move_goes_on_under_the_name(f: Function) -> None:
    """Breaks if what an all-reduce makes of a value that nobody reads any more gets another name."""
    x = f.given("x")
    o = f.run(RELU, "o", x)
    assert f.lines(f.move("all_reduce", "o_sum", o, "o"))[1:] == ['o = comm.all_reduce(o, "tp", 0)', "o"]


def test_a_move_beside_its_value_has_one_suffix(f: Function) -> None:
    """Breaks if a gathered value takes the name of the part that is read later."""
    x = f.given("x")
    full = f.move("all_gather", "x_full", x, "x")
    assert f.lines(f.run(ADD, "y", full, x)) == ['x_full = comm.all_gather(x, "tp", 0)', "y = x_full + x", "y"]


def test_an_argument_may_be_moved_under_its_name(f: Function) -> None:
    """Breaks if an argument that is only read moved keeps a second name."""
    x = f.given("x")
    assert f.lines(f.move("slice", "x_part", x, "x")) == ['x = comm.slice(x, "tp", 0)', "x"]


def test_what_is_saved_keeps_its_name(f: Function) -> None:
    """Breaks if a value that the function returns is overwritten by what it becomes."""
    y = f.run(RELU, "y", f.given("x"))
    part = f.move("slice", "y_part", y, "y")
    assert f.lines(part, y) == ["y = torch.relu(x)", 'y_part = comm.slice(y, "tp", 0)', "y_part, y"]


def test_a_part_of_a_gathered_value_is_the_value_again(f: Function) -> None:
    """Breaks if suffixes pile up (`x_full_part`), or a part goes on under the name of the whole."""
    full = f.given("x_full", "x")
    used = f.run(RELU, "y", full)
    part = f.move("slice", "x_part", full, "x")
    assert f.lines(used, part)[1:] == ['x = comm.slice(x_full, "tp", 0)', "y, x"]


def test_a_part_of_a_gathered_value_beside_the_value(f: Function) -> None:
    """Breaks if a second form takes the name of a value that is still read."""
    x, full = f.given("x"), f.given("x_full", "x")
    part = f.move("slice", "x_part", full, "x")
    assert f.lines(f.run(ADD, "y", x, part))[0] == 'x_part = comm.slice(x_full, "tp", 0)'


def test_two_moves_of_a_kind_are_one_form(f: Function) -> None:
    """Breaks if a value that two axes slice goes by two names, or by the value's own before both have."""
    x = f.given("x")
    once = f.move("slice", "x_part", x, "x")
    twice = f.move("slice", "x_part_1", once, "x")
    assert [line.partition(" =")[0] for line in f.lines(f.run(ADD, "y", twice, x))] == ["x_part", "x_part", "y", "y"]


def test_a_value_of_the_same_name_goes_on(f: Function) -> None:
    """Breaks if `x_1 = …; x_2 = x_1 + …` counts up where nobody reads the first again."""
    grad = f.given("grad")
    one = f.run(RELU, "x_1", grad, stem="x")
    two = f.run(ADD, "x_2", one, grad, stem="x")
    assert f.lines(two) == ["x_1 = torch.relu(grad)", "x_1 = x_1 + grad", "x_1"]


def test_an_argument_is_not_overwritten_by_another_value(f: Function) -> None:
    """Breaks if the caller's value goes on as another one: only what the function owns does."""
    x = f.given("x")
    y = f.run(RELU, "x_1", x, stem="x")
    assert f.lines(y) == ["x_1 = torch.relu(x)", "x_1"]


def test_what_the_function_owns_goes_on(f: Function) -> None:
    """Breaks if a saved value, read for the last time, gets a second name for what it becomes."""
    y = f.run(RELU, "x_1", f.given("x"), stem="x")
    assert f.lines(y, owned=["x"]) == ["x = torch.relu(x)", "x"]


def test_joint_sums_are_one_statement(f: Function) -> None:
    """Breaks if sums that are one message need names for the message, or new ones for what is added."""
    x = f.given("x")
    terms = [f.run(RELU, "loss", x), f.run(aten.sqrt.default, "count", x)]
    stack = f.run(aten.stack.default, "loss_and_count", terms)
    total = f.move("all_reduce", "sums", stack, "loss_and_count")
    picks = [f.run(operator.getitem, f"{name}_sum", total, i) for i, name in enumerate(("loss", "count"))]
    for node in (stack, total):
        node.meta["joins"] = 2
    for pick, name in zip(picks, ("loss", "count"), strict=True):
        pick.meta |= {NAME: name, FORM_OF: name}
    assert f.lines(*picks)[-2:] == [
        'loss, count = comm.all_reduce(torch.stack([loss, count]), "tp", 0)',
        "loss, count",
    ]


def test_a_view_that_one_operator_reads_is_written_inside(f: Function) -> None:
    """Breaks if views get lines of their own, or one that several read is written twice."""
    x = f.given("x")
    view = f.run(aten.transpose.int, "t", x, 0, 1)
    shared = f.run(aten.transpose.int, "s", x, 1, 0)
    y = f.run(MUL, "y", f.run(ADD, "a", view, shared), shared)
    assert f.lines(y) == ["s = x.transpose(1, 0)", "a = x.transpose(0, 1) + s", "y = a * s", "y"]


def test_of_two_shapes_the_last_will_do(f: Function) -> None:
    """Breaks if `x.reshape(16).reshape(2, 8)` is written, which is `x.reshape(2, 8)`."""
    once = f.run(aten.view.default, "v", f.given("x"), [16])
    assert f.lines(f.run(aten.view.default, "w", once, [2, 8]))[0] == "w = x.reshape(2, 8)"


def test_lines_that_are_too_long_are_broken(f: Function) -> None:
    """Breaks if views inside of a line make it longer than people read."""
    views = [f.run(aten.transpose.int, f"v{i}", f.given(f"a_value_with_quite_a_long_name_{i}"), 0, 1) for i in range(2)]
    lines = f.lines(f.run(ADD, "total_of_a_long_name", *views))
    assert [line.partition(" =")[0] for line in lines] == ["v0", "total_of_a_long_name", "total_of_a_long_name"]
    assert all(len(line) < 118 for line in lines)


@pytest.mark.parametrize(
    ("name", "wanted"), [("sum", "sum_1"), ("lambda", "lambda_1"), ("saved", "saved_1"), ("x", "x_1")]
)
def test_no_name_is_taken_from_another(f: Function, name: str, wanted: str) -> None:
    """Breaks if a variable hides a builtin, a keyword, something of the generated functions, or another value."""
    x = f.given("x")
    node = f.run(RELU, "value", x, stem="other")
    node.name = name
    assert f.lines(f.run(ADD, "y", node, x))[0] == f"{wanted} = torch.relu(x)"


def test_names_that_others_have_given(f: Function) -> None:
    """Breaks if the backward calls a saved value something else than the forward that saved it."""
    x = f.given("x")
    assert f.lines(f.run(RELU, "y", x), given={"x": "mine"}) == ["y = torch.relu(mine)", "y"]


def test_what_is_made_again_is_called_as_it_was(f: Function) -> None:
    """Breaks if the backward calls a value of the forward by another name where that is free, or two values by one."""
    x = f.given("x")
    again = f.run(RELU, "query_2", x, stem="query")
    again.meta[COPY_OF] = "query"
    assert f.lines(again, again) == ["query = torch.relu(x)", "query, query"]


def test_what_is_made_again_leaves_a_taken_name(f: Function) -> None:
    """Breaks if a value that is made again hides one that was kept under the same name."""
    x, kept = f.given("x"), f.given("query")
    again = f.run(RELU, "query_2", x, stem="other")
    again.meta[COPY_OF] = "query"
    assert f.lines(again, kept) == ["query_2 = torch.relu(x)", "query_2, query"]


@pytest.mark.parametrize(
    ("dims", "shape", "wanted"),
    [([0], (3,), "x.sum(0)"), ([0, 1], (), "x.sum([0, 1])"), ([0], (1, 3), "x.sum([0], keepdim=True).reshape(1, 3)")],
)
def test_a_sum_that_loses_its_dims_is_a_plain_sum(
    f: Function, dims: list[int], shape: tuple[int, ...], wanted: str
) -> None:
    """Breaks if a bias's gradient is summed in two steps, or a view that does more than drop dims is lost."""
    x = f.given("x")
    x.meta["type"] = TensorType((2, 3), torch.float32)
    total = f.run(aten.sum.dim_IntList, "total", x, dims, True)
    total.meta["type"] = TensorType((1, 1) if len(dims) == 2 else (1, 3), torch.float32)
    row = f.run(aten.reshape.default, "row", total, list(shape))
    row.meta["type"] = TensorType(shape, torch.float32)
    assert f.lines(row) == [f"row = {wanted}", "row"]
