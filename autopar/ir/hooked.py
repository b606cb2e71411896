"""What forward hooks of a model's modules look at: outputs of a program, for the hooks to be called with behind it.

    saved = {}
    model.encoder.register_forward_hook(lambda module, args, output: saved.update(h=output))

A hook that gives nothing back changes nothing of the program; what it does in Python is done once it has run. A value
is one `Carried`, which says whose it is: of which module and hook, of which call, and where in what the hook is given.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import groupby
from typing import Any

from torch import Tensor

from autopar.ir.told import Carried, Held

HOOK = "hook"
"""The kind of what hooks look at."""
_PLAIN = (bool, int, float, str, type(None))


class Unsaid(Exception):
    """Values that cannot be written down: they are of other classes than Python's own, or there is no tensor."""


@dataclass(frozen=True, slots=True)
class Look:
    """One call of a hook: of the `number`-th hook of that name in this table of a module; `call` counts its calls."""

    path: str
    table: str
    name: str
    number: int
    call: int

    def carried(self, given: Sequence[Any]) -> list[tuple[Carried, Tensor]]:
        """What it is given, the module left out, as values that a step leaves.

        Raises:
            Unsaid: it cannot be written down.
        """
        tensors: list[Tensor] = []
        text = json.dumps([_said(each, tensors) for each in given])
        if not tensors:
            raise Unsaid
        keys = (self.name, self.number, self.call, text)
        return [
            (Carried(Held(self.path, self.table, (*keys, place)), False, HOOK), x) for place, x in enumerate(tensors)
        ]


def looks(carried: Sequence[Carried], values: Sequence[Any]) -> Iterator[tuple[Look, list[Any]]]:
    """The calls of hooks, in their order, with what they are given; values that are no hook's are passed over."""
    pairs = [(each, value) for each, value in zip(carried, values, strict=True) if each.kind == HOOK]
    for (path, table, keys), group in groupby(pairs, lambda pair: _of(pair[0])):
        name, number, call, text = keys
        tensors = [value for _, value in group]
        yield Look(path, table, name, number, call), [_again(each, tensors) for each in json.loads(text)]


def place_of(carried: Carried) -> tuple[Look, int]:
    """Whose a hook's value is, and its number among the tensors that the call is given."""
    name, number, call, _, place = carried.held.keys
    return Look(carried.held.path, carried.held.name, name, number, call), place


def tensors_of(given: Any) -> list[Tensor]:
    """In the order in which they are numbered.

    Raises:
        Unsaid: it cannot be written down.
    """
    found: list[Tensor] = []
    _said(given, found)
    return found


def _of(carried: Carried) -> tuple[str, str, tuple[Any, ...]]:
    return carried.held.path, carried.held.name, carried.held.keys[:-1]


def _said(value: Any, tensors: list[Tensor]) -> Any:
    if isinstance(value, Tensor):
        tensors.append(value)
        return {"tensor": len(tensors) - 1}
    if type(value) in _PLAIN:
        return {"is": value}
    if type(value) in (list, tuple):
        return {type(value).__name__: [_said(each, tensors) for each in value]}
    if type(value) is dict and all(type(key) is str for key in value):
        return {"dict": {key: _said(each, tensors) for key, each in value.items()}}
    raise Unsaid


def _again(said: Any, tensors: Sequence[Any]) -> Any:
    ((kind, value),) = said.items()
    if kind == "tensor":
        return tensors[value]
    if kind == "dict":
        return {key: _again(each, tensors) for key, each in value.items()}
    if kind in ("list", "tuple"):
        found = [_again(each, tensors) for each in value]
        return tuple(found) if kind == "tuple" else found
    return value
