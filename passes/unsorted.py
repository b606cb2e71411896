"""Rows that are sorted, worked on one by one and put back stay where they are.

    order = numbers.argsort()                              y = f(x[arange(N) // k], numbers == e, …)
    rows = x[order // k];  mask = (start_e <= place) & (place < end_e)
    y[order] = f(rows, mask, …)                        →

Tokens are sorted by their experts so that each expert's lie side by side. A strategy that splits the batch would gather
them all for that. Where what is done between treats each row alone, as the operators' rules say, or sums over all of
them, and where places in the order count by no more than whether they lie in the part of one number, the order does not
matter. Which part two ends enclose is found by computing them for other numbers.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing as compat
from autopar.ir.nodes import drop_dead, map_nodes
from autopar.ir.op_call import op_call
from autopar.ir.rule import Exchange
from autopar.operators.rules.lookup import rule_for
from autopar.passes.indices import Builder, constant
from autopar.passes.said import COPIES, shape_of
from autopar.passes.tried import limit_of, places_tried

_aten = torch.ops.aten
_SORTS = (_aten.argsort.default, _aten.argsort.stable, _aten.sort.default, _aten.sort.stable)
_LOWER = (_aten.ge.Tensor, _aten.ge.Scalar)
_UPPER = (_aten.lt.Tensor, _aten.lt.Scalar)
_BOTH = (_aten.logical_and.default, _aten.bitwise_and.Tensor, _aten.__and__.Tensor, _aten.mul.Tensor)
_SAME = (*COPIES, _aten.view.default, _aten.reshape.default, _aten.flatten.using_ints, _aten.squeeze.dim)
"""What has the elements of its operand in their order."""
_ALIKE = (
    _aten.zeros.default, _aten.ones.default, _aten.full.default, _aten.zeros_like.default, _aten.ones_like.default,
    _aten.full_like.default, _aten.new_zeros.default, _aten.new_ones.default, _aten.new_full.default,
)  # fmt: skip
"""What makes all rows alike."""


class _MattersError(Exception):
    """The order of rows does, or nobody can tell."""


def simplify_sorted(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Leave rows where they are that a graph sorts by numbers of a `topk`, or an `argmax`, and puts back."""
    for node in [each for each in graph.nodes if each.target in _SORTS]:
        try:
            order = _Order.of(node)
            order.follow(graph)
        except _MattersError:
            continue
        order.rewrite(graph, origins)
    drop_dead(graph)


