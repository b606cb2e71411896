"""Rounds over groups of rows that are left out where a group has none: they are done, and nothing comes of them.

    for e, n in enumerate(counts.tolist()):
        if n == 0:                                  n == 0 → False: no row is between start and start + n
            continue
        made.append(expert[e](x[start : start + n]))
        start += n

What is left out has to be what nothing comes of where there are no rows. That is read off the source (nothing but rows
is collected, no other number is counted), off the graph (all that is used behind it is such rows, or written to such
rows) and off numbers of rows that are tried (a group is empty wherever the test says so).
"""

from __future__ import annotations

import ast
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing as compat
from autopar.passes.chosen_operators import FIRST, SPREAD
from autopar.passes.said import COPIES, shape_of
from autopar.passes.source import (
    Source,
    Span,
    asked_at,
    flat,
    is_only_joined,
    is_read_first,
    names_read,
    outside_of,
    source_of,
    span,
)
from autopar.passes.tried import limit_of, places_tried

_aten = torch.ops.aten
_EMPTY = {
    (_aten.eq.Scalar, 0), (_aten.le.Scalar, 0), (_aten.lt.Scalar, 1), (_aten.logical_not.default, None),
}  # fmt: skip
_SOME = {(_aten.ne.Scalar, 0), (_aten.gt.Scalar, 0), (_aten.ge.Scalar, 1)}
_PAIRS = {_aten.eq.Tensor: True, _aten.ne.Tensor: False, _aten.lt.Tensor: False, _aten.gt.Tensor: False}
_ADDING = (_aten.index_add.default, _aten.index_add_.default)
_SUMS = (_aten.sum.dim_IntList, _aten.permute.default)
_CHECK = _aten._assert_tensor_metadata.default


@dataclass(frozen=True, slots=True)
class Region:
    """What a test leaves out: the lines of a function, from which node on it was recorded."""

    code: CodeType
    lines: tuple[int, int]
    count: int

    @property
    def line(self) -> str:
        """Where it begins."""
        return f"{self.code.co_filename.rpartition('/')[2]}:{self.lines[0]}"

    def has(self, node: fx.Node) -> bool:
        """Whether a node was recorded in these lines."""
        first, last = self.lines
        found = compat.model_frames(node.stack_trace or "")
        own = [each for each in found if (each.filename, each.function) == (self.code.co_filename, self.code.co_name)]
        return any(first <= frame.line <= last for frame in own)


@dataclass(frozen=True, slots=True)
class _Left:
    """A test, and what it leaves out: the asked value, whether nothing is there where that is True, and numbers that
    have to be the same then.
    """

    region: Region
    asked: fx.Node
    empty: bool
    same: tuple[tuple[Any, Any], ...]


class NoRows:
    """The tests of a trace."""

    def __init__(self) -> None:
        self._left: list[_Left] = []

    def asked(self, value: Tensor, frame: FrameType | None) -> bool | None:
        """What a test gives for its rows to be worked on; None where it is another test."""
        node = compat.node_of(value)
        empty = None if node is None else _asks_for_rows(node)
        if node is None or empty is None or frame is None:
            return None
        source, held = source_of(frame.f_code), frame.f_locals
        found = None if source is None else left_out(source, asked_at(frame, source), empty)
        if found is None or not found.writes_tensors(held):
            return None
        same = [(held.get(name), 0 if other is None else held.get(other)) for name, other in found.same]
        self._left.append(_Left(Region(frame.f_code, found.lines, compat.count_recorded()), node, empty, tuple(same)))
        return not empty

    def wrong(self, ranges: Mapping[int, tuple[Any, Any, Tensor]]) -> str | None:
        """The line of a test that leaves out more than what nothing comes of; None if there is none. ranges: by their
        number, where rows begin and end, and their mask.
        """
        masks = {compat.node_of(mask): size for size, (_, _, mask) in ranges.items()}
        for left, own in zip(self._left, nodes_left([each.region for each in self._left]), strict=True):
            sizes = sizes_behind(own, masks, with_numbers=True)
            ends = [ranges[size][:2] for size in sizes or () if size in ranges]
            if sizes is None or len(ends) < len(sizes) or not _holds_when(left, [*ends, *left.same]):
                return left.region.line
        return None


def nodes_left(regions: Sequence[Region]) -> list[list[fx.Node]]:
    """The nodes of each: those that were recorded in its lines since, and before these were come to again."""
    nodes, ends, found = list(compat.recorded_since(0))[::-1], dict[Any, int](), list[list[fx.Node]]()
    for region in reversed(regions):
        key = region.code, region.lines
        found.append([node for node in nodes[region.count : ends.get(key, len(nodes))] if region.has(node)])
        ends[key] = region.count
    return found[::-1]


