"""The cache of a call of forward that was handed none, until somebody looks at it. Imports nothing."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from autopar.base.errors import AutoparError
from autopar.base.huggingface.reuse import put


def unmakeable(reason: str) -> AutoparError:
    """Of a call that left none."""
    return AutoparError(
        "a call without a cache gave none, and none can be made now",
        values=reason,
        remedy="call model.eval(), and forward with use_cache=True, which gives one",
    )


class Unmade:
    """The cache of a call that was handed none: it becomes one of ours when somebody asks it for anything.

    make: it, or why it cannot be made. It is collective: the prompt is read once more, on all ranks, by a program that
    keeps keys and values.
    """

    def __init__(self, make: Callable[[], Any] | AutoparError) -> None:
        self._make = make

    def become(self) -> None:
        """Raises an AutoparError where none can be made."""
        if isinstance(self._make, AutoparError):
            raise self._make
        made = self._make()
        self.__class__ = type(made)
        vars(self).clear()
        put(self, made)

    def __repr__(self) -> str:
        return "<a cache that is made when it is used>"

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):
            raise AttributeError(name)
        self.become()
        return getattr(self, name)

    def __len__(self) -> int:
        self.become()
        return len(self)

    def __iter__(self) -> Any:
        self.become()
        return iter(self)

    def __copy__(self) -> Any:
        self.become()
        return copy.copy(self)

    def __deepcopy__(self, memo: dict[int, Any]) -> Any:
        self.become()
        return copy.deepcopy(self, memo)
