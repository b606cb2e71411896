"""From a presolved graph to what is searched: its core, and tables that eliminate the core, too, where they are small.

`settle` eliminates what has two neighbours or fewer. How much work it is to eliminate all of what is left by tables
(`Buckets`) is known from their sizes beforehand. Where it is little, and no memory is to be priced, that takes the
place of message passing. Where it is a few seconds' work, or the limit may matter, it is done once, without the limit,
if messages do not close the gap (`untangle`): what is optimal without the limit, and fits, is optimal.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.buckets import Buckets
from autopar.solver.consistency import Domains, propagate
from autopar.solver.eliminate import Plan
from autopar.solver.graph import Graph, restrict, tidy
from autopar.solver.presolve import presolve
from autopar.solver.problem import BoolArray, Edge, FloatArray

EASY_CELLS = 2e7
"""Cells of tables that are added up in a tenth of a second."""
MOST_CELLS = 1e9
"""Cells of tables that are added up once (a few seconds)."""
MOST_KEPT = 6e7
"""Cells of tables that are kept meanwhile (half a GB, less where they become single precision)."""
UNTANGLED_SHARE = 0.1
"""The least share of the cells that leaving out dominated choices has been seen to leave."""
CELLS_A_SECOND = 2e8
COMPILED_EDGES = 500
COMPILED_CELLS = 5e6
"""Edges, or cells of their costs, left by elimination from which a graph is worked on whole, by compiled loops: from
there on numba is worth its second of loading, and eliminating at every price takes longer than passing messages."""
LARGE_EDGES = 3000
"""Edges left by elimination from which tables, master problems and programs over all choices are out of reach."""


@dataclass(frozen=True, slots=True)
class Settled:
    """A graph, the plan that leaves its core, and the one that eliminates the core (None: too much work, whatever is
    left out). whole: to be worked on whole, by compiled loops. large: of many nodes.
    """

    graph: Graph
    plan: Plan
    buckets: Buckets | None
    whole: bool = False
    large: bool = False

    @property
    def working_plan(self) -> Plan:
        """How messages are passed: on the core, or on the whole graph."""
        return Plan(self.graph, eliminates=False) if self.whole else self.plan

    @property
    def easy(self) -> Buckets | None:
        """The buckets, where they are little work."""
        return self.buckets if self.buckets is not None and self.buckets.cells <= EASY_CELLS else None


def settle(graph: Graph) -> Settled | Domains:
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
            if len(core) >= LARGE_EDGES:
                return Settled(graph, plan, None, whole=True, large=True)
            counts = [len(graph.costs[v]) for v in plan.core]
            buckets = Buckets(counts, _by_position(plan, core), most_cells=MOST_CELLS / UNTANGLED_SHARE)
            whole = len(core) >= COMPILED_EDGES or sum(e.costs.size for e in core) >= COMPILED_CELLS
            return Settled(graph, plan, buckets if buckets.done else None, whole)
        smaller = presolve(restrict(graph, domains.alive))
        if isinstance(smaller, Domains):
            return smaller
        graph = smaller


def untangle(settled: Settled, seconds: float) -> Settled | None:
    """The same without memory, and without the choices that then are dominated in the core; None where eliminating it
    by tables takes more than `seconds`, or too much memory.
    """
    if settled.buckets is None or seconds <= 0:
        return None
    usages = tuple(() for _ in settled.graph.costs)
    free = replace(settled, graph=replace(settled.graph, usages=usages, num_points=0))
    smaller = settle(tidy(restrict(free.graph, _undominated_in_core(free))))
    if isinstance(smaller, Domains) or smaller.buckets is None:
        return None
    small = smaller.buckets.cells <= min(MOST_CELLS, CELLS_A_SECOND * seconds) and smaller.buckets.kept <= MOST_KEPT
    return smaller if small else None


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
