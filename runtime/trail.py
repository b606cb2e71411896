"""What a rank does with others: written by the thread that runs steps, read by one that watches it (runtime/watch)."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager

from autopar.runtime.event import Event

BEGINNING = "the beginning of a step"
ENDING = "the end of a step"


class Trail:
    """Of one rank. issued: how many transfers it has begun. waits_for: the one that it waits for now, or None.

    since: when the last wait began or ended (`time.monotonic`, seconds). does: what takes long and concerns no others
    ("plans", "saves"), or None; does_since: when it began. waited: seconds waited, by what for, since somebody began
    anew; waited_s: all so far. did: seconds of `does` so far.
    """

    __slots__ = ("did", "does", "does_since", "issued", "since", "waited", "waited_s", "waits_for")

    def __init__(self) -> None:
        self.issued = 0
        self.waits_for: Event | str | None = None
        self.since = time.monotonic()
        self.does: str | None = None
        self.does_since = self.since
        self.waited: dict[str, float] = {}
        self.waited_s = 0.0
        self.did: dict[str, float] = {}

    @contextmanager
    def waiting(self, for_what: Event | str) -> Iterator[None]:
        """Around a wait for other ranks."""
        self.since = time.monotonic()  # first: whoever sees the wait sees since when
        self.waits_for = for_what
        try:
            yield
        finally:
            now = time.monotonic()
            at = for_what if isinstance(for_what, str) else f"{for_what.kind} over {for_what.axis} at {for_what.where}"
            self.waited[at] = self.waited.get(at, 0.0) + now - self.since
            self.waited_s += now - self.since
            self.waits_for, self.since = None, now

    @contextmanager
    def doing(self, what: str) -> Iterator[None]:
        """Around what may take long, on one rank too, and is no reason to worry."""
        before, begun = self.does, time.monotonic()
        if before is None:
            self.does_since = begun
        self.does = what
        try:
            yield
        finally:
            self.does, self.since = before, time.monotonic()
            if before is None:
                self.did[what] = self.did.get(what, 0.0) + self.since - begun

    def most(self) -> str:
        """What was waited for longest, "" for nothing."""
        return max(self.waited, key=lambda at: self.waited[at], default="")
