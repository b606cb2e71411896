"""Warnings of one thread."""

from __future__ import annotations

import contextlib
import threading
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, cast


@contextlib.contextmanager
def without_warnings() -> Iterator[None]:
    """No warnings from this thread. `warnings.catch_warnings` would replace every thread's filters, and put them back
    over what others have set meanwhile, for good.
    """
    of_thread = _OfThread(threading.get_ident())
    mine: Any = ("ignore", of_thread, Warning, None, 0)
    cast("list[Any]", warnings.filters).insert(0, mine)
    try:
        yield
    finally:
        of_thread.thread = None  # another thread may hold a copy of the list, and put it back later
        with contextlib.suppress(ValueError):
            cast("list[Any]", warnings.filters).remove(mine)


@dataclass(eq=False, slots=True)
class _OfThread:
    """In place of the pattern that a warning's text is to match."""

    thread: int | None

    def match(self, text: str) -> bool:
        """Whether the warning is this thread's."""
        return threading.get_ident() == self.thread
