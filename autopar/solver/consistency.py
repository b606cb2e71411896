"""Arc consistency: drop every choice that has no allowed partner at some neighbour, and explain a wipe-out.

Only infinite entries matter here. The algorithm is AC-3 (Mackworth 1977) on choice classes: class a of u keeps its
choices only while some alive class b of v has costs[a, b] < inf.
"""

from __future__ import annotations

from bisect import bisect_left
from collections import deque
from collections.abc import Container, Iterable, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.problem import BoolArray, Edge


@dataclass(slots=True)
class Domains:
    """What is still allowed. `alive[v][i]`: choice i of node v; `empty`: the node found without any choice left."""

    alive: list[BoolArray]
    empty: int | None = None
    trail: list[tuple[int, int]] = field(default_factory=list[tuple[int, int]])
    """(node, edge) in the order in which an edge took choices from a node: the reasons, for `explain`."""


def propagate(alive: Sequence[BoolArray], edges: Sequence[Edge]) -> Domains:
    """The largest arc consistent subset of `alive`. Stops at the first node left without a choice."""
    network = Network(len(alive), edges)
    return network.propagate(alive, network.hard)


class Network:
    """The edges that forbid something, and which nodes they touch; built once, propagated many times."""

    def __init__(self, num_nodes: int, edges: Sequence[Edge]) -> None:
        self.edges = edges
        self.allowed: dict[int, BoolArray] = {}
        self.touching: list[list[int]] = [[] for _ in range(num_nodes)]
        for index, edge in enumerate(edges):
            allowed = np.isfinite(edge.costs)
            if not allowed.all():
                self.allowed[index] = allowed
                self.touching[edge.u].append(index)
                self.touching[edge.v].append(index)
        self.hard = list(self.allowed)

    def propagate(
        self,
        alive: Sequence[BoolArray],
        seeds: Iterable[int],
        *,
        none_empty: bool = False,
        among: Container[int] | None = None,
    ) -> Domains:
        """Like the module's `propagate`; `seeds` are indices of edges. none_empty: no node is without a choice yet.
        among: only these edges forbid something.
        """
        result = Domains(list(alive))
        if not none_empty:
            result.empty = next((v for v, mask in enumerate(result.alive) if not mask.any()), None)
        queue = deque(seed for seed in seeds if seed in self.allowed)
        waiting = set(queue)
        while queue and result.empty is None:
            index = queue.popleft()
            waiting.discard(index)
            for node in self._revise(index, result):
                for other in self.touching[node]:
                    if other not in waiting and (among is None or other in among):
                        waiting.add(other)
                        queue.append(other)
        return result

    def _revise(self, index: int, domains: Domains) -> list[int]:
        edge, allowed, alive = self.edges[index], self.allowed[index], domains.alive
        changed: list[int] = []
        ends = (
            (edge.u, edge.u_class, edge.v, edge.v_class, allowed),
            (edge.v, edge.v_class, edge.u, edge.u_class, allowed.T),
        )
        for source, source_class, target, target_class, pairs in ends:
            present = np.zeros(pairs.shape[0], dtype=bool)
            present[source_class[alive[source]]] = True
            supported: BoolArray = np.logical_or.reduce(pairs[present], axis=0)
            kept = alive[target] & supported[target_class]
            if kept.sum() < alive[target].sum():
                alive[target] = kept
                domains.trail.append((target, index))
                changed.append(target)
                if not kept.any():
                    domains.empty = target
                    return changed
        return changed


def explain(
    alive: Sequence[BoolArray], edges: Sequence[Edge], domains: Domains
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """(nodes, edges) that suffice for the wipe-out in `domains`, none of the edges superfluous.

    Walks the trail of removals back from the empty node, then drops edges (in halving blocks, then one by one) as long
    as propagation still empties a node; what then emptied it says which of the others are needed still.
    """
    assert domains.empty is not None, "nothing to explain"
    network = Network(len(alive), edges)
    core = needed(edges, domains)
    block = max(1, len(core) // 2)
    while core:
        first = 0  # edges before this one have been tried
        while (position := bisect_left(core, first)) < len(core):
            trial = core[:position] + core[position + block :]
            found = network.propagate(alive, trial, among=frozenset(trial))
            first = core[position + block] if position + block < len(core) else len(edges)
            if found.empty is not None:
                core = needed(edges, found)
        if block == 1:
            break
        block //= 2
    nodes = {end for index in core for end in (edges[index].u, edges[index].v)} or {domains.empty}
    return tuple(sorted(nodes)), tuple(core)


def needed(edges: Sequence[Edge], domains: Domains) -> list[int]:
    """The edges without which a node would not have been emptied as it was, ascending."""
    assert domains.empty is not None
    blamed, needed = {domains.empty}, set[int]()
    for node, index in reversed(domains.trail):
        if node in blamed:
            needed.add(index)
            blamed.update((edges[index].u, edges[index].v))
    return sorted(needed)
