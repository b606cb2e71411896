"""Masks made small again: without the dims that a model expanded, and as [B, T] where they are of keys alone."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx

from autopar.base.torch_compat import tracing
from autopar.ir.nodes import dtype_of, map_nodes, operand_of, shape_of
from autopar.passes.attention.build import Builder
from autopar.passes.attention.constants import Constant, Constants

aten = torch.ops.aten

_ELEMENTWISE = frozenset(
    f"aten.{name}"
    for name in (
        "__and__.Tensor", "__or__.Tensor", "where.ScalarOther", "where.ScalarSelf", "masked_fill.Tensor", "to.dtype",
        "to.device", "_to_copy.default",
    )
)  # fmt: skip
_AND = frozenset({"aten.__and__.Tensor", "aten.bitwise_and.Tensor", "aten.logical_and.default"})


class Shrink:
    """`shrink(node)` broadcasts to the node's shape and has its values; it has size 1 where the node is expanded."""

    def __init__(self, builder: Builder, constants: Constants) -> None:
        self._build, self._constants = builder, constants
        self._found: dict[fx.Node, fx.Node] = {}
        self._keys: dict[tuple[fx.Node, tuple[int, ...]], fx.Node | None] = {}

    def __call__(self, node: fx.Node) -> fx.Node:
        if node not in self._found:
            small = self._small(node)
            self._found[node] = small if math.prod(shape_of(small)) < math.prod(shape_of(node)) else node
        return self._found[node]

    def keys(self, node: fx.Node, shape: tuple[int, int, int, int]) -> fx.Node | None:
        """A bool mask of scores [B, H, S, T] as [B, T], where it depends on neither head nor query; else None."""
        batch, _, _, num_keys = shape
        small = self(node)
        own: list[int] = [*(1,) * (4 - len(shape_of(small))), *shape_of(small)]
        if len(own) > 4 or own[1:3] != [1, 1] or own[0] not in (1, batch) or own[3] != num_keys:
            return None
        if (small, shape) not in self._keys:
            self._keys[small, shape] = self._matrix(small, own[0], batch, num_keys)
        return self._keys[small, shape]

    def _matrix(self, node: fx.Node, rows: int, batch: int, num_keys: int) -> fx.Node:
        """[B, T] of what has `rows` times T elements: a tensor that the mask was made of, if one has that shape."""
        source = node
        while shape_of(source) != (rows, num_keys) and (inner := self._inside(source)) is not None:
            source = inner
        if shape_of(source) != (rows, num_keys):
            source = self._build.make(self._build.after([node]), aten.reshape.default, node, [rows, num_keys])
        if rows < batch:
            place = self._build.after([source])
            source = self._build.make(place, aten.expand.default, source, [batch, num_keys])
        return source

    def _inside(self, node: fx.Node) -> fx.Node | None:
        """What a node is, but for dims of size 1 and their places among the others."""
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node) or math.prod(shape_of(source)) != math.prod(shape_of(node)):
            return None
        if node.target in (aten.unsqueeze.default, aten.view.default, aten.reshape.default, aten.squeeze.dim):
            return source if _plain(shape_of(source)) == _plain(shape_of(node)) else None
        if node.target is aten.slice.Tensor and shape_of(source) == shape_of(node):
            return source
        return source if node.target is aten.index.Tensor and self._takes_all(node, source) else None

    def _takes_all(self, node: fx.Node, source: fx.Node) -> bool:
        """Whether x[:, i] takes all columns in order."""
        indices: Any = node.args[1]
        if len(shape_of(source)) != 2 or len(indices) != 2 or indices[0] is not None:
            return False
        found = self._constants(indices[1])
        if not isinstance(found, Constant) or found.value.dtype == torch.bool:
            return False
        return torch.equal(found.whole.flatten(), torch.arange(shape_of(source)[1]))

    def _small(self, node: fx.Node) -> fx.Node:
        if node.op != "call_function" or not isinstance(node.target, tracing.OpOverload):
            return node
        if node.target is aten.expand.default:
            return self(operand_of(node))
        if node.target is aten.unsqueeze.default:
            source = operand_of(node)
            small = self(source)
            if small is source or len(shape_of(small)) != len(shape_of(source)):
                return node
            return self._build.make(self._build.after([small]), aten.unsqueeze.default, small, node.args[1])
        if str(node.target) in _ELEMENTWISE or torch.Tag.pointwise in node.target.tags:
            return self._elementwise(node)
        return node

    def _elementwise(self, node: fx.Node) -> fx.Node:
        operands = node.all_input_nodes
        if str(node.target) in _AND and len(operands) == 2 and all(dtype_of(n) == torch.bool for n in operands):
            for one, other in (operands, reversed(operands)):
                found = self._constants(one)
                if found is not None and bool(found.value.all()):
                    return self(other)
        small = {operand: self(operand) for operand in operands}
        size = torch.broadcast_shapes(*(shape_of(operand) for operand in small.values()))
        if size.numel() == math.prod(shape_of(node)):
            return node
        args, kwargs = map_nodes((node.args, node.kwargs), lambda n: small[n])
        made = self._build.make(self._build.after([*small.values()]), node.target, *args, **kwargs)
        return made if dtype_of(made) == dtype_of(node) else node  # a tensor without dims counts less


def _plain(shape: tuple[int, ...]) -> list[int]:
    return [size for size in shape if size > 1]
