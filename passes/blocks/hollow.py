"""Stand-ins for blocks that will not be traced: a block's class and attributes, without its tensors and modules.

A tracer lifts every parameter of a model before it begins. With stand-ins it sees those of distinct blocks only.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from autopar.passes.blocks.alike import OWN


class NotRepeated(Exception):
    """The graph is not what repeating blocks would give; the model is to be traced in another way."""


def hollow(block: nn.Module, classes: dict[type[nn.Module], type[nn.Module]]) -> nn.Module:
    """A module that is like `block` for whoever calls it, and says NotRepeated to whoever looks for what is inside.

    Its forward is still to be replaced. classes: those that were made before, by the blocks'; grows.
    """
    cls = type(block)
    if cls not in classes:
        classes[cls] = _hollow_class(cls)
    new = object.__new__(classes[cls])
    inside = frozenset(name for kind in _REGISTERED for name in vars(block)[kind])
    for name, value in vars(block).items():
        own = name in OWN and isinstance(value, Mapping)
        new.__dict__[name] = type(value)() if own else value
    new.__dict__["_autopar_inside"] = inside
    return new


_REGISTERED = ("_parameters", "_buffers", "_modules")


def _hollow_class(cls: type[nn.Module]) -> type[nn.Module]:
    def look_up(self: nn.Module, name: str) -> Any:
        if name in self.__dict__.get("_autopar_inside", ()):
            raise NotRepeated(f"{name} of a block is read from outside of it")
        return cls.__getattr__(self, name)

    names = {name: getattr(cls, name) for name in ("__module__", "__qualname__", "__doc__")}
    return type(cls.__name__, (cls,), {**names, "__getattr__": look_up})
