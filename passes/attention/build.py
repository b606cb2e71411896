"""New nodes in a captured graph, each with the shapes, the module and the source line of a node that it stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir import TensorType, map_nodes

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Place:
    """Before which node new ones go, and which node's module and source line they get."""

    before: fx.Node
    like: fx.Node


class Builder:
    """Makes nodes. `origins` (node name -> module and source line) grows with the graph."""

    def __init__(self, graph: fx.Graph, origins: dict[str, str]) -> None:
        self.graph, self.origins = graph, origins

    def make(self, place: Place, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """`target(*args, **kwargs)`; its shapes are those it gives for the operands' shapes."""
        with self.graph.inserting_before(place.before):
            node = self.graph.call_function(target, args, kwargs)
        operands, options = map_nodes((args, kwargs), lambda n: n.meta["val"])
        node.meta = {**place.like.meta, "val": target(*operands, **options)}
        self.origins[node.name] = self.origins.get(place.like.name, "")
        return node

    def after(self, nodes: Iterable[fx.Node]) -> Place:
        """Right after the last of some nodes: where what is made of them can be read by all that can read them."""
        order = {node: number for number, node in enumerate(self.graph.nodes)}
        last = max(nodes, key=order.__getitem__)
        following = last.next
        while following.op == "placeholder":
            following = following.next
        return Place(following, last)

    def reshaped(self, place: Place, node: fx.Node, shape: tuple[int, ...]) -> fx.Node:
        """The node in another shape of as many elements; itself where it has that shape."""
        return node if shape_of(node) == shape else self.make(place, aten.reshape.default, node, list(shape))

    def rank_four(self, place: Place, node: fx.Node) -> fx.Node:
        """The node with dims of size 1 in front, four in all."""
        missing = 4 - len(shape_of(node))
        return self.reshaped(place, node, (1,) * missing + shape_of(node)) if missing else node


def shape_of(node: object) -> tuple[int, ...]:
    """The shape of a node's value; () for what is no tensor."""
    value = node.meta.get("val") if isinstance(node, fx.Node) else None
    return TensorType.of(value).shape if isinstance(value, torch.Tensor) else ()


def dtype_of(node: fx.Node) -> torch.dtype:
    """The dtype of a node's value."""
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
