"""Exact elimination of nodes with at most two neighbours, redone cheaply for every set of node costs.

    w alone                 a constant
    u - w                   costs_u(a) += min_w [ costs_w + C(a, w) ]
    u - w - v    ->  u - v  D(a, b) = min_w [ C(a, w) + costs_w + C'(w, b) ]
    u = v        ->  u - v  parallel edges added up over the common refinement of their classes

(bucket elimination: Dechter, Artificial Intelligence 113, 1999). Which steps to take depends on the structure alone,
so a `Plan` is made once; a memory price changes only node costs, and `Plan.run` repeats the arithmetic. What is left is
the *core*: every node has three neighbours or more, or a matrix between its neighbours would be too large.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np

from autopar.solver.graph import Graph, joint_classes
from autopar.solver.problem import Edge, FloatArray, IntArray

MAX_CELLS = 16_384
MAX_WORK = 2_000_000
MAX_BLOCK = 262_144


@dataclass(frozen=True, slots=True)
class Slot:
    """An edge of some stage of the elimination, without its costs."""

    u: int
    v: int
    u_class: IntArray
    v_class: IntArray
    shape: tuple[int, int]

    def seen_from(self, node: int) -> tuple[IntArray, int, IntArray, bool]:
        """(classes of node, the other node, its classes, whether costs must be transposed to be [node, other])."""
        if node == self.u:
            return self.u_class, self.v, self.v_class, False
        return self.v_class, self.u, self.u_class, True


@dataclass(frozen=True, slots=True)
class Drop:
    """Eliminate `node`, whose only edges are `slots` (none, one or two); two leave the new edge `result`."""

    node: int
    slots: tuple[int, ...]
    result: int = -1
    joint: IntArray | None = None
    first: IntArray | None = None
    second: IntArray | None = None


@dataclass(frozen=True, slots=True)
class Join:
    """Add edge `slots[1]` to the parallel `slots[0]`, giving the edge `result`. Index arrays are [class of result]."""

    slots: tuple[int, int]
    result: int
    u_parts: tuple[IntArray, IntArray]
    v_parts: tuple[IntArray, IntArray]


@dataclass(slots=True)
class Reduced:
    """The outcome of `Plan.run`: per node the costs it was eliminated with (or has in the core), per slot a matrix."""

    costs: list[FloatArray]
    matrices: list[FloatArray]
    constant: float


class Plan:
    """The elimination of one graph. `core` lists the nodes left, `core_edges` the slots between them.

    eliminates: if not, the core is the whole graph.
    """

    def __init__(self, graph: Graph, *, eliminates: bool = True) -> None:
        self.whole = not eliminates
        self.slots = [Slot(e.u, e.v, e.u_class, e.v_class, (e.costs.shape[0], e.costs.shape[1])) for e in graph.edges]
        self.given = [e.costs for e in graph.edges]
        self.steps: list[Drop | Join] = []
        self._around: list[dict[int, list[int]]] = [{} for _ in graph.costs]
        for index, slot in enumerate(self.slots):
            self._around[slot.u].setdefault(slot.v, []).append(index)
            self._around[slot.v].setdefault(slot.u, []).append(index)
        gone = self._schedule() if eliminates else set[int]()
        self.core = [v for v in range(len(graph.costs)) if v not in gone]
        used = {index for v in self.core for indices in self._around[v].values() for index in indices}
        self.core_edges = sorted(used)

    def run(self, costs: list[FloatArray]) -> Reduced:
        """Eliminate with these node costs [k] (not modified)."""
        made = [np.zeros((0, 0))] * (len(self.slots) - len(self.given))
        state = Reduced([c.copy() for c in costs], [*self.given, *made], 0.0)
        for step in self.steps:
            if isinstance(step, Join):
                self._run_join(step, state)
            elif len(step.slots) == 2:
                state.matrices[step.result] = self._bypass(step, state)
            elif len(step.slots) == 1:
                classes, other, other_class, turned = self.slots[step.slots[0]].seen_from(step.node)
                matrix = state.matrices[step.slots[0]]
                best = class_min(state.costs[step.node], classes, matrix.shape[1 if turned else 0])
                message = (matrix + best).min(axis=1) if turned else (matrix + best[:, None]).min(axis=0)
                state.costs[other] += message[other_class]
            else:
                state.constant += float(state.costs[step.node].min())
        return state

    def decode(self, choice: IntArray, state: Reduced) -> IntArray:
        """`choice` [num nodes], set for the core, completed (in place) with the best choice of eliminated nodes."""
        for step in reversed(self.steps):
            if isinstance(step, Drop):
                local = state.costs[step.node]
                for index in step.slots:
                    classes, other, other_class, turned = self.slots[index].seen_from(step.node)
                    matrix = state.matrices[index]
                    there = other_class[choice[other]]
                    local = local + (matrix[there] if turned else matrix[:, there])[classes]
                choice[step.node] = int(np.argmin(local))
        return choice

    def core_problem(self, state: Reduced) -> list[Edge]:
        """The edges of the core with their costs (node indices unchanged)."""
        slots = ((self.slots[i], state.matrices[i]) for i in self.core_edges)
        return [Edge(s.u, s.v, s.u_class, s.v_class, matrix) for s, matrix in slots]

    def spread(self, grown: list[FloatArray], state: Reduced) -> None:
        """Complete reduced costs: `grown[v][i]`, set for the core, is by how much the bound grows if v takes choice i.

        For w between u and v, x_w = i costs at least the min over (a, b) of max(grown_u(a), grown_v(b)) plus what i
        costs more there than the best choice of w.
        """
        for step in reversed(self.steps):
            if isinstance(step, Drop):
                mine = state.costs[step.node]
                if len(step.slots) == 2:
                    grown[step.node] = mine + self._spread_between(step, grown, state)
                elif step.slots:
                    classes, other, other_class, turned = self.slots[step.slots[0]].seen_from(step.node)
                    matrix = state.matrices[step.slots[0]] if turned else state.matrices[step.slots[0]].T
                    there = class_min(grown[other], other_class, len(matrix))
                    message = (matrix + class_min(mine, classes, matrix.shape[1])).min(axis=1)
                    base = np.full(len(matrix), np.inf)
                    np.subtract(there, message, out=base, where=np.isfinite(message))
                    grown[step.node] = mine + (matrix + base[:, None]).min(axis=0)[classes]
                else:
                    grown[step.node] = mine - mine.min()

    def _spread_between(self, step: Drop, grown: list[FloatArray], state: Reduced) -> FloatArray:
        assert step.joint is not None
        slot = self.slots[step.result]
        u_grown = class_min(grown[slot.u], slot.u_class, slot.shape[0])
        v_grown = class_min(grown[slot.v], slot.v_class, slot.shape[1])
        through = state.matrices[step.result]
        base = np.full(through.shape, np.inf)
        np.subtract(np.maximum(u_grown[:, None], v_grown), through, out=base, where=np.isfinite(through))
        left, right = self._sides(step, state)
        best = [float((base + (left[:, g, None] + right[:, g])).min()) for g in range(left.shape[1])]
        return np.array(best)[step.joint]

    def _schedule(self) -> set[int]:
        gone: set[int] = set()
        heap = [(len(near), 0, v) for v, near in enumerate(self._around) if len(near) <= 2]
        heapq.heapify(heap)
        while heap:
            degree, work, node = heapq.heappop(heap)
            if node in gone or degree != len(self._around[node]):
                continue
            if degree == 2 and work == 0:
                work = self._work(node)
                if work <= MAX_WORK:
                    heapq.heappush(heap, (2, work, node))
                continue
            if degree == 2 and self._work(node) > MAX_WORK:
                continue
            neighbours = list(self._around[node])
            self._drop(node)
            gone.add(node)
            for other in neighbours:
                if len(self._around[other]) <= 2:
                    heapq.heappush(heap, (len(self._around[other]), 0, other))
        return gone

    def _work(self, node: int) -> int:
        """Multiplied sizes of a two-neighbour elimination; more than MAX_WORK where its matrix would be too large."""
        if any(len(indices) > 1 for indices in self._around[node].values()):
            return MAX_WORK + 1
        first, second = (indices[0] for indices in self._around[node].values())
        rows, columns = (self.slots[i].shape[0 if self.slots[i].v == node else 1] for i in (first, second))
        mine = max(self.slots[i].shape[1 if self.slots[i].v == node else 0] for i in (first, second))
        return rows * columns * mine if rows * columns <= MAX_CELLS else MAX_WORK + 1

    def _drop(self, node: int) -> None:
        for other in list(self._around[node]):
            while len(self._around[node][other]) > 1:
                self._join(node, other)
        indices = tuple(near[0] for near in self._around[node].values())
        others = list(self._around[node])
        for other in others:
            del self._around[other][node]
        if len(indices) < 2:
            self.steps.append(Drop(node, indices))
            return
        u, v = others
        ends = [self.slots[i].seen_from(node) for i in indices]
        joint, first, second = joint_classes(ends[0][0], ends[1][0])
        shape = (self._width(indices[0], u), self._width(indices[1], v))
        self.slots.append(Slot(u, v, ends[0][2], ends[1][2], shape))
        result = len(self.slots) - 1
        self.steps.append(Drop(node, indices, result, joint, first, second))
        self._around[u].setdefault(v, []).append(result)
        self._around[v].setdefault(u, []).append(result)
        if len(self._around[u][v]) > 1 and self._joint_cells(u, v) <= MAX_CELLS:
            self._join(u, v)

    def _width(self, index: int, node: int) -> int:
        slot = self.slots[index]
        return slot.shape[0] if slot.u == node else slot.shape[1]

    def _joint_cells(self, u: int, v: int) -> int:
        first, second = (self.slots[i].seen_from(u) for i in self._around[u][v][:2])
        return len(joint_classes(first[0], second[0])[1]) * len(joint_classes(first[2], second[2])[1])

    def _join(self, u: int, v: int) -> None:
        left, right = self._around[u][v][:2]
        first, second = self.slots[left].seen_from(u), self.slots[right].seen_from(u)
        u_class, *u_parts = joint_classes(first[0], second[0])
        v_class, *v_parts = joint_classes(first[2], second[2])
        self.slots.append(Slot(u, v, u_class, v_class, (len(u_parts[0]), len(v_parts[0]))))
        result = len(self.slots) - 1
        self.steps.append(Join((left, right), result, (u_parts[0], u_parts[1]), (v_parts[0], v_parts[1])))
        rest = [*self._around[u][v][2:], result]
        self._around[u][v] = rest
        self._around[v][u] = list(rest)

    def _run_join(self, step: Join, state: Reduced) -> None:
        u = self.slots[step.result].u
        total: FloatArray | None = None
        for index, rows, columns in zip(step.slots, step.u_parts, step.v_parts, strict=True):
            matrix = state.matrices[index] if self.slots[index].u == u else state.matrices[index].T
            part = matrix[np.ix_(rows, columns)]
            total = part if total is None else total + part
        assert total is not None
        state.matrices[step.result] = total

    def _bypass(self, step: Drop, state: Reduced) -> FloatArray:
        assert step.joint is not None and step.first is not None
        best = class_min(state.costs[step.node], step.joint, len(step.first))
        left, right = self._sides(step, state)
        return min_plus(left + best, right)

    def _sides(self, step: Drop, state: Reduced) -> tuple[FloatArray, FloatArray]:
        """The two edge matrices of a dropped node, each [class of neighbour, joint class of the node]."""
        assert step.first is not None and step.second is not None
        sides: list[FloatArray] = []
        for index, part in zip(step.slots, (step.first, step.second), strict=True):
            matrix = state.matrices[index] if self.slots[index].v == step.node else state.matrices[index].T
            sides.append(matrix[:, part])
        return sides[0], sides[1]


def min_plus(left: FloatArray, right: FloatArray) -> FloatArray:
    """D[a, b] = min_g left[a, g] + right[b, g]."""
    step = max(1, MAX_BLOCK // max(1, right.size))
    blocks = [(left[i : i + step, None, :] + right).min(axis=2) for i in range(0, len(left), step)]
    return np.concatenate(blocks)


def class_min(costs: FloatArray, classes: IntArray, num: int) -> FloatArray:
    """The least cost in each of `num` classes."""
    best = np.full(num, np.inf)
    np.minimum.at(best, classes, costs)
    return best
