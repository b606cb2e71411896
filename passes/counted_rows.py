"""What Python does only where a mask chooses rows at all, as it is traced: with rows.

    for e in range(E):                             of every round, also those without rows
        idx = torch.where(chosen == e)[0]
        if idx.numel() == 0:                       nothing but rows is written behind it: done, and nothing comes of it
            continue
        out.index_add_(0, idx, expert[e](x[idx]))

    if len(rows) > 0:                              a number, which would be another one: taken for granted, guarded
        losses.append(F.mse_loss(rows, target))        (`usual.py`)
    if rows.shape[0] > capacity:                   what more is asked of a number: refused
        rows = rows[:capacity]

Sizes that Python asks for are `Count`s (`row_counts.py`), so it is told what is done with them: fractions of them are
numbers that are read of the mask (`read_numbers.py`). `int()` and `math.sqrt()` make plain numbers: what they are used
for is read off the source, and refused where that does not say it. What comes of
what is left out is read off the source and off the graph (`no_rows.py`). A round of a loop over what is marked
(`chosen_loops.py`) always has rows.
"""

from __future__ import annotations

import ast
import builtins
import functools
import logging
import operator
import sys
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.errors import AutoparError
from autopar.base.torch_compat import tracing as compat
from autopar.passes.checks import LIBRARIES, passing
from autopar.passes.chosen_functions import Chosen
from autopar.passes.chosen_operators import FIRST
from autopar.passes.no_rows import Region, left_out, nodes_left, sizes_behind
from autopar.passes.read_numbers import Numbers
from autopar.passes.row_counts import Count, has_counts, plain, without_counts
from autopar.passes.source import (
    WRITTEN_OUT,
    Source,
    Span,
    asked_at,
    call_asked,
    expression_asked,
    is_handed_out,
    is_said,
    is_tensor,
    source_of,
    span,
)
from autopar.passes.usual import Usual

_COUNTING = {Tensor.numel, Tensor.nelement}
_SIZES = {Tensor.size, Tensor.shape.__get__}  # type: ignore[attr-defined]
_COMPARISONS: Mapping[type[ast.cmpop], Callable[[Any, Any], Any]] = {
    ast.Eq: operator.eq, ast.NotEq: operator.ne, ast.Lt: operator.lt, ast.LtE: operator.le, ast.Gt: operator.gt,
    ast.GtE: operator.ge,
}  # fmt: skip
_TURNED = {operator.lt: operator.gt, operator.gt: operator.lt, operator.le: operator.ge, operator.ge: operator.le}
_PLAIN = frozenset({"len", "int", "float"})
"""Functions that give the number itself."""
_DIFFERING = (ast.Add, ast.Sub, ast.Mult, ast.Div, ast.Pow)
_WRITERS = tuple(str(Path(module.__file__ or "").parent) for module in (logging,)) + (warnings.__file__ or "",)
"""What writes texts for whoever asks for them."""
_EXTREMES = {torch.sym_max: "__sym_max__", torch.sym_min: "__sym_min__"}
"""What `max` and `min` are while torch exports."""
_COMPARING = frozenset({"eq", "ne", "lt", "le", "gt", "ge", "less", "less_equal", "greater", "greater_equal"})
_RECKONING = frozenset(
    {"add", "sub", "mul", "div", "truediv", "floordiv", "mod", "pow", "radd", "rsub", "rmul", "rdiv", "rtruediv"}
    | {"rpow", "rfloordiv", "rmod", "true_divide", "divide", "multiply", "subtract", "remainder", "floor_divide"}
)
"""Functions of tensors that take a number as an operand."""
_SIZING = frozenset(
    {"view", "reshape", "expand", "repeat", "unflatten", "new_zeros", "new_ones", "new_empty", "new_full"}
)
"""Methods of tensors that are told sizes."""


@dataclass(frozen=True, slots=True)
class _Left:
    """What is left out where a mask chooses nothing. rows: its number."""

    region: Region
    rows: int
    mask: Tensor
    line: str


