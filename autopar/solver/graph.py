"""The solver's working copy of a problem: ever smaller graphs, each with its way back to the original choices."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from autopar.solver.problem import AssignmentProblem, BoolArray, Edge, FloatArray, IntArray, Usage

_HASH = np.random.default_rng(0).integers(1, 2**63, 16_384, dtype=np.uint64)
"""Rows whose sums weighted by these (modulo 2**64) differ are not equal."""
FEW_ROWS = 16
"""Rows that are told apart by their bytes in less time than their sums take."""
SMALL_CELLS = 4096
"""Of an edge that is looked at together with others."""
PARALLEL_GROWTH = 4
"""Parallel edges become one unless its matrix would have more than this many times their cells together."""


@dataclass(frozen=True, slots=True)
class Graph:
    """Nodes with costs [k] and usages, edges, and `lift`.

    `lift[w]` = (v, table) for each node w of the original problem: its choice is table[choice of v here].
    """

    costs: tuple[FloatArray, ...]
    edges: tuple[Edge, ...]
    usages: tuple[tuple[Usage, ...], ...]
    lift: tuple[tuple[int, IntArray], ...]
    num_points: int

    def original_choice(self, choice: IntArray) -> tuple[int, ...]:
        """The choice of every node of the original problem."""
        return tuple(int(table[choice[node]]) for node, table in self.lift)

    def choice_here(self, original: Sequence[int]) -> IntArray | None:
        """The inverse of `original_choice`; None where a choice was dropped on the way here."""
        nodes, tables, lengths = self._lifted()
        starts = np.cumsum([0, *self.num_choices])
        count = np.bincount(nodes, minlength=len(self.costs))
        agree = tables == np.repeat(np.asarray(original, dtype=np.int64), lengths)
        places = (
            np.arange(len(tables))
            - np.repeat(np.cumsum(lengths) - lengths, lengths)
            + np.repeat(starts[nodes], lengths)
        )
        votes = np.bincount(places[agree], minlength=int(starts[-1]))
        fits = votes == np.repeat(count, self.num_choices)
        at = np.flatnonzero(fits)
        owner = np.searchsorted(starts, at, side="right") - 1
        found, first = np.unique(owner, return_index=True)
        return at[first] - starts[:-1] if len(found) == len(self.costs) else None

    def _lifted(self) -> tuple[IntArray, IntArray, IntArray]:
        """`lift` in arrays: the nodes, their tables one after the other, and how long each is."""
        nodes = np.array([node for node, _ in self.lift], dtype=np.int64)
        lengths = np.array([len(table) for _, table in self.lift], dtype=np.int64)
        tables = np.concatenate([table for _, table in self.lift]) if self.lift else np.zeros(0, dtype=np.int64)
        return nodes, tables, lengths

    @property
    def num_choices(self) -> list[int]:
        return [len(costs) for costs in self.costs]


def from_problem(problem: AssignmentProblem, usages: Sequence[tuple[Usage, ...]], num_points: int) -> Graph:
    """The problem as it is, on the shortened timeline of `usages`. Infinite node costs are still there."""
    return Graph(
        tuple(node.costs.astype(np.float64) for node in problem.nodes),
        problem.edges,
        tuple(usages),
        tuple((v, np.arange(len(node.costs))) for v, node in enumerate(problem.nodes)),
        num_points,
    )


def restrict(graph: Graph, alive: Sequence[BoolArray], *, tidied: bool = False) -> Graph:
    """The graph with only the choices in `alive` (at least one a node).

    tidied: `tidy` follows, which leaves out the rows and columns of edges that no choice has any more.
    """
    whole = [bool(mask.all()) for mask in alive]
    if all(whole):
        return graph
    kept = [np.flatnonzero(mask) for mask in alive]
    narrow = _with_classes if tidied else _reclass
    narrowed: dict[tuple[int, int], IntArray] = {}

    def classes(own: IntArray, node: int) -> IntArray:
        if whole[node]:
            return own
        key = (id(own), node)  # many edges have one
        if key not in narrowed:
            narrowed[key] = own[kept[node]]
        return narrowed[key]

    return Graph(
        tuple(costs[keep] for costs, keep in zip(graph.costs, kept, strict=True)),
        tuple(
            e if whole[e.u] and whole[e.v] else narrow(e, classes(e.u_class, e.u), classes(e.v_class, e.v))
            for e in graph.edges
        ),
        tuple(
            tuple(Usage(u.start, u.end, u.bytes[keep]) for u in usages)
            for usages, keep in zip(graph.usages, kept, strict=True)
        ),
        tuple((node, table[kept[node]]) for node, table in graph.lift),
        graph.num_points,
    )


def merge(graph: Graph, owners: Sequence[tuple[int, IntArray]]) -> Graph:
    """The graph in which node w is gone wherever owners[w] = (v, table) with v != w: w chooses table[choice of v]. It
    is yet to be tidied.
    """
    roots = [w for w, (v, _) in enumerate(owners) if v == w]
    index = {v: i for i, v in enumerate(roots)}
    costs = [graph.costs[v].copy() for v in roots]
    usages: list[dict[tuple[int, int], FloatArray]] = [{} for _ in roots]
    for w, (v, table) in enumerate(owners):
        here = index[v]
        if v != w:
            costs[here] += graph.costs[w][table]
        for usage in graph.usages[w]:
            span, size = (usage.start, usage.end), usage.bytes[table]
            usages[here][span] = usages[here][span] + size if span in usages[here] else size
    edges: list[Edge] = []
    for e in graph.edges:
        (u, u_table), (v, v_table) = owners[e.u], owners[e.v]
        edges.append(Edge(index[u], index[v], e.u_class[u_table], e.v_class[v_table], e.costs))
    lift = tuple((index[owners[node][0]], table[owners[node][1]]) for node, table in graph.lift)
    spans = tuple(tuple(Usage(s, t, size) for (s, t), size in sorted(spans.items())) for spans in usages)
    return Graph(tuple(costs), tuple(edges), spans, lift, graph.num_points)


def tidy(graph: Graph, since: Graph | None = None) -> Graph:
    """The same problem with fewer, smaller edges; those of `since` are known to be tidy.

    Equal classes become one; edges that depend on one end only, and edges of a node with itself, become node costs
    (possibly infinite ones); parallel edges become one.
    """
    costs = [c.copy() for c in graph.costs]
    pairs: dict[tuple[int, int], list[Edge]] = {}
    known = {id(e) for e in since.edges} if since is not None else set[int]()
    joining = _Joining()
    for e in graph.edges:
        if id(e) in known:
            pairs.setdefault((e.u, e.v), []).append(e)
            continue
        if e.u == e.v:
            costs[e.u] += e.costs[e.u_class, e.v_class]
            continue
        edge = joining.of(e)
        if edge.costs.shape[0] == 1:
            costs[edge.v] += edge.costs[0][edge.v_class]
        elif edge.costs.shape[1] == 1:
            costs[edge.u] += edge.costs[:, 0][edge.u_class]
        else:
            turned = edge if edge.u < edge.v else transpose(edge)
            pairs.setdefault((turned.u, turned.v), []).append(turned)
    edges: list[Edge] = []
    for group in pairs.values():
        edges.extend(_join_parallel(group))
    return Graph(tuple(costs), tuple(edges), graph.usages, graph.lift, graph.num_points)


def transpose(e: Edge) -> Edge:
    """The same edge seen from its other end."""
    return Edge(e.v, e.u, e.v_class, e.u_class, e.costs.T)


def joint_classes(first: IntArray, second: IntArray) -> tuple[IntArray, IntArray, IntArray]:
    """The common refinement of two classings of the same choices: (class of each choice, first part, second part)."""
    width = int(second.max()) + 1
    pairs = first * width + second
    used = np.zeros((int(first.max()) + 1) * width, dtype=bool)
    used[pairs] = True
    codes = np.flatnonzero(used)
    joint = np.zeros(len(used), dtype=np.int64)
    joint[codes] = np.arange(len(codes))
    return joint[pairs], codes // width, codes % width


def forbidding(edges: Sequence[Edge]) -> list[bool]:
    """Which edges forbid some pair of choices: asked of small ones all at once, as most have a few cells."""
    found = [e.costs.size > SMALL_CELLS and not np.isfinite(e.costs).all() for e in edges]
    small = [index for index, e in enumerate(edges) if e.costs.size <= SMALL_CELLS]
    if small:
        cells = np.concatenate([edges[index].costs.ravel() for index in small])
        starts = np.cumsum([0, *(edges[index].costs.size for index in small[:-1])])
        for index, forbids in zip(small, np.logical_or.reduceat(np.isinf(cells), starts).tolist(), strict=True):
            found[index] = forbids
    return found


def _with_classes(edge: Edge, u_class: IntArray, v_class: IntArray) -> Edge:
    return Edge(edge.u, edge.v, u_class, v_class, edge.costs)


def _reclass(edge: Edge, u_class: IntArray, v_class: IntArray) -> Edge:
    """`edge` with these classes for its ends, without the rows and columns that none of them uses."""
    costs = edge.costs
    u_used, v_used = np.zeros(costs.shape[0], dtype=bool), np.zeros(costs.shape[1], dtype=bool)
    u_used[u_class], v_used[v_class] = True, True
    if not u_used.all():
        costs, u_class = costs[u_used], (np.cumsum(u_used) - 1)[u_class]
    if not v_used.all():
        costs, v_class = costs[:, v_used], (np.cumsum(v_used) - 1)[v_class]
    return Edge(edge.u, edge.v, u_class, v_class, costs)


class _Joining:
    """Edges with equal classes joined, without those that no choice has: worked out once for edges that share a matrix,
    and for ends that share their classes, as most do.
    """

    def __init__(self) -> None:
        self._matrices: dict[tuple[object, ...], tuple[IntArray | None, IntArray | None, FloatArray]] = {}
        self._used: dict[tuple[int, int], tuple[IntArray, IntArray | None]] = {}

    def of(self, e: Edge) -> Edge:
        """The same edge, smaller."""
        u_class, u_kept = self._of_end(e.u_class, e.costs.shape[0])
        v_class, v_kept = self._of_end(e.v_class, e.costs.shape[1])
        costs = e.costs if u_kept is None else e.costs[u_kept]
        costs = costs if v_kept is None else costs[:, v_kept]
        key = (costs.shape, costs.dtype.str, costs.tobytes())
        found = self._matrices.get(key)
        if found is None:
            found = self._matrices[key] = _distinct(costs)
        u_group, v_group, costs = found
        u_class = u_class if u_group is None else u_group[u_class]
        return Edge(e.u, e.v, u_class, v_class if v_group is None else v_group[v_class], costs)

    def _of_end(self, classes: IntArray, num: int) -> tuple[IntArray, IntArray | None]:
        """Classes in fewer numbers, and which of them are left of `num`: those that a choice has (None: all)."""
        key = (id(classes), num)
        if key not in self._used:
            used = np.zeros(num, dtype=bool)
            used[classes] = True
            whole = bool(used.all())
            self._used[key] = (classes, None) if whole else ((np.cumsum(used) - 1)[classes], used)
        return self._used[key]


def _distinct(costs: FloatArray) -> tuple[IntArray | None, IntArray | None, FloatArray]:
    """The set of equal rows that each row is of, and of columns (None: no two are equal); one of each set."""
    rows = columns = None
    if (found := _equal_rows(costs)) is not None:
        costs, rows = costs[found[0]], found[1]
    if (found := _equal_rows(costs.T)) is not None:
        costs, columns = costs[:, found[0]], found[1]
    return rows, columns, np.ascontiguousarray(costs, dtype=np.float64)


def _equal_rows(matrix: FloatArray) -> tuple[list[int], IntArray] | None:
    """(the first of each set of equal rows, the set of each row); None where no two are equal."""
    if len(matrix) > FEW_ROWS and matrix.dtype == np.float64 and matrix.shape[1] <= len(_HASH):
        hashes = matrix.view(np.uint64) @ _HASH[: matrix.shape[1]]
        if len(np.unique(hashes)) == len(hashes):
            return None
    data, width = np.ascontiguousarray(matrix).tobytes(), matrix.shape[1] * matrix.itemsize
    rows = [data[start : start + width] for start in range(0, len(data), width)]
    number = {row: index for index, row in enumerate(dict.fromkeys(rows))}
    if len(number) == len(rows):
        return None
    group = np.array([number[row] for row in rows], dtype=np.int64)
    return np.unique(group, return_index=True)[1].tolist(), group


def _join_parallel(group: list[Edge]) -> list[Edge]:
    joined = group[:1]
    for edge in group[1:]:
        last = joined[-1]
        u_class, u_last, u_edge = joint_classes(last.u_class, edge.u_class)
        v_class, v_last, v_edge = joint_classes(last.v_class, edge.v_class)
        cells = len(u_last) * len(v_last)
        if cells > max(4096, PARALLEL_GROWTH * (last.costs.size + edge.costs.size)):
            joined.append(edge)
            continue
        costs = last.costs[np.ix_(u_last, v_last)] + edge.costs[np.ix_(u_edge, v_edge)]
        joined[-1] = Edge(edge.u, edge.v, u_class, v_class, costs)
    return joined
