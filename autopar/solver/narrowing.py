"""Memory prices of graphs on which a pass takes long: sought among the few choices that matter, then tried on all.

    a few passes on all   ->   what each choice adds to the bound, at several prices   ->   the choices that add least
            ^                                                                                        |
            +------------- their prices, and what was found among them  <--- solved by themselves <--+

What is left out only makes prices of the few wrong, never a bound: bounds are those of all choices.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.fixing import reduced_costs
from autopar.solver.graph import Graph, restrict
from autopar.solver.oracle import Oracle
from autopar.solver.parts import Part, bounded
from autopar.solver.prices import binds, overload_price, query, worst_point
from autopar.solver.problem import BoolArray, FloatArray, IntArray
from autopar.solver.search import Search

Shares = tuple[float, ...]

FIRST_SWEEPS = 6
NEXT_SWEEPS = 8
MAX_ROUNDS = 4
MAX_PRICES = 60
SHARE_OF_CELLS = 0.02
FEWEST_CELLS = 1e6
GUESSES: Shares = (0.0, 0.03, 0.1, 0.3, 1.0, 3.0)
"""Before a price is known: shares of the one at which what is above the limit costs as much as everything else."""
AROUND: Shares = (0.7, 1.0, 1.5)
"""Times the price."""
SETTLED = 0.1
"""Prices have settled that change by no more than this share of them."""
CLOSEST = 30
"""So many of the cheapest columns at the prices are among the few."""


def find_prices(oracle: Oracle, search: Search, prices: FloatArray) -> FloatArray:
    """Prices [num points] near the best ones, and good choices (offered), on the way to which all is passed over a few
    times only.
    """
    best, best_bound = prices, query(oracle, search, prices, FIRST_SWEEPS)
    if not search.columns or not oracle.graph.edges or not (prices.any() or binds(search)):
        return best
    classes = _Classes(oracle.graph)
    most_cells = max(FEWEST_CELLS, SHARE_OF_CELLS * float(classes.sizes.sum()))
    for number in range(MAX_ROUNDS):
        if search.closed or search.late:
            break
        part = _among_few(oracle, search, prices, classes, most_cells)
        if part is None:
            break
        for column in part.columns:
            search.offer(column)
        change, prices = float(np.abs(part.prices - prices).sum()), part.prices
        bound = query(oracle, search, prices, NEXT_SWEEPS)
        if bound > best_bound:
            best, best_bound = prices, bound
        if number and change <= SETTLED * float(prices.sum()):
            break
    return best


def _among_few(oracle: Oracle, search: Search, prices: FloatArray, classes: _Classes, most_cells: float) -> Part | None:
    """What comes of the few choices that promise most, by the messages of all at these prices."""
    graph, memory = oracle.graph, oracle.memory
    bound, grown = reduced_costs(oracle, float(prices.sum()) * search.target.limit)
    priced, times = prices, AROUND
    if not prices.any():
        priced, times = np.zeros(len(prices)), GUESSES
        priced[worst_point(search)] = overload_price(search, oracle)
    excess, charged = np.concatenate(grown) - memory.price(prices), memory.price(priced)
    among = np.zeros(len(excess), dtype=bool)
    for column in sorted(search.columns, key=lambda c: c.cost + float(prices @ c.profile))[:CLOSEST]:
        here = graph.choice_here(column.choice)
        if here is not None:
            among[memory.offsets[:-1] + here] = True
    few = _few([excess + share * charged for share in times], among, memory.offsets, classes, most_cells)
    whole = Part(bound, 0, graph, prices, search.columns)
    return bounded(restrict(graph, few), whole, search, 1, MAX_PRICES)


class _Classes:
    """The classes of the choices at every edge: what of a matrix is left when choices go."""

    def __init__(self, graph: Graph) -> None:
        base = np.concatenate([[0], np.cumsum(graph.num_choices)])
        self.sizes = np.array([e.costs.size for e in graph.edges], dtype=np.int64)
        lengths = np.array([n for e in graph.edges for n in e.costs.shape], dtype=np.int64)
        self.starts = np.cumsum(lengths) - lengths
        ends = [(v, classes) for e in graph.edges for v, classes in ((e.u, e.u_class), (e.v, e.v_class))]
        self.choice: IntArray = np.concatenate([base[v] + np.arange(len(classes)) for v, classes in ends])
        self.of = np.concatenate([start + classes for start, (_, classes) in zip(self.starts, ends, strict=True)])
        self.count = int(lengths.sum())

    def least(self, values: FloatArray) -> FloatArray:
        """The least value, by choice, of each class."""
        result = np.full(self.count, np.inf)
        np.minimum.at(result, self.of, values[self.choice])
        return result

    def cells(self, kept: BoolArray) -> float:
        """Cells of the matrices of kept classes."""
        left = np.add.reduceat(kept, self.starts, dtype=np.int64)
        return float((left[0::2] * left[1::2]).sum())


def _few(
    scores: Sequence[FloatArray], among: BoolArray, offsets: IntArray, classes: _Classes, most_cells: float
) -> list[BoolArray]:
    """Per node the choices whose score, by one of the scores, is next to its node's least, as many as have no more
    than so many cells of costs; and those `among` them in any case.
    """
    excess = np.full(len(among), np.inf)
    for score in scores:
        least = np.repeat(np.minimum.reduceat(score, offsets[:-1]), np.diff(offsets))
        np.minimum(excess, score - least, out=excess)
    excess[among] = 0.0
    widths, of_class = np.unique(excess[np.isfinite(excess)]), classes.least(excess)
    low, high = 0, len(widths)
    while high - low > 1:
        middle = (low + high) // 2
        if classes.cells(of_class <= widths[middle]) <= most_cells:
            low = middle
        else:
            high = middle
    return np.split(excess <= widths[low], offsets[1:-1])
