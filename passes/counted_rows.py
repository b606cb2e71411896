"""What Python does only where a mask chooses rows at all, as it is traced: with rows.

    for e in range(E):                             of every round, also those without rows
        idx = torch.where(chosen == e)[0]
        if idx.numel() == 0:                       nothing but rows is written behind it: done, and nothing comes of it
            continue
        out.index_add_(0, idx, expert[e](x[idx]))

    if len(rows) > 0:                              a number, which would be another one: taken for granted, guarded
        losses.append(F.mse_loss(rows, target))        (`usual.py`)

Python asks for numbers of rows, which are plain ones; so which test asks is read off the source, and so is what comes
of what it leaves out. A round of a loop over what is marked (`chosen_loops.py`) always has rows.
"""

from __future__ import annotations

import ast
import inspect
import sys
import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import CodeType, FrameType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.passes.checks import frame_of_model
from autopar.passes.chosen import Chosen
from autopar.passes.no_rows import flat, is_only_joined, is_read_first
from autopar.passes.usual import Usual

_ASKING = {Tensor.numel, Tensor.nelement, Tensor.__len__, Tensor.size, Tensor.shape.__get__}  # type: ignore[attr-defined]
_WRITING = frozenset({"index_add", "index_put", "index_copy", "scatter", "scatter_add", "masked_scatter"})
"""Methods that write to rows, and leave the others as they are."""
_JUMPS = (
    ast.NamedExpr,
    ast.Await,
    ast.Yield,
    ast.YieldFrom,
    ast.Return,
    ast.Break,
    ast.Raise,
    ast.Global,
    ast.Nonlocal,
)


class CountedRows(TorchFunctionMode):
    """While a model is traced in which masks choose rows. usual: takes for granted that there are some; without it,
    what would be is refused.
    """

    def __init__(self, chosen: Chosen, usual: Usual | None = None) -> None:
        super().__init__()
        self.chosen, self.usual = chosen, usual

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        found = func(*args, **(kwargs or {}))
        if func in _ASKING and self.chosen.loops.now is None and any(True for _ in self.chosen.known()):
            self._asked(tuple(args[0].shape), sys._getframe(1))
        return found

    def _asked(self, shape: tuple[int, ...], frame: FrameType) -> None:
        masks = {rows: mask for mask, rows in self.chosen.known()}
        counted = [dim for dim, size in enumerate(shape) if _is_of(size, masks)]
        own = frame_of_model(frame) if counted else None
        if own is not None:
            for test in _tests_at(own):
                self._look_at(test, own, shape, counted, masks)

    def _look_at(
        self, test: _Test, own: FrameType, shape: tuple[int, ...], counted: Sequence[int], masks: Mapping[int, Tensor]
    ) -> None:
        if test.dim is not None and test.dim % len(shape) not in counted:
            return
        asked = own.f_locals.get(test.of or "", None)
        if test.of is not None and (not isinstance(asked, Tensor) or tuple(asked.shape) != shape):
            return  # the line asks something else of this one
        rows = {name for name, value in own.f_locals.items() if _holds_rows(value, masks)}
        tensors = {name for name, value in own.f_locals.items() if isinstance(value, Tensor)}
        if test.left is not None and _leaves_numbers(test.left, test.tree, tensors, rows):
            return
        line = f"{own.f_code.co_filename.rpartition('/')[2]}:{own.f_lineno}"
        if self.usual is None:
            raise AutoparError(
                "forward() does something else where a mask chooses no rows, which values say", where=line,
                remedy="do the same for any number of rows: sums over rows, and numbers from mask.sum()",
            )  # fmt: skip
        self.usual.takes_rows(masks[shape[counted[0]]], line)


@dataclass(frozen=True, slots=True)
class _Test:
    """A test of whether there are rows. dim: whose size is asked for, None of all. of: the name of what is asked; None
    of what has none. left: statements that are left out where there are none, and nothing else; None where it is more.
    """

    tree: ast.AST
    dim: int | None
    of: str | None
    left: tuple[ast.stmt, ...] | None


def _is_of(size: Any, masks: Mapping[int, Tensor]) -> bool:
    """Whether a size is the number of rows that a mask chooses; what torch itself does not know is not."""
    return type(size) is int and size in masks


