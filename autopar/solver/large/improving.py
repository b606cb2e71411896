"""What a search does with the time that is left: annealing, and large neighbourhoods where programs are small."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import numpy as np

from autopar.solver.exact import solve_exactly
from autopar.solver.graph import Graph
from autopar.solver.large.annealing import Landscape, anneal
from autopar.solver.large.neighbourhoods import MOST_PAIRS, Neighbourhoods
from autopar.solver.memory import Memory
from autopar.solver.methods import draws_neighbourhoods
from autopar.solver.oracle import Evaluator
from autopar.solver.pool import combine, with_best
from autopar.solver.problem import USAGE_TOLERANCE, FloatArray, IntArray
from autopar.solver.search import Search, column_of

SLICE_SHARE = 0.15
SHORTEST_SLICE = 2.0
LONGEST_PROGRAM = 8.0


def anneal_for(graph: Graph, search: Search, prices: FloatArray, seconds: float, start: IntArray) -> None:
    """Anneal from what is known, or from `start` while nothing is, and offer what is found."""
    memory, evaluator = Memory(graph.usages, graph.num_choices, graph.num_points), Evaluator(graph)
    for choice in _annealed(graph, memory, evaluator, search, prices, seconds, start, search.threads, 0):
        search.offer(column_of(graph, evaluator, memory, choice))
    search.raise_bound(-np.inf, "annealing")


def keep_improving(graph: Graph, search: Search, prices: FloatArray) -> None:
    """Until the time is over or the gap closed: anneal, and beside it solve neighbourhoods one after the other."""
    memory, evaluator = Memory(graph.usages, graph.num_choices, graph.num_points), Evaluator(graph)
    ends = {end for e in graph.edges for end in (e.u, e.v)}
    neighbourhoods = Neighbourhoods(graph, memory) if draws_neighbourhoods(len(ends)) else None
    if neighbourhoods is not None and not len(neighbourhoods.free):
        return
    length, seed = max(SHORTEST_SLICE, SLICE_SHARE * search.seconds_left), 1
    while not search.closed and search.seconds_left > 0.2:
        seconds = min(length, search.seconds_left)
        beside = search.threads if neighbourhoods is None else max(1, search.threads - 1)
        with ThreadPoolExecutor(1) as pool:
            found = pool.submit(
                _annealed, graph, memory, evaluator, search, prices, seconds, None, beside, seed
            )  # fmt: skip
            if search.threads == 1:
                found.result()
            if neighbourhoods is not None:
                _solve_neighbourhoods(neighbourhoods, graph, memory, evaluator, search, seconds)
        rounds = found.result()
        for choice in rounds:
            search.offer(column_of(graph, evaluator, memory, choice))
        search.raise_bound(-np.inf, "annealing")
        seed += search.threads
        if len(rounds) > 1:
            combine(graph, with_best(rounds, graph, search), search, prices, LONGEST_PROGRAM, MOST_PAIRS)
            search.raise_bound(-np.inf, "combining")


def _annealed(
    graph: Graph, memory: Memory, evaluator: Evaluator, search: Search, prices: FloatArray, seconds: float,
    start: IntArray | None, threads: int, seed: int,
) -> list[IntArray]:  # fmt: skip
    """What the rounds of one annealing come to, in the order in which they ended."""
    known = None if search.choice is None else graph.choice_here(search.choice)
    choice, cost = (start, np.inf) if known is None else (known, search.cost)
    if choice is None:
        return []
    if np.isfinite(cost):
        scale = abs(cost)
    else:
        edges = evaluator.edge_costs(choice)
        scale = float(evaluator.node_costs(choice).sum() + edges[np.isfinite(edges)].sum())
    land = Landscape.of(graph, search.target.limit * (1 + 0.5 * USAGE_TOLERANCE), scale)
    charged = memory.price(prices) if len(prices) else np.zeros(len(land.costs))
    found: list[IntArray] = []
    anneal(
        land, choice, cost, charged, float(prices.sum()), seconds, lambda choice, _: found.append(choice),
        search.clock, threads=threads, seed=seed,
    )  # fmt: skip
    return found


def _solve_neighbourhoods(
    neighbourhoods: Neighbourhoods, graph: Graph, memory: Memory, evaluator: Evaluator, search: Search, seconds: float
) -> None:
    left = search.time_for(seconds)
    while left() > 0 and not search.closed and search.choice is not None:
        here = graph.choice_here(search.choice)
        small = None if here is None else neighbourhoods.draw(here)
        if small is None:
            if here is None:
                return
            continue
        begun = search.clock()
        exact = solve_exactly(
            small, search.target, [], search.gap, search.cost,
            search.time_for(min(LONGEST_PROGRAM, max(left(), 0.1))), search.clock,
        )  # fmt: skip
        neighbourhoods.took(search.clock() - begun)
        if exact.choice is not None:
            choice = graph.choice_here(small.original_choice(exact.choice))
            assert choice is not None, "a neighbourhood has no choices of its own"
            search.offer(column_of(graph, evaluator, memory, choice))
            search.raise_bound(-np.inf, "neighbourhoods")
