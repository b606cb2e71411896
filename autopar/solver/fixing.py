"""Reduced-cost fixing: drop the choices that cannot be part of anything better than what is known."""

from __future__ import annotations

import numpy as np

from autopar.solver.consistency import Domains
from autopar.solver.graph import Graph, restrict
from autopar.solver.oracle import Oracle
from autopar.solver.presolve import presolve
from autopar.solver.problem import FloatArray


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
    smaller = presolve(restrict(oracle.graph, alive))
    return None if isinstance(smaller, Domains) else smaller
