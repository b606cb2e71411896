"""Memory over time: which time points can bind, what is alive there under a choice, what a price does to the costs."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autopar.solver.problem import FloatArray, IntArray, Usage

UsageLists = Sequence[Sequence[Usage]]


def binding_points(usages: UsageLists) -> tuple[list[tuple[Usage, ...]], int]:
    """The same usages on a shorter timeline, of only those time points that can be a peak, and how many these are.

    Bytes are never negative, so a moment is dominated by its successor unless something ends in between, and by its
    predecessor unless something started in between. What is left are the maximal cliques of the interval graph.
    Usages of one node over the same points are added up, usages of nothing dropped.
    """
    real = [[u for u in node if u.end > u.start and u.bytes.any()] for node in usages]
    starts = {u.start for node in real for u in node}
    ends = {u.end for node in real for u in node}
    times = sorted(starts | ends)
    kept = [left for left, right in itertools.pairwise(times) if left in starts and right in ends]
    points = np.array(kept, dtype=np.int64)
    shortened: list[tuple[Usage, ...]] = []
    for node in real:
        total: dict[tuple[int, int], FloatArray] = {}
        for u in node:
            span = (int(np.searchsorted(points, u.start)), int(np.searchsorted(points, u.end)))
            total[span] = total[span] + u.bytes if span in total else u.bytes.astype(np.float64)
        shortened.append(tuple(Usage(start, end, size) for (start, end), size in sorted(total.items())))
    return shortened, len(points)


class Memory:
    """Usages of all nodes in flat arrays. `offsets[v] + i` is the flat index of choice i of node v."""

    def __init__(self, usages: UsageLists, num_choices: Sequence[int], num_points: int) -> None:
        self.num_points = num_points
        self.offsets = np.concatenate([[0], np.cumsum(num_choices)]).astype(np.int64)
        flat = [(v, u) for v, node in enumerate(usages) for u in node]
        self.node = np.array([v for v, _ in flat], dtype=np.int64)
        self.start = np.array([u.start for _, u in flat], dtype=np.int64)
        self.end = np.array([u.end for _, u in flat], dtype=np.int64)
        self.bytes = np.concatenate([u.bytes for _, u in flat]) if flat else np.zeros(0)
        lengths = np.array([len(u.bytes) for _, u in flat], dtype=np.int64)
        self.base = np.cumsum(lengths) - lengths
        self.usage_of = np.repeat(np.arange(len(flat)), lengths)
        inner = np.arange(len(self.bytes)) - self.base[self.usage_of]
        self.target = self.offsets[self.node[self.usage_of]] + inner

    def profile(self, choice: IntArray) -> FloatArray:
        """Bytes alive at each point, [num_points]."""
        return self._spread(self.bytes[self.base + choice[self.node]])

    def least(self) -> FloatArray:
        """At each point, the sum over usages of the smallest bytes: a lower bound on every profile, [num_points]."""
        return self._spread(np.minimum.reduceat(self.bytes, self.base)) if len(self.base) else np.zeros(self.num_points)

    def price(self, prices: FloatArray) -> FloatArray:
        """What `prices` (seconds a byte at each point) add to the cost of each choice, flat."""
        summed = np.concatenate([[0.0], np.cumsum(prices)])
        weight = summed[self.end] - summed[self.start]
        return binned(self.target, self.bytes * weight[self.usage_of], int(self.offsets[-1]))

    def row(self, point: int) -> FloatArray:
        """Bytes that each choice keeps alive at `point`, flat: the coefficients of that memory constraint."""
        alive = ((self.start <= point) & (point < self.end)).astype(np.float64)
        return binned(self.target, self.bytes * alive[self.usage_of], int(self.offsets[-1]))

    def _spread(self, size: FloatArray) -> FloatArray:
        delta = binned(self.start, size, self.num_points + 1) - binned(self.end, size, self.num_points + 1)
        return delta.cumsum()[: self.num_points]


def binned(index: IntArray, values: FloatArray, length: int) -> FloatArray:
    """The sum of the values of each index, [length]."""
    return np.bincount(index, values, length).astype(np.float64, copy=False)
