"""How many rows a mask chooses, as Python's number: one that knows what it is made of, and tells what is asked of it.

n = rows.shape[0]          Count of 1000003, mask.sum()
n * 2 + 1                  Count of 2000007, mask.sum() * 2 + 1
0.5 * n, n / 4             a number that is read of mask.sum() (`read_numbers.py`)
n > 0                      `Asked.compared`: what has to be so for the answer to be right
math.sqrt(n), f"{n}"       `Asked.escapes`, `Asked.written`

It says that it is an `int`, and is none: what is written in C (`0.5 * n`, `math.sqrt`, `range`, NumPy) reads an `int`
without asking it. torch's functions take one of torch's symbolic numbers wherever they take an `int`, so it is one of
these to them, and `CountedRows` gives them the number itself.
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType, SimpleNamespace
from typing import Any, Protocol

import torch
from torch import Tensor


class Asked(Protocol):
    """Who is told what Python asks of numbers of rows."""

    def compared(self, count: Count, by: Callable[[Any, Any], Any], other: Any, found: bool, frame: FrameType) -> bool:
        """What a comparison gives, whose answer for the traced number is `found`."""
        ...

    def read(self, count: Count) -> Any:
        """A number that is read of what says it, for what makes a fraction of it."""
        ...

    def number(self, value: Tensor) -> Any:
        """A number that is read of a tensor."""
        ...

    def escapes(self, count: Count, frame: FrameType) -> None:
        """It becomes a plain number."""
        ...

    def written(self, count: Count, frame: FrameType) -> None:
        """It becomes a text."""
        ...

    def looked_up(self, frame: FrameType) -> None:
        """It is looked up in a dict or a set."""
        ...


class Count(torch.SymInt):
    """plain: the number that the trace has. rows: the mask's number, where it is 0 exactly where that chooses nothing;
    None of others. said: what makes it of masks, a traced number. most: what it may be at most, None if unknown.
    """

    plain: int
    asked: Asked
    rows: int | None
    said: Callable[[], Any]
    most: int | None
    __class__: Any = property(lambda _: int)
    """To `isinstance`."""

    def __init__(
        self, plain: int, asked: Asked, said: Callable[[], Any], rows: int | None = None, most: int | None = None
    ) -> None:
        self.plain, self.asked, self.rows, self.said, self.most = plain, asked, rows, said, most
        self.node = _NO_NODE

    def __bool__(self) -> bool:
        return self.asked.compared(self, operator.ne, 0, self.plain != 0, sys._getframe(1))

    def __int__(self) -> int:
        self.asked.escapes(self, sys._getframe(1))
        return self.plain

    __index__ = __int__

    def __float__(self) -> float:
        self.asked.escapes(self, sys._getframe(1))
        return float(self.plain)

    def __repr__(self) -> str:
        self.asked.written(self, sys._getframe(1))
        return str(self.plain)

    __str__ = __repr__

    def __format__(self, spec: str) -> str:
        self.asked.written(self, sys._getframe(1))
        return format(self.plain, spec)

    def __hash__(self) -> int:
        self.asked.looked_up(sys._getframe(1))
        return hash(self.plain)

    def __neg__(self) -> Any:
        return 0 - self

    def __abs__(self) -> Count:
        return Count(abs(self.plain), self.asked, lambda: self.said().abs())

    def __invert__(self) -> Any:
        return -1 - self

    def __pos__(self) -> Count:
        return self

    __floor__ = __ceil__ = __trunc__ = conjugate = __pos__
    numerator = real = property(__pos__)
    denominator, imag = 1, 0

    def __round__(self, digits: int | None = None) -> Any:
        return self if digits is None or digits >= 0 else round(int(self), digits)

    def __copy__(self) -> Count:
        return self

    def __reduce__(self) -> Any:
        return int, (self.plain,)

    def __deepcopy__(self, memo: Any) -> int:
        return self.plain

    def bit_length(self) -> int:
        """As an `int`'s."""
        self.asked.escapes(self, sys._getframe(1))
        return self.plain.bit_length()


_NO_NODE: Any = SimpleNamespace(is_nested_int=lambda: False, is_symbolic=lambda: False, is_constant=lambda: True)
"""What torch asks of its own symbolic numbers."""


def plain(value: Any) -> Any:
    """A number as the trace has it; everything else as it is."""
    return value.plain if type(value) is Count else value


