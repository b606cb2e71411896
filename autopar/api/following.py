"""A model goes on after it was compiled: what of it programs follow."""

from __future__ import annotations

import copy
from typing import Any, NamedTuple

from torch import nn

from autopar.api.ties import follow_ties
from autopar.base.errors import AutoparError
from autopar.base.huggingface.adapters import SWITCHES
from autopar.base.huggingface.configuration import configurations

Number = tuple[str, object]
"""The path of a number or flag of a module, and what it is now."""


class _Number(NamedTuple):
    """A number or flag of a module, or of a configuration, as it was when the model was compiled. planned, held: the
    attributes of the one that programs are traced from, and of the user's.
    """

    planned: dict[str, Any]
    held: dict[str, Any]
    name: str
    value: bool | float | int
    path: str

    def has_changed(self) -> bool:
        now = self.held.get(self.name, self.value)
        return bool(now != self.value and self.value == self.value)  # NaN is no other number than NaN


Compiled = dict[tuple[int, str], bool | float | int]
"""Numbers and flags by module and name; configurations are counted behind the modules."""


def numbers_of(blueprint: nn.Module) -> Compiled:
    """The numbers and flags that a model is compiled with."""
    return {
        (place, name): value
        for place, module in enumerate([*blueprint.modules(), *configurations(blueprint).values()])
        for name, value in vars(module).items()
        if type(value) in (bool, float, int) and name != "training" and name not in SWITCHES
    }


class Following:
    """A compiled model beside the copy that programs are traced from. compiled: the numbers that both had."""

    def __init__(self, blueprint: nn.Module, model: nn.Module, compiled: Compiled) -> None:
        self.blueprint, self.model, self._compiled = blueprint, model, compiled
        self._numbers: list[_Number] | None = None

    def follow(self) -> tuple[Number, ...]:
        """train() and eval(), adapters on and off, and numbers, module by module, as on the user's model. The numbers
        that are no more what they were when the model was compiled.

        Raises:
            AutoparError: modules were put into the model, or taken out.
        """
        engine: Any = getattr(self.model, "autopar", None)
        follow_ties(self.blueprint, self.model, is_planned=engine is None or engine.interface is not None)
        planned, theirs = list(self.blueprint.modules()), list(self.model.modules())
        if len(planned) != len(theirs):
            raise _restructured(self.blueprint, self.model)
        for own, other in zip(planned, theirs, strict=True):
            own.training = other.training
            for switch in SWITCHES:
                if switch in vars(other):
                    vars(own)[switch] = copy.copy(vars(other)[switch])
        return self._followed_numbers(planned, theirs)

    def _followed_numbers(self, planned: list[nn.Module], theirs: list[nn.Module]) -> tuple[Number, ...]:
        if self._numbers is None:
            paths = [path for path, _ in self.blueprint.named_modules(remove_duplicate=True)]
            own, held = configurations(self.blueprint), configurations(self.model)
            ours = [vars(each) for each in (*planned, *own.values())]
            yours = [vars(each) for each in (*theirs, *held.values())]
            if own.keys() != held.keys():  # other objects than there were are followed no more
                yours = [*yours[: len(theirs)], *ours[len(planned) :]]
            paths += own
            self._numbers = [
                _Number(ours[place], yours[place], name, value, f"{paths[place]}.{name}".lstrip("."))
                for (place, name), value in self._compiled.items()
            ]
        changed = []
        for each in self._numbers:
            now = each.held.get(each.name, each.value) if each.has_changed() else each.value
            if each.planned.get(each.name) is not now:
                each.planned[each.name] = now
            if now is not each.value:
                changed.append((each.path, now))
        return tuple(changed)


def _restructured(planned: nn.Module, model: nn.Module) -> AutoparError:
    """What is said where a compiled model has other modules than it was compiled with."""
    then, now = dict(planned.named_modules()), dict(model.named_modules())
    name = next(name for name in (*now, *then) if (name in then) != (name in now))
    return AutoparError(
        f"{name} was {'put into' if name in now else 'taken out of'} a {type(model).__name__} that is compiled already",
        remedy="Change the model first, and compile then: autopar.compile(get_peft_model(model, config), mesh)",
    )
