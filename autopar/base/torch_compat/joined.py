"""What a node of a trace computes, where it reads a part of tensors that were joined: that of the one it lies in.

    packed = torch.cat([keys, gates, mask.to(keys.dtype)[..., None]], -1)
    keys, gates, mask = packed.split([8, 8, 1], -1)

The last part is made of the mask alone, whatever the others are made of.
"""

from __future__ import annotations

import operator
from collections.abc import Callable
from typing import Any, TypeGuard

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.base.torch_compat.handed_on import handed_in
from autopar.base.torch_compat.written import writes_into

aten = torch.ops.aten

Computed = tuple[Callable[..., Any], tuple[Any, ...], dict[str, Any]]
"""A function, its arguments in order, and those by name."""
_SPLITS = (aten.split.Tensor, aten.split.sizes, aten.split_with_sizes.default, aten.chunk.default)


def computed_by(node: fx.Node) -> Computed:
    """What gives the value of a node: what it calls, the same part of the one tensor that it is a part of, or what a
    block is handed.
    """
    if (source := handed_in(node)) is not None:
        return aten.alias.default, (source,), {}
    return _part_of_joined(node) or (node.target, node.args, dict(node.kwargs))  # type: ignore[return-value]


def nodes_in(computed: Computed) -> list[fx.Node]:
    """The nodes among arguments."""
    found: list[fx.Node] = []
    map_arg(computed[1:], found.append)
    return found


def _part_of_joined(node: fx.Node) -> Computed | None:
    """None of what is no part, lies in several, was cast, or of tensors that anything is written into."""
    part = _part(node)
    if part is None:
        return None
    joined, dim, start, length = part
    args: tuple[Any, ...] = joined.args
    named: dict[str, Any] = joined.kwargs
    parts = args[0] if args else named["tensors"]
    along = int(named.get("dim", args[1] if len(args) > 1 else 0)) % _value(joined).dim()
    if dim != along:
        return None
    for each in parts:
        size = _size(each, dim)
        if size is None:
            return None
        if start < size:
            same = _value(each).dtype == _value(joined).dtype
            if start + length > size or not same or writes_into((joined, each), node.graph):
                return None
            if node.target is aten.select.int:
                return aten.select.int, (each, dim, start), {}
            return aten.narrow.default, (each, dim, start, length), {}
        start -= size
    return None


def _part(node: fx.Node) -> tuple[fx.Node, int, int, int] | None:
    """The joined tensors that a node reads a part of; the dim, where the part begins, and how long it is."""
    args: tuple[Any, ...] = node.args
    split = args[0] if node.target is operator.getitem else None
    if isinstance(split, fx.Node) and split.target in _SPLITS and _is_joined(split.args[0]):
        joined, place = split.args[0], args[1]
        dim: Any = split.kwargs.get("dim", split.args[2] if len(split.args) > 2 else 0)
        values = split.meta.get("val")
        if not isinstance(dim, int) or not isinstance(place, int) or not isinstance(values, list | tuple):
            return None
        dim %= _value(joined).dim()
        sizes = [each.shape[dim] for each in values]
        if not all(isinstance(size, int) for size in sizes):
            return None
        place %= len(sizes)
        return joined, dim, sum(sizes[:place]), sizes[place]
    if node.target not in (aten.select.int, aten.slice.Tensor) or not _is_joined(args[0]):
        return None
    joined, *numbers = args
    if not all(isinstance(each, int | None) for each in numbers) or node.kwargs or not numbers:
        return None
    dim = int(numbers[0] or 0) % _value(joined).dim()
    size = _size(joined, dim)
    if size is None:
        return None
    if node.target is aten.select.int:
        return joined, dim, int(numbers[1]) % size, 1
    start, end, step = slice(*numbers[1:]).indices(size)
    return (joined, dim, start, end - start) if step == 1 and end > start else None


def _is_joined(source: Any) -> TypeGuard[fx.Node]:
    return isinstance(source, fx.Node) and source.target is aten.cat.default and _value(source) is not None


def _value(node: fx.Node) -> Any:
    return node.meta.get("val")


def _size(node: Any, dim: int) -> int | None:
    """Of a tensor along a dim; None where the trace does not know it, or an empty tensor has no such dim."""
    value = _value(node) if isinstance(node, fx.Node) else None
    if not isinstance(value, torch.Tensor) or value.dim() <= dim or not isinstance(value.shape[dim], int):
        return None
    return int(value.shape[dim])
