"""Stand-ins for blocks that will not be traced: the classes and attributes of a block and its modules, without tensors.

A tracer lifts every parameter of a model before it begins. With stand-ins it sees those of distinct blocks only.
Whoever asks a block for one of its modules gets a stand-in, too, whose attributes may be read and set; who asks for a
tensor, or lists what is inside, is told Unshown.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NoReturn

from torch import nn

from autopar.passes.blocks.alike import OWN


class NotRepeated(Exception):
    """The graph is not what repeating blocks would give; the model is to be traced in another way."""


class Unshown(NotRepeated):
    """A model looks for what is inside of a block: the tracer is to be shown all of them."""


@dataclass(slots=True)
class Running:
    """Whether a model's forward runs: then whoever counts or lists what is in a block is the model, not the tracer.

    missed: what it was told is not there; the model's own code may have gone on.
    """

    now: bool = False
    missed: str = ""

    def misses(self, what: str) -> NoReturn:
        """Raises Unshown."""
        self.missed = what
        raise Unshown(what)


def hollow(block: nn.Module, running: Running) -> nn.Module:
    """A module of the same class that is like `block` for whoever calls it, and says Unshown to whoever looks for
    tensors inside. Its forward is still to be replaced.
    """
    new = object.__new__(type(block))
    for name, value in vars(block).items():
        if name == "_modules":
            parts = {key: None if part is None else hollow(part, running) for key, part in value.items()}
            new.__dict__[name] = _Modules(parts, running)
        elif name in _TENSORS:
            new.__dict__[name] = _Inside({}, running, frozenset(value))
        else:
            new.__dict__[name] = type(value)() if name in OWN and isinstance(value, Mapping) else value
    return new


def attributes_of(stand_in: nn.Module) -> Iterator[tuple[dict[str, Any], str, Any]]:
    """Of a stand-in and those inside of it: dictionaries, and what these have of the block's own, by name."""
    own = vars(stand_in)
    yield from ((own, name, value) for name, value in list(own.items()) if name not in OWN)
    for part in dict.values(own["_modules"]):
        if part is not None:
            yield from attributes_of(part)


_TENSORS = ("_parameters", "_buffers")


class _Inside(dict[str, Any]):
    """The parameters, buffers or modules of a block that is not there: none for whoever lists them."""

    def __init__(self, there: Mapping[str, Any], running: Running, names: frozenset[str] = frozenset()) -> None:
        super().__init__(there)
        self._names, self._running = names, running

    def __contains__(self, name: object) -> bool:
        if name in self._names:
            self._running.misses(f"{name} of a block is read from outside of it")
        return super().__contains__(name)

    def __missing__(self, name: str) -> Any:
        self._running.misses(f"{name} of a block is read from outside of it")


class _Modules(_Inside):
    """The modules of a block that is not there: stand-ins, each for who asks for it."""


def _listing(name: str) -> Callable[..., Any]:
    of_dict = getattr(dict, name)

    def method(self: _Inside, *args: Any) -> Any:
        if self._running.now:
            self._running.misses("what is in a block is listed from outside of it")
        if isinstance(self, _Modules) and name in _LISTINGS:
            return getattr({}, name)(*args)
        return of_dict(self, *args)

    return method


_LISTINGS = (
    "__iter__", "__reversed__", "__len__", "__eq__", "__ne__", "__or__", "__ror__", "keys", "values", "items", "get",
    "copy",
)  # fmt: skip
_CHANGES = ("pop", "popitem", "setdefault", "update", "clear", "__setitem__", "__delitem__")
for _name in (*_LISTINGS, *_CHANGES):
    setattr(_Inside, _name, _listing(_name))
