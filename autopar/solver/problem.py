"""The assignment problem as plain data.

Choose one index x_v per node v so as to

    minimise    sum_v costs_v[x_v]  +  sum_e costs_e[u_class_e[x_u], v_class_e[x_v]]
    subject to  sum of usage.bytes[x_v] over the usages alive at t  <=  usage_limit,   for every time t,

where an infinite cost forbids the choice or the pair. A hard tie is an edge that is infinite off its diagonal. Edge
costs are kept between *classes* of choices, because a given neighbour cannot tell most choices of an operator apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

FloatArray = NDArray[np.float64]
IntArray = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

USAGE_TOLERANCE = 1e-9
"""Relative slack on the limit within which a choice counts as fitting (sums of float64 are not exact)."""


class Usage(NamedTuple):
    """Memory that a node holds during [start, end) on an integer timeline: `bytes[i]` under its choice i."""

    start: int
    end: int
    bytes: FloatArray


@dataclass(frozen=True, slots=True)
class Node:
    """A decision. `costs[i]` is the time in seconds of choice i; np.inf forbids it."""

    name: str
    costs: FloatArray
    usages: tuple[Usage, ...] = ()


class Edge(NamedTuple):
    """A cost between two nodes: choice i of u and j of v together cost `costs[u_class[i], v_class[j]]` seconds.

    A tuple, as graphs of thousands are made anew by every step of presolving.
    """

    u: int
    v: int
    u_class: IntArray
    v_class: IntArray
    costs: FloatArray


@dataclass(frozen=True, slots=True)
class AssignmentProblem:
    """Nodes, edges between them (by index) and the most bytes that may be alive at once (None: no limit).

    Raises ValueError where shapes, indices or values do not fit together.
    """

    nodes: tuple[Node, ...]
    edges: tuple[Edge, ...] = ()
    usage_limit: float | None = None

    def __post_init__(self) -> None:
        bad = _is_bad([*(node.costs for node in self.nodes), *(edge.costs for edge in self.edges)])
        odd = _is_odd([usage.bytes for node in self.nodes for usage in node.usages])
        for index, node in enumerate(self.nodes):
            _check_node(index, node, bad, odd)
        ranges: dict[int, tuple[int, int]] = {}
        for index, edge in enumerate(self.edges):
            _check_edge(index, edge, self.nodes, bad, ranges)
        if self.usage_limit is not None and not self.usage_limit >= 0:
            raise ValueError(f"usage_limit must be a number of bytes >= 0, not {self.usage_limit}")

    def evaluate(self, choice: Sequence[int]) -> float:
        """The cost in seconds of one choice per node, memory aside; np.inf where something forbidden is chosen."""
        total = sum(float(node.costs[i]) for node, i in zip(self.nodes, choice, strict=True))
        for edge in self.edges:
            total += float(edge.costs[edge.u_class[choice[edge.u]], edge.v_class[choice[edge.v]]])
        return total

    def peak(self, choice: Sequence[int]) -> tuple[int, float]:
        """(the first time at which most bytes are alive under `choice`, how many they are); (0, 0.0) without usages."""
        alive = [
            (usage.start, usage.end, float(usage.bytes[i]))
            for node, i in zip(self.nodes, choice, strict=True)
            for usage in node.usages
            if usage.end > usage.start
        ]
        if not alive:
            return 0, 0.0
        start, end, size = (np.array(column) for column in zip(*alive, strict=True))
        times = np.unique(np.concatenate([start, end]))
        delta = np.zeros(len(times))
        np.add.at(delta, np.searchsorted(times, start), size)
        np.add.at(delta, np.searchsorted(times, end), -size)
        profile = np.cumsum(delta)
        worst = int(np.argmax(profile))
        return int(times[worst]), float(profile[worst])

    def fits(self, choice: Sequence[int]) -> bool:
        """Whether the peak is within the limit, up to a relative tolerance of 1e-9."""
        if self.usage_limit is None:
            return True
        return self.peak(choice)[1] <= self.usage_limit * (1 + USAGE_TOLERANCE)


@dataclass(frozen=True, slots=True)
class Conflict:
    """Why there is no solution.

    `nodes` and `edges` (indices into the problem) cannot be satisfied together. `needed_bytes` is the smallest usage
    limit known to be feasible (None: not found, or memory is not the reason).
    """

    message: str
    nodes: tuple[int, ...] = ()
    edges: tuple[int, ...] = ()
    needed_bytes: float | None = None


Status = Literal["optimal", "feasible", "infeasible", "unknown"]


@dataclass(frozen=True, slots=True)
class Solution:
    """What was found, and how good it is.

    `choice` is empty unless `status` is "optimal" (cost proven to be within the requested gap of the best) or
    "feasible".
    `bound` is a proven lower bound on the cost of every choice that fits (np.inf: there is none); `gap` is
    (cost - bound) / |cost|. `memory_price` is the Lagrange price of the limit in seconds a byte, summed over time: what
    one more byte would save, to first order; 0 where the limit is slack. `seconds` is CPU time, or wall
    clock time where that limits the search. `excluded`: there is no choice, whatever the limit: what edges and nodes
    allow does not go together. `is_ended_by_clock`: another machine, or a busier one, may find another choice.
    """

    choice: tuple[int, ...]
    cost: float
    bound: float
    gap: float
    status: Status
    memory_price: float
    peak_bytes: float
    seconds: float
    conflict: Conflict | None = None
    excluded: bool = False
    is_ended_by_clock: bool = False


def relative_gap(cost: float, bound: float) -> float:
    """(cost - bound) / |cost|, never negative; np.inf where there is no cost yet."""
    if cost <= bound:
        return 0.0
    if not np.isfinite(cost) or not np.isfinite(bound):
        return float("inf")
    return (cost - bound) / max(abs(cost), 1e-300)


def _is_bad(costs: Sequence[FloatArray]) -> bool:
    """Whether some cost is neither finite nor +inf: asked of all at once, as most have a few numbers alone."""
    least = np.concatenate([each.ravel() for each in costs]).min(initial=np.inf) if costs else 0.0
    return not least > -np.inf  # of numbers with a NaN the least is one


def _is_odd(sizes: Sequence[FloatArray]) -> bool:
    """Whether some bytes are negative or not finite."""
    together = np.concatenate([each.ravel() for each in sizes]) if sizes else np.zeros(0)
    return not (together.min(initial=0.0) >= 0 and together.max(initial=0.0) < np.inf)


def _check_node(index: int, node: Node, bad: bool, odd: bool) -> None:
    where = f"node {index} ({node.name!r})"
    if node.costs.ndim != 1 or len(node.costs) == 0:
        raise ValueError(
            f"{where}: costs must have one dimension and at least one choice, not shape {node.costs.shape}"
        )
    if bad and (np.isnan(node.costs).any() or (node.costs == -np.inf).any()):
        raise ValueError(f"{where}: costs must be finite or +inf")
    for usage in node.usages:
        if usage.bytes.shape != node.costs.shape:
            raise ValueError(f"{where}: usage of shape {usage.bytes.shape}, but {len(node.costs)} choices")
        if usage.end < usage.start:
            raise ValueError(f"{where}: usage ends at {usage.end} before it starts at {usage.start}")
        if odd and not ((usage.bytes >= 0) & np.isfinite(usage.bytes)).all():
            raise ValueError(f"{where}: usage bytes must be finite and >= 0")


def _check_edge(index: int, edge: Edge, nodes: tuple[Node, ...], bad: bool, ranges: dict[int, tuple[int, int]]) -> None:
    """ranges: the least and the largest of the classes that were looked at, by the array's id: edges share many."""
    if not (0 <= edge.u < len(nodes) and 0 <= edge.v < len(nodes)):
        raise ValueError(f"{_of_edge(index, edge)}: there are {len(nodes)} nodes")
    ends: tuple[tuple[Any, int, int], ...] = ((edge.u_class, edge.u, 0), (edge.v_class, edge.v, 1))
    for classes, end, side in ends:
        if classes.shape != nodes[end].costs.shape:
            raise ValueError(
                f"{_of_edge(index, edge)}: {classes.shape} classes for the {nodes[end].costs.shape} choices of node "
                f"{end}"
            )
        if id(classes) not in ranges:
            ranges[id(classes)] = int(classes.min()), int(classes.max())
        least, most = ranges[id(classes)]
        if edge.costs.ndim != 2 or least < 0 or most >= edge.costs.shape[side]:
            raise ValueError(
                f"{_of_edge(index, edge)}: classes of node {end} do not index costs of shape {edge.costs.shape}"
            )
    if bad and (np.isnan(edge.costs).any() or (edge.costs == -np.inf).any()):
        raise ValueError(f"{_of_edge(index, edge)}: costs must be finite or +inf")


def _of_edge(index: int, edge: Edge) -> str:
    return f"edge {index} ({edge.u}-{edge.v})"
