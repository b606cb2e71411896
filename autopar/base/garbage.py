"""Work that makes many small objects, among all that a process has made so far."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from contextlib import contextmanager


@contextmanager
def without_collection() -> Iterator[None]:
    """Inside, or in a function that it decorates, nobody searches for garbage, which would take longer than the work:
    what is made is let go in the end, in no circles.
    """
    was = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was:
            gc.enable()
