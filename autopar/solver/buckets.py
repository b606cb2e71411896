"""Bucket elimination of what message passing works on (the core), by tables over the neighbours of a node.

    w with neighbours a, b, c   ->   T(a, b, c) = min_w [ costs_w + C(a, w) + C'(w, b) + C''(w, c) ]

Where every table is small enough this is exact: the minimum and a choice that has it. Where the table of a node would
have too many cells, its edges and tables are dealt out to several *mini-buckets*, each with a minimum of its own, and
the result is a lower bound: each of them lets the node choose anew (Dechter and Rish, Journal of the ACM 50, 2003).
On costs that messages have reparametrised it is no lower than the bound of the messages, as no term is below its least
value. Tables are kept between classes of choices, as edges are.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.graph import joint_classes
from autopar.solver.problem import Edge, FloatArray, IntArray

BLOCK_CELLS = 131_072
"""Cells that are added up at once: what a core's cache holds."""
SINGLE_CELLS = 65_536
"""Tables of more cells are kept in single precision once they were used: `decode` only compares what stands in them."""


@dataclass(frozen=True, slots=True)
class Factor:
    """A table over the classes of its nodes: `classes[w]` is the class of each choice of w, in the order of the axes."""

    classes: dict[int, IntArray]

    @property
    def shape(self) -> tuple[int, ...]:
        return tuple(int(each.max()) + 1 for each in self.classes.values())


