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
ALL_RIVALS_CELLS = 2_000_000
"""Where comparing all choices of a node takes more differences of edge costs than this, a few rivals have to do."""

Side = tuple[IntArray, FloatArray, int, IntArray]
"""An edge as a node sees it: (its classes, costs [its class, other class], the other node, the other's classes)."""


def undominated(graph: Graph, *, since: Graph | None = None, thorough: bool = False) -> list[BoolArray]:
    """The choices to keep. Each is tested against the rivals most likely to dominate (the cheapest, the lightest), or
    `thorough`-ly against all choices of its node.

    since: a graph that was looked at before. Nodes that are as they were there are not looked at again.
    """
    sides: list[list[Side]] = [[] for _ in graph.costs]
    for e in graph.edges:
        sides[e.u].append((e.u_class, e.costs, e.v, e.v_class))
        sides[e.v].append((e.v_class, e.costs.T, e.u, e.u_class))
    alive = [np.ones(len(costs), dtype=bool) for costs in graph.costs]
    fresh = _changed(graph, since)
    for node, costs in enumerate(graph.costs):
        if len(costs) == 1 or not fresh[node]:
            continue
        present: list[tuple[IntArray, FloatArray]] = []
        for classes, matrix, other, other_class in sides[node]:
            used = np.zeros(matrix.shape[1], dtype=bool)
            used[other_class[alive[other]]] = True
            present.append((classes, matrix if used.all() else matrix[:, used]))
        usages = [u.bytes for u in graph.usages[node]]
        rivals = _rivals(costs, usages, present, thorough)
        dominated = _dominated(rivals, costs, usages, present)
        for row, rival in zip(dominated, rivals, strict=True):
            if alive[node][rival]:
                alive[node] &= ~row
    return alive


def _changed(graph: Graph, since: Graph | None) -> list[bool]:
    """Which nodes have other costs or edges than there; all, where there were other nodes."""
    if since is None or len(since.costs) != len(graph.costs):
        return [True] * len(graph.costs)
    changed = [not np.array_equal(now, old) for now, old in zip(graph.costs, since.costs, strict=True)]
    known = {id(e) for e in since.edges}
    for e in graph.edges:
        if id(e) not in known:
            changed[e.u] = changed[e.v] = True
    return changed


def _rivals(
    costs: FloatArray, usages: list[FloatArray], sides: list[tuple[IntArray, FloatArray]], thorough: bool
) -> list[int]:
    """Choices to compare with, the most hopeful first."""
    hopeful = costs.copy()
    for classes, matrix in sides:
        hopeful += matrix.min(axis=1)[classes]
    ranked: list[int] = np.argsort(hopeful, kind="stable").tolist()
    if thorough and sum(matrix.shape[0] * matrix.size for _, matrix in sides) <= ALL_RIVALS_CELLS:
        return ranked
    lightest = [int(np.argmin(np.sum(usages, axis=0)))] if usages else []
    return [*ranked[:NUM_RIVALS], *lightest]


def _dominated(
    rivals: list[int], costs: FloatArray, usages: list[FloatArray], sides: list[tuple[IntArray, FloatArray]]
) -> BoolArray:
    """[rival, choice]: whether the rival may replace the choice; of equals the lower index may."""
    margin = costs - costs[rivals, None]
    for classes, matrix in sides:
        theirs = classes[rivals]
        if len(rivals) > len(matrix):
            least = _least_margins(matrix, np.arange(len(matrix)))[theirs]
        else:
            least = _least_margins(matrix, theirs)
        margin += least[:, classes]
    index = np.arange(len(costs))
    dominated: BoolArray = (margin > 0) | ((margin == 0) & (index >= np.array(rivals)[:, None]))
    for size in usages:
        dominated &= size >= size[rivals, None]
    dominated[np.arange(len(rivals)), rivals] = False
    return dominated


def _least_margins(matrix: FloatArray, mine: IntArray) -> FloatArray:
    """[rival class, class]: by how much the class is at least dearer than the rival class, whatever the neighbour does.

    What both forbid does not count; -inf where the rival forbids what the class allows.
    """
    rival = matrix[mine][:, None]
    if np.isfinite(matrix).all():
        least: FloatArray = (matrix - rival).min(axis=2)
        return least
    forbidden = np.isinf(rival)
    differences = np.where(forbidden, np.where(np.isinf(matrix), np.inf, -np.inf), 0.0)
    np.subtract(matrix, rival, out=differences, where=~np.broadcast_to(forbidden, differences.shape))
    return np.asarray(differences.min(axis=2))