def sizes_behind(own: Collection[fx.Node], masks: Mapping[Any, int], *, with_numbers: bool) -> set[int] | None:
    """The numbers of the rows of which something is used behind some nodes, or written to what was before; None where
    more is used, or written. masks: of which it may be one. with_numbers: whether whole numbers may be used, too.
    """
    inside, sizes = set(own), set[int]()
    for node in own:
        if compat.is_mutable(node) and _lies_in(node.args[0]) not in inside:
            if not _writes_rows(node, sizes):
                return None
            continue
        if not any(user not in inside and user.target is not _CHECK for user in node.users):
            continue
        rows = [size for size in shape_of(node) if size >= FIRST]
        if rows or node in masks:
            sizes.add(rows[0] if rows else masks[node])
        elif not (with_numbers and _is_whole_number(node)) and not _writes_rows(node, sizes):
            return None
    return sizes


def _lies_in(node: Any) -> Any:
    """What a node is a view of, or has been written to."""
    while node.op == "call_function" and isinstance(node.target, compat.OpOverload):
        returns = node.target._schema.returns
        if not returns or returns[0].alias_info is None or not isinstance(node.args[0], fx.Node):
            break
        node = node.args[0]
    return node


def _asks_for_rows(node: fx.Node) -> bool | None:
    """Whether a test is True where there is nothing; None where it asks for something else."""
    target: Any = node.target
    if target in _PAIRS and isinstance(node.args[1], fx.Node):
        return _PAIRS[target]
    key = (node.target, node.args[1] if len(node.args) > 1 else None)
    if key in _EMPTY:
        return True
    return False if key in _SOME or (_is_whole_number(node) and not shape_of(node)) else None


def _is_whole_number(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, Tensor) and not value.dim() and value.dtype == torch.int64


def _writes_rows(node: Any, sizes: set[int]) -> bool:
    """Whether a node is what was there before, with something else in rows that a mask chooses, whose number is noted:
    `where(mask, rows, before)`, or `before` and rows that are added to it, or a tensor that becomes that.
    """
    before: Any = None
    written: list[tuple[Any, Any]]
    while node.target in (*COPIES, _aten.copy_.default):
        if node.target is _aten.copy_.default:
            before = node.args[0]
        node = node.args[1] if node.target is _aten.copy_.default else node.args[0]
    if node.target in _ADDING:
        first, _, _, added = node.args[:4]
        if shape_of(added)[:1] >= (FIRST,):
            sizes.add(shape_of(added)[0])
            return before in (None, first)
        written, first = [(added, 0)], first if before is not None else None
    elif node.target is _aten.add.Tensor:
        written = [(each, 0) for each in node.args if isinstance(each, fx.Node)]
        first = next((each for each in node.args if each is before), None)
    else:
        written, first = [(node, before)], before
    for each, elsewhere in written:
        value: Any = _stripped(each)
        if value.target not in (_aten.where.self, _aten.where.ScalarOther):
            continue
        rows = _stripped(value.args[1])
        other = value.args[2]
        same = elsewhere is None or other is elsewhere or (type(elsewhere) is int and other == elsewhere)
        if same and before is first and isinstance(rows, fx.Node) and rows.target is SPREAD:
            sizes.add(shape_of(rows.args[0])[0])
            return True
    return False


def _stripped(node: Any) -> Any:
    """What a node is but for copies, sums, which are 0 of zeros, and the order of dims."""
    while isinstance(node, fx.Node) and node.target in (*COPIES, *_SUMS):
        node = node.args[0]
    return node


def _holds_when(left: _Left, pairs: list[tuple[Any, Any]]) -> bool:
    """Whether both of each pair are the same number in all trials in which the test says that there is nothing."""
    seen: set[bool] = set()
    for given in group_trials(left.asked):
        asked = compat.value_of(left.asked, given)
        if asked is None:
            return False
        nothing = bool(_plain(asked)) == left.empty
        seen.add(nothing)
        if nothing and any(number_of(one, given) != number_of(other, given) for one, other in pairs):
            return False
    return seen == {True, False}


def number_of(value: Any, given: Mapping[fx.Node, Tensor]) -> Any:
    """Python's number, or what a traced one is where some nodes are given; a number that is no other's if unknown."""
    if not isinstance(value, Tensor):
        return value
    node = compat.node_of(value)
    known = None if node is None else compat.value_of(node, given)
    return object() if known is None else _plain(known)


def _plain(value: Tensor) -> Any:
    with compat.outside_of_tracing():
        return value.item()


def group_trials(node: fx.Node) -> Iterator[dict[fx.Node, Tensor]]:
    """Numbers that the places may be, which some node is made of, that a `topk`, an `argmax` or a `sort` found."""
    waiting, seen, roots = [node], {node}, []
    while waiting:
        last = waiting.pop()
        if last.op == "call_function" and limit_of(last) is not None:
            roots.append(last)
            continue
        new = [each for each in last.all_input_nodes if each not in seen]
        seen.update(new)
        waiting += new
    if roots:
        with compat.outside_of_tracing():
            tried = [places_tried(root) for root in roots]
        for values in zip(*tried, strict=True):
            yield dict(zip(roots, values, strict=True))


