"""What of a head is rotated, and how: read off what each element of a row is computed of.

However a model writes its rotary embedding (halves that are cut, or neighbours that are stacked; tables as wide as the
head, or half of it, or repeated; float32 in between), element i of a row comes out as

    y[i] = x[i] · cos[f(i)] ± x[p(i)] · sin[g(i)], or x[i] as it is

so rows are followed element by element through the operators that cut, join and cast them, and p, f, g and the type in
which products are made say which rotation it is. What is anything else is none.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.nodes import argument, dtype_of, shape_of
from autopar.ir.op_call import name_of
from autopar.operators.basic import HALF

_aten, _own = torch.ops.aten, torch.ops.autopar
_LEADING = 3
"""Dims in front of rows: batch, heads and positions, in the order in which the model has them."""
_LONGEST = 4096
"""Elements of a row that are followed."""


@dataclass(frozen=True, slots=True)
class Rotation:
    """What a node's rows are.

    x: what is rotated, of the same shape. cos, sin: tables [B|1, 1, S, R] (a dim of one where x has heads) or
    [B|1, S, R], or half as wide. interleaved: whether neighbours are pairs. half_tables: whether tables are R / 2 wide.
    in_float32: whether it is computed in float32 and rounded once. turned: whether x has heads behind positions,
    [B, S, H, D], and the node is its transpose.
    """

    x: fx.Node
    cos: fx.Node
    sin: fx.Node
    interleaved: bool = False
    half_tables: bool = False
    in_float32: bool = False
    turned: bool = False

    @property
    def kind(self) -> tuple[Any, ...]:
        """What queries and keys of one operator have in common."""
        return self.cos, self.sin, self.interleaved, self.half_tables, self.in_float32


class _Number(NamedTuple):
    """An element of a node's rows, as it is or negated."""

    source: fx.Node
    column: int
    sign: int = 1


class _Product(NamedTuple):
    """Of two elements (their signs are 1)."""

    a: _Number
    b: _Number
    sign: int
    dtype: torch.dtype


class _Sum(NamedTuple):
    """rounded: the type of what comes out, where that is not that of the sum."""

    a: _Product
    b: _Product
    dtype: torch.dtype
    rounded: torch.dtype | None = None


