"""Memory prices of large graphs: the volume algorithm (Barahona and Anbil, Mathematical Programming 87, 2000).

    v      = (moving average of the bytes alive) - limit            a direction, where single answers jump about
    prices = max(0, best prices + f (target - best bound) / |v|^2 v)
    bound  = one sweep of messages each way at these prices, from the messages of the last

`target` brackets the optimum from above: the cheapest choice that fits where that is near, else a little over the
bound, and moved up as the bound arrives. Where many time points bind, a master problem (autopar.solver.prices) would
need a choice for each; and messages need not converge before a price is tried, as every sweep gives a bound.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from autopar.solver.oracle import Oracle
from autopar.solver.problem import FloatArray, IntArray
from autopar.solver.search import Search, column_of

FIRST_SWEEPS = 20
SWEEPS = 2
NEAR = 0.95
AHEAD = 1.05
SLOW_AFTER = 10
SMALLEST_STEP = 1e-4
REPORT_EVERY = 20
KEPT = 100
"""Choices at prices near the best: what a program can make one out of that fits."""


@dataclass(slots=True)
class _Average:
    """The moving average of the bytes alive at each point."""

    profile: FloatArray

    def add(self, profile: FloatArray, limit: float) -> None:
        """Take in another profile, with the weight (within bounds) that leaves the least violation."""
        towards = profile - self.profile
        length = float(towards @ towards)
        weight = -float((self.profile - limit) @ towards) / length if length > 0 else 0.0
        self.profile = self.profile + min(0.15, max(0.02, weight)) * towards


def ascend_by_volume(
    oracle: Oracle, search: Search, prices: FloatArray, seconds: float
) -> tuple[FloatArray, list[IntArray]]:
    """Raise the bound for so many seconds, or until steps are tiny.

    Returns (the best prices [num points], choices of the graph at the last of them that were the best so far; the best
    comes last).
    """
    messages, limit, end = oracle.compiled, search.target.limit, search.clock() + seconds
    assert messages is not None, "volume works on large graphs"

    def query(at: FloatArray, sweeps: int) -> tuple[float, IntArray]:
        oracle.set_prices(at)
        oracle.clock.spend(oracle.pass_s * sweeps)
        bound = max(max(messages.sweep(True), messages.sweep(False)) for _ in range(sweeps))
        paid = float(at.sum()) * limit if len(at) else 0.0
        return bound - paid, messages.relaxed_round()

    best, choice = query(prices, FIRST_SWEEPS)
    best_prices, choices = prices, deque([choice], KEPT)
    search.raise_bound(best, "messages")
    average = _Average(oracle.memory.profile(choice))
    _offer(oracle, search, choice)
    step, slow, rounds = 0.5, 0, 0
    target = best + 0.2 * abs(best) + 1e-12
    while len(prices) and search.clock() < end and step > SMALLEST_STEP and not search.closed:
        rounds += 1
        over = average.profile - limit
        over[(best_prices <= 0) & (over < 0)] = 0.0
        length = float(over @ over)
        if length == 0:
            break
        if best > NEAR * target:
            target = best + (AHEAD - 1) * abs(best) + 1e-12
        if search.cost < target:
            target = search.cost
        tried = np.maximum(0.0, best_prices + step * (target - best) / length * over)
        bound, choice = query(tried, SWEEPS)
        profile = oracle.memory.profile(choice)
        along = float((profile - limit) @ over)
        average.add(profile, limit)
        if profile.max() <= limit:
            _offer(oracle, search, choice)
        if bound > best:
            step = min(2.0, 1.1 * step) if along >= 0 else step
            best, best_prices, slow = bound, tried, 0
            choices.append(choice)
        else:
            slow += 1
            if slow == SLOW_AFTER:
                step, slow = step * 0.66, 0
        if rounds % REPORT_EVERY == 0:
            search.raise_bound(best, "prices")
    search.raise_bound(best, "prices")
    oracle.set_prices(best_prices)
    return best_prices, list(choices)


def _offer(oracle: Oracle, search: Search, choice: IntArray) -> None:
    """Take note of a choice if it is better than what is known."""
    if oracle.evaluator.cost(choice) < search.cost:
        search.offer(column_of(oracle.graph, oracle.evaluator, oracle.memory, choice))
