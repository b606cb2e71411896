"""Which experts tokens have chosen, said of the masks that say for each expert which tokens have.

    index[T, K] == e, for every e                     →   index
    one_hot(index).permute(2, 1, 0)[e]                →   index
    (one_hot(argmax) * (place < capacity))[..., e]    →   where(any, argmax over e, E): what is dropped chooses none
    any other masks[E][T]                             →   all experts, of which those count that have the token

Shape suffixes: E experts, M the dims of a mask, T tokens, K choices a token.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx

from autopar.passes.expert_products import is_cast, stripped
from autopar.passes.indices import Builder
from autopar.passes.said import Said, shape_of
from autopar.passes.tried import limit_of

_aten = torch.ops.aten
_ANDS = (_aten.__and__.Tensor, _aten.bitwise_and.Tensor, _aten.logical_and.default)
_POSITIVE = (_aten.gt.Scalar, _aten.greater.Scalar, _aten.ne.Scalar, _aten.not_equal.Scalar)
_VIEWS = (_aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.permute.default)
_CHOSEN_BY = (_aten.topk.default, _aten.sort.default, _aten.max.dim, _aten.min.dim)


@dataclass(frozen=True, slots=True)
class Masks:
    """The masks of all experts, [M] each. others: the dims that are choices of one token, not tokens."""

    build: Builder
    said: Said
    each: Sequence[fx.Node]
    others: tuple[int, ...]

    @property
    def shape(self) -> tuple[int, ...]:
        return shape_of(self.each[0])

    def together(self, parts: Sequence[fx.Node]) -> fx.Node:
        """[E, …] of what every expert has: what they are rows of, where they are."""
        rows = [_row_of(part) for part in parts]
        table = rows[0][0] if rows[0] is not None else None
        if table is not None and shape_of(table)[0] == len(parts) and _in_order(self.said, rows, table, 0):
            return table
        return self.build(_aten.stack.default, list(parts))

    def by_token(self, x: Any, last: int | None = None) -> fx.Node:
        """x[M] as [T, K]; with `last`, x[M, last] as [T, K, last]."""
        rank = len(self.shape)
        order = [dim for dim in range(rank) if dim not in self.others] + list(self.others)
        count = math.prod(self.shape[dim] for dim in self.others)
        order += range(rank, len(shape_of(x)))
        if x.target is _aten.permute.default and [x.args[1][dim] for dim in order] == list(range(len(order))):
            x = x.args[0]
        elif order != list(range(len(order))):
            x = self.build(_aten.permute.default, x, order)
        shape = [math.prod(self.shape) // count, count, *(() if last is None else (last,))]
        return x if list(shape_of(x)) == shape else self.build(_aten.reshape.default, x, shape)


@dataclass(frozen=True, slots=True)
class Choices:
    """indices[T, K] of experts. every: each expert is a choice of its own, of every choice that masks have."""

    masks: Masks
    indices: fx.Node
    every: bool = False

    def of(self, values: Sequence[fx.Node]) -> fx.Node:
        """What every expert has for each token, [M] for each, as [T, K] of those that are chosen."""
        build, masks, num = self.masks.build, self.masks, len(values)
        tokens, chosen = shape_of(self.indices)
        if all(masks.said(each) == masks.said(values[0]) for each in values):
            found = masks.by_token(self._flat(values[0]))
            if not self.every:
                return found
            found = build(_aten.expand.default, build(_aten.unsqueeze.default, found, -1), [tokens, chosen // num, num])
            return build(_aten.reshape.default, found, [tokens, chosen])
        rows = [_row_of(self._flat(value)) for value in values]
        table, dim = rows[0][:2] if rows[0] is not None else (None, 0)
        same = table is not None and shape_of(table)[dim] == num
        if same and table is not None and _in_order(masks.said, rows, table, dim):
            order = [each for each in range(len(shape_of(table))) if each != dim]
            wide = build(_aten.permute.default, table, [*order, dim]) if dim < len(order) else table
        else:
            wide = build(_aten.stack.default, [self._flat(value) for value in values], -1)
        wide = masks.by_token(wide, num)
        if self.every:
            return build(_aten.reshape.default, wide, [tokens, chosen])
        number = build(_aten.clamp.default, self.indices, 0, num - 1)
        found = build(_aten.gather.default, wide, -1, build(_aten.unsqueeze.default, number, -1))
        return build(_aten.squeeze.dim, found, -1)

    def _flat(self, value: fx.Node) -> fx.Node:
        shape = list(self.masks.shape)
        return value if list(shape_of(value)) == shape else self.masks.build(_aten.reshape.default, value, shape)


def _in_order(said: Said, rows: Sequence[tuple[fx.Node, int, int] | None], table: Any, dim: int) -> bool:
    """Whether values are all rows of a table, in order."""
    return all(
        row is not None and row[1:] == (dim, number) and said(row[0]) == said(table) for number, row in enumerate(rows)
    )


def choices_of(masks: Masks) -> Choices:
    """The experts that masks say."""
    parts = [_conjuncts(mask) for mask in masks.each]
    numbered = _numbered(masks, parts) or _of_table(masks, parts)
    return numbered or _every(masks, masks.build(_aten.stack.default, list(masks.each), -1))


def _conjuncts(mask: Any) -> list[fx.Node]:
    mask = stripped(mask)
    if mask.target in _ANDS:
        return [part for each in mask.args for part in _conjuncts(each)]
    return [mask]


def _numbered(masks: Masks, parts: Sequence[Sequence[fx.Node]]) -> Choices | None:
    """index == e."""
    index, first = None, 0
    for e, each in enumerate(parts):
        found = [(at, row) for at, part in enumerate(each) if (row := _equals(part)) is not None]
        if len(found) != 1:
            return None
        at, (own, number) = found[0]
        if index is None:
            index, first = own, number
        if number != first + e or masks.said(own) != masks.said(index):
            return None
        if not all(_is_hit(masks.said, part, index, number) for place, part in enumerate(each) if place != at):
            return None
    assert index is not None
    if shape_of(index) != masks.shape:
        return None
    indices = masks.by_token(index)
    return Choices(masks, masks.build(_aten.sub.Tensor, indices, first) if first else indices)


def _of_table(masks: Masks, parts: Sequence[Sequence[fx.Node]]) -> Choices | None:
    """table[e], or [.., e, ..] of any dim."""
    found = _rows_of_one(masks, parts)
    if found is None:
        return None
    table, dim = found
    build, num = masks.build, len(parts)
    if (known := _index_of(table)) is not None and known[1][dim] == len(known[1]) - 1:
        index, order = known
        order = [place for each, place in enumerate(order) if each != dim]
        if order != sorted(order):
            index = build(_aten.permute.default, index, order)
        return Choices(masks, masks.by_token(index))
    if shape_of(table)[dim] != num:
        table = build(_aten.slice.Tensor, table, dim, 0, num)
    rest = [each for each in range(len(shape_of(table))) if each != dim]
    wide = build(_aten.permute.default, table, [*rest, dim]) if dim < len(rest) else table
    if wide.meta["val"].dtype != torch.bool:
        wide = build(_aten.ne.Scalar, wide, 0)
    if not is_one_at_most(table, dim):
        return _every(masks, wide)
    number = build(_aten.argmax.default, build(_aten.to.dtype, wide, torch.int64), -1)
    none = build(_aten.logical_not.default, build(_aten.any.dim, wide, -1))
    return Choices(masks, masks.by_token(build(_aten.masked_fill.Scalar, number, none, num)))


def _rows_of_one(masks: Masks, parts: Sequence[Sequence[fx.Node]]) -> tuple[fx.Node, int] | None:
    """The table of which every mask is a row, and along which dim."""
    table, dim = None, 0
    for e, each in enumerate(parts):
        rows = [(at, row) for at, part in enumerate(each) if shape_of(part) == masks.shape and (row := _marks_of(part))]
        if len(rows) != 1:
            return None
        at, (own, own_dim, number) = rows[0]
        if table is None:
            table, dim = own, own_dim
        if own_dim != dim or number != e or masks.said(own) != masks.said(table):
            return None
        if not all(_is_any(masks.said, part, own, dim, e) for place, part in enumerate(each) if place != at):
            return None
    return None if table is None else (table, dim)


def _every(masks: Masks, wide: fx.Node) -> Choices:
    """wide[M, E]: every expert is a choice, of which those count that have the token."""
    build, num = masks.build, shape_of(wide)[-1]
    wide = masks.by_token(wide, num)
    tokens, count, _ = shape_of(wide)
    wide = build(_aten.reshape.default, wide, [tokens, count * num])
    device = wide.meta["val"].device
    numbers = build(_aten.arange.default, count * num, device=device)
    if count > 1:
        numbers = build(_aten.remainder.Scalar, numbers, num)
    numbers = build(_aten.expand.default, build(_aten.unsqueeze.default, numbers, 0), [tokens, count * num])
    none = build(_aten.logical_not.default, wide)
    return Choices(masks, build(_aten.masked_fill.Scalar, numbers, none, num), every=True)


# ------------------------------------------------------------------------------------------- what a mask is made of


def _row_of(node: Any) -> tuple[fx.Node, int, int] | None:
    """The table, dim and number of which a node is a row."""
    node = stripped(node)
    if node.target is _aten.select.int:
        source, dim, number = node.args
    elif node.target is operator.getitem and getattr(node.args[0], "target", None) is _aten.unbind.int:
        unbound: Any = node.args[0]
        source, dim, number = unbound.args[0], (*unbound.args, 0)[1], node.args[1]
    elif node.target in (_aten.squeeze.dim, _aten.squeeze.default, _aten.view.default, _aten.reshape.default):
        cut: Any = node.args[0]
        if cut.target is not _aten.slice.Tensor or len(cut.args) != 4 or cut.args[3] != cut.args[2] + 1:
            return None
        source, dim, number, _ = cut.args
        shape = list(shape_of(cut))
        del shape[dim]
        if list(shape_of(node)) != shape:
            return None
    else:
        return None
    sizes = shape_of(source)
    return source, dim % len(sizes), number % sizes[dim]


def _marks_of(node: Any) -> tuple[fx.Node, int, int] | None:
    """The row whose numbers a mask marks."""
    node = stripped(node)
    marks = node.target in (_aten.ne.Scalar, _aten.not_equal.Scalar) and node.args[1] == 0
    if marks or (is_cast(node) and node.meta["val"].dtype == torch.bool):
        return _row_of(node.args[0])
    return _row_of(node) if node.meta["val"].dtype == torch.bool else None


def _equals(node: Any) -> tuple[fx.Node, int] | None:
    """index and e of `index == e`."""
    if node.target is _aten.eq.Scalar and type(node.args[1]) is int:
        return node.args[0], node.args[1]
    return None


def _index_of(table: Any) -> tuple[fx.Node, list[int]] | None:
    """Of `one_hot(index).permute(order)`: index, and the order of dims, the last one that of the numbers."""
    node, order = _of_bool(table), list(range(len(shape_of(table))))
    while node.target in (_aten.permute.default, _aten.transpose.int):
        source: Any = node.args[0]
        moved = list(range(len(order)))
        if node.target is _aten.permute.default:
            moved = [dim % len(order) for dim in node.args[1]]
        else:
            one, other = node.args[1:]
            moved[one], moved[other] = moved[other], moved[one]
        order, node = [moved[dim] for dim in order], _of_bool(source)
    return (node.args[0], order) if node.target is _aten.one_hot.default else None


def _of_bool(node: Any) -> Any:
    """What is 0 where a node is: through casts, and `x != 0`."""
    while True:
        before = node
        node = stripped(node)
        if is_cast(node) or (node.target in (_aten.ne.Scalar, _aten.not_equal.Scalar) and node.args[1] == 0):
            if not node.args[0].meta["val"].is_floating_point():
                node = node.args[0]
        if node is before:
            return node


def is_one_at_most(node: Any, dim: int) -> bool:
    """Whether no more than one element along a dim is other than 0."""
    node = _of_bool(node)
    rank = len(shape_of(node))
    target, source = node.target, node.args[0] if node.args else None
    if target is _aten.one_hot.default:
        return dim == rank - 1
    if target in (*_ANDS, _aten.mul.Tensor):
        return any(
            isinstance(each, fx.Node) and len(shape_of(each)) == rank and shape_of(each)[dim] == shape_of(node)[dim]
            and is_one_at_most(each, dim)
            for each in node.args
        )  # fmt: skip
    if not isinstance(source, fx.Node):
        return False
    before, after = shape_of(source), shape_of(node)
    if target is _aten.permute.default:
        return is_one_at_most(source, node.args[1][dim] % rank)
    if target is _aten.transpose.int:
        pair = [each % rank for each in node.args[1:]]
        return is_one_at_most(source, pair[1 - pair.index(dim)] if dim in pair else dim)
    if target in (_aten.view.default, _aten.reshape.default, _aten.unsqueeze.default, _aten.squeeze.dim):
        behind = math.prod(after[dim + 1 :])
        same = [
            each for each, size in enumerate(before)
            if size == after[dim] and size > 1 and math.prod(before[each + 1 :]) == behind
        ]  # fmt: skip
        return len(same) == 1 and is_one_at_most(source, same[0])
    return False


def _is_hit(said: Said, node: Any, index: Any, number: int) -> bool:
    """Whether a mask says that any of an index is a number: beside `index == number` it says nothing."""
    counted = _counted(node, number)
    known = None if counted is None else _index_of(counted[0])
    return (
        known is not None
        and counted is not None
        and known[1][counted[1]] == len(known[1]) - 1
        and (said(known[0]) == said(_unordered(index)))
    )


def _is_any(said: Said, node: Any, table: Any, dim: int, number: int) -> bool:
    """Whether a mask says that anything of a row is set: beside the row it says nothing."""
    counted = _counted(node, number)
    return counted is not None and counted[1] == dim and said(_of_bool(counted[0])) == said(_of_bool(table))


def _counted(node: Any, number: int) -> tuple[fx.Node, int] | None:
    """The table, and along which dim, of whose row of this number a mask says whether anything is set."""
    row = _row_of(node)
    if row is None or row[1:] != (0, number) or len(shape_of(row[0])) != 1:
        return None
    counts: Any = stripped(row[0])
    if counts.target in _POSITIVE and counts.args[1] == 0:
        counts = stripped(counts.args[0])
    if counts.target not in (_aten.sum.dim_IntList, _aten.any.dim, _aten.any.dims) or len(counts.args) != 2:
        return None
    table, dims = counts.args
    rank = len(shape_of(table))
    gone = {each % rank for each in (dims if isinstance(dims, list | tuple) else [dims])}
    left = [each for each in range(rank) if each not in gone]
    return (table, left[0]) if len(left) == 1 and _is_count(table) else None


def _is_count(node: Any) -> bool:
    """Whether nothing in a table is below 0."""
    node = _of_bool(node)
    if node.meta["val"].dtype == torch.bool or node.target is _aten.one_hot.default:
        return True
    if node.target in (_aten.permute.default, _aten.transpose.int, _aten.view.default, _aten.reshape.default):
        return _is_count(node.args[0])
    return node.target is _aten.mul.Tensor and all(isinstance(x, fx.Node) and _is_count(x) for x in node.args)


def _unordered(node: Any) -> Any:
    while node.target in (_aten.permute.default, _aten.transpose.int, _aten.t.default):
        node = stripped(node.args[0])
    return node


def is_never(mask: Any) -> bool:
    """Whether a mask is never set: of a number that no choice among fewer gives."""
    for part in _conjuncts(mask):
        if (equal := _equals(part)) is not None:
            if equal[1] >= _bound(equal[0]):
                return True
        elif (row := _marks_of(part)) is not None and (known := _index_of(row[0])) is not None:
            index, order = known
            if order[row[1]] == len(order) - 1 and row[2] >= _bound(index):
                return True
    return False


def covers(index: Any, num: int) -> bool:
    """Whether all of an index are below a number of experts."""
    node = stripped(index)
    while node.target in (*_VIEWS, _aten.index_select.default):
        node = stripped(node.args[0])
    limit = limit_of(node)
    return limit is not None and limit <= num


def _bound(index: Any) -> float:
    """The number that all of an index are below."""
    node: Any = _unordered(stripped(index))
    if node.target is operator.getitem and node.args[1] == 1 and node.args[0].target in _CHOSEN_BY:
        choice = node.args[0]
        place = 2 if choice.target is _aten.topk.default else 1
        dim = choice.args[place] if len(choice.args) > place else choice.kwargs.get("dim", -1)
        return shape_of(choice.args[0])[dim]
    if node.target is _aten.argmax.default and len(node.args) > 1 and isinstance(node.args[1], int):
        return shape_of(node.args[0])[node.args[1]]
    return math.inf