def _holds_rows(value: Any, masks: Mapping[int, Tensor]) -> bool:
    """Whether a value is of rows that a mask chooses, or a mask."""
    return isinstance(value, Tensor) and (value.dtype == torch.bool or any(_is_of(size, masks) for size in value.shape))


@lru_cache(maxsize=256)
def _tree(code: CodeType) -> tuple[ast.AST, int] | None:
    """The source of a function, and how many lines of its file are before it."""
    try:
        lines, first = inspect.getsourcelines(code)
        return ast.parse(textwrap.dedent("".join(lines))), max(first, 1) - 1
    except (OSError, SyntaxError):
        return None


def _tests_at(frame: FrameType) -> tuple[_Test, ...]:
    """The tests at a frame's line that ask whether there are rows, or ask it of a number that the line gives a name."""
    found = _tree(frame.f_code)
    return () if found is None else _tests_in(found[0], frame.f_lineno - found[1])


@lru_cache(maxsize=4096)
def _tests_in(tree: ast.AST, at: int) -> tuple[_Test, ...]:
    tests: list[_Test] = []
    named: dict[str, _Asked] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.If | ast.IfExp | ast.While) and _stands_at(node.test, at):
            tests += (
                _Test(tree, asked.dim, asked.of, _left_out(tree, node, asked.empty))
                for asked in _asked_in(node.test, None)
            )  # fmt: skip
        if isinstance(node, ast.Assign) and _stands_at(node, at) and len(node.targets) == 1:
            count = _count(node.value)
            if isinstance(node.targets[0], ast.Name) and count is not None:
                named[node.targets[0].id] = count
    for node in ast.walk(tree) if named else ():
        if isinstance(node, ast.If | ast.IfExp | ast.While):
            tests += (
                _Test(tree, count.dim, count.of, _left_out(tree, node, asked.empty))
                for name, count in named.items()
                for asked in _asked_in(node.test, name)
            )  # fmt: skip
    return tuple(tests)


def _stands_at(node: ast.expr | ast.stmt, line: int) -> bool:
    return node.lineno <= line <= (node.end_lineno or line)


@dataclass(frozen=True, slots=True)
class _Asked:
    """What is asked for: dim and of as of `_Test`. empty: whether the test is True where there are none; None where it
    asks for other things, too.
    """

    dim: int | None
    of: str | None
    empty: bool | None = None


def _count(value: ast.expr) -> _Asked | None:
    """The number of rows, or of elements, that an expression is; None of other expressions."""
    on: ast.expr | None = None
    dim: int | None = None
    if isinstance(value, ast.Call):
        if isinstance(value.func, ast.Name) and value.func.id == "len" and len(value.args) == 1:
            on, dim = value.args[0], 0
        elif isinstance(value.func, ast.Attribute) and value.func.attr in ("numel", "nelement"):
            on = value.func.value
        elif isinstance(value.func, ast.Attribute) and value.func.attr == "size" and len(value.args) == 1:
            on, dim = value.func.value, _plain(value.args[0])
    elif isinstance(value, ast.Subscript) and isinstance(value.value, ast.Attribute) and value.value.attr == "shape":
        on, dim = value.value.value, _plain(value.slice)
    return None if on is None else _Asked(dim, on.id if isinstance(on, ast.Name) else None)


def _plain(value: ast.expr) -> int | None:
    try:
        found = ast.literal_eval(value)
    except ValueError:
        return None
    return found if isinstance(found, int) else None


def _asked_in(test: ast.expr, name: str | None, alone: bool = True) -> Iterator[_Asked]:
    """What a test, or a part of it, asks of numbers of rows (of a name, if one is given): whether they are 0."""
    if isinstance(test, ast.BoolOp):
        for each in test.values:
            yield from _asked_in(each, name, alone=False)
        return
    if isinstance(test, ast.UnaryOp) and isinstance(test.op, ast.Not):
        for asked in _asked_in(test.operand, name, alone):
            yield _Asked(asked.dim, asked.of, None if asked.empty is None else not asked.empty)
        return
    empty: bool | None = False
    if isinstance(test, ast.Compare):
        if len(test.ops) != 1:
            return
        one, other, operator = test.left, test.comparators[0], type(test.ops[0])
        if isinstance(one, ast.Constant):
            one, other, operator = other, one, _TURNED.get(operator, operator)
        key = operator, other.value if isinstance(other, ast.Constant) else None
        if key not in _EMPTY:
            return
        test, empty = one, _EMPTY[key]
    if name is not None:
        count = _Asked(None, name) if isinstance(test, ast.Name) and test.id == name else None
    else:
        count = _count(test)
    if count is not None:
        yield _Asked(count.dim, count.of, empty if alone else None)


