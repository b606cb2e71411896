"""Whether data that was read (JSON) has the types that a program expects of it, said in Python's own notation.

    check(list[tuple[str, int]], [["dp", 2], ["tp", 2]], "mesh")

A hint may be str, int, float, bool, None, a Literal, a union, list, tuple, Mapping, a TypedDict or a dataclass. Tuples
and dataclasses stand for what JSON makes of them: lists, and objects with a value for each field. Numbers are finite,
but those of `MaybeInfinite`.

By hand, though `msgspec` and `cattrs` convert and check by hints too: a plan is read on machines that nothing can be
installed on, so that what reads it needs no package beyond torch's own. Either would also have to be told of every
notation (a sharding is `dp=S(0), tp=R`, actions of a schedule are rows of text), of bounds (finite numbers, whole ones
below 2**62), and of errors that say where in the file; that is most of these files.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import MISSING, fields, is_dataclass
from types import NoneType, UnionType
from typing import Annotated, Any, Literal, NotRequired, Union, get_args, get_origin, get_type_hints, is_typeddict

MaybeInfinite = Annotated[float, "or without end, such as the gap of what nothing is proven of"]
LARGEST = 1 << 62
"""Of whole numbers, either sign: counts and bytes."""


class WrongType(ValueError):
    """A value that is not of the type asked for; the message says where it stands."""


def check(hint: Any, value: Any, where: str) -> None:
    """Nothing for a value of this type. where: for errors, as in `plan.regions`.

    Raises:
        WrongType: another type, a name that is missing or not known, a number that is not finite or too large.
    """
    _checker(hint)(value, where)


@functools.cache
def _checker(hint: Any) -> Any:
    """A function that checks one value; made once for each hint."""
    origin, arguments = get_origin(hint), get_args(hint)
    if hint is Any:
        return lambda value, where: None
    if origin is NotRequired:
        return _checker(arguments[0])
    if hint in _SCALARS:
        return _SCALARS[hint]
    if origin is Literal:
        return functools.partial(_literal, arguments)
    if origin in (Union, UnionType):
        return functools.partial(_union, tuple(arguments))
    if origin is tuple and arguments[-1:] != (Ellipsis,):
        return functools.partial(_row, tuple(map(_checker, arguments)))
    if origin in (tuple, list, Sequence):
        return functools.partial(_list, _checker(arguments[0]))
    if origin in (dict, Mapping):
        assert arguments[0] is str, hint
        return functools.partial(_mapping, _checker(arguments[1]))
    return _record_checker(hint)


def _record_checker(hint: Any) -> Any:
    hints = get_type_hints(hint, include_extras=True)
    if is_typeddict(hint):
        required = frozenset(name for name, each in hints.items() if get_origin(each) is not NotRequired)
    else:
        assert is_dataclass(hint), hint
        hints = {each.name: hints[each.name] for each in fields(hint) if each.init}
        required = frozenset(
            each.name for each in fields(hint) if each.default is MISSING and each.default_factory is MISSING
        )
    return functools.partial(_record, {name: _checker(each) for name, each in hints.items()}, required)


def _fail(expected: str, value: Any, where: str) -> WrongType:
    is_short = isinstance(value, int | float | bool | None)
    said = repr(value) if is_short else next((text for kind, text in _KINDS if isinstance(value, kind)), "a value")
    said = said if len(said) < 60 else f"{said[:56]} …"
    return WrongType(f"{where} should be {expected}, and is {said}")


_KINDS = ((str, "a text"), (list, "a list"), (dict, "a mapping"))


def _str(value: Any, where: str) -> None:
    if type(value) is not str:
        raise _fail("a text", value, where)


def _int(value: Any, where: str) -> None:
    if type(value) is not int or not -LARGEST <= value <= LARGEST:
        raise _fail("a whole number", value if type(value) is not int else float("inf"), where)


def _float(value: Any, where: str) -> None:
    is_number = type(value) is float or (type(value) is int and -LARGEST <= value <= LARGEST)
    if not is_number or not math.isfinite(value):
        raise _fail("a finite number", value if type(value) is not int else float("inf"), where)


def _maybe_infinite(value: Any, where: str) -> None:
    if type(value) is not float or math.isnan(value):
        _float(value, where)


def _bool(value: Any, where: str) -> None:
    if type(value) is not bool:
        raise _fail("true or false", value, where)


def _none(value: Any, where: str) -> None:
    if value is not None:
        raise _fail("null", value, where)


_SCALARS = {
    str: _str, int: _int, float: _float, bool: _bool, None: _none, NoneType: _none, MaybeInfinite: _maybe_infinite
}  # fmt: skip


def _literal(known: tuple[Any, ...], value: Any, where: str) -> None:
    if not any(type(value) is type(each) and value == each for each in known):
        raise _fail(f"one of {', '.join(map(str, known))}", value, where)


def _union(hints: tuple[Any, ...], value: Any, where: str) -> None:
    last: WrongType | None = None
    for hint in hints:
        try:
            return _checker(hint)(value, where)
        except WrongType as error:
            last = last if hint is NoneType and last is not None else error
    assert last is not None
    raise last


def _list(inner: Any, value: Any, where: str) -> None:
    if type(value) is not list and type(value) is not tuple:
        raise _fail("a list", value, where)
    for number, each in enumerate(value):
        try:
            inner(each, "")
        except WrongType as error:
            raise WrongType(f"{where}[{number}]{error}") from None


def _row(inner: tuple[Any, ...], value: Any, where: str) -> None:
    if (type(value) is not list and type(value) is not tuple) or len(value) != len(inner):
        raise _fail(f"a list of {len(inner)}", value, where)
    for number, (check_one, each) in enumerate(zip(inner, value, strict=True)):
        check_one(each, f"{where}[{number}]")


def _mapping(inner: Any, value: Any, where: str) -> None:
    if type(value) is not dict:
        raise _fail("a mapping", value, where)
    for key, each in value.items():
        _str(key, f"a key of {where}")
        inner(each, f"{where}[{key[:40]!r}]")


def _record(known: Mapping[str, Any], required: frozenset[str], value: Any, where: str) -> None:
    if type(value) is not dict:
        raise _fail("a mapping", value, where)
    if missing := sorted(required - value.keys()):
        raise WrongType(f"{where} lacks {', '.join(missing)}")
    for key, each in value.items():
        if key not in known:
            raise WrongType(f"{where} has {str(key)[:40]!r}, which it should not")
        known[key](each, f"{where}.{key}")
