"""Stand-ins for blocks that will not be traced: a block's class and attributes, without its tensors and modules.

A tracer lifts every parameter of a model before it begins. With stand-ins it sees those of distinct blocks only.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn

from autopar.passes.blocks.alike import OWN


class NotRepeated(Exception):
    """The graph is not what repeating blocks would give; the model is to be traced in another way."""


@dataclass(slots=True)
class Running:
    """Whether a model's forward runs: then whoever counts or lists what is in a block is the model, not the tracer."""

    now: bool = False


def hollow(block: nn.Module, running: Running) -> nn.Module:
    """A module of the same class that is like `block` for whoever calls it, and says NotRepeated to whoever looks for
    what is inside. Its forward is still to be replaced.
    """
    new = object.__new__(type(block))
    for name, value in vars(block).items():
        if name in _REGISTERED:
            new.__dict__[name] = _Inside(frozenset(value), running)
        else:
            new.__dict__[name] = type(value)() if name in OWN and isinstance(value, Mapping) else value
    return new


_REGISTERED = ("_parameters", "_buffers", "_modules")


class _Inside(dict[str, Any]):
    """The parameters, buffers or modules of a block that is not there: none."""

    def __init__(self, names: frozenset[str], running: Running) -> None:
        super().__init__()
        self._names, self._running = names, running

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            raise NotRepeated(f"{name} of a block is read from outside of it")
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        raise NotRepeated(f"{name} of a block is read from outside of it")


def _listing(name: str) -> Callable[..., Any]:
    of_dict = getattr(dict, name)

    def method(self: _Inside, *args: Any) -> Any:
        if self._running.now:
            raise NotRepeated("what is in a block is listed from outside of it")
        return of_dict(self, *args)

    return method


_LISTINGS = ("__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "keys", "values", "items")
for _name in (
    *_LISTINGS,
    "get",
    "copy",
    "pop",
    "popitem",
    "setdefault",
    "update",
    "clear",
    "__setitem__",
    "__delitem__",
):
    setattr(_Inside, _name, _listing(_name))