# ---------------------------------------------------------------------------------------------------- the source


@dataclass(frozen=True, slots=True)
class Statements:
    """lines: of a file. same: names of two numbers that have to be the same, None of 0. tensors: names of what has to
    be tensors, whose values the graph has.
    """

    lines: tuple[int, int]
    same: tuple[tuple[str, str | None], ...]
    tensors: tuple[str, ...]

    def writes_tensors(self, held: Mapping[str, Any]) -> bool:
        """Whether what is written are tensors with dims."""
        return all(isinstance(held.get(name), Tensor) and held[name].dim() for name in self.tensors)


def left_out(source: Source, places: Collection[Span], empty: bool) -> Statements | None:
    """What a test leaves out that asks for what stands at one of some places; None where it may be more than what comes
    of rows. empty: what that is where there are none.
    """
    for node in ast.walk(source.tree):
        for body in (getattr(node, "body", None), getattr(node, "orelse", None)):
            if not isinstance(body, list):
                continue
            for place, statement in enumerate(body):
                if not isinstance(statement, ast.If):
                    continue
                test = statement.test
                negated = isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not)
                asked = test.operand if isinstance(test, ast.UnaryOp) and negated else test
                if not {span(test), span(asked)} & set(places):
                    continue
                skips = isinstance(statement.body[0], ast.Continue) and isinstance(node, ast.For) and body is node.body
                if statement.orelse or isinstance(asked, ast.BoolOp) or (skips != empty) == (not negated):
                    return None
                left = body[place + 1 :] if skips else statement.body
                return _only_rows(source.tree, left) if left else None
    return None


def _only_rows(tree: ast.AST, left: list[ast.stmt]) -> Statements | None:
    """What has to be so for nothing but rows to come of some statements; None where source alone does not allow it."""
    outside = outside_of(tree, left)
    read = names_read(outside)
    same: list[tuple[str, str | None]] = []
    tensors: list[str] = []
    stored = {
        node.id
        for statement in left
        for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }
    waiting = list(left)
    while waiting:
        statement = waiting.pop(0)
        if any(isinstance(node, ast.NamedExpr | ast.Await | ast.Yield | ast.YieldFrom) for node in ast.walk(statement)):
            return None
        if isinstance(statement, ast.Assign | ast.AugAssign):
            targets = statement.targets if isinstance(statement, ast.Assign) else [statement.target]
            for target in flat(targets):
                if isinstance(target, ast.Subscript) and isinstance(target.value, ast.Name):
                    tensors.append(target.value.id)
                elif not isinstance(target, ast.Name):
                    return None
                elif target.id in read or is_read_first(left, target.id):
                    found = _carried(statement, target.id)
                    others = {each for pair in (found or ([],))[0] for each in pair if each not in (None, target.id)}
                    if found is None or others & stored:  # numbers are compared as they are at the test
                        return None
                    same += found[0]
                    tensors += found[1]
        elif isinstance(statement, ast.Expr) and isinstance(statement.value, ast.Call):
            function = statement.value.func
            if not isinstance(function, ast.Attribute) or not isinstance(function.value, ast.Name):
                return None
            name = function.value.id
            if not (is_only_joined(outside, name) if function.attr == "append" else function.attr.endswith("_")):
                return None
            tensors += [] if function.attr == "append" or name not in read else [name]
        elif isinstance(statement, ast.If):
            waiting = [*statement.body, *statement.orelse, *waiting]
        elif isinstance(statement, ast.Pass):
            continue
        else:
            return None
    last = left[-1]
    return Statements((left[0].lineno, last.end_lineno or last.lineno), tuple(same), tuple(tensors))


def _carried(statement: ast.Assign | ast.AugAssign, name: str) -> tuple[list[tuple[str, str | None]], list[str]] | None:
    """Of a statement that sets a name which is read behind it: numbers that have to be the same, and tensors."""
    value = statement.value
    if isinstance(statement, ast.AugAssign):
        added = value if isinstance(statement.op, ast.Add) else None
        return ([(added.id, None)], []) if isinstance(added, ast.Name) else None
    if len(statement.targets) != 1 or not isinstance(statement.targets[0], ast.Name):
        return None
    if isinstance(value, ast.Name):
        return [(name, value.id)], []
    if isinstance(value, ast.BinOp) and isinstance(value.op, ast.Add):
        sides = [each.id for each in (value.left, value.right) if isinstance(each, ast.Name)]
        if len(sides) == 2 and name in sides:
            return [(sides[1 - sides.index(name)], None)], []
        return ([], [name]) if name in sides else None
    if isinstance(value, ast.Call) and isinstance(value.func, ast.Attribute):
        first = [value.func.value, *value.args[:1]]
        return ([], [name]) if any(isinstance(each, ast.Name) and each.id == name for each in first) else None
    return None
