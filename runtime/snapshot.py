"""What decides, beside its values and the batch, what a forward of a model is: whether it is as it was."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import chain, repeat
from operator import attrgetter, is_
from typing import Any

from torch import nn

from autopar.base.huggingface.adapters import SWITCHES
from autopar.base.huggingface.configuration import configurations
from autopar.runtime.hooks import BACKWARD, FORWARD

_WANTS, _GRAD = attrgetter("requires_grad"), attrgetter("grad")


class Snapshot:
    """What of a model, beside its values, decides what a forward of it is: as one forward found it.

    with_grads: which parameters want gradients, and have them, too: ranks tell each other.
    """

    def __init__(self, model: nn.Module, with_grads: bool = True) -> None:
        modules = list(model.modules())
        # All of it is compared in few calls of C.
        self._of_modules, self._kinds = modules, [*map(type, modules)]
        self._vars = [vars(module) for module in modules]
        self._modes = self._read("training")
        self._children = self._read_children()
        self._held = self._ids()
        inside = [getattr(each, kind) for each in modules[1:] for kind in {**FORWARD, **BACKWARD}]
        self._no_hooks = [hooks for hooks in inside if not hooks]
        self._hooks = [hooks for hooks in inside if hooks]
        self._keys = [*map(tuple, self._hooks)]
        numbers = [
            (vars(holder), name, value)
            for holder in [*modules, *configurations(model).values()]
            for name, value in vars(holder).items()
            if (type(value) in (bool, int, float) and name != "training") or name in SWITCHES
        ]
        self._holders, self._names = [held for held, *_ in numbers], [name for _, name, _ in numbers]
        self._values = [list(x) if isinstance(x, list) else x for *_, x in numbers]
        self._parameters = list(model.parameters())  # held, so that their ids are nobody else's
        self._grads = _grads(self._parameters) if with_grads else None

    def holds(self) -> bool:
        """Whether all of it is as it was."""
        if [*map(type, self._of_modules)] != self._kinds or self._read("training") != self._modes:
            return False
        if self._read_children() != self._children or self._ids() != self._held:
            return False
        if [*map(dict.get, self._holders, self._names)] != self._values:
            return False
        if any(self._no_hooks) or [*map(tuple, self._hooks)] != self._keys:
            return False
        return self._grads is None or _grads(self._parameters) == self._grads

    def _read(self, name: str) -> list[Any]:
        return [*map(dict.get, self._vars, repeat(name))]

    def _read_children(self) -> list[list[nn.Module | None]]:
        return [*map(list, map(dict.values, self._read("_modules")))]

    def _ids(self) -> list[int]:
        """Of the parameters, with how many each module has."""
        held = self._read("_parameters")
        return [*map(len, held), *map(id, chain.from_iterable(map(dict.values, held)))]


def _grads(parameters: Sequence[nn.Parameter]) -> list[bool]:
    """Of each, whether it wants gradients; then of each, whether it has none."""
    return [*map(_WANTS, parameters), *map(is_, map(_GRAD, parameters), repeat(None))]
