"""Presolve: make the graph smaller without losing any optimum (ties excepted: the lower index stays).

    problem -> arc consistency -> ties merged -> dominated choices dropped -> ... until little changes

Every step is exact for *any* price on memory, because a choice only goes, or is only merged, with its usages.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import numpy as np

from autopar.solver.consistency import Domains, propagate
from autopar.solver.dominance import undominated
from autopar.solver.graph import Graph, forbidding, merge, restrict, tidy
from autopar.solver.methods import is_long
from autopar.solver.problem import Edge, FloatArray, IntArray

MAX_ROUNDS = 8
WORTH_REPEATING = 0.97


def presolve(graph: Graph, *, rounds: int = MAX_ROUNDS, thorough: bool = False) -> Graph | Domains:
    """A smaller graph with finite node costs, arc consistent; or the domains in which a node has no choice left.

    rounds: how often at most. thorough: look for dominated choices among all, not among a few.
    """
    domains = consistent(graph.costs, graph.edges)
    if domains.empty is not None:
        return domains
    graph = tidy(restrict(graph, domains.alive, tidied=True))
    looked: Graph | None = None
    for _ in range(rounds):
        before = (sum(graph.num_choices), len(graph.edges))
        merged = merge_ties(graph)
        graph = tidy(merged, since=graph)
        domains = consistent(graph.costs, graph.edges)
        if domains.empty is not None:
            return domains
        graph = tidy(restrict(graph, domains.alive, tidied=True), since=graph)
        looked, alive = graph, undominated(graph, since=looked, thorough=thorough)
        graph = tidy(restrict(graph, alive, tidied=True), since=graph)
        after = (sum(graph.num_choices), len(graph.edges))
        if all(new >= WORTH_REPEATING * old for new, old in zip(after, before, strict=True)):
            break
    domains = consistent(graph.costs, graph.edges)
    return domains if domains.empty is not None else tidy(restrict(graph, domains.alive, tidied=True), since=graph)


def consistent(costs: Sequence[FloatArray], edges: Sequence[Edge]) -> Domains:
    """What edges leave of the choices that cost anything finite; of long graphs without a trail."""
    alive = [np.isfinite(each) for each in costs]
    if not is_long(len(edges)):
        return propagate(alive, edges)
    from autopar.solver import compiled_presolve  # it loads numba

    return Domains(*compiled_presolve.propagate(alive, edges))


def merge_ties(graph: Graph) -> Graph:
    """Merge v into u where every choice of u leaves v exactly one: hard ties, and followers of finer choices.

    u --[inf but for one v per u]-- v   ->   u   with the costs, usages and edges of the v that each choice implies
    """
    owners: list[tuple[int, IntArray]] = [(v, np.arange(len(costs))) for v, costs in enumerate(graph.costs)]

    def owner(w: int) -> tuple[int, IntArray]:
        v, table = owners[w]
        while owners[v][0] != v:
            v, onward = owners[v]
            table = table[onward]
        return v, table

    for edge in itertools.compress(graph.edges, forbidding(graph.edges)):
        (u, u_table), (v, v_table) = owner(edge.u), owner(edge.v)
        if u == v:
            continue
        now = Edge(u, v, edge.u_class[u_table], edge.v_class[v_table], edge.costs)
        v_of_u, u_of_v = _implied(now.costs, now.u_class, now.v_class), _implied(now.costs.T, now.v_class, now.u_class)
        if u_of_v is not None and (v_of_u is None or v < u):
            owners[u] = (v, u_of_v)
        elif v_of_u is not None:
            owners[v] = (u, v_of_u)
    if all(v == w for w, (v, _) in enumerate(owners)):
        return graph
    return merge(graph, [owner(w) for w in range(len(owners))])


def _implied(costs: FloatArray, u_class: IntArray, v_class: IntArray) -> IntArray | None:
    """The only choice of v that each choice of u allows; None where some choice of u does not leave exactly one."""
    finite = np.isfinite(costs)
    count = np.bincount(v_class, minlength=costs.shape[1])
    if not ((finite @ count)[u_class] == 1).all():
        return None
    member = np.zeros(costs.shape[1], dtype=np.int64)
    member[v_class] = np.arange(len(v_class))
    implied: IntArray = member[np.argmax(finite & (count > 0), axis=1)[u_class]]
    return implied
