"""A part of a problem's choices, solved by itself: its prices, its bound, what was found in it."""

from __future__ import annotations

from dataclasses import dataclass, field

from autopar.solver.consistency import Domains
from autopar.solver.graph import Graph
from autopar.solver.methods import method_for
from autopar.solver.oracle import Oracle
from autopar.solver.presolve import presolve
from autopar.solver.prices import ascend
from autopar.solver.problem import FloatArray
from autopar.solver.search import Column, Search
from autopar.solver.settle import settle

MAX_ROUNDS = 12
"""Prices tried for a part that begins near the best ones."""


@dataclass(order=True, slots=True)
class Part:
    """What is known of a part: a bound on what lies in it, the best prices, columns that lie in it."""

    bound: float
    number: int
    graph: Graph = field(compare=False)
    prices: FloatArray = field(compare=False)
    columns: list[Column] = field(compare=False)


def bounded(graph: Graph, parent: Part, search: Search, number: int, max_rounds: int = MAX_ROUNDS) -> Part | None:
    """The part of the parent that is `graph`, with its own prices and bound, none lower than its parent's; None where
    nothing in it is better than what is known.
    """
    search.clock.presolve(graph)
    smaller = presolve(graph)
    settled = smaller if isinstance(smaller, Domains) else settle(smaller)
    if isinstance(settled, Domains):
        return None
    inside = [c for c in parent.columns if settled.graph.choice_here(c.choice) is not None]
    own = Search(search.target, search.gap, search.deadline, clock=search.clock, columns=inside)
    own.cost, own.choice = search.cost, search.choice
    own.seen = {column.choice for column in inside}
    method = method_for(settled.size, "part", priced=bool(settled.graph.num_points))
    plan = settled.working_plan(method)
    oracle = Oracle(settled.graph, plan, compiles=method.compiles(anytime=False), clock=search.clock)
    prices = ascend(oracle, own, parent.prices, max_rounds=max_rounds)
    for column in own.columns:
        if column.cost < search.cost:
            search.offer(column)
    return Part(max(parent.bound, own.bound), number, settled.graph, prices, own.columns)
