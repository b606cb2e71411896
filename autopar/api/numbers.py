"""Numbers and flags of modules that change behind `compile`: `dropout.p = 0.2`, `norm.momentum = 0.5`, `net.step += 1`.

What forward reads of Python stands in programs. So other numbers are another kind of program, planned at the first
batch that comes with them; where that program is the same for a few values, nobody asks for the number again.
"""

from __future__ import annotations

import logging
from collections.abc import Collection, Mapping
from typing import Any

from torch import nn

from autopar.api.following import Number
from autopar.base.errors import AutoparError
from autopar.planner.inputs import NUMBERS, family_key
from autopar.runtime.executable import Executable

logger = logging.getLogger("autopar")
MOST_ALIKE = 3
"""Values of a number for which the program was the same, until it counts as one that forward does not read."""
MOST_NUMBERS = 16
"""Programs for batches of the same shapes that differ in numbers of modules."""
Key = tuple[Any, ...]


class Numbers:
    """Which numbers of a model decide its programs, as far as was seen."""

    def __init__(self, blueprint: nn.Module) -> None:
        self._blueprint = blueprint
        self._family: object = None
        self._not_read: dict[object, set[str]] = {}
        self._alike: dict[tuple[object, str], int] = {}

    def follow(
        self, changed: tuple[Number, ...], inputs: Mapping[str, Any], differentiate: bool, told: Collection[str] = ()
    ) -> None:
        """Have the kind of a batch say the numbers that are others than when the model was compiled, but for those that
        programs are told.
        """
        held = vars(self._blueprint)
        held[NUMBERS] = ()
        if changed:
            self._family = (family_key(self._blueprint, inputs), differentiate)
            passed = self._not_read.get(self._family, set())
            held[NUMBERS] = tuple((path, repr(value)) for path, value in changed if path not in (*passed, *told))

    def check(self, kind: Key, executables: Mapping[Key, Executable]) -> None:
        """Raises AutoparError where a program for each value of a number has become too many programs."""
        others = [each for each, _ in executables if _without(each) == _without(kind)]
        if len(set(others)) >= MOST_NUMBERS:
            names = ", ".join(sorted(_differing(others[-1], kind)))
            raise AutoparError(
                f"{names} of the model decides what its forward does, and is another number once more",
                values=f"{MOST_NUMBERS} programs were made for batches of the same shapes",
                remedy="Keep it in a buffer, which programs read at every step: self.register_buffer(name, "
                "torch.tensor(value)), written by .fill_(); or hand it in with the batch, as a tensor",
            )

    def planned(self, kind: Key, executables: dict[Key, Executable]) -> None:
        """A program was made for these numbers: what it says of them beside those that were there."""
        (new,) = (each for each in executables if each[0] == kind)
        for key, other in executables.items():
            if key[0] == kind or _without(key[0]) != _without(kind):
                continue
            names = _differing(key[0], kind)
            if other.source != executables[new].source or not _same(other.constants, executables[new].constants):
                for name in names:
                    self._alike.pop((self._family, name), None)
                continue
            for name in names:
                self._alike[self._family, name] = self._alike.get((self._family, name), 0) + 1
                if self._alike[self._family, name] == MOST_ALIKE:
                    self._not_read.setdefault(self._family, set()).add(name)
                    logger.warning(
                        "autopar: %s of the model is another number than when it was compiled; for %d of them the "
                        "program was the same, so from now on it counts as one that forward does not read",
                        name, MOST_ALIKE,
                    )  # fmt: skip
            executables[new] = other
            return


def _numbers(kind: Key) -> tuple[tuple[str, str], ...]:
    found: tuple[tuple[str, str], ...] = kind[0][-1]
    return found


def _without(kind: Key) -> Key:
    return (kind[0][:-1], *kind[1:])


def _differing(one: Key, other: Key) -> set[str]:
    return {path for path, _ in set(_numbers(one)) ^ set(_numbers(other))}


def _same(one: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    return one.keys() == other.keys() and all(one[name].equal(other[name]) for name in one)
