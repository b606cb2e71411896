"""Integer programs within a search: of a graph, and of what several choices are made of."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.consistency import Domains
from autopar.solver.exact import num_pairs, solve_exactly
from autopar.solver.graph import Graph, restrict
from autopar.solver.memory import Memory
from autopar.solver.oracle import Evaluator
from autopar.solver.presolve import presolve
from autopar.solver.problem import FloatArray, IntArray
from autopar.solver.search import Search, column_of

MOST_POINTS = 100
"""Points in time whose memory is limited from the start; the rest are, where an answer exceeds the limit there."""


def combine(
    graph: Graph, choices: Sequence[IntArray], search: Search, prices: FloatArray, seconds: float, most_pairs: int
) -> None:
    """Offer the best that can be made of several choices of the graph, which need not fit each: a program over only
    what they take, small where most of them agree, and good at fitting into memory. None of more than `most_pairs`.
    """
    alive = [np.zeros(count, dtype=bool) for count in graph.num_choices]
    for choice in choices:
        for mask, i in zip(alive, choice.tolist(), strict=True):
            mask[i] = True
    few = restrict(graph, alive)
    search.clock.presolve(few)
    small = presolve(few)
    if not isinstance(small, Domains) and num_pairs(small) <= most_pairs:
        run_program(small, search, prices, seconds)


def with_best(choices: Sequence[IntArray], graph: Graph, search: Search) -> list[IntArray]:
    """The choices, and the best one known."""
    best = None if search.choice is None else graph.choice_here(search.choice)
    return [*choices] if best is None else [*choices, best]


def run_program(graph: Graph, search: Search, prices: FloatArray, seconds: float) -> float:
    """Offer what the integer program of `graph` finds; returns its bound (for this graph only)."""
    reference = search.cost if np.isfinite(search.cost) else max(search.bound, 0.0)
    if reference == 0:
        reference = max((float(c.max()) for c in graph.costs), default=0.0) or 1.0
    dearest = np.argsort(-prices, kind="stable")[:MOST_POINTS]
    points = [int(t) for t in dearest if prices[t] > 0]
    left = search.time_for(seconds)
    exact = solve_exactly(graph, search.target, points, search.gap, reference, left, search.clock)
    if exact.choice is not None:
        memory = Memory(graph.usages, graph.num_choices, graph.num_points)
        search.offer(column_of(graph, Evaluator(graph), memory, exact.choice))
    return exact.bound
