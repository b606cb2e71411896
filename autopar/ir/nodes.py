"""What passes ask of a node of a graph: its arguments, and the tensor that it makes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.ir.tensor_type import TensorType

NAME = "autopar_name"
"""In a node's meta: what a person would call its value (`passes/outlining/`); passes on to what it becomes."""
TERM = "autopar_term"
"""The same of one term of a gradient, by what it comes through; `NAME` is better where there is one."""
FORM_OF = "form_of"
"""In a lowered node's meta: the name of the value that it is, moved to where its readers want it or not."""
COPY_OF = "autopar_copy_of"
"""In the meta of a value that the backward makes again: the name of the forward's."""
FORMS = {"slice": "part", "all_gather": "full", "all_reduce": "sum", "reduce_scatter": "sum", "all_to_all": "turned"}
"""How the name of what a move makes ends, behind that of the value."""
GIVEN = "autopar_given"
"""In a node's meta: what blocks that are given its value call it, by their paths."""
ROW = "autopar_row"
"""In the meta of a captured node: the number of the long row (`Folded`) whose last period in the graph it is of."""


def type_of(node: object) -> TensorType | None:
    """The shape and dtype of a node's value; None for what is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return TensorType.of(value) if isinstance(value, torch.Tensor) else None


def shape_of(node: object) -> tuple[int, ...]:
    """The shape of a node's value; () for what is no tensor."""
    type_ = type_of(node)
    return type_.shape if type_ else ()


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node's value, a tensor."""
    dtype: torch.dtype = node.meta["val"].dtype
    return dtype


def is_float(node: fx.Node) -> bool:
    """Whether a node's value is a tensor of floating point."""
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.is_floating_point()


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, given by position or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def operand_of(node: fx.Node, position: int = 0) -> fx.Node:
    """An argument of a call that is a node."""
    found = node.args[position]
    assert isinstance(found, fx.Node), (node, position)
    return found


def frozen(value: Any) -> Any:
    """Arguments as a key of a dict; 1, 1.0 and True are three."""
    if isinstance(value, list | tuple):
        return tuple(map(frozen, value))
    if isinstance(value, Mapping):
        return tuple(sorted((key, frozen(item)) for key, item in value.items()))
    return (type(value), value) if isinstance(value, int | float) else value


def map_nodes(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """`value` (arguments of a node) with every node in it replaced by what `function` gives."""
    mapper: Any = fx.map_arg
    return mapper(value, function)


def result_types(node: fx.Node) -> tuple[TensorType | None, ...]:
    """The types of a node's results (one for a plain tensor)."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(TensorType.of(v) if isinstance(v, torch.Tensor) else None for v in values)


def drop_dead(graph: fx.Graph) -> None:
    """Drop what nobody reads, in place. As `fx.Graph.eliminate_dead_code`, which checks all of the graph before, and of
    each node whether it may go: verification checks graphs between passes.
    """
    for node in reversed(graph.nodes):
        if not node.users and not node.is_impure():
            graph.erase_node(node)


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same node names, and the map from old nodes to new ones."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, mapping)
    if output is not None:
        new.output(output)
    return new, mapping


def format_target(node: fx.Node) -> str:
    """`aten.mul.Tensor`, `autopar.linear`: an operator as the printed program and the solver name it."""
    target = node.target
    return (
        str(target).removesuffix(".default") if not callable(target) or hasattr(target, "_schema") else target.__name__
    )