_TURNED: Mapping[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Lt: ast.Gt,
    ast.Gt: ast.Lt,
    ast.LtE: ast.GtE,
    ast.GtE: ast.LtE,
}
_EMPTY: Mapping[tuple[type[ast.cmpop], Any], bool] = {
    (ast.Eq, 0): True, (ast.LtE, 0): True, (ast.Lt, 1): True, (ast.NotEq, 0): False, (ast.Gt, 0): False,
    (ast.GtE, 1): False,
}  # fmt: skip
"""Comparisons that ask whether there is any, and whether they are True where there is none."""


def _left_out(tree: ast.AST, test: ast.If | ast.IfExp | ast.While, empty: bool | None) -> tuple[ast.stmt, ...] | None:
    """The statements that are left out where there are no rows; None where something else is done then."""
    if not isinstance(test, ast.If) or test.orelse or empty is None:
        return None
    skips = len(test.body) == 1 and isinstance(test.body[0], ast.Continue)
    if skips != empty:
        return None
    if not skips:
        return tuple(test.body)
    for node in ast.walk(tree):
        if isinstance(node, ast.For) and test in node.body:
            return tuple(node.body[node.body.index(test) + 1 :])
    return None


def _leaves_numbers(left: Sequence[ast.stmt], tree: ast.AST, tensors: set[str], rows: set[str]) -> bool:
    """Whether nothing comes of statements where there are no rows, but what is written to rows, and rows that are put
    together. tensors, rows: names of those.
    """
    inside = {id(node) for statement in left for node in ast.walk(statement)}
    outside = [node for node in ast.walk(tree) if id(node) not in inside]
    read = {node.id for node in outside if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Load)}
    own = {
        node.id for statement in left for node in ast.walk(statement)
        if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store)
    }  # fmt: skip

    def is_kept(name: str) -> bool:
        return name in read or is_read_first(list(left), name)

    def writes_rows(target: ast.expr) -> bool:
        if isinstance(target, ast.Name):
            return not is_kept(target.id)
        if not isinstance(target, ast.Subscript) or not isinstance(target.value, ast.Name):
            return False
        if target.value.id in own:
            return True
        at = {node.id for node in ast.walk(target.slice) if isinstance(node, ast.Name)}
        return target.value.id in tensors and bool(at & (rows - own))

    for statement in left:
        for node in ast.walk(statement):
            if isinstance(node, _JUMPS):
                return False
            if isinstance(node, ast.Assign):
                good = all(map(writes_rows, flat(node.targets))) or _is_written_of(node)
            elif isinstance(node, ast.AugAssign):
                good = writes_rows(node.target) and not (isinstance(node.target, ast.Name) and is_kept(node.target.id))
            elif isinstance(node, ast.For):
                good = all(map(writes_rows, flat([node.target])))
            elif isinstance(node, ast.Expr) and isinstance(node.value, ast.Call):
                good = _call_writes_rows(node.value, outside, tensors | own)
            else:
                good = not isinstance(node, ast.Delete | ast.With | ast.Try | ast.While | ast.AnnAssign)
            if not good:
                return False
    return True


def _is_written_of(statement: ast.Assign) -> bool:
    """`out = out.index_add(0, idx, rows)`."""
    value, targets = statement.value, statement.targets
    return (
        isinstance(value, ast.Call)
        and isinstance(value.func, ast.Attribute)
        and value.func.attr.rstrip("_") in _WRITING
        and isinstance(value.func.value, ast.Name)
        and len(targets) == 1
        and isinstance(targets[0], ast.Name)
        and targets[0].id == value.func.value.id
    )


def _call_writes_rows(call: ast.Call, outside: list[ast.AST], tensors: set[str]) -> bool:
    """`out.index_add_(0, idx, rows)`, or `parts.append(rows)` of a list whose elements are only put together."""
    if not isinstance(call.func, ast.Attribute) or not isinstance(call.func.value, ast.Name):
        return False
    name, method = call.func.value.id, call.func.attr
    if method == "append":
        return is_only_joined(outside, name)
    return name in tensors and method.endswith("_") and method.rstrip("_") in _WRITING
