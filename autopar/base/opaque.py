"""What stands in the place of a value to see that nobody looks at it."""

from __future__ import annotations

from typing import NoReturn


class LookedAtError(Exception):
    """An `Opaque` was looked at."""


class Opaque:
    """It can be handed on, and told from None; whatever else is done with it raises."""

    def __getattr__(self, name: str) -> NoReturn:
        raise LookedAtError(name)

    def __bool__(self) -> NoReturn:
        raise LookedAtError("bool")

    def __eq__(self, other: object) -> bool:
        if isinstance(other, Opaque):
            return self is other
        raise LookedAtError("==")

    __hash__ = object.__hash__

    def __deepcopy__(self, memo: object) -> Opaque:
        return self
