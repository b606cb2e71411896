"""Dominated choices: another choice of the same node costs no more and takes no more memory, whatever the rest do.

Goldstein's criterion (Biophysical Journal 66, 1994): j replaces i when

    costs[i] - costs[j] + sum_e min_b (costs_e[i, b] - costs_e[j, b]) >= 0,

with b over the choices that the neighbour still has. Usages must not grow at any time, so that it holds at every price.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.graph import Graph
from autopar.solver.problem import BoolArray, FloatArray, IntArray

NUM_RIVALS = 3

Side = tuple[IntArray, FloatArray, int, IntArray]
"""An edge as a node sees it: (its classes, costs [its class, other class], the other node, the other's classes)."""


def undominated(graph: Graph) -> list[BoolArray]:
    """The choices to keep. Each is tested against the rivals most likely to dominate: the cheapest, the lightest."""
    sides: list[list[Side]] = [[] for _ in graph.costs]
    for e in graph.edges:
        sides[e.u].append((e.u_class, e.costs, e.v, e.v_class))
        sides[e.v].append((e.v_class, e.costs.T, e.u, e.u_class))
    alive = [np.ones(len(costs), dtype=bool) for costs in graph.costs]
    for node, costs in enumerate(graph.costs):
        if len(costs) == 1:
            continue
        present: list[tuple[IntArray, FloatArray]] = []
        for classes, matrix, other, other_class in sides[node]:
            used = np.zeros(matrix.shape[1], dtype=bool)
            used[other_class[alive[other]]] = True
            present.append((classes, matrix if used.all() else matrix[:, used]))
        usages = [u.bytes for u in graph.usages[node]]
        for rival in _rivals(costs, usages, present):
            if alive[node][rival]:
                alive[node] &= ~_dominated_by(rival, costs, usages, present)
    return alive


def _rivals(costs: FloatArray, usages: list[FloatArray], sides: list[tuple[IntArray, FloatArray]]) -> list[int]:
    hopeful = costs.copy()
    for classes, matrix in sides:
        hopeful += matrix.min(axis=1)[classes]
    order = [int(i) for i in np.argsort(hopeful, kind="stable")[:NUM_RIVALS]]
    if usages:
        lightest = int(np.argmin(np.sum(usages, axis=0)))
        order.append(lightest)
    return order


def _dominated_by(
    rival: int, costs: FloatArray, usages: list[FloatArray], sides: list[tuple[IntArray, FloatArray]]
) -> BoolArray:
    margin = costs - costs[rival]
    for classes, matrix in sides:
        mine = matrix[classes[rival]]
        reachable = np.isfinite(mine)
        if reachable.all():
            worst = (matrix - mine).min(axis=1)
        else:
            worst = (matrix[:, reachable] - mine[reachable]).min(axis=1)
            worst[np.isfinite(matrix[:, ~reachable]).any(axis=1)] = -np.inf
        margin = margin + worst[classes]
    dominated: BoolArray = margin >= 0
    dominated[:rival] &= margin[:rival] > 0
    dominated[rival] = False
    for size in usages:
        dominated &= size >= size[rival]
    return dominated
