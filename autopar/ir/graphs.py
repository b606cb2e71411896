"""Questions that several passes ask of a graph: who reads what, what parameters alone make, what is a view."""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import COPY_OF, map_nodes, result_types
from autopar.ir.op_call import OpCall, TensorSpec, name_of
from autopar.ir.region import Region


def source_of(node: fx.Node) -> tuple[fx.Node, int]:
    """The operator that computes a value, and which of its results it is (getitem picks one)."""
    if node.target is operator.getitem:
        return node.args[0], node.args[1]  # type: ignore[return-value]
    return node, 0


def placeholders(graph: fx.Graph, most: int | None = None) -> list[fx.Node]:
    """What a graph is given, in order; the first `most` of it, which takes no walk through all nodes."""
    return list(itertools.islice((node for node in graph.nodes if node.op == "placeholder"), most))


def operands_of(node: fx.Node) -> list[fx.Node]:
    """Tensor operands in order, each occurrence its own: positional, then keyword arguments, lists flattened."""
    found: list[fx.Node] = []

    def note(operand: fx.Node) -> fx.Node:
        found.append(operand)
        return operand

    map_nodes((node.args, node.kwargs), note)
    return found


def op_call(node: fx.Node) -> OpCall:
    """The operator instance of a node: its arguments with tensors replaced by their specs."""
    specs = {source: _spec(source) for source in node.all_input_nodes}
    args = map_nodes(node.args, lambda n: specs[n])
    kwargs = map_nodes(node.kwargs, lambda n: specs[n])
    results = tuple(TensorSpec(t.shape, t.dtype) if t else None for t in result_types(node))
    return OpCall(node.target, tuple(args), dict(kwargs), tuple(specs[n] for n in operands_of(node)), results)


def _spec(node: fx.Node) -> TensorSpec:
    value: Any = node.meta["val"]
    assert isinstance(value, torch.Tensor), f"{node.name} is not one tensor"
    return TensorSpec(tuple(int(size) for size in value.shape), value.dtype)


def _base_name(node: fx.Node) -> str:
    return node.target.name().split(".")[0] if isinstance(node.target, tracing.OpOverload) else ""


def reached(roots: Iterable[fx.Node], following: Callable[[fx.Node], Iterable[fx.Node]]) -> set[fx.Node]:
    """The nodes, and all that follows on them."""
    found: set[fx.Node] = set()
    stack = list(roots)
    while stack:
        node = stack.pop()
        if node not in found:
            found.add(node)
            stack += following(node)
    return found


def ancestors(roots: Iterable[fx.Node], stops: Callable[[fx.Node], bool] = lambda _: False) -> set[fx.Node]:
    """The nodes, and all that they are computed from; what `stops` is taken, and not what it is computed from."""
    return reached(roots, lambda node: () if stops(node) else node.all_input_nodes)


def users_of(roots: Iterable[fx.Node]) -> set[fx.Node]:
    """The nodes, and all that is computed from them."""
    return reached(roots, lambda node: node.users)


def parameter_only(region: Region, graph: fx.Graph) -> set[fx.Node]:
    """Slots, and nodes computed from slots alone."""
    holders = [node for node in graph.nodes if node.op == "placeholder"]
    found = set(holders[: len(region.slots)])
    for node in graph.nodes:
        if node.op == "call_function" and node.all_input_nodes and all(n in found for n in node.all_input_nodes):
            found.add(node)
    return found


class Recompute:
    """Copies of forward values that the backward makes again: `use` gives the copy, made before the node that first
    asks.
    """

    def __init__(self, graph: fx.Graph, forward: set[fx.Node], is_free: Callable[[fx.Node], bool]) -> None:
        self._graph, self._forward, self._is_free = graph, forward, is_free
        self.copies: dict[fx.Node, fx.Node] = {}

    def rewire(self, user: fx.Node) -> None:
        """Let a backward node read the copies."""
        user.args = map_nodes(user.args, lambda n: self.use(n, user))
        user.kwargs = map_nodes(user.kwargs, lambda n: self.use(n, user))

    def use(self, node: fx.Node, user: fx.Node) -> fx.Node:
        """What `user`, a backward node, reads in place of `node`."""
        if node.op != "call_function" or node not in self._forward:
            return node
        if node not in self.copies and self._is_free(node):
            args = map_nodes(node.args, lambda n: self.use(n, user))
            kwargs = map_nodes(node.kwargs, lambda n: self.use(n, user))
            with self._graph.inserting_before(user):
                copy = self._graph.create_node("call_function", node.target, args, kwargs, name=node.name)
            copy.meta = {COPY_OF: node.name, **node.meta}
            self.copies[node] = copy
        return self.copies.get(node, node)


_VIEWS = frozenset(
    f"aten::{name}"
    for name in [
        "view",
        "_unsafe_view",
        "expand",
        "unsqueeze",
        "squeeze",
        "transpose",
        "permute",
        "t",
        "select",
        "slice",
        "split",
        "unbind",
        "getitem",
    ]
)


def is_view(node: fx.Node) -> bool:
    """Whether a node's result shares the memory of its first operand."""
    return _base_name(node) in _VIEWS or "getitem" in name_of(node.target)


CACHES: Mapping[str, tuple[int, ...]] = {"rotary_write": (5, 6, 8, 9), "cache_write": (2, 3, 5, 6)}
"""The operands of what writes a token into caches that are caches: of keys, of values, and their scales."""


def caches_of(node: fx.Node) -> list[fx.Node]:
    """The caches that a node writes into, where it is one of autopar's operators that do."""
    places = CACHES.get(name_of(node.target).removeprefix("autopar.").removesuffix(".default"), ())
    given = [node.args[place] for place in places if place < len(node.args)]
    return [each for each in given if isinstance(each, fx.Node)]


def is_attention(node: fx.Node) -> bool:
    """Whether a node is attention, or its gradient."""
    return node.op == "call_function" and name_of(node.target).startswith("autopar.attention")