@dataclass(frozen=True, slots=True)
class Part:
    """How a table enters a sum: its index, its axes in the order of the sum's, there the class of each joint class."""

    factor: int
    axes: tuple[int, ...]
    gather: tuple[IntArray, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A minimum over `node` of the sum of `parts`, [joint class of node, ...neighbours] -> the table `result`.

    `joint`: the joint class of each choice of the node. The costs of the node count in the first of its buckets only.
    """

    node: int
    parts: tuple[Part, ...]
    joint: IntArray
    shape: tuple[int, ...]
    result: int
    first: bool


@dataclass(slots=True)
class Filled:
    """The outcome of `Buckets.run`: the least cost (or a bound on it), and all tables, for `decode`."""

    bound: float
    costs: Sequence[FloatArray]
    tables: list[FloatArray] = field(default_factory=list[FloatArray])


class Buckets:
    """The order of elimination of one graph, made once.

    `max_cells`: of a bucket that is not split. `exact`: none was split. `cells`: what a run adds up; where that would
    be more than `most_cells`, there is no order (`done` is false).
    """

    def __init__(
        self,
        num_choices: Sequence[int],
        edges: Sequence[Edge],
        *,
        max_cells: float = math.inf,
        most_cells: float = math.inf,
    ) -> None:
        self.num_choices, self.max_cells, self.most_cells = list(num_choices), max_cells, most_cells
        self.factors = [Factor({e.u: e.u_class, e.v: e.v_class}) for e in edges]
        self.order: list[int] = []
        self.bucket_factors: list[list[int]] = []
        self.buckets: list[Bucket] = []
        self.exact, self.cells = True, 0.0
        self._at: list[set[int]] = [set() for _ in num_choices]
        for index, e in enumerate(edges):
            self._at[e.u].add(index)
            self._at[e.v].add(index)
        self.done = self._schedule()

    def run(self, costs: Sequence[FloatArray], matrices: Sequence[FloatArray]) -> Filled:
        """Eliminate all nodes, at these costs of nodes [k] and of edges [class of u, class of v]."""
        filled = Filled(0.0, costs, [*matrices, *[np.zeros(0)] * (len(self.factors) - len(matrices))])
        for bucket in self.buckets:
            least = _least(bucket, filled)
            if bucket.result >= 0:
                filled.tables[bucket.result] = least
            else:
                filled.bound += float(least)
            for part in bucket.parts:
                table = filled.tables[part.factor]
                if table.size > SINGLE_CELLS:
                    filled.tables[part.factor] = (table - table.min()).astype(np.float32)
        return filled

    def decode(self, filled: Filled) -> list[int]:
        """A choice of every node, each the best given those eliminated after it; of an exact run, the best there is."""
        choice = [0] * len(self.num_choices)
        for node, factors in zip(reversed(self.order), reversed(self.bucket_factors), strict=True):
            local = filled.costs[node]
            for index in factors:
                classes = self.factors[index].classes
                at = tuple(slice(None) if w == node else each[choice[w]] for w, each in classes.items())
                local = local + filled.tables[index][at][classes[node]]
            choice[node] = int(local.argmin())
        return choice

    def _schedule(self) -> bool:
        """Least work first; the nodes next to an eliminated one are weighed again. False: it is too much work."""
        weighed = [self._weigh(v, self._at[v]) for v in range(len(self._at))]
        heap = [(cells, v) for v, cells in enumerate(weighed)]
        heapq.heapify(heap)
        gone: set[int] = set()
        while heap:
            cells, node = heapq.heappop(heap)
            if node in gone or cells != weighed[node]:
                continue
            gone.add(node)
            for other in self._eliminate(node) - gone:
                weighed[other] = self._weigh(other, self._at[other])
                heapq.heappush(heap, (weighed[other], other))
            if self.cells > self.most_cells:
                return False
        return True

    def _joint(self, node: int, factors: set[int] | list[int]) -> dict[int, IntArray]:
        """The joint classes of a node (first) and of its neighbours over some of its tables."""
        joint = {node: np.zeros(self.num_choices[node], dtype=np.int64)}
        for index in sorted(factors):
            for w, classes in self.factors[index].classes.items():
                joint[w] = joint_classes(joint[w], classes)[0] if w in joint else classes
        return joint

    def _weigh(self, node: int, factors: set[int] | list[int]) -> float:
        return math.prod(float(classes.max()) + 1 for classes in self._joint(node, factors).values())

    def _eliminate(self, node: int) -> set[int]:
        """Plan the buckets of a node; returns its neighbours."""
        factors = sorted(self._at[node])
        self.order.append(node)
        self.bucket_factors.append(factors)
        near = {w for index in factors for w in self.factors[index].classes} - {node}
        for index in factors:
            for w in self.factors[index].classes:
                self._at[w].discard(index)
        for number, group in enumerate(self._groups(node, factors)):
            self._add_bucket(node, group, first=number == 0)
        return near

    def _groups(self, node: int, factors: list[int]) -> list[list[int]]:
        """All tables in one bucket, or, the largest first, each in the first bucket that it does not make too large."""
        if not factors or self._weigh(node, factors) <= self.max_cells:
            return [factors]
        self.exact = False
        groups: list[list[int]] = []
        for index in sorted(factors, key=lambda i: (-math.prod(self.factors[i].shape), i)):
            for group in groups:
                if self._weigh(node, [*group, index]) <= self.max_cells:
                    group.append(index)
                    break
            else:
                groups.append([index])
        return groups

    def _add_bucket(self, node: int, group: list[int], *, first: bool) -> None:
        joint = self._joint(node, group)
        mine = joint.pop(node)
        count = int(mine.max()) + 1
        near = dict(sorted(joint.items(), key=lambda item: (-int(item[1].max()), item[0])))
        axis_of = {w: axis for axis, w in enumerate((node, *near))}
        shape = (count, *(int(classes.max()) + 1 for classes in near.values()))
        parts = [self._part(index, {node: mine, **near}, axis_of) for index in group]
        parts.sort(key=lambda part: math.prod(part.shape))
        self.cells += math.prod(float(n) for n in shape)
        result = -1
        if near:
            result = len(self.factors)
            self.factors.append(Factor(near))
            for w in near:
                self._at[w].add(result)
        self.buckets.append(Bucket(node, tuple(parts), mine, shape, result, first))

    def _part(self, index: int, joint: dict[int, IntArray], axis_of: dict[int, int]) -> Part:
        classes = self.factors[index].classes
        own = list(classes)
        axes = sorted(range(len(own)), key=lambda axis: axis_of[own[axis]])
        gather: list[IntArray] = []
        shape = [1] * len(axis_of)
        for axis in axes:
            w = own[axis]
            table = np.zeros(int(joint[w].max()) + 1, dtype=np.int64)
            table[joint[w]] = classes[w]
            gather.append(table)
            shape[axis_of[w]] = len(table)
        return Part(index, tuple(axes), tuple(gather), tuple(shape))


def _least(bucket: Bucket, filled: Filled) -> FloatArray:
    """The table of a bucket: the least over its node of the sum of its parts."""
    mine = np.zeros(bucket.shape[0])
    if bucket.first:
        mine.fill(np.inf)
        np.minimum.at(mine, bucket.joint, filled.costs[bucket.node])
    terms = [mine.reshape(-1, *[1] * (len(bucket.shape) - 1))]
    for part in bucket.parts:
        table = filled.tables[part.factor].transpose(part.axes)
        terms.append(table[np.ix_(*part.gather)].reshape(part.shape))
    if len(bucket.shape) == 1:
        return np.asarray(sum(terms).min())
    result = np.empty(bucket.shape[1:])
    for block in _blocks(bucket.shape):
        total = terms[0][_within(block, terms[0].shape)]
        for term in terms[1:]:
            total = total + term[_within(block, term.shape)]
        np.minimum.reduce(total, axis=0, out=result[block])
    return result


def _blocks(shape: tuple[int, ...]) -> Iterator[tuple[slice, ...]]:
    """Blocks of the axes of the neighbours (all but the first of `shape`) of not many more than BLOCK_CELLS cells."""
    rest = math.prod(shape[2:]) * shape[0]
    step = max(1, BLOCK_CELLS // rest)
    if len(shape) < 3 or rest <= BLOCK_CELLS:
        for start in range(0, shape[1], step):
            yield (slice(start, start + step),)
        return
    inner = max(1, BLOCK_CELLS // (rest // shape[2]))
    for start in range(shape[1]):
        for second in range(0, shape[2], inner):
            yield slice(start, start + 1), slice(second, second + inner)


def _within(block: tuple[slice, ...], shape: tuple[int, ...]) -> tuple[slice, ...]:
    """The block of a term, which is the same along axes that it does not have."""
    return (slice(None), *(slice(None) if n == 1 else cut for cut, n in zip(block, shape[1:], strict=False)))
