"""From a presolved graph to what is searched: its core, and tables that eliminate the core, too, where they are small.

`settle` eliminates what has two neighbours or fewer. How much work it is to eliminate all of what is left by tables
(`Buckets`) is known from their sizes beforehand. Where it is little, and no memory is to be priced, that takes the
place of message passing (`autopar.solver.methods`). Where it is a few seconds' work, or the limit may matter, it is
done once, without the limit, if messages do not close the gap (`untangle`): what is optimal without the limit, and
fits, is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.buckets import Buckets
from autopar.solver.consistency import Domains, propagate
from autopar.solver.eliminate import Plan
from autopar.solver.graph import Graph, restrict, tidy
from autopar.solver.methods import Method, Size, most_cells_asked, most_cells_planned, worth_untangling
from autopar.solver.presolve import presolve
from autopar.solver.problem import BoolArray, Edge, FloatArray


@dataclass(frozen=True, slots=True)
class Settled:
    """A graph, the plan that leaves its core, the tables that eliminate the core (None: they have more than `planned`
    cells), and what `autopar.solver.methods` asks.
    """

    graph: Graph
    plan: Plan
    buckets: Buckets | None
    size: Size
    planned: float = 0.0

    @property
    def may_untangle(self) -> bool:
        """Whether it is not known yet that eliminating the core is too much work, whatever is left out."""
        return self.buckets is not None or 0 < self.planned < most_cells_asked()

    def working_plan(self, method: Method) -> Plan:
        """How messages are passed: on the core, or on the whole graph."""
        return Plan(self.graph, eliminates=False) if method.whole else self.plan


def settle(graph: Graph, *, anytime: bool = False) -> Settled | Domains:
    """The graph and an elimination plan whose core is arc consistent, too; or the domains that leave a core node empty.

    Eliminating a node joins what its neighbours allow each other, which can forbid more than the edges did alone.
    """
    while True:
        plan = Plan(graph)
        core = plan.core_problem(plan.run(list(graph.costs)))
        domains = propagate([np.ones(len(costs), dtype=bool) for costs in graph.costs], core)
        if domains.empty is not None:
            return domains
        if all(mask.all() for mask in domains.alive):
            pairs, all_pairs = (sum(e.costs.size for e in edges) for edges in (core, graph.edges))
            size = Size(len(core), pairs, all_pairs)
            most_cells = most_cells_planned(size, priced=bool(graph.num_points), anytime=anytime)
            if not most_cells:
                return Settled(graph, plan, None, size)
            buckets = _tables(graph, plan, core, most_cells)
            if buckets is None:
                return Settled(graph, plan, None, size, most_cells)
            return Settled(graph, plan, buckets, replace(size, tables=buckets.cells), most_cells)
        smaller = presolve(restrict(graph, domains.alive))
        if isinstance(smaller, Domains):
            return smaller
        graph = smaller


def untangle(settled: Settled, seconds: float) -> Settled | None:
    """The same without memory, and without the choices that then are dominated in the core; None where eliminating it
    by tables takes more than `seconds`, or too much memory.
    """
    if not settled.may_untangle or seconds <= 0:
        return None
    usages = tuple(() for _ in settled.graph.costs)
    free = replace(settled, graph=replace(settled.graph, usages=usages, num_points=0))
    if settled.buckets is None:
        core = settled.plan.core_problem(settled.plan.run(list(settled.graph.costs)))
        if _tables(settled.graph, settled.plan, core, most_cells_asked()) is None:
            return None
    smaller = settle(tidy(restrict(free.graph, _undominated_in_core(free))), anytime=True)
    if isinstance(smaller, Domains) or smaller.buckets is None:
        return None
    return smaller if worth_untangling(smaller.buckets.cells, smaller.buckets.kept, seconds) else None


def _tables(graph: Graph, plan: Plan, core: list[Edge], most_cells: float) -> Buckets | None:
    """How to eliminate the core, whose edges these are; None where it is more than so many cells."""
    buckets = Buckets([len(graph.costs[v]) for v in plan.core], _by_position(plan, core), most_cells=most_cells)
    return buckets if buckets.done else None


def _undominated_in_core(settled: Settled) -> list[BoolArray]:
    """The choices to keep of every node of a graph without usages.

    What is eliminated answers to its neighbours as well as can be: so a choice of theirs can be dominated that was not
    while every edge was taken at its worst.
    """
    plan = settled.plan
    state = plan.run(list(settled.graph.costs))
    mine: tuple[FloatArray, ...] = tuple(state.costs[v] for v in plan.core)
    edges = tuple(_by_position(plan, plan.core_problem(state)))
    lift = tuple((p, np.arange(len(costs))) for p, costs in enumerate(mine))
    smaller = presolve(Graph(mine, edges, tuple(() for _ in mine), lift, 0), thorough=True)
    assert not isinstance(smaller, Domains), "what is arc consistent has an undominated choice"
    alive = [np.ones(len(costs), dtype=bool) for costs in settled.graph.costs]
    for v, (_, table) in zip(plan.core, smaller.lift, strict=True):
        alive[v] = np.zeros(len(alive[v]), dtype=bool)
        alive[v][table] = True
    return alive


def _by_position(plan: Plan, edges: list[Edge]) -> list[Edge]:
    """Edges of the core between positions in `plan.core`."""
    position = {v: p for p, v in enumerate(plan.core)}
    return [Edge(position[e.u], position[e.v], e.u_class, e.v_class, e.costs) for e in edges]
