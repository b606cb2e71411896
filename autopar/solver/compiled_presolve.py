"""Dominated choices and arc consistency of large graphs, by compiled loops: what `dominance` and `consistency` say.

Python's share of every edge is what these take on graphs of thousands of small matrices. The answers are the same to
the last choice: sums are taken in the same order.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from autopar.solver.compiled import exactly
from autopar.solver.graph import Graph, forbidding
from autopar.solver.problem import BoolArray, Edge, FloatArray, IntArray


class Sides(NamedTuple):
    """The edges of a graph, and which of them each node has, in their order.

    Choice i of node s is at `base[s] + i`. Edge e joins u[e] and v[e]; its matrix of rows[e] by columns[e] is at
    cell[e], the classes of its ends' choices at u_at[e] and v_at[e]. Node s has the edges near[first[s]:first[s + 1]].
    """

    base: IntArray
    u: IntArray
    v: IntArray
    rows: IntArray
    columns: IntArray
    cell: IntArray
    u_at: IntArray
    v_at: IntArray
    classes: IntArray
    first: IntArray
    near: IntArray


def sides(num_choices: Sequence[int], edges: Sequence[Edge]) -> Sides:
    """The structure of a graph's edges, without their costs."""
    u = np.array([e.u for e in edges], dtype=np.int64)
    v = np.array([e.v for e in edges], dtype=np.int64)
    counts = np.array(num_choices, dtype=np.int64)
    rows = np.array([e.costs.shape[0] for e in edges], dtype=np.int64)
    columns = np.array([e.costs.shape[1] for e in edges], dtype=np.int64)
    ends = np.column_stack([u, v]).ravel()
    at = _starts(counts[ends])
    classes = [each for e in edges for each in (e.u_class, e.v_class)]
    joined = np.concatenate(classes).astype(np.int64) if classes else np.zeros(0, dtype=np.int64)
    near = np.argsort(ends, kind="stable") // 2
    first = _starts(np.bincount(ends, minlength=len(counts)))
    return Sides(
        _starts(counts), u, v, rows, columns, _starts(rows * columns), at[:-1:2], at[1::2], joined, first, near
    )


@lru_cache(maxsize=1)
def load() -> None:
    """Compile all loops (seconds, at the first call on a machine), or read them (tenths of a second)."""
    same, free = np.array([0, 1]), np.zeros(2)
    edge = Edge(0, 1, same, same, np.array([[0.0, np.inf], [np.inf, 0.0]]))
    propagate([np.ones(2, dtype=bool)] * 2, [edge])
    undominated(Graph((free, free), (edge,), ((), ()), ((0, same), (1, same)), 0), [True, True], 1)


def undominated(graph: Graph, fresh: Sequence[bool], num_rivals: int) -> list[BoolArray]:
    """The choices to keep: as `dominance.undominated`, with few rivals. fresh: the nodes that are looked at."""
    structure = sides(graph.num_choices, graph.edges)
    sizes = [u.bytes for usages in graph.usages for u in usages]
    held, size_at = _starts(np.array([*map(len, graph.usages)])), _starts(np.array([*map(len, sizes)], dtype=np.int64))
    costs, cells = _joined(graph.costs), _joined([e.costs.ravel() for e in graph.edges])
    looked, alive = np.array(fresh, dtype=np.bool_), np.ones(int(structure.base[-1]), dtype=np.bool_)
    _keep(structure, costs, cells, held, _joined(sizes), size_at, looked, num_rivals, alive)
    return _split(alive, structure.base)


def propagate(alive: Sequence[BoolArray], edges: Sequence[Edge]) -> tuple[list[BoolArray], int | None]:
    """The largest arc consistent subset of `alive`, and the node that is left without a choice, if any."""
    hard = list(itertools.compress(edges, forbidding(edges)))
    structure = sides([len(mask) for mask in alive], hard)
    allowed = [np.isfinite(e.costs).ravel() for e in hard]
    flat = np.concatenate(alive)
    cells = np.concatenate(allowed) if allowed else np.zeros(0, dtype=np.bool_)
    counts = np.add.reduceat(flat.astype(np.int64), structure.base[:-1])
    empty = int(np.argmin(counts)) if not counts.all() else int(_revise_all(structure, cells, flat))
    return _split(flat, structure.base), None if empty < 0 else empty


def narrow(structure: Sides, allowed: BoolArray, alive: BoolArray) -> int:
    """Make `alive`, of all choices one after the other, arc consistent in place; returns the node that is left without
    a choice, or -1. allowed: for each cell of the edges' matrices.
    """
    return int(_revise_all(structure, allowed, alive))


def _starts(sizes: IntArray) -> IntArray:
    return np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)


def _joined(parts: Sequence[FloatArray]) -> FloatArray:
    return np.concatenate(parts).astype(np.float64) if len(parts) else np.zeros(0)


def _split(flat: BoolArray, base: IntArray) -> list[BoolArray]:
    bounds = base.tolist()
    return [flat[start:end] for start, end in itertools.pairwise(bounds)]