class CountedRows(TorchFunctionMode):
    """While a model is traced in which masks choose rows. numbers: that are read of tensors. usual: takes for granted
    that there are some; without it, what would be is refused. is_on: whether forward runs.
    """

    def __init__(self, chosen: Chosen, numbers: Numbers, usual: Usual | None = None) -> None:
        super().__init__()
        self.chosen, self.numbers, self.usual = chosen, numbers, usual
        chosen.usual = usual
        self._left: list[_Left] = []
        self._plain: dict[int | float, Count] = {}
        self.is_on = False

    def within(self, forward: Callable[..., Any]) -> Callable[..., Any]:
        """A forward that looks behind itself at what comes of what is left out where there are no rows."""

        @functools.wraps(forward)
        def run(*args: Any, **kwargs: Any) -> Any:
            self.is_on = True
            with self._len_is_counted():
                try:
                    found = forward(*args, **kwargs)
                finally:
                    self.is_on = False
            regions = nodes_left([left.region for left in self._left])
            for left, own in zip(self._left, regions, strict=True):
                sizes = sizes_behind(own, {}, with_numbers=False)
                if sizes is None or not sizes <= {left.rows}:
                    self._takes_rows(left.mask, left.line)
            return self._handed_out(found)

        return run

    @contextmanager
    def _len_is_counted(self) -> Iterator[None]:
        """`len(rows)` is as `rows.shape[0]`: torch has its own `max`, `min` and `math.pow` while it exports, too."""
        before = builtins.len

        def counted(of: Any, /) -> Any:
            return self._count(of.size(0)) if isinstance(of, Tensor) and of.dim() else before(of)

        builtins.len = counted
        try:
            yield
        finally:
            builtins.len = before

    def _handed_out(self, results: Any) -> Any:
        """What forward returns, with numbers that are read in place of those of rows, and of Python's own."""

        def read(leaf: Any) -> Any:
            if type(leaf) is Count:
                return self.read(leaf)
            if type(leaf) not in (int, float) or self.numbers.is_made_plain(leaf):
                return leaf
            wide = torch.float64 if type(leaf) is float else torch.int64
            if (count := self._plain.get(leaf)) is not None:
                return self.number(count.said().to(wide))
            self.chosen.numbers = True
            return self.number(torch.scalar_tensor(leaf, dtype=wide))

        leaves, spec = compat.tree_flatten(results)
        return compat.tree_unflatten([read(leaf) for leaf in leaves], spec)

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if has_counts(args) or has_counts(kwargs):
            if func in _EXTREMES:
                one, other = args if type(args[0]) is Count else args[::-1]
                return getattr(one, _EXTREMES[func])(other)
            if func is torch.scalar_tensor:  # of which torch.tensor makes its numbers while torch exports
                return self.read(args[0]).to(kwargs.get("dtype") or torch.get_default_dtype()).clone()
            if func in (torch.as_tensor, Tensor.new_tensor):
                return self._made(args[-1]).to(kwargs.get("dtype"))
            args, kwargs = self._with_plain(func, args), without_counts(kwargs)
        found = func(*args, **kwargs)
        if not self.is_on or not isinstance(found, int | tuple):
            return found
        if func in _SIZES:
            if type(found) is int:
                return self._count(found)
            if isinstance(found, torch.Size):
                return torch.Size([self._count(size) for size in found])
        if func in _COUNTING:
            rows = [size for size in args[0].shape if self._mask(size) is not None]
            if len(rows) == 1 and type(found) is int and found:
                return self._count(rows[0], found // rows[0])
        if func is Tensor.__len__ and type(count := self._count(found)) is Count:
            self._becomes_plain(count, "len", sys._getframe(1))
        return found

    def _with_plain(self, func: Callable[..., Any], args: tuple[Any, ...]) -> Any:
        """The arguments of a function of tensors with plain numbers; beside tensors, they are what is counted."""
        name = getattr(func, "__name__", "").strip("_")
        operands = [each for each in args if isinstance(each, Tensor)]
        of_rows = any(self._mask(size) is not None for each in operands for size in each.shape)
        reckons = operands and (name in _COMPARING or (name in _RECKONING and not of_rows))
        floating = any(each.is_floating_point() for each in operands)
        return without_counts(
            args, (lambda count: count.said() if floating else self.read(count)) if reckons else plain
        )

    def _made(self, data: Any) -> Any:
        """What `torch.tensor` makes of numbers."""
        if not isinstance(data, list | tuple):
            return self.read(data).clone() if type(data) is Count else torch.tensor(data)
        return torch.stack([self._made(each) for each in data])

    def compared(self, count: Count, by: _By, other: Any, found: bool, frame: FrameType) -> bool:
        """As `Asked`."""
        frame = compat.caller_of_builtins(frame)
        if not self._is_asked(frame) or self._is_same(count, other):
            return found
        source = source_of(frame.f_code)
        test = _Test(set() if source is None else asked_at(frame, source), by, other)
        return self._decided(count, test, found, source, frame)

    def _decided(self, count: Count, test: _Test, found: bool, source: Source | None, frame: FrameType) -> bool:
        by, other = test.by, test.other
        line, is_equality = _line(frame), by in (operator.eq, operator.ne)
        if type(other) is not Count and count.rows is not None and count.most is not None:
            none, some, all_of_them = by(0, other), by(count.plain // count.rows, other), by(count.most, other)
            if none == some == all_of_them and not (is_equality and 0 < other < count.most):
                return bool(none)
            if none != some == all_of_them == found:
                self._asks_for_some(count.rows, test.places, bool(none), source, frame)
                return found
        wanted = None if self.usual is None else passing(frame, by_name=True)
        if wanted is not None and self.usual is not None:
            said = by(count.said(), other.said() if type(other) is Count else other)
            self.usual.takes_check(said == wanted, line)
            return wanted
        if not is_equality or self.usual is None or not (type(other) is Count or count.rows is not None):
            raise _refused(line)
        said = other.said() if type(other) is Count else other
        self.usual.takes_numbers(by(count.said(), said) == found, line)
        return found

    def _is_same(self, count: Count, other: Any) -> bool:
        """Whether both are the number of rows that one mask chooses, whatever it is."""
        if type(other) is Count:
            return count.rows is not None and count.rows == other.rows and count.plain == other.plain
        return count.rows == other

    def looked_up(self, frame: FrameType) -> None:
        """As `Asked`."""
        if self._is_asked(frame) and "site-packages" not in frame.f_code.co_filename:
            raise _refused(_line(frame))

    def read(self, count: Count) -> Any:
        """As `Asked`."""
        return self.number(count.said())

    def number(self, value: Tensor) -> Any:
        """As `Asked`."""
        return self.numbers.item(value)

    def escapes(self, count: Count, frame: FrameType) -> None:
        """As `Asked`."""
        frame = compat.caller_of_builtins(frame)
        if self._is_asked(frame):
            self._becomes_plain(count, "", frame)

    def written(self, count: Count, frame: FrameType) -> None:
        """As `Asked`."""
        while _is_between(frame.f_code.co_filename) and frame.f_back is not None:
            frame = frame.f_back
        source, asked = expression_asked(frame)
        known = source is not None and asked is not None and is_said(asked, source)
        if self.is_on and not known and not frame.f_code.co_filename.startswith((*LIBRARIES, *_WRITERS)):
            raise _refused(_line(frame))

    def _is_asked(self, frame: FrameType) -> bool:
        """Whether a model asks, not what traces it."""
        return self.is_on and not _is_between(frame.f_code.co_filename)

    def _mask(self, size: Any) -> Tensor | None:
        """The mask that chooses so many rows. What torch itself does not know is not such a size."""
        if type(size) is not int or size < FIRST:
            return None
        return next((mask for mask, rows in self.chosen.known() if rows == size), None)

    def _count(self, size: Any, times: int = 1) -> Any:
        """A size as Python is told it, so many times."""
        mask = self._mask(size)
        if mask is None:
            return size
        return Count(size * times, self, lambda: mask.sum() * times, size, mask.numel() * times)

    def _asks_for_some(
        self, rows: int, places: set[Span], empty: bool, source: Source | None, frame: FrameType
    ) -> None:
        """A test asks whether a mask chooses rows, which is `empty` where it chooses none."""
        if self.chosen.loops.now is not None:
            return
        mask = self._mask(rows)
        assert mask is not None
        found = None if source is None else left_out(source, places, empty)
        if found is None or found.same or not found.writes_tensors(frame.f_locals):
            self._takes_rows(mask, _line(frame))
        else:
            region = Region(frame.f_code, found.lines, compat.count_recorded())
            self._left.append(_Left(region, rows, mask, _line(frame)))

    def _takes_rows(self, mask: Tensor, line: str) -> None:
        if self.usual is None:
            raise _refused(line)
        self.usual.takes_rows(mask, line)

    def _becomes_plain(self, count: Count, function: str, frame: FrameType | None) -> None:
        """`len(rows)`, or, of no such function, what is under way (`int(n)`, `math.sqrt(n)`): what the source does with
        it.

        Raises:
            AutoparError: more than it says.
        """
        while frame is not None and _is_between(frame.f_code.co_filename):
            frame = frame.f_back
        if frame is None or frame.f_code.co_filename.startswith((*LIBRARIES, *_WRITERS)):
            return  # torch's own layers mind no values
        source, asked = call_asked(frame, function) if function else expression_asked(frame)
        if source is None or asked is None:
            raise _refused(_line(frame))
        called = asked.func.id if isinstance(asked, ast.Call) and isinstance(asked.func, ast.Name) else ""
        if called in _PLAIN and is_handed_out(asked, source):
            self._plain[count.plain] = count
            return
        if is_said(asked, source):
            return
        if not (called in _PLAIN or _differs(asked)):
            raise _refused(_line(frame))
        for test in _uses(asked, source, frame, set(), called not in _PLAIN):
            if test is None:
                raise _refused(_line(frame))
            found = bool(test.by(count.plain, test.other))
            if self._decided(count, test, found, source, frame) != found:
                raise _refused(_line(frame))


_By = Callable[[Any, Any], Any]


@dataclass(frozen=True, slots=True)
class _Test:
    """A comparison of a number of rows with another one, and where it stands."""

    places: set[Span]
    by: _By
    other: Any


def _refused(line: str) -> AutoparError:
    return AutoparError(
        "forward() asks how many rows a mask chooses, and may do otherwise for other numbers, which values say",
        where=line,
        remedy="do the same for any number of rows: sums over rows, fractions of their number (n / 2, max(n, 1)), "
        "numbers from mask.sum(); whether there are any may be asked, n == 0",
    )


def _line(frame: FrameType) -> str:
    return f"{frame.f_code.co_filename.rpartition('/')[2]}:{frame.f_lineno}"


def _is_between(filename: str) -> bool:
    """Whether a file is a tracer's, that calls functions of tensors for a model."""
    return compat.is_tracer_file(filename) and not filename.startswith(("<", *LIBRARIES))


def _uses(
    node: ast.expr, source: Source, frame: FrameType, names: set[str], is_derived: bool = False
) -> Iterator[_Test | None]:
    """The tests that a plain number goes into, None where it may decide otherwise. names: that were looked at.
    is_derived: whether it is another one by now, so that no test is known.
    """
    parent = source.parents[node]
    if _is_test(node, source):
        yield None if is_derived else _Test({span(node)}, operator.ne, 0)
    elif isinstance(parent, ast.Compare):
        yield None if is_derived else _comparison(node, parent)
    elif isinstance(parent, ast.Call) and (least := _least(node, parent)) is not None:
        yield None if is_derived or least > 1 else _Test({span(parent)}, operator.ge, 1)
        yield from _uses(parent, source, frame, names, is_derived=True)
    elif isinstance(parent, ast.Call):
        if not (node in parent.args and _minds_no_values(parent.func, frame)):
            yield None
    elif isinstance(parent, ast.Assign | ast.NamedExpr):
        targets = parent.targets if isinstance(parent, ast.Assign) else [parent.target]
        if len(targets) != 1 or not isinstance(targets[0], ast.Name):
            yield None
            return
        name = targets[0].id
        for each in ast.walk(source.tree) if name not in names else ():
            if isinstance(each, ast.Name) and each.id == name and isinstance(each.ctx, ast.Load):
                yield from _uses(each, source, frame, {*names, name}, is_derived)
            elif isinstance(each, ast.Global | ast.Nonlocal) and name in each.names:
                yield None
        if isinstance(parent, ast.NamedExpr):
            yield from _uses(parent, source, frame, {*names, name}, is_derived)
    elif (
        isinstance(parent, ast.BinOp)
        and isinstance(parent.op, _DIFFERING)
        and is_tensor(parent.right if node is parent.left else parent.left, source, frame)
    ):
        return  # in a program its number is seen
    elif isinstance(parent, ast.BinOp) and not isinstance(parent.op, _DIFFERING):
        yield None
    elif isinstance(parent, ast.BinOp | ast.Tuple | ast.List):
        yield from _uses(parent, source, frame, names, is_derived=True)
    elif not isinstance(parent, ast.FormattedValue | ast.Expr):
        yield None


def _differs(asked: ast.expr) -> bool:
    """Whether what is made of a number is another one for each, so that two traces tell that it is used."""
    if isinstance(asked, ast.BinOp):
        return isinstance(asked.op, _DIFFERING)
    name = getattr(asked.func, "attr", None) if isinstance(asked, ast.Call) else None
    return name in ("sqrt", "log", "log2", "log10", "log1p", "exp", "pow")


def _is_test(node: ast.expr, source: Source) -> bool:
    """Whether nothing but the truth of an expression counts."""
    parent = source.parents[node]
    if isinstance(parent, ast.BoolOp):
        return _is_test(parent, source)
    if isinstance(parent, ast.UnaryOp):
        return isinstance(parent.op, ast.Not)
    if isinstance(parent, ast.Call):
        return isinstance(parent.func, ast.Name) and parent.func.id == "bool"
    if isinstance(parent, ast.comprehension):
        return node in parent.ifs
    return isinstance(parent, ast.If | ast.While | ast.IfExp | ast.Assert) and node is parent.test


def _comparison(node: ast.expr, parent: ast.Compare) -> _Test | None:
    by = _COMPARISONS.get(type(parent.ops[0])) if len(parent.ops) == 1 else None
    other = parent.comparators[0] if node is parent.left else parent.left
    if by is None or not isinstance(other, ast.Constant) or type(other.value) is not int:
        return None
    return _Test({span(parent)}, by if node is parent.left else _TURNED.get(by, by), other.value)


def _least(node: ast.expr, call: ast.Call) -> int | None:
    """The other number of `max(n, 1)`; None of other calls."""
    if not isinstance(call.func, ast.Name) or call.func.id != "max" or len(call.args) != 2 or call.keywords:
        return None
    other = call.args[1] if node is call.args[0] else call.args[0]
    return other.value if isinstance(other, ast.Constant) and type(other.value) is int else None


def _minds_no_values(function: ast.expr, frame: FrameType) -> bool:
    """Whether a function writes a number down, or is torch's: in a program its numbers are seen."""
    if isinstance(function, ast.Name):
        return function.id in WRITTEN_OUT
    if not isinstance(function, ast.Attribute):
        return False
    root: ast.expr = function.value
    while isinstance(root, ast.Attribute):
        root = root.value
    held = (frame.f_locals | frame.f_globals).get(root.id) if isinstance(root, ast.Name) else None
    if isinstance(held, ModuleType):
        return held.__name__.partition(".")[0] in ("torch", "logging")
    return isinstance(held, Tensor) or function.attr in WRITTEN_OUT | _SIZING
