"""New nodes in a captured graph, each with the shapes, the module and the source line of a node that it stands for."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import map_nodes, shape_of

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
        self._made: dict[object, fx.Node] = {}

    def make(self, place: Place, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        """`target(*args, **kwargs)`; its shapes are those it gives for the operands' shapes. What has been made in the
        place of the same node before serves again: the mask of all layers is made once.
        """
        key = (place.like, target, repr((args, kwargs)))  # a node's name is its own
        if key not in self._made:
            self._made[key] = self._new(place, target, args, kwargs)
        return self._made[key]

    def _new(self, place: Place, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
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