def has_counts(value: Any) -> bool:
    """Whether there is a `Count` among arguments."""
    if isinstance(value, slice):
        return any(map(has_counts, (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return any(map(has_counts, value.values()))
    return type(value) is Count or (isinstance(value, list | tuple) and any(map(has_counts, value)))


def without_counts(value: Any, instead: Callable[[Count], Any] = plain) -> Any:
    """Arguments with the numbers themselves."""
    if type(value) is Count:
        return instead(value)
    if not has_counts(value):
        return value
    if isinstance(value, slice):
        return slice(*(without_counts(each, instead) for each in (value.start, value.stop, value.step)))
    if isinstance(value, dict):
        return {name: without_counts(each, instead) for name, each in value.items()}
    found = [without_counts(each, instead) for each in value]
    return type(value)(*found) if hasattr(value, "_fields") else type(value)(found)


def _said(value: Any) -> Any:
    return value.said() if type(value) is Count else value


def _read(value: Any) -> Any:
    return value.asked.read(value) if type(value) is Count else value


def _larger(one: int, two: int) -> int:
    return one if one > two else two


def _smaller(one: int, two: int) -> int:
    return two if one > two else one


def _comparison(by: Callable[[Any, Any], Any]) -> Callable[[Count, Any], Any]:
    def compare(self: Count, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.asked.compared(self, by, other, bool(by(self.plain, plain(other))), sys._getframe(1))

    return compare


def _arithmetic(by: Callable[[Any, Any], Any], turned: bool) -> Callable[[Count, Any], Any]:
    def reckon(self: Count, other: Any) -> Any:
        if isinstance(other, complex):
            self.asked.escapes(self, sys._getframe(1))
        if not isinstance(other, int | float) or isinstance(other, Tensor):
            return NotImplemented
        one, two = (other, self) if turned else (self, other)
        if isinstance(other, float) or by in (operator.truediv, operator.pow):
            return by(_read(one), _read(two))
        if not turned and by in (operator.mod, operator.floordiv) and type(other) is int and other == 1:
            return 0 if by is operator.mod else self
        found = by(plain(one), plain(two))
        scaled = by is operator.mul and type(other) is int and other > 0
        return Count(
            found, self.asked, lambda: by(_said(one), _said(two)), self.rows if scaled else None,
            self.most * other if scaled and self.most is not None else None,
        )  # fmt: skip

    return reckon


def _escaping(by: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    def reckon(self: Count, other: Any) -> Any:
        if not isinstance(other, int):
            return NotImplemented
        self.asked.escapes(self, sys._getframe(1))
        return by(plain(other), self.plain) if turned else by(self.plain, plain(other))

    return reckon


def _extreme(
    of_plain: Callable[[int, int], int], of_both: Callable[..., Any], side: str
) -> Callable[[Count, Any], Any]:
    """`max` or `min`, which torch has its own of for its symbolic numbers. side: the bound that a number is of them."""

    def find(self: Count, other: Any) -> Any:
        if isinstance(other, float):
            return self.asked.number((_read(self) * 1.0).clamp(**{side: other}))
        found = of_plain(self.plain, plain(other))
        if type(other) is Count:
            return Count(found, self.asked, lambda: of_both(self.said(), other.said()))
        return Count(found, self.asked, lambda: self.said().clamp(**{side: other}))

    return find


def _divided(self: Any, other: Any) -> Any:
    return (self // other, self % other) if isinstance(other, int | float) else NotImplemented


def _dividing(self: Any, other: Any) -> Any:
    return (other // self, other % self) if isinstance(other, int | float) else NotImplemented


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Count, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "floordiv", "mod", "truediv", "pow"):
    setattr(Count, f"__{_name}__", _arithmetic(getattr(operator, _name), turned=False))
    setattr(Count, f"__r{_name}__", _arithmetic(getattr(operator, _name), turned=True))
for _name in ("and_", "or_", "xor", "lshift", "rshift"):
    setattr(Count, f"__{_name.strip('_')}__", _escaping(getattr(operator, _name), turned=False))
    setattr(Count, f"__r{_name.strip('_')}__", _escaping(getattr(operator, _name), turned=True))
for _name, _by in (
    ("divmod", _divided), ("rdivmod", _dividing), ("sym_max", _extreme(_larger, torch.maximum, "min")),
    ("sym_min", _extreme(_smaller, torch.minimum, "max")),
):  # fmt: skip
    setattr(Count, f"__{_name}__", _by)
