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
_froze = False
_thresholds = (0, 0, 0)
OFTEN = (50_000, 20, 20)
"""As `gc.set_threshold` has them, for what makes graphs: many objects that live long, and few circles among them."""


@contextmanager
def older_spared() -> Iterator[None]:
    """Inside, or in a function that it decorates, garbage is searched for among what is made meanwhile: who has loaded
    torch and transformers has a million objects, and walking them again and again took a seventh of planning. It is
    searched for less often, too (`OFTEN`), unless somebody has turned that off or has thresholds that are no lower.

    What becomes garbage of what was there is let go after it; so is what was there when `spare` was called. Where
    somebody has called `gc.freeze()`, nothing is done: undoing it would undo theirs.
    """
    global _inside, _froze, _thresholds
    with _LOCK:
        _inside += 1
        if _inside == 1:
            # Once, not at each that lies in another: what is frozen is counted one by one.
            _froze = not gc.get_freeze_count()
            if _froze:
                gc.freeze()
                _thresholds = gc.get_threshold()
                if 0 < _thresholds[0] < OFTEN[0]:
                    gc.set_threshold(*OFTEN)
    try:
        yield
    finally:
        with _LOCK:
            _inside -= 1
            if not _inside and _froze:
                _froze = False
                gc.unfreeze()
                if gc.get_threshold() == OFTEN:
                    gc.set_threshold(*_thresholds)


def spare() -> None:
    """Inside `older_spared` also what there is by now: what is kept to the end need not be walked until then."""
    with _LOCK:
        if _froze:
            gc.freeze()
