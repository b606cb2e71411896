"""Small sums over one axis that are due together travel as one message: latency counts there, not bytes.

    s = comm.all_reduce(loss, "dp")              sums = torch.stack([loss, count])
    n = comm.all_reduce(count, "dp")     →       s, n = comm.all_reduce(sums, "dp")
    mean = s / n                                 mean = s / n

Terms are due together where nothing but such sums reads the first's before those of the last are there, so nobody waits
longer. They are of one type and lie alike: what is stacked is added element by element, as it would be alone.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Hashable, Sequence
from typing import Any, cast

import torch
from torch import fx

from autopar.ir.sharding import Shard, Sharding, local_shape
from autopar.ir.tensor_type import TensorType

aten = torch.ops.aten

MAX_BYTES = 1 << 18
"""Of one tensor on one rank. Stacking goes over the bytes once more; of larger ones that is no longer free."""


def join_sums(graph: fx.Graph, sizes: Sequence[int]) -> None:
    """Join them in a lowered graph; sizes: of the mesh's axes. What is added says in `meta["joins"]` how many it stands
    for.
    """
    waiting = _Waiting(graph)
    for node in list(graph.nodes):
        if (kind := _kind(node, sizes)) is not None:
            waiting.add(node, kind)
        else:
            waiting.give(node)


class _Waiting:
    """Reductions that nothing has read yet, those that can be one message together.

    A sum over a second axis reads one over the first, and waits with it: a group has a depth, how many reductions its
    terms have come through that wait too, and reads from groups of less depth alone.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self._graph = graph
        self._groups: dict[tuple[int, Hashable], list[fx.Node]] = {}
        self._group_of: dict[fx.Node, tuple[int, Hashable]] = {}

    def add(self, node: fx.Node, kind: Hashable) -> None:
        """Let a reduction wait."""
        before = self._group_of.get(_terms(node))
        key = (0 if before is None else before[0] + 1, kind)
        self._groups.setdefault(key, []).append(node)
        self._group_of[node] = key

    def give(self, reader: fx.Node) -> None:
        """Have what a node reads, at the latest before it."""
        for source in reader.all_input_nodes:
            if source in self._group_of:
                self._close(self._group_of[source], reader)

    def _close(self, key: tuple[int, Hashable], reader: fx.Node) -> None:
        group = self._groups.pop(key)
        for node in group:
            before = self._group_of.get(_terms(node))
            if before is not None:
                self._close(before, reader)
        for node in group:
            del self._group_of[node]
        if len(group) > 1:
            _join(self._graph, group, reader)
        elif key[0]:
            reader.prepend(group[0])


def _kind(node: fx.Node, sizes: Sequence[int]) -> Hashable | None:
    """What reductions that can be one message have in common; None of anything else."""
    if node.op != "call_method" or node.target not in ("all_reduce", "reduce_scatter"):
        return None
    source = _terms(node)
    type_: TensorType = source.meta["type"]
    sharding: Sharding = source.meta["sharding"]
    if math.prod(local_shape(type_.shape, sharding, sizes)) * type_.dtype.itemsize > MAX_BYTES:
        return None
    return (node.target, node.args[2:], tuple(sorted(node.kwargs.items())), type_, sharding)


def _join(graph: fx.Graph, group: Sequence[fx.Node], reader: fx.Node) -> None:
    """One message in place of these, in front of what reads it."""
    last = group[-1]
    sources = [_terms(node) for node in group]
    with graph.inserting_before(reader):
        together = graph.create_node(
            "call_function", aten.stack.default, (sources,), name=f"{sources[0].name}_and_{sources[-1].name}"
        )
        where: list[Any] = list(last.args)
        where[1] = together
        if last.target == "reduce_scatter":
            where[3] += 1  # its dim: there is one in front now
        reduced = graph.create_node("call_method", str(last.target), tuple(where), last.kwargs)
        for node, terms in ((together, sources[0]), (reduced, last)):
            node.meta |= {
                "type": _stacked(terms.meta["type"], len(group)),
                "sharding": _moved(terms.meta["sharding"]),
                "origin": sources[-1].meta.get("origin", ""),
                "joins": len(group),
            }
        picks = [graph.call_function(operator.getitem, (reduced, number)) for number in range(len(group))]
    for node, pick in zip(group, picks, strict=True):
        name, pick.meta = node.name, dict(node.meta)
        node.replace_all_uses_with(pick)
        graph.erase_node(node)
        pick.name = name


def _terms(reduction: fx.Node) -> fx.Node:
    """What a reduction adds up."""
    return cast(fx.Node, reduction.args[1])


def _stacked(type_: TensorType, count: int) -> TensorType:
    return TensorType((count, *type_.shape), type_.dtype)


def _moved(sharding: Sharding) -> Sharding:
    """The same placements, with one dim in front."""
    return tuple(Shard(each.dim + 1, each.outer, each.zigzag) if isinstance(each, Shard) else each for each in sharding)
