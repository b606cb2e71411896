"""A model goes on after it was compiled: what of it programs follow, and what is told because they do not."""

from __future__ import annotations

import copy
import logging
from typing import Any, NamedTuple

from torch import nn

from autopar.base.errors import AutoparError
from autopar.base.huggingface.adapters import SWITCHES

logger = logging.getLogger("autopar")


class _Number(NamedTuple):
    """A number or flag of a module, as it was when the model was compiled. held: the attributes of the module."""

    held: dict[str, Any]
    name: str
    value: bool | float | int
    path: str

    def has_changed(self) -> bool:
        now = self.held.get(self.name, self.value)
        return bool(now != self.value and self.value == self.value)  # NaN is no other number than NaN


class Following:
    """A compiled model beside the copy that programs are traced from."""

    def __init__(self, blueprint: nn.Module, model: nn.Module) -> None:
        self.blueprint, self.model = blueprint, model
        self._numbers: list[_Number] | None = None

    def follow(self) -> None:
        """train() and eval(), and adapters on and off, module by module, as on the user's model.

        Raises:
            AutoparError: modules were put into the model, or taken out.
        """
        planned, theirs = list(self.blueprint.modules()), list(self.model.modules())
        if len(planned) != len(theirs):
            raise _restructured(self.blueprint, self.model)
        self._tell_numbers()
        for own, other in zip(planned, theirs, strict=True):
            own.training = other.training
            for switch in SWITCHES:
                if switch in vars(other):
                    vars(own)[switch] = copy.copy(vars(other)[switch])

    def _tell_numbers(self) -> None:
        """Say once of a number or flag that a module had when it was compiled, and has no more, that programs go on
        with the old one: what forward reads of Python stands in them.
        """
        if self._numbers is None:
            pairs = zip(self.blueprint.named_modules(), self.model.modules(), strict=True)
            self._numbers = [
                _Number(vars(other), name, value, f"{path}.{name}".lstrip("."))
                for (path, own), other in pairs
                for name, value in vars(own).items()
                if type(value) in (bool, float, int) and name != "training" and name not in SWITCHES
            ]
        changed = [each for each in self._numbers if each.has_changed()]
        for held, name, value, path in changed:
            logger.warning(
                "%s is %s now, and was %s when the model was compiled: its programs go on with %s, if they read it; "
                "compile the model again to have them read %s",
                path, held[name], value, value, held[name],
            )  # fmt: skip
        if changed:
            self._numbers = [each for each in self._numbers if not each.has_changed()]


def _restructured(planned: nn.Module, model: nn.Module) -> AutoparError:
    """What is said where a compiled model has other modules than it was compiled with."""
    then, now = dict(planned.named_modules()), dict(model.named_modules())
    name = next(name for name in (*now, *then) if (name in then) != (name in now))
    return AutoparError(
        f"{name} was {'put into' if name in now else 'taken out of'} a {type(model).__name__} that is compiled already",
        remedy="Change the model first, and compile then: autopar.compile(get_peft_model(model, config), mesh)",
    )
