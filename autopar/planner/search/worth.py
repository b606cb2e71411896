"""Which points are worth working out, from bounds of what they take and what was found so far."""

from __future__ import annotations

import bisect
import math
from collections.abc import Iterable
from dataclasses import dataclass, field

from autopar.planner.search.candidate import Candidate, Point
from autopar.planner.search.stages import Computing, Moving

MARGIN = 1.1
"""By how much estimates may be off: points within it of the best are all worked out."""
SLOWEST, LARGEST = 2.0, 3.0
"""Points that take so many times the shortest step, or the memory limit, are not worked out."""


@dataclass
class Worth:
    """What was found. top: how many plans are wanted. fastest: seconds of the fastest fitting point of each kind.

    steps, sizes: the frontier, seconds ascending and bytes descending.
    """

    limit_bytes: float
    top: int
    fastest: dict[tuple[object, ...], float] = field(default_factory=dict)
    steps: list[float] = field(default_factory=list)
    sizes: list[float] = field(default_factory=list)
    bound_s: float = math.inf
    slowest_s: float = math.inf

    def add(self, found: Iterable[Candidate]) -> None:
        """Take note of estimates."""
        for each in found:
            self._add_to_frontier(each.step_s, each.peak_bytes)
            if each.fits and each.step_s < self.fastest.get(each.point.kind, math.inf):
                self.fastest[each.point.kind] = each.step_s
        best = sorted(self.fastest.values())
        if len(best) >= self.top:
            self.bound_s = MARGIN * best[self.top - 1]
        if best:
            self.slowest_s = SLOWEST * best[0]

    def _add_to_frontier(self, step_s: float, peak_bytes: float) -> None:
        if self._is_beaten(step_s, peak_bytes):
            return
        place = bisect.bisect_left(self.steps, step_s)
        stop = place
        while stop < len(self.sizes) and self.sizes[stop] >= peak_bytes:
            stop += 1
        self.steps[place:stop], self.sizes[place:stop] = [step_s], [peak_bytes]

    def _is_beaten(self, step_s: float, peak_bytes: float) -> bool:
        place = bisect.bisect_right(self.steps, step_s)
        return place > 0 and self.sizes[place - 1] <= peak_bytes

    def is_too_slow(self, step_s: float) -> bool:
        """Whether a point that takes at least so long is not worked out, whatever it holds."""
        return step_s > self.slowest_s

    def is_beaten(self, step_s: float, peak_bytes: float) -> bool:
        """Whether a point that takes at least so much is neither among the best nor on the frontier."""
        return step_s > self.bound_s and self._is_beaten(step_s, peak_bytes)

    def is_too_large(self, peak_bytes: float) -> bool:
        return peak_bytes > LARGEST * self.limit_bytes


def least_seconds(point: Point, own: Computing) -> float:
    """A lower bound of a point's step: the work spread evenly over the ranks of its pipeline, what it takes to fill it,
    and nothing moved.
    """
    filling = {"1f1b": point.pp - 1.0, "interleaved": (point.pp - 1) / point.stages_per_rank}
    return (point.microbatches + filling.get(point.schedule, 0.0)) * own.total_s / point.pp


def least_bytes(point: Point, own: Computing, moving: Moving | None = None) -> float:
    """A lower bound of what the fullest rank holds: its part of the activations, and, where it is known what becomes of
    them, of the parameters.
    """
    if point.pp == 1:
        size = own.saved_bytes
    elif point.schedule in ("zbv", "dualpipev"):
        size = own.saved_bytes * min(1.0, point.microbatches / point.pp)
    else:  # rank r holds its stages' for min(m, p - r) microbatches; the fullest has least where all have as much
        size = own.saved_bytes / sum(1 / min(point.microbatches, held) for held in range(1, point.pp + 1))
    if moving is None:
        return size
    waits = point.pp > 1 or point.microbatches > 1
    return size + (moving.whole["static_bytes"] - (0.0 if waits else moving.whole["waiting_bytes"])) / point.pp
