"""Reduced-cost fixing: drop the choices that cannot be part of anything better than what is known."""

from __future__ import annotations

import numpy as np

from autopar.solver.consistency import Domains
from autopar.solver.graph import Graph, restrict
from autopar.solver.oracle import Oracle
from autopar.solver.presolve import presolve
from autopar.solver.prices import refresh
from autopar.solver.problem import FloatArray
from autopar.solver.search import Search

WORTH_REPEATING = 0.7
"""Fixing that leaves no more than this share of the choices is worth searching what is left anew."""


def reduced_costs(oracle: Oracle, limit_cost: float) -> tuple[float, list[FloatArray]]:
    """(bound, by how much it grows if node v takes choice i: [k] per node), at the prices and messages of the oracle.

    `limit_cost` is what the prices pay for the limit. To keep every choice that costs less than some threshold, it is
    enough to keep the i with bound + grown[v][i] < threshold.
    """
    bound, grown_core = oracle.messages.excess()
    grown: list[FloatArray] = [np.zeros(0)] * len(oracle.graph.costs)
    for node, values in zip(oracle.messages.nodes, grown_core, strict=True):
        grown[node] = values
    oracle.plan.spread(grown, oracle.state)
    return bound + oracle.state.constant - limit_cost, grown


def below(oracle: Oracle, bound: float, grown: list[FloatArray], threshold: float) -> Graph | None:
    """The presolved graph of the choices that may be part of something cheaper than `threshold`; None: nothing is."""
    alive = [bound + values < threshold for values in grown]
    if not all(mask.any() for mask in alive):
        return None
    left = restrict(oracle.graph, alive)
    oracle.clock.presolve(left)
    smaller = presolve(left)
    return None if isinstance(smaller, Domains) else smaller


def fix(oracle: Oracle, search: Search, prices: FloatArray) -> Graph | None:
    """The graph without the choices that cannot improve on the incumbent by half the gap; None: closed."""
    refresh(oracle, search, prices)
    if search.closed:
        return None
    threshold = search.cost - 0.5 * search.tolerance(search.cost)
    smaller = below(oracle, *reduced_costs(oracle, limit_paid(search, prices)), threshold)
    search.floor = min(search.floor, threshold)
    if smaller is None:
        search.raise_bound(np.inf, "fixing")
    return smaller


def limit_paid(search: Search, prices: FloatArray) -> float:
    """What the prices pay for the limit."""
    return float(prices.sum()) * search.target.limit if prices.any() else 0.0
