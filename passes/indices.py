"""Indices that say which rows of a batch they take: written so that the batch dim can be split."""

from __future__ import annotations

import math
import operator
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing as compat
from autopar.ir.nodes import drop_dead, map_nodes


def simplify_batched_index(graph: fx.Graph, origins: dict[str, str]) -> None:
    """x[arange(B)[:, None], j] is x[:, j], and x[arange(B), j_B] takes one element of each row: said so, the batch dim
    can be split like any other.

    Mask code and pooling index every row by its own number; as written, each rank would need all rows.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.index.Tensor or len(node.args[1]) < 2:
            continue
        source, (rows, *others) = node.args
        if rows is None or any(other is None for other in others):
            continue
        count = source.meta["val"].shape[0]
        shape = tuple(rows.meta["val"].shape)
        if math.prod(shape) != count or shape[0] != count or not _is_row_number(rows, count):
            continue
        build = Builder(graph, node, origins)
        new = _shared_columns(build, source, others) or _one_a_row(build, source, others)
        if new is not None:
            node.replace_all_uses_with(new)
            graph.erase_node(node)
    drop_dead(graph)


def simplify_masked_write(graph: fx.Graph, origins: dict[str, str]) -> None:
    """x[mask] = v, where v is the same at all places, is where(mask, v, x): its gradient needs no size by value."""
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.index_put.default or len(node.args) > 3 or node.kwargs:
            continue
        x, (mask, *others), value = node.args
        if others or mask is None or mask.meta["val"].dtype != torch.bool:
            continue
        rest = x.meta["val"].ndim - mask.meta["val"].ndim
        shape = tuple(value.meta["val"].shape)
        if math.prod(shape[: len(shape) - rest] if len(shape) > rest else ()) != 1:
            continue
        build = Builder(graph, node, origins)
        place = build(torch.ops.aten.view.default, mask, [*mask.meta["val"].shape, *(1,) * rest])
        if len(shape) > rest:
            value = build(torch.ops.aten.view.default, value, list(shape[len(shape) - rest :]))
        node.replace_all_uses_with(build(torch.ops.aten.where.self, place, value, x))
        graph.erase_node(node)


_SPLITS = (torch.ops.aten.split.Tensor, torch.ops.aten.split_with_sizes.default)
_VIEWS = (torch.ops.aten.view.default, torch.ops.aten.reshape.default, torch.ops.aten.flatten.using_ints)


def simplify_pieces(graph: fx.Graph, origins: dict[str, str]) -> None:
    """cat([each.reshape(-1, D) for each in x.split(sizes)]) is x.reshape(-1, D), which splits by rows: features of
    images are made lists, one for each row, and are put together again.
    """
    for node in list(graph.nodes):
        if node.target is not torch.ops.aten.cat.default or (node.args[1] if len(node.args) > 1 else 0) != 0:
            continue
        parts = [each.args[0] if each.target in _VIEWS else each for each in node.args[0]]
        source = parts[0].args[0] if parts[0].target is operator.getitem else None
        if not isinstance(source, fx.Node) or source.target not in _SPLITS or not _is_along_rows(source):
            continue
        in_order = [each.args == (source, number) for number, each in enumerate(parts)]
        if not all(in_order) or len(parts) != len(source.meta["val"]):
            continue
        rest = tuple(node.meta["val"].shape[1:])
        if all(_keeps_last(piece, part, rest) for piece, part in zip(node.args[0], parts, strict=True)):
            shape = list(node.meta["val"].shape)
            build = Builder(graph, node, origins)
            node.replace_all_uses_with(build(torch.ops.aten.reshape.default, source.args[0], shape))
            graph.erase_node(node)
    drop_dead(graph)


def _is_along_rows(split: fx.Node) -> bool:
    dim = split.args[2] if len(split.args) > 2 else split.kwargs.get("dim", 0)
    return isinstance(dim, int) and dim == 0


def _keeps_last(piece: fx.Node, part: fx.Node, rest: tuple[int, ...]) -> bool:
    """Whether a piece has the elements of a part in their order: rows of the shape `rest`, which the part's dims end
    with.
    """
    shape = tuple(part.meta["val"].shape)
    return tuple(piece.meta["val"].shape[1:]) == rest and shape[len(shape) - len(rest) :] == rest


@dataclass(frozen=True, slots=True)
class Builder:
    """Makes nodes in front of `node`, with its origin."""

    graph: fx.Graph
    node: fx.Node
    origins: dict[str, str]

    def __call__(self, target: Any, *args: Any, **kwargs: Any) -> fx.Node:
        with self.graph.inserting_before(self.node):
            made = self.graph.call_function(target, args, kwargs)
        values = map_nodes(args, lambda n: n.meta["val"])
        made.meta = {**self.node.meta, "val": target(*values, **kwargs)}
        self.origins[made.name] = self.origins.get(self.node.name, "")
        return made


def _shared_columns(build: Builder, source: fx.Node, others: list[fx.Node]) -> fx.Node | None:
    """x[rows[:, None], j[None, …]] where every row takes the same j."""
    rank = len(build.node.meta["val"].shape)
    shapes = [tuple(other.meta["val"].shape) for other in others]
    if any(len(shape) != rank or shape[0] != 1 for shape in shapes):
        return None
    squeezed = [build(torch.ops.aten.squeeze.dim, other, 0) for other in others]
    return build(torch.ops.aten.index.Tensor, source, [None, *squeezed])


def _one_a_row(build: Builder, source: fx.Node, others: list[fx.Node]) -> fx.Node | None:
    """x[rows, j] where row b takes j[b]: a gather along the second dim."""
    shape = tuple(source.meta["val"].shape)
    column = others[0].meta["val"]
    if len(others) != 1 or tuple(column.shape) != shape[:1] or column.dtype not in (torch.int32, torch.int64):
        return None
    index = others[0]
    if index.target is not torch.ops.aten.argmax.default:  # gather takes no index that counts from the end
        counted = build(torch.ops.aten.add.Tensor, index, shape[1])
        index = build(torch.ops.aten.where.self, build(torch.ops.aten.lt.Scalar, index, 0), counted, index)
    if column.dtype != torch.int64:
        index = build(torch.ops.aten.to.dtype, index, torch.int64)
    index = build(torch.ops.aten.view.default, index, [shape[0], *(1,) * (len(shape) - 1)])
    index = build(torch.ops.aten.expand.default, index, [shape[0], 1, *shape[2:]])
    return build(torch.ops.aten.squeeze.dim, build(torch.ops.aten.gather.default, source, 1, index), 1)


def _is_row_number(node: fx.Node, count: int) -> bool:
    """Whether a constant value counts 0, 1, … `count` - 1."""
    value = constant(node)
    return value is not None and torch.equal(value.flatten(), torch.arange(count))


def constant(node: fx.Node) -> torch.Tensor | None:
    """The value of a node that depends on no input and no parameter; None for others."""
    if node.op != "call_function" or not isinstance(node.target, compat.OpOverload):
        return None
    operands = {source: constant(source) for source in node.all_input_nodes}
    if any(value is None for value in operands.values()):
        return None
    args, kwargs = map_nodes((node.args, node.kwargs), lambda n: operands[n])
    kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
    return node.target(*args, **kwargs)