class Rows:
    """The rows of a graph's nodes."""

    def __init__(self) -> None:
        self._known: dict[fx.Node, np.ndarray] = {}

    def rotation(self, node: fx.Node) -> Rotation | None:
        """How a node [B, H, S, D] is rotated; None where it is not."""
        source = node.args[0] if node.args else None
        if isinstance(source, fx.Node) and _swaps_heads(node):
            inside = self._rotation(source)
            return None if inside is None else replace(inside, turned=True)
        return self._rotation(node)

    def _rotation(self, node: fx.Node) -> Rotation | None:
        if len(shape_of(node)) != _LEADING + 1:
            return None
        row = self._of(node).tolist()
        sums = [each for each in row if isinstance(each, _Sum)]
        wide = len(sums)
        if not wide or wide % 2 or row[:wide] != sums or not all(isinstance(each, _Number) for each in row[wide:]):
            return None
        dtype, narrow = sums[0].dtype, dtype_of(node)
        if any((each.dtype, each.rounded or each.dtype) != (dtype, narrow) for each in sums):
            return None
        if dtype != narrow and (dtype != torch.float32 or narrow not in HALF):
            return None
        for x in dict.fromkeys(each.source for each in (sums[0].a.a, sums[0].a.b)):
            found = self._turned_by(x, row, wide, node, in_float32=dtype != narrow)
            if found is not None:
                return found
        return None

    def _turned_by(self, x: fx.Node, row: list[Any], wide: int, node: fx.Node, *, in_float32: bool) -> Rotation | None:
        """The rotation, where it is of elements of x."""
        parted = [_parted(each, x) for each in row[:wide]]
        columns = [own for each in parted for own, _, _ in each] + [each.column for each in row[wide:]]
        begin = min(columns, default=0)
        if any(each.source is not x or each.sign != 1 for each in row[wide:]):
            return None
        own = self._node([_Number(x, begin + place) for place in range(len(row))], node)
        if own is None or [each.column - begin for each in row[wide:]] != [*range(wide, len(row))]:
            return None
        for interleaved in (False, True):
            tables = _tables(parted, begin, wide, interleaved)
            if tables is not None:
                break
        else:
            return None
        found = self._table(tables, interleaved)
        types = {dtype_of(node), torch.float32} if in_float32 else {dtype_of(node)}
        if found is None or dtype_of(found[0]) != dtype_of(found[1]) or dtype_of(found[0]) not in types:
            return None
        cos, sin, half_tables = found
        return Rotation(own, cos, sin, interleaved, half_tables, in_float32)

    def _table(
        self, tables: tuple[list[_Number], list[_Number]], interleaved: bool
    ) -> tuple[fx.Node, fx.Node, bool] | None:
        """Nodes that are cos and sin, and whether these are half as wide as what is rotated: as they are where they
        come from elsewhere, else before halves were repeated.
        """
        size = len(tables[0])
        halves = [(each[::2], each[1::2]) if interleaved else (each[: size // 2], each[size // 2 :]) for each in tables]
        if all(first == second for first, second in halves):
            narrow = [self._node(first) for first, _ in halves]
            if narrow[0] is not None and narrow[1] is not None:
                return narrow[0], narrow[1], True
        cos, sin = (self._node(each) for each in tables)
        return None if cos is None or sin is None else (cos, sin, False)

    def _node(self, row: Sequence[_Number], like: fx.Node | None = None) -> fx.Node | None:
        """The first node that has these rows. like: of its shape and type."""
        for node, known in self._known.items():
            fits = like is None or (shape_of(node) == shape_of(like) and dtype_of(node) == dtype_of(like))
            if fits and known.ndim == 1 and len(known) == len(row) and known.tolist() == list(row):
                return node
        return None

    def _of(self, node: fx.Node) -> np.ndarray:
        """The rows of a node with four dims or more, as an array of elements as its dims behind the leading ones."""
        if node not in self._known:
            found = self._through(node)
            self._known[node] = _numbers(node, shape_of(node)[_LEADING:]) if found is None else found
        return self._known[node]

    def _through(self, node: fx.Node) -> np.ndarray | None:
        """What an operator makes of the rows of its operands; None where it is not followed."""
        shape, sources = shape_of(node), node.all_input_nodes
        if node.op != "call_function" or len(shape) <= _LEADING or not sources:
            return None
        if node.target is operator.getitem:
            return self._piece(node)
        if node.target is _own.rotary.default:
            return self._rotary(node)
        work = _OPERATORS.get(name_of(node.target).removesuffix(".default"))
        if work is None or any(len(shape_of(each)) <= _LEADING for each in sources):
            return None
        found = work(node, [self._of(each) for each in sources])
        return found if found is not None and found.shape == shape[_LEADING:] else None

    def _rotary(self, node: fx.Node) -> np.ndarray | None:
        """What `autopar.rotary` is, spelled out."""
        sources = node.all_input_nodes
        if len(sources) != 3:
            return None
        x, cos, sin = sources
        size, dtype, row = shape_of(node)[-1], dtype_of(node), self._of(x).tolist()
        self._known |= {each: _numbers(each, (size,)) for each in (cos, sin) if each not in self._known}
        if not all(isinstance(each, _Number) and each.sign == 1 for each in row):
            return None
        made = []
        for place in range(size):
            partner, sign = (place + size // 2, -1) if place < size // 2 else (place - size // 2, 1)
            own = _Product(row[place], _Number(cos, place), 1, dtype)
            made.append(_Sum(own, _Product(row[partner], _Number(sin, place), sign, dtype), dtype))
        return _array(made, (size,))

    def _piece(self, node: fx.Node) -> np.ndarray | None:
        """One of what a tensor is cut into along its rows."""
        cut, place = node.args
        source = cut.args[0] if isinstance(cut, fx.Node) and cut.args else None
        if not isinstance(cut, fx.Node) or not isinstance(source, fx.Node) or not isinstance(place, int):
            return None
        dim = argument(cut, 2, "dim", 0)
        is_cut = name_of(cut.target).startswith(("aten.split", "aten.chunk"))
        if not is_cut or len(shape_of(source)) <= _LEADING or dim % len(shape_of(source)) < _LEADING:
            return None
        axis = dim % len(shape_of(source)) - _LEADING
        begin = sum(piece.shape[dim] for piece in cut.meta["val"][:place])
        rows = self._of(source)
        return rows.take(range(begin, begin + node.meta["val"].shape[dim]), axis=axis)


def _parted(each: _Sum, x: fx.Node) -> list[tuple[int, _Number, int]]:
    """Of both products the column of x, the element of a table, and the sign; nothing where one has no x."""
    found = []
    for product in (each.a, each.b):
        own, table = (product.a, product.b) if product.a.source is x else (product.b, product.a)
        if own.source is not x or table.source is x or product.dtype != each.dtype:
            return []
        found.append((own.column, table, product.sign))
    return found


def _tables(
    parted: Sequence[list[tuple[int, _Number, int]]], begin: int, wide: int, interleaved: bool
) -> tuple[list[_Number], list[_Number]] | None:
    """The elements of cos and sin, where the pairs that are rotated are these."""
    cos, sin = [], []
    for place, products in enumerate(parted):
        first = place % 2 == 0 if interleaved else place < wide // 2
        partner = place + (1 if interleaved else wide // 2) * (1 if first else -1)
        own = [each for each in products if each[0] == begin + place]
        others = [each for each in products if each[0] == begin + partner]
        if len(own) != 1 or len(others) != 1 or own[0][2] != 1 or others[0][2] != (-1 if first else 1):
            return None
        cos.append(own[0][1])
        sin.append(others[0][1])
    return cos, sin


def _swaps_heads(node: fx.Node) -> bool:
    """Whether a node is its operand with dims 1 and 2 in each other's place."""
    if node.target is _aten.transpose.int:
        return {dim % 4 for dim in node.args[1:]} == {1, 2} and len(shape_of(node)) == 4  # type: ignore[operator]
    return node.target is _aten.permute.default and [dim % 4 for dim in node.args[1]] == [0, 2, 1, 3]  # type: ignore[operator,union-attr]


def _numbers(node: fx.Node, tail: tuple[int, ...]) -> np.ndarray:
    """A node's own elements; none where there are very many."""
    size = math.prod(tail)
    return _array([_Number(node, place) if size <= _LONGEST else None for place in range(size)], tail)


def _array(elements: Sequence[Any], shape: tuple[int, ...]) -> np.ndarray:
    return np.fromiter(elements, dtype=object, count=len(elements)).reshape(shape)


def _each(function: Callable[..., Any], *rows: np.ndarray) -> np.ndarray | None:
    """The function of each element; None where it has none of one."""
    if len({each.shape for each in rows}) != 1:
        return None
    made = [function(*elements) for elements in zip(*(each.reshape(-1).tolist() for each in rows), strict=True)]
    return None if any(each is None for each in made) else _array(made, rows[0].shape)


# --------------------------------------------------------------------------------------------------------- operators


def _same(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    return rows[0]


def _cast(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    """Exact for elements that are widened, or get their own type back; a sum is rounded once."""
    dtype, source = dtype_of(node), node.all_input_nodes[0]

    def cast(each: Any) -> Any:
        if isinstance(each, _Number):
            own = dtype_of(each.source)
            return each if dtype == own or (own in HALF and dtype == torch.float32) else None
        is_rounded = isinstance(each, _Sum) and each.rounded is None
        return each._replace(rounded=dtype) if is_rounded and dtype != each.dtype else None

    return rows[0] if dtype == dtype_of(source) else _each(cast, rows[0])


def _negated(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    has_sign = (_Number, _Product)
    return _each(lambda each: each._replace(sign=-each.sign) if isinstance(each, has_sign) else None, rows[0])


def _multiplied(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    dtype = dtype_of(node)

    def product(a: Any, b: Any) -> Any:
        if not isinstance(a, _Number) or not isinstance(b, _Number):
            return None
        return _Product(a._replace(sign=1), b._replace(sign=1), a.sign * b.sign, dtype)

    return _each(product, *rows) if len(rows) == 2 else None


def _added(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    dtype, takes = dtype_of(node), name_of(node.target).startswith("aten.sub")

    def total(a: Any, b: Any) -> Any:
        if not isinstance(a, _Product) or not isinstance(b, _Product):
            return None
        return _Sum(a, b._replace(sign=-b.sign) if takes else b, dtype)

    ordered = len(rows) == 2 and list(node.args[:2]) == node.all_input_nodes
    return _each(total, *rows) if ordered and not node.kwargs else None


def _cut(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    axis = argument(node, 1, "dim", 0) % len(shape_of(node)) - _LEADING
    start, stop, step = argument(node, 2, "start"), argument(node, 3, "end"), argument(node, 4, "step", 1)
    return None if axis < 0 else rows[0][(slice(None),) * axis + (slice(start, stop, step),)]


def _joined(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    """Of a list, in which an operand may be twice."""
    stacks = node.target is _aten.stack.default
    axis = argument(node, 1, "dim", 0) % len(shape_of(node)) - _LEADING
    parts: Any = node.args[0]
    by_node = dict(zip(node.all_input_nodes, rows, strict=True))
    if axis < 0 or len({shape_of(each)[:_LEADING] for each in parts}) != 1:
        return None
    return (np.stack if stacks else np.concatenate)([by_node[each] for each in parts], axis=axis)


def _viewed(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    """The same rows in other dims; nothing where the leading ones change, or elements are repeated along them."""
    shape, source = shape_of(node), shape_of(node.all_input_nodes[0])
    if shape[:_LEADING] != source[:_LEADING]:
        return None
    return rows[0].reshape(shape[_LEADING:])


def _repeated(node: fx.Node, rows: list[np.ndarray]) -> np.ndarray | None:
    shape, source = shape_of(node), shape_of(node.all_input_nodes[0])
    is_inside = shape[:_LEADING] == source[:_LEADING] and len(shape) == len(source)
    return np.broadcast_to(rows[0], shape[_LEADING:]) if is_inside else None


_OPERATORS: Mapping[str, Callable[[fx.Node, list[np.ndarray]], np.ndarray | None]] = {
    "aten.clone": _same, "aten.alias": _same, "aten.detach": _same, "aten.contiguous": _same,
    "aten._to_copy": _cast, "aten.to.dtype": _cast, "aten.neg": _negated, "aten.mul.Tensor": _multiplied,
    "aten.add.Tensor": _added, "aten.sub.Tensor": _added, "aten.slice.Tensor": _cut, "aten.cat": _joined,
    "aten.stack": _joined, "aten.view": _viewed, "aten._unsafe_view": _viewed, "aten.reshape": _viewed,
    "aten.unsqueeze": _viewed, "aten.squeeze.dim": _viewed, "aten.expand": _repeated,
}  # fmt: skip
