"""Products of batches of matrices, and their operands as [B, H, rows, columns]."""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
from torch import fx

from autopar.ir.nodes import argument, shape_of
from autopar.passes.attention.build import Builder, Place
from autopar.passes.attention.masks import Unfit

aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Product:
    """left [*, S, K] times right [*, K, T] (of an einsum: whatever the dims say).

    left_dims, right_dims: how the operands of an einsum are permuted to [*, S, K] and [*, T, K], or, with values,
    [*, T, E]; None: as they are. result_dims: how the result [*, S, E] is permuted to the node's.
    """

    node: fx.Node
    left: fx.Node
    right: fx.Node
    left_dims: tuple[int, ...] | None = None
    right_dims: tuple[int, ...] | None = None
    result_dims: tuple[int, ...] | None = None
    is_einsum: bool = False


def read_product(node: fx.Node, left: fx.Node | None = None) -> Product | None:
    """A product of batches of matrices. left: of probabilities (these) with values, whose result may have its dims in
    any order; without it, of queries and keys, whose result has the keys last.
    """
    if node.target is aten.einsum.default:
        return _einsum(node, left)
    operands = node.args[1:3] if node.target is aten.baddbmm.default else node.args[:2]
    if node.target not in (aten.matmul.default, aten.bmm.default, aten.baddbmm.default):
        return None
    a, b = operands
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node) or (left is not None and a is not left) or a is b:
        return None
    ranks = {len(shape_of(a)), len(shape_of(b))}
    return Product(node, a, b) if ranks in ({3}, {4}) else None


def _einsum(node: fx.Node, left: fx.Node | None) -> Product | None:
    equation, operands = str(node.args[0]).replace(" ", ""), node.args[1]
    assert isinstance(operands, list | tuple)
    terms, arrow, result = equation.partition("->")
    names = terms.split(",")
    if not arrow or len(names) != 2 or "." in equation or len(operands) != 2:
        return None
    a, b = operands
    if not isinstance(a, fx.Node) or not isinstance(b, fx.Node):
        return None
    if any(len(set(own)) < len(own) for own in (*names, result)):
        return None
    return _of_values(node, (a, b), names, result, left) if left is not None else _of_keys(node, (a, b), names, result)


def _of_keys(node: fx.Node, operands: tuple[fx.Node, fx.Node], names: list[str], result: str) -> Product | None:
    """bshd, bthd -> bhst"""
    lead, query, key = result[:-2], result[-2:-1], result[-1:]
    for q, k in ((0, 1), (1, 0)):
        summed = (set(names[0]) & set(names[1])) - set(result)
        if len(summed) != 1 or query not in names[q] or key not in names[k]:
            continue
        last = summed.pop()
        if set(names[q]) != {*lead, query, last} or set(names[k]) != {*lead, key, last} or len(lead) not in (1, 2):
            return None
        order = [
            tuple(names[q].index(n) for n in (*lead, query, last)),
            tuple(names[k].index(n) for n in (*lead, key, last)),
        ]
        return Product(node, operands[q], operands[k], order[0], order[1], is_einsum=True)
    return None


def _of_values(
    node: fx.Node, operands: tuple[fx.Node, fx.Node], names: list[str], result: str, left: fx.Node
) -> Product | None:
    """bhst, bthd -> bshd"""
    p = 0 if operands[0] is left else 1
    if operands[p] is not left or operands[1 - p] is left:
        return None
    lead, query, key = names[p][:-2], names[p][-2:-1], names[p][-1:]
    last = set(names[1 - p]) - {*lead, key}
    if len(last) != 1 or len(lead) not in (1, 2) or query in names[1 - p]:
        return None
    size = last.pop()
    if set(names[1 - p]) != {*lead, key, size} or set(result) != {*lead, query, size}:
        return None
    order = tuple(names[1 - p].index(n) for n in (*lead, key, size))
    back = tuple((*lead, query, size).index(n) for n in result)
    if len(lead) == 1:  # the heads, of which there is one, in the second place
        back = tuple(dim + 1 if dim else 0 for dim in back)
    return Product(node, left, operands[1 - p], None, order, back, True)


def four_dims(
    build: Builder, place: Place, node: fx.Node, dims: tuple[int, ...] | None, batch: int, heads: int
) -> fx.Node:
    """An operand as [B, H, rows, columns]; B times H in one dim are taken apart, as a view undone where it was one."""
    if dims is not None and dims != tuple(range(len(dims))):
        node = build.make(place, aten.permute.default, node, list(dims))
    shape = shape_of(node)
    if len(shape) == 4:
        return node
    if len(shape) != 3 or shape[0] != batch * heads:
        raise Unfit(f"an operand of its products is {list(shape)}")
    wanted = (batch, heads, *shape[1:])
    source: object = node
    while isinstance(source, fx.Node) and source.target in (
        aten.view.default,
        aten.reshape.default,
        aten.expand.default,
    ):
        source = source.args[0]
        if shape_of(source) == wanted:
            assert isinstance(source, fx.Node)
            return source
        if math.prod(shape_of(source)) != math.prod(wanted):
            break
    return build.reshaped(place, node, wanted)


def untransposed(build: Builder, place: Place, node: fx.Node) -> fx.Node:
    """x[B, H, T, D] of a node that is x transposed, [B, H, D, T]; transposed back where it was made otherwise."""
    source = node.args[0] if node.args else None
    if isinstance(source, fx.Node) and len(shape_of(source)) == 4:
        if node.target is aten.mT.default:
            return source
        if node.target is aten.transpose.int and {argument(node, i, f"dim{i - 1}") % 4 for i in (1, 2)} == {2, 3}:
            return source
        if node.target is aten.permute.default and list(argument(node, 1, "dims")) == [0, 1, 3, 2]:
            return source
    return build.make(place, aten.transpose.int, node, 2, 3)
