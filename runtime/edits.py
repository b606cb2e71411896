"""Whether a rank wrote into parameters between the steps of optimizers, where what they hold cannot tell.

A rank's piece of a parameter is nobody else's, so no other one has anything to compare it with. But torch counts what
is written into a tensor, and every rank does the same to a model: one that wrote where others did not is about to
compute with other weights. What goes past torch's count (`.data`, a piece that `to_local()` gave) is not seen.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from operator import attrgetter

from torch import nn

from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.runtime.alike import axis_of

_COUNT = attrgetter("_version")


class Edits:
    """The parameters of one model that are looked at, by name."""

    def __init__(self, parameters: Mapping[str, nn.Parameter]) -> None:
        self._names, self._parameters = tuple(parameters), tuple(parameters.values())
        self._seen = self._counts()
        self._written: dict[str, None] = {}

    @classmethod
    def of(cls, model: nn.Module, interface: ProgramInterface, here: Iterable[TensorInterface]) -> Edits:
        """Of the parameters of which no other rank has what this one has. here: those that this rank holds."""
        names = (entry.name for entry in here if not axis_of(entry, interface))
        return cls({name: model.get_parameter(name) for name in names})

    def note(self) -> None:
        """Before an optimizer's step: what was written until now was not written by it."""
        now = self._counts()
        if now != self._seen:
            written = (name for name, *both in zip(self._names, self._seen, now, strict=True) if both[0] != both[1])
            self._written.update(dict.fromkeys(written))
            self._seen = now

    def accept(self) -> None:
        """After an optimizer's step: what was written was written by it."""
        self._seen = self._counts()

    def taken(self) -> tuple[str, ...]:
        """The names of what was written since this was asked last, but for what steps wrote."""
        self.note()
        found = tuple(self._written)
        self._written.clear()
        return found

    def _counts(self) -> tuple[int, ...]:
        return tuple(map(_COUNT, self._parameters))
