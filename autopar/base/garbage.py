"""Work that makes many small objects, among all that a process has made so far."""

from __future__ import annotations

import gc
import threading
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


_LOCK = threading.Lock()
_inside = 0


@contextmanager
def older_spared() -> Iterator[None]:
    """Inside, or in a function that it decorates, garbage is searched for among what is made meanwhile: who has loaded
    torch and transformers has a million objects, and walking them again and again took a seventh of planning.

    What becomes garbage of what was there is let go after it; so is what was there when `spare` was called. Where
    somebody has called `gc.freeze()`, nothing is done: undoing it would undo theirs.
    """
    global _inside
    with _LOCK:
        froze = _inside > 0 or not gc.get_freeze_count()
        if froze:
            _inside += 1
            if _inside == 1:
                gc.freeze()
    try:
        yield
    finally:
        if froze:
            with _LOCK:
                _inside -= 1
                if not _inside:
                    gc.unfreeze()


def spare() -> None:
    """Inside `older_spared` also what there is by now: what is kept to the end need not be walked until then."""
    with _LOCK:
        if _inside:
            gc.freeze()