def number_parts(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Where a mask marks the places that one number has among those that are sorted, it says which number is there.

    (start_e <= place) & (place < end_e)   →   numbers[order] == e
    """
    for sort in [each for each in graph.nodes if each.target in _SORTS]:
        try:
            order = _Order.of(sort)
        except _MattersError:
            continue
        trials, index = _Trials(order), order.values
        for node in list(graph.nodes):
            ends = _ends(node, order.count) if node.target in _BOTH and shape_of(node) == (order.count,) else None
            number = None if ends is None else trials.number_between(*ends)
            if number is None:
                continue
            if index is None:
                with graph.inserting_after(order.places):
                    index = graph.call_function(_aten.index_select.default, (order.numbers, 0, order.places))
                index.meta["val"] = order.numbers.meta["val"].new_empty(order.count)
                origins[index.name] = origins.get(order.places.name, "")
            node.replace_all_uses_with(Builder(graph, node, origins)(_aten.eq.Scalar, index, number))
    drop_dead(graph)


@dataclass(slots=True)
class _Order:
    """places, values: what sorting gives. numbers: [N], what is sorted, of `root`, a tensor of numbers below `limit`.

    rows: which dim of a value is in this order. descending: whether the largest number comes first.
    inverse: what says where each row has gone. exits: what puts rows back, or adds them to others, which it does then,
    too; and the rows that are its result.
    """

    places: fx.Node
    values: fx.Node | None
    numbers: fx.Node
    root: fx.Node
    limit: int
    descending: bool
    rows: dict[fx.Node, int]
    inverse: set[fx.Node]
    exits: dict[fx.Node, fx.Node]

    @staticmethod
    def of(sort: fx.Node) -> _Order:
        numbers, call = sort.args[0], op_call(sort.target, *_values((sort.args, sort.kwargs)), None)
        if not isinstance(numbers, fx.Node) or len(shape_of(numbers)) != 1:
            raise _MattersError
        picks = {user.args[1]: user for user in sort.users if user.target is operator.getitem}
        is_pair = sort.target in (_aten.sort.default, _aten.sort.stable)
        places, values = (picks.get(1), picks.get(0)) if is_pair else (sort, None)
        root: Any = numbers
        while root.target in _SAME:
            root = root.args[0]
        limit = limit_of(root)
        if places is None or limit is None or numbers.meta["val"].is_floating_point():
            raise _MattersError
        rows = {each: 0 for each in (places, values) if each is not None}
        descending = bool(call.arg("descending", False))
        return _Order(places, values, numbers, root, limit, descending, rows, set(), {})

    @property
    def count(self) -> int:
        return int(self.numbers.meta["val"].numel())

    # -------------------------------------------------------------------------------------------------- is it the same

    def follow(self, graph: fx.Graph) -> None:
        """See which values are in this order, up to where rows are put back.

        Raises:
            _MattersError: somebody minds it.
        """
        lost: set[fx.Node] = set()
        for node in graph.nodes:
            if node in self.rows:
                continue
            minds = any(each in lost for each in node.all_input_nodes)
            if node.op == "output":
                if minds or any(each in self.rows for each in node.all_input_nodes):
                    raise _MattersError
            elif node.op == "call_function":
                if any(each in self.rows or each in self.inverse for each in node.all_input_nodes) or minds:
                    try:
                        self._see(node, minds)
                    except _MattersError:  # where parts end may be read off what is sorted, and nothing else
                        lost.add(node)
        if not self.exits:
            raise _MattersError

    def _see(self, node: Any, minds: bool) -> None:
        if minds:
            raise _MattersError
        if node.target in _ALIKE or self._is_added(node):
            return
        if torch.Tag.nondeterministic_seeded in getattr(node.target, "tags", ()) or compat.is_mutable(node):
            raise _MattersError
        if node.target in (_aten.argsort.default, _aten.argsort.stable) and self._is_identity(node.args[0]):
            self.inverse.add(node)
        elif (back := self._put_back(node)) is not None:
            self.exits[node] = back
        elif any(each in self.inverse for each in node.all_input_nodes):
            raise _MattersError
        else:
            self._by_rule(node)

    def _is_added(self, node: Any) -> bool:
        """Whether rows are added wherever each belongs."""
        if node.target is not _aten.index_add.default or node.args[1] != 0 or node.args[0] in self.rows:
            return False
        added = [self._first(each) for each in node.args[2:4]]
        self.exits |= {node: node} if None not in added else {}
        return None not in added

    def _put_back(self, node: Any) -> fx.Node | None:
        """The rows that a node puts back in their places, all of them."""
        where: Any = None
        rows: Any = None
        if node.target is _aten.index_copy.default and node.args[1] == 0:
            where, rows = node.args[2:4]
        elif node.target is _aten.index_put.default and len(node.args[1]) == 1 and len(node.args) == 3:
            (where,), rows = node.args[1:3]
        elif (taken := _rows_taken(node)) is not None and taken[1] in self.inverse:
            return self._first(taken[0])
        if where is None or not self._is_identity(where):
            return None
        return self._first(rows) if shape_of(rows) == shape_of(node) and _dtype(rows) == _dtype(node) else None

    def _first(self, rows: Any) -> fx.Node | None:
        return rows if self.rows.get(rows) == 0 else None

    def _is_identity(self, node: Any) -> bool:
        """Whether it is the order itself."""
        while isinstance(node, fx.Node) and node.target in COPIES:
            node = node.args[0]
        return node is self.places

    def _by_rule(self, node: Any) -> None:
        """Where rows lie in what an operator gives that treats each alone, or sums them."""
        output = node.meta["val"]
        rule = rule_for(op_call(node.target, *_values((node.args, node.kwargs)), output))
        operands: list[fx.Node] = []
        map_nodes((node.args, node.kwargs), operands.append)
        walked = {rule.operands[n][self.rows[each]] for n, each in enumerate(operands) if each in self.rows}
        if len(walked) != 1 or len(factors := next(iter(walked))) != 1:
            raise _MattersError
        (factor,) = factors
        placed = {name for _, name in (*rule.offset_args, *rule.starts_args)}
        if rule.pair is not None:  # a token's experts are its own, whatever its place
            placed |= {rule.pair.key} if isinstance(rule.pair, Exchange) else {rule.pair.query, rule.pair.key}
        if not rule.can_split(factor) or rule.sizes[factor] != self.count or rule.position_args or factor in placed:
            raise _MattersError
        for number, each in enumerate(operands):
            dims = [dim for dim, names in enumerate(rule.operands[number] or ()) if factor in names]
            if dims and dims != [self.rows.get(each)] and each.target not in _ALIKE:
                raise _MattersError
        results = [dims or () for dims in rule.results]
        found = [[dim for dim, names in enumerate(dims) if factor in names] for dims in results]
        if not any(found):
            if rule.factor(factor).reduce != "sum":
                raise _MattersError
            return
        if any(len(dims) != 1 or walks[dims[0]] != factors for dims, walks in zip(found, results, strict=True)):
            raise _MattersError
        if isinstance(output, list | tuple):
            self.rows.update((pick, found[pick.args[1]][0]) for pick in node.users)
        else:
            self.rows[node] = found[0][0]

    # ---------------------------------------------------------------------------------------------------- leave them

    def rewrite(self, graph: fx.Graph, origins: dict[str, str]) -> None:
        """The graph without the order."""
        build = Builder(graph, self.places, origins)
        counted = build(_aten.arange.default, self.count, dtype=_dtype(self.places), device=torch.device("meta"))
        self.places.replace_all_uses_with(counted)
        if self.values is not None:
            self.values.replace_all_uses_with(self.numbers)
        for node, rows in self.exits.items():
            if rows is not node:
                node.replace_all_uses_with(rows)
        for node in list(graph.nodes):
            if node in self.rows or node in self.exits or node in counted.users:
                self._simplify(node, Builder(graph, node, origins))

    def _simplify(self, node: Any, build: Builder) -> None:
        """Rows that are taken by their own numbers, or each several times in turn; or so added."""
        if node.target is _aten.index_add.default and not node.kwargs and len(node.args) == 4:
            x, _, index, added = node.args
        elif (taken := _rows_taken(node)) is not None:
            (x, index), added = taken, None
        else:
            return
        value, rows, rest = constant(index), shape_of(x)[0], shape_of(x)[1:]
        if value is None or value.numel() != self.count or self.count % rows:
            return
        each = self.count // rows
        if not torch.equal(value.flatten(), torch.arange(self.count) // each):
            return
        if added is not None:
            found = build(_aten.sum.dim_IntList, build(_aten.reshape.default, added, [rows, each, *rest]), [1])
            x = build(_aten.add.Tensor, x, found)
        elif each > 1:
            x = build(_aten.expand.default, build(_aten.unsqueeze.default, x, 1), [rows, each, *rest])
            x = build(_aten.reshape.default, x, [self.count, *rest])
        node.replace_all_uses_with(x)


def _rows_taken(node: Any) -> tuple[fx.Node, fx.Node] | None:
    """A tensor, and the numbers by which a node takes its rows; None of other nodes."""
    if node.target is _aten.index_select.default and node.args[1] == 0:
        return node.args[0], node.args[2]
    if node.target is _aten.index.Tensor and len(node.args[1]) == 1:
        return node.args[0], node.args[1][0]
    return None


class _Trials:
    """What ends are for several tensors of numbers."""

    def __init__(self, order: _Order) -> None:
        limit = order.limit
        self._known: list[dict[fx.Node, Any]] = [{order.root: x} for x in places_tried(order.root)]
        self._parts: list[list[tuple[int, int]]] = []
        for known in self._known:
            numbers = _computed(order.numbers, known)
            if order.values is not None:
                known[order.values] = numbers.sort(descending=order.descending).values
            counts = torch.bincount(numbers.flatten().long(), minlength=limit)
            ends = [0, *(counts.flip(0) if order.descending else counts).cumsum(0).tolist()]
            parts = list(itertools.pairwise(ends))
            self._parts.append(parts[::-1] if order.descending else parts)

    def number_between(self, start: Any, end: Any) -> int | None:
        """The number whose part of the sorted rows two ends enclose, whatever the numbers are; None: there is none."""
        able: set[int] | None = None
        for known, parts in zip(self._known, self._parts, strict=True):
            try:
                values = [_computed(each, known) if isinstance(each, fx.Node) else each for each in (start, end)]
            except _MattersError:
                return None
            here = {number for number, part in enumerate(parts) if part == tuple(map(int, values))}
            able = here if able is None else able & here
        return next(iter(able)) if able is not None and len(able) == 1 else None


def _computed(node: fx.Node, known: dict[fx.Node, Any]) -> Tensor:
    """The value of a node that is made of known ones and of Python's own numbers, which is known then."""
    waiting = [node]
    while waiting:
        last = waiting[-1]
        if last in known:
            waiting.pop()
            continue
        is_draw = torch.Tag.nondeterministic_seeded in getattr(last.target, "tags", ())
        if last.op != "call_function" or is_draw or compat.is_mutable(last):
            raise _MattersError
        if missing := [each for each in last.all_input_nodes if each not in known]:
            waiting += missing
            continue
        args, kwargs = map_nodes((last.args, last.kwargs), known.__getitem__)
        kwargs = {key: torch.device("cpu") if key == "device" else value for key, value in kwargs.items()}
        known[last] = last.target(*args, **kwargs)  # type: ignore[operator]
        waiting.pop()
    found: Tensor = known[node]
    return found


def _ends(node: fx.Node, count: int) -> tuple[Any, Any] | None:
    """The ends of `(start <= arange) & (arange < end)`."""
    sides = {each.target: each for each in node.all_input_nodes}
    lower = next((sides[target] for target in _LOWER if target in sides), None)
    upper = next((sides[target] for target in _UPPER if target in sides), None)
    if lower is None or upper is None:
        return None
    for side in (lower, upper):
        places, end = side.args
        value = constant(places) if isinstance(places, fx.Node) and shape_of(places) == (count,) else None
        if value is None or (isinstance(end, fx.Node) and end.meta["val"].numel() != 1):
            return None
        if not torch.equal(value, torch.arange(count)):
            return None
    return lower.args[1], upper.args[1]


def _values(given: Any) -> tuple[Sequence[Any], Mapping[str, Any]]:
    found: tuple[Sequence[Any], Mapping[str, Any]] = map_nodes(given, lambda node: node.meta["val"])
    return found


def _dtype(node: Any) -> Any:
    return getattr(node.meta.get("val"), "dtype", None)
