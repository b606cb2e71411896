"""A number that tells when it is looked at: a layer's own, which most layers only hand on to a cache."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


class Watched:
    """In the place of an int: whatever is made of it is made of the int, and `look` hears of it first.

    It is no int for C code, which would read it unseen: that asks `__index__`, or raises TypeError. place: where it was
    read, for whoever takes it as it is.
    """

    __slots__ = ("_look", "_value", "place")
    __class__: Any = property(lambda self: int)  # what `isinstance` goes by

    def __init__(self, value: int, place: tuple[str, str], look: Callable[[], None]) -> None:
        self._value, self.place, self._look = value, place, look

    def looked(self) -> int:
        """The number; it counts as looked at."""
        self._look()
        return self._value

    def unseen(self) -> int:
        """The number, for whoever tells by `place` that it was read there."""
        return self._value


def is_watched(value: object) -> bool:
    """Whether it is such a number, and no int."""
    return type(value) is Watched


def _on_the_int(name: str) -> Callable[..., Any]:
    def method(self: Watched, *others: Any) -> Any:
        plain = [other.looked() if is_watched(other) else other for other in others]
        return getattr(self.looked(), name)(*plain)

    return method


def _of_the_int(name: str) -> property:
    def read(self: Watched) -> Any:
        return getattr(self.looked(), name)

    return property(read)


_OWN = (
    "new",
    "init",
    "init_subclass",
    "subclasshook",
    "getattribute",
    "setattr",
    "delattr",
    "class",
    "reduce",
    "reduce_ex",
)
_OF_OBJECTS = frozenset(f"__{name}__" for name in (*_OWN, "getstate", "getnewargs", "sizeof", "dir", "doc"))
for _name in dir(int):
    if _name not in _OF_OBJECTS:
        of = _on_the_int if callable(getattr(int, _name)) else _of_the_int
        setattr(Watched, _name, of(_name))
