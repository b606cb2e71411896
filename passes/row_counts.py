"""How many rows a mask chooses, as Python's number: one that knows what it is made of, and tells what is asked of it.

n = rows.shape[0]          Count(1000003), mask.sum()
n * 2 + 1                  Count(2000007), mask.sum() * 2 + 1
n > 0                      `Asked.compared`: what has to be so for the answer to be right
"""

from __future__ import annotations

import operator
import sys
from collections.abc import Callable
from types import FrameType
from typing import Any, Protocol


class Asked(Protocol):
    """Who is told what Python asks of numbers of rows."""

    def compared(self, count: Count, by: Callable[[Any, Any], Any], other: Any, found: bool, frame: FrameType) -> bool:
        """What a comparison gives, whose answer for the traced number is `found`."""
        ...

    def escapes(self, count: Count, frame: FrameType) -> None:
        """It becomes a plain number."""
        ...

    def looked_up(self, frame: FrameType) -> None:
        """It is looked up in a dict or a set."""
        ...


class Count(int):
    """rows: the mask's number, where it is 0 exactly where that chooses nothing; None of others. said: what makes it of
    masks, a traced number. most: what it may be at most, None if unknown.
    """

    asked: Asked
    rows: int | None
    said: Callable[[], Any]
    most: int | None

    @classmethod
    def of(
        cls, number: int, asked: Asked, said: Callable[[], Any], rows: int | None = None, most: int | None = None
    ) -> Count:
        """A number that the trace has, which stands for what is said."""
        found = cls(number)
        found.asked, found.rows, found.said, found.most = asked, rows, said, most
        return found

    def __bool__(self) -> bool:
        return self.asked.compared(self, operator.ne, 0, int(self.plain) != 0, sys._getframe(1))

    @property
    def plain(self) -> int:
        """The number itself."""
        return int.__add__(self, 0)

    def __int__(self) -> int:
        self.asked.escapes(self, sys._getframe(1))
        return self.plain

    def __float__(self) -> float:
        self.asked.escapes(self, sys._getframe(1))
        return float(self.plain)

    __trunc__ = __int__

    def __hash__(self) -> int:
        self.asked.looked_up(sys._getframe(1))
        return int.__hash__(self)

    def __neg__(self) -> Any:
        return 0 - self

    def __reduce__(self) -> Any:
        return int, (self.plain,)

    def __deepcopy__(self, memo: Any) -> int:
        return self.plain


def _plain(value: Any) -> Any:
    return value.plain if isinstance(value, Count) else value


def _said(value: Any) -> Any:
    return value.said() if isinstance(value, Count) else value


def _comparison(by: Callable[[Any, Any], Any]) -> Callable[[Count, Any], Any]:
    def compare(self: Count, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        return self.asked.compared(self, by, other, bool(by(self.plain, _plain(other))), sys._getframe(1))

    return compare


def _arithmetic(by: Callable[[Any, Any], Any], turned: bool) -> Callable[[Count, Any], Any]:
    def reckon(self: Count, other: Any) -> Any:
        if isinstance(other, float):
            self.asked.escapes(self, sys._getframe(1))
        if not isinstance(other, int):
            return NotImplemented
        if not turned and by in (operator.mod, operator.floordiv) and type(other) is int and other == 1:
            return 0 if by is operator.mod else self
        one, two = (other, self) if turned else (self, other)
        found = by(_plain(one), _plain(two))
        scaled = by is operator.mul and not isinstance(other, Count) and other > 0
        return Count.of(
            found, self.asked, lambda: by(_said(one), _said(two)), self.rows if scaled else None,
            self.most * other if scaled and self.most is not None else None,
        )  # fmt: skip

    return reckon


def _escaping(by: Callable[..., Any], turned: bool) -> Callable[..., Any]:
    def reckon(self: Count, other: Any) -> Any:
        if not isinstance(other, int | float):
            return NotImplemented
        self.asked.escapes(self, sys._getframe(1))
        return by(_plain(other), self.plain) if turned else by(self.plain, _plain(other))

    return reckon


def _escaping_alone(by: Callable[[int], Any]) -> Callable[[Count], Any]:
    def reckon(self: Count) -> Any:
        self.asked.escapes(self, sys._getframe(1))
        return by(self.plain)

    return reckon


for _name in ("eq", "ne", "lt", "le", "gt", "ge"):
    setattr(Count, f"__{_name}__", _comparison(getattr(operator, _name)))
for _name in ("add", "sub", "mul", "floordiv", "mod"):
    setattr(Count, f"__{_name}__", _arithmetic(getattr(operator, _name), turned=False))
    setattr(Count, f"__r{_name}__", _arithmetic(getattr(operator, _name), turned=True))
for _name, _by in (
    ("truediv", operator.truediv), ("pow", operator.pow), ("divmod", divmod), ("and", operator.and_),
    ("or", operator.or_), ("xor", operator.xor), ("lshift", operator.lshift), ("rshift", operator.rshift),
):  # fmt: skip
    setattr(Count, f"__{_name}__", _escaping(_by, turned=False))
    setattr(Count, f"__r{_name}__", _escaping(_by, turned=True))
for _name in ("abs", "pos", "invert", "round"):
    setattr(Count, f"__{_name}__", _escaping_alone(round if _name == "round" else getattr(operator, _name)))
