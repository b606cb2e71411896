"""Dominated choices: another choice of the same node costs no more and takes no more memory, whatever the rest do.

Goldstein's criterion (Biophysical Journal 66, 1994): j replaces i when

    costs[i] - costs[j] + sum_e min_b (costs_e[i, b] - costs_e[j, b]) >= 0,

with b over the choices that the neighbour still has. Usages must not grow at any time, so that it holds at every price.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.graph import Graph
from autopar.solver.methods import is_long
from autopar.solver.problem import BoolArray, FloatArray, IntArray

NUM_RIVALS = 3
ALL_RIVALS_CELLS = 2_000_000
"""Where comparing all choices of a node takes more differences of edge costs than this, a few rivals have to do."""
SAMPLE = 16
"""Choices of a neighbour, at least, by which it is told first what cannot be dominated."""

Side = tuple[IntArray, FloatArray, int, IntArray]
"""An edge as a node sees it: (its classes, costs [its class, other class], the other node, the other's classes)."""


def undominated(graph: Graph, *, since: Graph | None = None, thorough: bool = False) -> list[BoolArray]:
    """The choices to keep. Each is tested against the rivals most likely to dominate (the cheapest, the lightest), or
    `thorough`-ly against all choices of its node.

    since: a graph that was looked at before. Nodes that are as they were there are not looked at again.
    """
    fresh = _changed(graph, since)
    if is_long(len(graph.edges)) and not thorough:
        from autopar.solver import compiled_presolve  # it loads numba

        return compiled_presolve.undominated(graph, fresh, NUM_RIVALS)
    sides: list[list[Side]] = [[] for _ in graph.costs]
    for e in graph.edges:
        sides[e.u].append((e.u_class, e.costs, e.v, e.v_class))
        sides[e.v].append((e.v_class, e.costs.T, e.u, e.u_class))
    alive = [np.ones(len(costs), dtype=bool) for costs in graph.costs]
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
    index = np.arange(len(costs))
    lighter = np.ones((len(rivals), len(costs)), dtype=bool)
    for size in usages:
        lighter &= size >= size[rivals, None]
    lighter[np.arange(len(rivals)), rivals] = False

    def dominated(of: IntArray, sides: list[tuple[IntArray, FloatArray]]) -> BoolArray:
        margin = costs[of] - costs[rivals, None]
        for classes, matrix in sides:
            theirs, mine = classes[rivals], classes[of]
            used = np.unique(mine)
            least = _least_margins(matrix[used], matrix[theirs])
            with np.errstate(invalid="ignore"):  # where one edge says never, it does not matter what another says
                margin += least[:, np.searchsorted(used, mine)]
        return lighter[:, of] & ((margin > 0) | ((margin == 0) & (of >= np.array(rivals)[:, None])))

    # Most choices are better than every rival for some of the neighbours' choices, and a few of those tell.
    few = [(classes, matrix[:, :: 1 + matrix.shape[1] // SAMPLE]) for classes, matrix in sides]
    hopeful = np.flatnonzero(dominated(index, few).any(axis=0))
    result = np.zeros_like(lighter)
    if len(hopeful):
        result[:, hopeful] = dominated(hopeful, sides)
    return result


def _least_margins(matrix: FloatArray, rivals: FloatArray) -> FloatArray:
    """[rival, class]: by how much the class is at least dearer than the rival, whatever the neighbour does.

    What both forbid does not count; -inf where the rival forbids what the class allows.
    """
    rival = rivals[:, None]
    if np.isfinite(matrix).all() and np.isfinite(rivals).all():
        least: FloatArray = (matrix - rival).min(axis=2)
        return least
    forbidden = np.isinf(rival)
    differences = np.where(forbidden, np.where(np.isinf(matrix), np.inf, -np.inf), 0.0)
    np.subtract(matrix, rival, out=differences, where=~np.broadcast_to(forbidden, differences.shape))
    return np.asarray(differences.min(axis=2))
