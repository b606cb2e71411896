"""Which dims of a region's values are classes: the rows of a matrix of parameters, as of a head.

logits = linear(x, w[V, D])  →  dim 2;  flat = view(logits, [-1, V]), half = logits / 2  →  the same classes, in 1, in 2
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import shape_of
from autopar.ir.region import Region
from autopar.operators import OVER_CLASSES

aten = torch.ops.aten

_SAME_SHAPE = frozenset(
    {"aten::_to_copy", "aten::to", "aten::clone", "aten::contiguous", "aten::alias", "aten::detach"}
)
_VIEWS = frozenset({"aten::view", "aten::reshape", "aten::_unsafe_view", "aten::flatten"})


def over_classes(region: Region) -> frozenset[fx.Node]:
    """Functions of a row's classes that `operators.OVER_CLASSES` has in pieces: of classes that a linear of a parameter
    makes, outside of the repeated blocks, whose own softmaxes (of attention, of routers) are one operator.
    """
    if region.module:
        return frozenset()
    dims, found = _class_dims(region), set[fx.Node]()
    for node in region.graph.nodes:
        source = node.args[0] if node.args else None
        if node.target in OVER_CLASSES and isinstance(source, fx.Node) and source in dims:
            if _is_along(node, dims[source], len(shape_of(source))):
                found.add(node)
    return frozenset(found)


def _class_dims(region: Region) -> dict[fx.Node, int]:
    """Values that have classes -> the dim."""
    slots = {node for node, _ in zip(region.graph.nodes, region.slots, strict=False)}
    dims: dict[fx.Node, int] = {}
    for node in region.graph.nodes:
        if node.op != "call_function" or not isinstance(node.meta.get("val"), torch.Tensor):
            continue
        if node.target is aten.linear.default and node.args[1] in slots:
            dims[node] = len(shape_of(node)) - 1
            continue
        for source in node.all_input_nodes:
            dim = _dim_behind(node, source, dims[source]) if source in dims else None
            if dim is not None:
                dims[node] = dim
                break
    return dims


def _dim_behind(node: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Where a dim of an operand is in the result: moved, or in step with those of others."""
    if isinstance(node.target, tracing.OpOverload) and _is_by_element(node):
        before, after = shape_of(source), shape_of(node)
        moved = dim + len(after) - len(before)
        return moved if after[moved] == before[dim] else None
    return moved_dim(node, source, dim)


def _is_by_element(node: fx.Node) -> bool:
    """Whether a result has a row's classes where its operand has them; softmaxes do, too."""
    softmax = node.target in OVER_CLASSES and node.target not in (aten.gather.default, aten.logsumexp.default)
    return softmax or torch.Tag.pointwise in node.target.tags  # type: ignore[union-attr]


def _is_along(node: fx.Node, dim: int, ndim: int) -> bool:
    """Whether a node works along this dim alone, and, where it takes elements, takes one of each row."""
    arguments: list[Any] = list(node.args)
    given = arguments[1] if len(arguments) > 1 else node.kwargs.get("dim")
    along: list[Any] = list(given) if isinstance(given, (list, tuple)) else [given]
    if len(along) != 1 or not isinstance(along[0], int) or along[0] % ndim != dim:
        return False
    if node.target is not aten.gather.default:
        return True
    before, after = list(shape_of(arguments[0])), list(shape_of(node))
    return after == [*before[:dim], 1, *before[dim + 1 :]]


def moved_dim(user: fx.Node, source: fx.Node, dim: int) -> int | None:
    """Where a dim of `source` is in the result of `user`, which moves elements; None where that computes with it."""
    name = user.target.name().split(".")[0] if isinstance(user.target, tracing.OpOverload) else ""
    before, after = shape_of(source), shape_of(user)
    if any(node is not source for node in user.all_input_nodes):
        return None
    if name in _SAME_SHAPE and before == after:
        return dim
    if name in _VIEWS and dim == len(before) - 1 and after and after[-1] == before[-1]:
        return len(after) - 1
    if name == "aten::transpose":
        pair = [int(d) % len(before) for d in user.args[1:3]]  # type: ignore[arg-type]
        return pair[1 - pair.index(dim)] if dim in pair else dim
    if name == "aten::permute":
        return [int(d) % len(before) for d in user.args[1]].index(dim)  # type: ignore[union-attr, arg-type]
    if name == "aten::slice":
        along = int(user.args[1]) % len(before) if len(user.args) > 1 else 0  # type: ignore[arg-type]
        return None if along == dim else dim
    return None
