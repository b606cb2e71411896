"""backward_notes: of what each node of a recorded backward is the gradient, and which operator it comes from."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import NAME, TERM
from autopar.passes.differentiation.backward_notes import BackwardNotes

Made = Callable[..., Any]
aten = torch.ops.aten


def backward_of(forward: Callable[[Made, Tensor], Tensor], shape: tuple[int, ...] = (3,)) -> list[fx.Node]:
    """The operators of forward and backward. forward(made, x): `made(origin, name, function, *args)` calls a function
    for a node of the model.
    """

    def joint(x: Tensor, grad: Tensor) -> Tensor:
        notes = BackwardNotes()

        def made(origin: str, name: str, function: Callable[..., Any], *args: Any) -> Any:
            with tracing.tag_new_nodes(origin):
                result = function(*args)
            notes.made(result, origin, name)
            return result

        y = forward(made, x)
        (found,) = torch.autograd.grad(y, x, grad)
        return found

    x = torch.empty(shape, device="meta", requires_grad=True)
    module = tracing.make_fx(joint, {}, [x, torch.empty(shape, device="meta")])
    return [node for node in module.graph.nodes if node.op == "call_function"]


def one(nodes: list[fx.Node], target: object) -> fx.Node:
    (found,) = (node for node in nodes if node.target is target)
    return found


def test_what_an_operator_records_comes_from_its_line() -> None:
    """Breaks if the backward's nodes lose the module and line of the operator that they differentiate."""
    nodes = backward_of(lambda made, x: made("b (m.py:2)", "b", torch.tanh, made("a (m.py:1)", "a", torch.sigmoid, x)))
    assert one(nodes, aten.tanh_backward.default).meta[tracing.ORIGIN_KEY] == "b (m.py:2)"
    assert one(nodes, aten.sigmoid_backward.default).meta[tracing.ORIGIN_KEY] == "a (m.py:1)"


def test_a_gradient_is_named_by_its_value() -> None:
    """Breaks if what an operator's backward gives is named by that operator, not by the value whose gradient it is."""
    nodes = backward_of(lambda made, x: made("", "b", torch.tanh, made("", "a", torch.sigmoid, x)))
    assert one(nodes, aten.tanh_backward.default).meta[NAME] == "grad_a"


def test_the_forward_keeps_its_names() -> None:
    """Breaks if recorded nodes of the forward go without the model's names, or one is overwritten later."""
    nodes = backward_of(lambda made, x: made("", "again", torch.neg, made("", "a", torch.sigmoid, x)).neg())
    assert one(nodes, aten.sigmoid.default).meta[NAME] == "a"


def test_sums_of_gradients_belong_to_the_value() -> None:
    """Breaks if the sum of two gradients has no name and no line: no operator of the forward records it."""

    def forward(made: Made, x: Tensor) -> Tensor:
        a = made("a (m.py:1)", "a", torch.sigmoid, x)
        return made("s (m.py:3)", "s", torch.add, made("", "b", torch.tanh, a), made("", "c", torch.sin, a))

    total = one([n for n in backward_of(forward) if n.name != "add"], aten.add.Tensor)
    assert (total.meta[NAME], total.meta[tracing.ORIGIN_KEY]) == ("grad_a", "a (m.py:1)")


def test_terms_are_named_by_what_they_come_through() -> None:
    """Breaks if one of several terms of a gradient says nothing of where it comes from."""

    def forward(made: Made, x: Tensor) -> Tensor:
        return made("", "s", torch.add, made("", "b", torch.tanh, x), made("", "c", torch.relu, x))

    nodes = backward_of(forward)
    assert one(nodes, aten.tanh_backward.default).meta[TERM] == "from_b"
    assert one(nodes, aten.threshold_backward.default).meta[TERM] == "from_c"


@pytest.mark.parametrize("name", ["b", ""])
def test_an_operator_of_several_steps(name: str) -> None:
    """Breaks if terms that come through the inner steps of an operator go unnamed, or get a name that it has not."""
    nodes = backward_of(lambda made, x: made("m (m.py:1)", name, lambda value: torch.tanh(value).exp(), x))
    inner = one(nodes, aten.tanh_backward.default)
    assert inner.meta.get(TERM) == (f"from_{name}" if name else None)
    assert inner.meta[tracing.ORIGIN_KEY] == "m (m.py:1)"


def test_a_result_that_is_named_later() -> None:
    """Breaks if an operator of several results, each of which is named when it is picked, names no term."""

    def forward(made: Made, x: Tensor) -> Tensor:
        results = made("", "", torch.native_layer_norm, x, [3], None, None, 1e-5)
        return made("", "norm", lambda values: values[0], results)

    nodes = backward_of(forward)
    assert [node.meta[TERM] for node in nodes if TERM in node.meta] == ["from_norm"]
