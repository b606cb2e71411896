"""Branch and bound on the Lagrangian bound, where a few large tensors make memory lumpy.

At the best prices one answer is cheap and does not fit, another fits and is dear, and no price lies between them. They
differ in what some node holds: with its choices split there, each half has prices of its own, and a better bound.

    heap of (bound, graph, prices)  ->  the least bound: its node with the most priced bytes in doubt
                                    ->  two halves  ->  prices (autopar.solver.prices)  ->  heap, unless within the gap
"""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterator

import numpy as np

from autopar.solver.fixing import below, reduced_costs
from autopar.solver.graph import Graph, restrict
from autopar.solver.memory import Memory
from autopar.solver.oracle import Oracle
from autopar.solver.parts import Part, bounded
from autopar.solver.problem import FloatArray
from autopar.solver.search import Search

CLOSEST = 6
"""So many of the cheapest columns at the prices say what is in doubt."""
FEW = 20
CHEAP = 10_000.0
"""Splits, and nodes, edges or thousands of pairs that they look at, which are little work; after them, the gap need
only be the one that is worth effort to prove."""
TELLING = 4
"""Splits that tell whether all the cheap ones would close the gap."""
MAX_SPLITS = 400
DIVES = (3e-4, 3e-3, 3e-2)
"""How far above the bound, relative to it."""
DIVING_WORK = 5000.0


def branch(graph: Graph, search: Search, prices: FloatArray, seconds: float) -> None:
    """Raise the bound, and offer what is found, until the search is closed, nothing is in doubt, or time is up.

    `graph` has every choice that may still improve on the best; `prices`: the best ones of the whole.
    """
    left = search.time_for(seconds)
    few = min(FEW, int(CHEAP / _work(graph)))
    if few < TELLING:
        search.gap = max(search.gap, search.proof_gap)
        if search.closed:
            return
    numbers = itertools.count()
    root = bounded(graph, Part(search.bound, 0, graph, prices, search.columns), search, next(numbers))
    leaves = [] if root is None else [root]
    search.raise_bound(leaves[0].bound if leaves else np.inf, "branches")
    gap_before = search.relative_gap
    for count in range(MAX_SPLITS):
        hopeless = count == TELLING and (gap_before - search.relative_gap) * few < (gap_before - search.gap) * count
        if count == few or hopeless:
            search.gap = max(search.gap, search.proof_gap)
        if search.closed or left() <= 0 or not leaves:
            return
        first = leaves[0]
        halves = _halves(first)
        if halves is None:
            return
        heapq.heappop(leaves)
        for half in halves:
            if left() <= 0:
                heapq.heappush(leaves, Part(first.bound, next(numbers), half, first.prices, first.columns))
                continue
            found = bounded(half, first, search, next(numbers))
            if found is not None:
                heapq.heappush(leaves, found)
        search.raise_bound(leaves[0].bound if leaves else np.inf, "branches")


def dive(oracle: Oracle, search: Search, prices: FloatArray) -> None:
    """Search a little above the bound of the oracle's messages, where few choices are left: what is good is there, if
    messages have converged, and rounds better among few. What is not there costs more than that, which is a bound.
    """
    bound, grown = reduced_costs(oracle, float(prices.sum()) * search.target.limit if prices.any() else 0.0)
    for number, share in enumerate(DIVES):
        threshold = bound + share * abs(bound)
        if threshold >= search.cost or search.closed or search.late:
            return
        smaller, proven = below(oracle, bound, grown, threshold), np.inf
        if smaller is not None:
            if _work(smaller) > DIVING_WORK:
                return
            part = bounded(smaller, Part(bound, 0, smaller, prices, search.columns), search, number)
            proven = np.inf if part is None else part.bound
        search.raise_bound(min(threshold, proven), "dive")


def _work(graph: Graph) -> float:
    """What it takes to look at a graph."""
    return len(graph.costs) + len(graph.edges) + 1e-3 * sum(edge.costs.size for edge in graph.edges)


def _halves(leaf: Part) -> Iterator[Graph] | None:
    """The graph with the choices of one node split by their priced bytes; None where no node is in doubt."""
    graph = leaf.graph
    memory = Memory(graph.usages, graph.num_choices, graph.num_points)
    priced = memory.price(leaf.prices)
    ranked = sorted(leaf.columns, key=lambda c: c.cost + float(leaf.prices @ c.profile))[:CLOSEST]
    here = [choice for column in ranked if (choice := graph.choice_here(column.choice)) is not None]
    if len(here) < 2:
        return None
    held = np.array([priced[memory.offsets[:-1] + choice] for choice in here])
    least, most = held.min(axis=0), held.max(axis=0)
    node = int(np.argmax(most - least))
    if most[node] <= least[node]:
        return None
    mine = priced[memory.offsets[node] : memory.offsets[node + 1]]
    low = mine <= 0.5 * (least[node] + most[node])
    whole = [np.ones(count, dtype=bool) for count in graph.num_choices]
    return (restrict(graph, [*whole[:node], side, *whole[node + 1 :]]) for side in (low, ~low))
