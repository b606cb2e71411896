"""`as_strided`, which reads memory as it lies, as views of what lies there: a program's tensors may lie otherwise.

x: [B, 4, 6, D], in order; as_strided(x, [B, 7, 6, D], [24·D, 3·D, D, 1])   (windows that overlap by half)
→  x.reshape(B, 24·D).unfold(-1, 6·D, 3·D).reshape(B, 7, 6, D)
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.passes.indices import Builder

_aten = torch.ops.aten


def simplify_strided(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Every `as_strided` becomes what it gives of its tensor, in whatever order that lies.

    Raises:
        AutoparError: it reads beside the tensor, in gaps of it or in another of which it is a part, or may do so.
    """
    for node in list(graph.nodes):
        if node.target is _aten.as_strided.default:
            build = Builder(graph, node, origins)
            node.replace_all_uses_with(_read(build, node))
            graph.erase_node(node)


def _read(build: Builder, node: Any) -> fx.Node:
    source, size, strides = node.args[:3]
    given = node.args[3] if len(node.args) > 3 else node.kwargs.get("storage_offset")
    offset, x = given or 0, source.meta["val"]
    shape, own = tuple(x.shape), tuple(x.stride())
    order = sorted((dim for dim, length in enumerate(shape) if length > 1), key=lambda dim: -own[dim])
    read = [(length, step) for length, step in zip(size, strides, strict=True) if length > 1]
    alone = given is None or not _may_lie_in_another(source)
    for kept in (_kept(order, shape, own, read), {}) if alone and math.prod(size) else ():
        group = [dim for dim in order if dim not in kept.values()]
        unit, row = own[group[-1]] if group else 1, math.prod(shape[dim] for dim in group)
        rest = [(length, step) for place, (length, step) in enumerate(read) if place not in kept]
        whole = all(step % unit == 0 for _, step in rest) and offset % unit == 0
        if whole and _follow(group, shape, own) and offset + sum((n - 1) * step for n, step in rest) < row * unit:
            break
    else:
        raise AutoparError(
            "as_strided reads memory that may lie beside what it is given",
            where=build.origins.get(node.name) or None,
            values=f"shape {shape}, strides {own}; it reads {tuple(size)} by {tuple(strides)}",
            remedy="use unfold, or indices, which say the same of a tensor however it lies",
        )
    others = [dim for dim in range(len(shape)) if dim not in order]
    free = [shape[dim] for dim in kept.values()]
    flat = build(_aten.permute.default, source, [*kept.values(), *group, *others])
    flat = build(_aten.reshape.default, flat, [*free, row])
    flat = _windows(build, flat, [(length, step // unit) for length, step in rest], offset // unit)
    flat = build(_aten.reshape.default, flat, [*free, *(length for length, _ in rest)])
    places = [*kept, *(place for place in range(len(read)) if place not in kept)]
    flat = build(_aten.permute.default, flat, [places.index(place) for place in range(len(read))])
    return build(_aten.reshape.default, flat, list(size))


def _windows(build: Builder, flat: fx.Node, rest: Sequence[tuple[int, int]], offset: int) -> fx.Node:
    """What is read of the last dim: the number and the step of each dim of it."""
    dim = len(flat.meta["val"].shape) - 1
    first, length = len(rest), 1
    while first and rest[first - 1][1] == length:
        first -= 1
        length *= rest[first][0]
    if first == 1 and rest[0][1] > 0 and not offset:
        cut = build(_aten.unfold.default, flat, dim, length, rest[0][1])
        return build(_aten.slice.Tensor, cut, dim, 0, rest[0][0])
    if first:
        return build(_aten.index_select.default, flat, dim, _places(build, rest, offset))
    return build(_aten.slice.Tensor, flat, dim, offset, offset + length)


def _follow(dims: Sequence[int], shape: Sequence[int], own: Sequence[int]) -> bool:
    """Whether each of some dims makes a step over all of the next."""
    return all(own[dim] == own[after] * shape[after] for dim, after in pairwise(dims))


def _kept(
    order: Sequence[int], shape: Sequence[int], own: Sequence[int], read: Sequence[tuple[int, int]]
) -> dict[int, int]:
    """Dims of what is read that are dims of the tensor: place -> dim."""
    dims = {(shape[dim], own[dim]): dim for dim in order}
    alike = Counter(read)
    return {place: dims[each] for place, each in enumerate(read) if each in dims and alike[each] == 1}


def _may_lie_in_another(source: fx.Node) -> bool:
    """Whether a tensor may begin within another one's memory, from whose beginning an offset would count."""
    if source.op != "call_function":
        return True
    returned = getattr(source.target, "_schema", None)
    return returned is None or any(each.alias_info is not None for each in returned.returns)


def _places(build: Builder, rest: Sequence[tuple[int, int]], offset: int) -> fx.Node:
    """Where each element that is read lies."""
    device = torch.device("meta")
    found = build(_aten.arange.start, offset, offset + 1, dtype=torch.int64, device=device)
    for length, step in rest:
        counted = build(_aten.arange.default, length, dtype=torch.int64, device=device)
        steps = build(_aten.mul.Tensor, counted, step)
        found = build(_aten.add.Tensor, build(_aten.unsqueeze.default, found, -1), steps)
        found = build(_aten.reshape.default, found, [-1])
    return found