@exactly
def _keep(
    graph: Sides,
    costs: FloatArray,
    cells: FloatArray,
    held: IntArray,
    sizes: FloatArray,
    size_at: IntArray,
    fresh: BoolArray,
    num_rivals: int,
    alive: BoolArray,
) -> None:
    """Leave out, in place, what is dominated. held[s]: the first of node s's usages, whose bytes are at size_at."""
    most, widest = 1, 1
    for s in range(len(graph.base) - 1):
        most = max(most, graph.base[s + 1] - graph.base[s])
    for e in range(len(graph.u)):
        widest = max(widest, max(graph.rows[e], graph.columns[e]))
    hopeful, margin, weight, least = np.empty(most), np.empty(most), np.empty(most), np.empty(widest)
    used, never = np.empty(widest, np.bool_), np.empty(most, np.bool_)
    rivals = np.empty(num_rivals + 1, np.int64)
    dominated = np.empty((num_rivals + 1, most), np.bool_)
    for s in range(len(graph.base) - 1):
        start, k = graph.base[s], graph.base[s + 1] - graph.base[s]
        if k == 1 or not fresh[s]:
            continue
        for i in range(k):
            hopeful[i] = costs[start + i]
        for position in range(graph.first[s], graph.first[s + 1]):
            e = graph.near[position]
            mine, here, others = _seen_from(graph, alive, e, graph.u[e] == s, used)
            row, column, at = _strides(graph, e, graph.u[e] == s)
            for a in range(mine):
                least[a] = np.inf
                for b in range(others):
                    if used[b]:
                        least[a] = min(least[a], cells[at + a * row + b * column])
            for i in range(k):
                hopeful[i] += least[graph.classes[here + i]]
        count = min(num_rivals, k)
        for r in range(count):
            best = -1
            for i in range(k):
                taken = False
                for other in range(r):
                    taken |= rivals[other] == i
                if not taken and (best < 0 or hopeful[i] < hopeful[best]):
                    best = i
            rivals[r] = best
        if held[s + 1] > held[s]:
            for i in range(k):
                weight[i] = 0.0
                for usage in range(held[s], held[s + 1]):
                    weight[i] += sizes[size_at[usage] + i]
            lightest = 0
            for i in range(k):
                if weight[i] < weight[lightest]:
                    lightest = i
            rivals[count] = lightest
            count += 1
        for r in range(count):
            rival = rivals[r]
            for i in range(k):
                margin[i] = costs[start + i] - costs[start + rival]
                never[i] = i == rival or np.isinf(costs[start + rival])
                for usage in range(held[s], held[s + 1]):
                    never[i] |= sizes[size_at[usage] + i] < sizes[size_at[usage] + rival]
            for position in range(graph.first[s], graph.first[s + 1]):
                e = graph.near[position]
                mine, here, others = _seen_from(graph, alive, e, graph.u[e] == s, used)
                row, column, at = _strides(graph, e, graph.u[e] == s)
                theirs = at + graph.classes[here + rival] * row
                for a in range(mine):
                    low = np.inf
                    for b in range(others):
                        if used[b]:
                            cost, other = cells[at + a * row + b * column], cells[theirs + b * column]
                            if np.isinf(other):
                                low = low if np.isinf(cost) else -np.inf
                            elif cost - other < low:
                                low = cost - other
                    least[a] = low
                for i in range(k):
                    a = graph.classes[here + i]
                    if least[a] == -np.inf:
                        never[i] = True
                    else:
                        margin[i] += least[a]
            for i in range(k):
                dominated[r, i] = not never[i] and (margin[i] > 0 or (margin[i] == 0 and i >= rival))
        for r in range(count):
            if alive[start + rivals[r]]:
                for i in range(k):
                    if dominated[r, i]:
                        alive[start + i] = False


@exactly
def _seen_from(graph: Sides, alive: BoolArray, e: int, from_u: bool, used: BoolArray) -> tuple[int, int, int]:
    """How many classes an end of an edge has, where they are, and how many classes the other end has; which of these a
    choice still has, is written into `used`.
    """
    if from_u:
        mine, here, other, there, others = graph.rows[e], graph.u_at[e], graph.v[e], graph.v_at[e], graph.columns[e]
    else:
        mine, here, other, there, others = graph.columns[e], graph.v_at[e], graph.u[e], graph.u_at[e], graph.rows[e]
    for b in range(others):
        used[b] = False
    start = graph.base[other]
    for i in range(graph.base[other + 1] - start):
        if alive[start + i]:
            used[graph.classes[there + i]] = True
    return mine, here, others


@exactly
def _strides(graph: Sides, e: int, from_u: bool) -> tuple[int, int, int]:
    """From one class of an end to the next in an edge's cells, from one of the other's, and where the cells are."""
    if from_u:
        return graph.columns[e], 1, graph.cell[e]
    return 1, graph.columns[e], graph.cell[e]


@exactly
def _revise_all(graph: Sides, allowed: BoolArray, alive: BoolArray) -> int:
    """AC-3, in place; the node that is left without a choice, or -1."""
    count = len(graph.u)
    queue, waiting = np.arange(count), np.ones(count, np.bool_)
    widest = 1
    for e in range(count):
        widest = max(widest, max(graph.rows[e], graph.columns[e]))
    used = np.empty(widest, np.bool_)
    supported = np.empty(widest, np.bool_)
    head, length = 0, count
    while length:
        index = queue[head]
        head, length = (head + 1) % count, length - 1
        waiting[index] = False
        for side in range(2):
            target = graph.v[index] if side == 0 else graph.u[index]
            mine, here, others = _seen_from(graph, alive, index, side == 1, used)
            row, column, at = _strides(graph, index, side == 1)
            for a in range(mine):
                supported[a] = False
                for b in range(others):
                    if used[b] and allowed[at + a * row + b * column]:
                        supported[a] = True
                        break
            start, fewer, left = graph.base[target], False, False
            for i in range(graph.base[target + 1] - start):
                if alive[start + i]:
                    if supported[graph.classes[here + i]]:
                        left = True
                    else:
                        alive[start + i] = False
                        fewer = True
            if not left:
                return int(target)
            if fewer:
                for position in range(graph.first[target], graph.first[target + 1]):
                    other = graph.near[position]
                    if not waiting[other]:
                        waiting[other] = True
                        queue[(head + length) % count] = other
                        length += 1
    return -1
