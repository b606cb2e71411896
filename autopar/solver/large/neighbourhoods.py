"""Large neighbourhood search: part of the nodes choose anew, exactly, while the others stay (Shaw, CP 1998).

Neighbourhoods are grown from a random node along the edges, or from the nodes that hold memory where most is held; with
the rest fixed, presolve leaves a small integer program. Their size follows the time that the programs take.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.consistency import Domains
from autopar.solver.exact import num_pairs
from autopar.solver.graph import Graph, restrict
from autopar.solver.memory import Memory
from autopar.solver.presolve import presolve
from autopar.solver.problem import BoolArray, IntArray

FIRST_PAIRS = 4_000
MOST_PAIRS = 120_000
GROWTH = 1.3
TRIES = 6
SHORT, LONG = 0.5, 4.0
"""Seconds of a program: neighbourhoods grow below, shrink above."""


class Neighbourhoods:
    """The neighbourhoods of one graph. `pairs`: how many pairs of choices a program should have, by now."""

    def __init__(self, graph: Graph, memory: Memory, seed: int = 0) -> None:
        self.graph, self.memory = graph, memory
        self.random = np.random.default_rng(seed)
        self.pairs = float(FIRST_PAIRS)
        self.near: list[list[int]] = [[] for _ in graph.costs]
        self.size = np.array([len(costs) for costs in graph.costs], dtype=np.int64)
        for e in graph.edges:
            self.near[e.u].append(e.v)
            self.near[e.v].append(e.u)
        self.free = np.flatnonzero(self.size > 1)

    def draw(self, choice: IntArray) -> Graph | None:
        """A graph in which only a neighbourhood is free, about as large as wanted; None where it has no choice."""
        order = self._order(choice)
        count = max(2, int(len(order) * min(1.0, self.pairs / MOST_PAIRS)))
        graph: Graph | None = None
        for _ in range(TRIES):
            graph = self._fixed(choice, order[:count])
            if graph is None:
                return None
            pairs = num_pairs(graph)
            if pairs > 1.5 * self.pairs and count > 2:
                count = max(2, int(count * max(0.4, self.pairs / pairs)))
            elif pairs < 0.6 * self.pairs and count < len(order):
                count = min(len(order), int(count * min(2.0, self.pairs / max(pairs, 1))) + 1)
            else:
                break
        return graph if graph is not None and num_pairs(graph) <= 2 * self.pairs else None

    def took(self, seconds: float) -> None:
        """How long the last program took."""
        if seconds < SHORT:
            self.pairs = min(MOST_PAIRS, self.pairs * GROWTH)
        elif seconds > LONG:
            self.pairs = max(500.0, self.pairs / GROWTH)

    def _order(self, choice: IntArray) -> list[int]:
        """Nodes with choices, those to free first."""
        kind = self.random.integers(4)
        rank = self.random.random(len(self.graph.costs))
        if kind == 0 and self.graph.num_points:
            profile = self.memory.profile(choice)
            point = int(self.random.choice(np.argsort(-profile)[: max(1, len(profile) // 20)]))
            alive = (self.memory.start <= point) & (point < self.memory.end)
            rank[self.memory.node[alive]] -= 1.0
            return [int(v) for v in self.free[np.argsort(rank[self.free], kind="stable")]]
        seen: dict[int, None] = {}
        heap = [int(self.random.choice(self.free))]
        waiting = list(heap)
        while len(seen) < len(self.free):
            if not waiting:
                rest = [int(v) for v in self.free if int(v) not in seen]
                waiting = [int(self.random.choice(rest))]
            at = int(self.random.integers(len(waiting))) if kind == 1 else 0
            node = waiting.pop(at)
            if node in seen:
                continue
            seen[node] = None
            waiting.extend(other for other in self.near[node] if other not in seen and self.size[other] > 1)
        return list(seen)

    def _fixed(self, choice: IntArray, free: list[int]) -> Graph | None:
        alive: list[BoolArray] = [np.arange(k) == i for k, i in zip(self.size.tolist(), choice.tolist(), strict=True)]
        for v in free:
            alive[v] = np.ones(int(self.size[v]), dtype=bool)
        graph = presolve(restrict(self.graph, alive))
        return None if isinstance(graph, Domains) else graph
