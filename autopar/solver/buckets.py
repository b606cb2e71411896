"""Exact bucket elimination of what message passing works on (the core), by tables over the neighbours of a node.

    w with neighbours a, b, c   ->   T(a, b, c) = min_w [ costs_w + C(a, w) + C'(w, b) + C''(w, c) ]

(Dechter, Artificial Intelligence 113, 1999). Tables are kept between classes of choices, as edges are. Their sizes are
known before anything is added up, so that whoever asks can tell whether it is worth it: it is wherever blocks follow
one another and few values cross from one to the next.
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
    """A table over classes of choices: `classes[w]` is the class of each choice of node w, in the order of the axes;
    `sizes[w]` counts them.
    """

    classes: dict[int, IntArray]
    sizes: dict[int, int]

    @staticmethod
    def of(classes: dict[int, IntArray]) -> Factor:
        """With their sizes, which are asked for more often than factors are made."""
        return Factor(classes, {w: int(each.max()) + 1 for w, each in classes.items()})

    @property
    def cells(self) -> float:
        return math.prod(map(float, self.sizes.values()))


@dataclass(frozen=True, slots=True)
class Part:
    """How a table enters a sum: its index, its axes in the order of the sum's, there the class of each joint class."""

    factor: int
    axes: tuple[int, ...]
    gather: tuple[IntArray, ...]
    shape: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """A minimum over `node` of the sum of `parts`, [joint class of node, ...neighbours] -> the table `result` (-1: the
    node has no neighbour left). `joint`: the joint class of each choice of the node.
    """

    node: int
    parts: tuple[Part, ...]
    joint: IntArray
    shape: tuple[int, ...]
    result: int


@dataclass(frozen=True, slots=True)
class Planned:
    """A bucket to be: the joint classes of its node (first) and of the neighbours, the tables that enter its sum, and
    as of `Bucket`.
    """

    joint: dict[int, IntArray]
    factors: list[int]
    shape: tuple[int, ...]
    result: int


@dataclass(slots=True)
class Filled:
    """The outcome of `Buckets.run`: the least cost (np.inf: there is none), and all tables, for `decode`."""

    least: float
    costs: Sequence[FloatArray]
    tables: list[FloatArray] = field(default_factory=list[FloatArray])


class Buckets:
    """The order of elimination of one graph, made once. `cells`: what a run adds up; where that would be more than
    `most_cells`, there is no order (`done` is false). `kept`: cells of the tables that are kept for `decode`.
    """

    def __init__(self, num_choices: Sequence[int], edges: Sequence[Edge], most_cells: float = math.inf) -> None:
        self.num_choices = list(num_choices)
        self.factors = [Factor.of({e.u: e.u_class, e.v: e.v_class}) for e in edges]
        self._planned: list[Planned] = []
        self.cells = self.kept = 0.0
        self._at: list[set[int]] = [set() for _ in num_choices]
        for index, e in enumerate(edges):
            self._at[e.u].add(index)
            self._at[e.v].add(index)
        self.done = self._schedule(most_cells)
        # How tables enter sums is worked out where there will be sums.
        self.buckets = [self._bucket(each) for each in self._planned] if self.done else []

    def run(self, costs: Sequence[FloatArray], matrices: Sequence[FloatArray]) -> Filled:
        """Eliminate all nodes, at these costs of nodes [k] and of edges [class of u, class of v]."""
        filled = Filled(0.0, costs, [*matrices, *[np.zeros(0)] * (len(self.factors) - len(matrices))])
        for bucket in self.buckets:
            least = _least(bucket, filled)
            if bucket.result >= 0:
                filled.tables[bucket.result] = least
            else:
                filled.least += float(least)
            for part in bucket.parts:
                table = filled.tables[part.factor]
                if table.size > SINGLE_CELLS:
                    filled.tables[part.factor] = (table - table.min()).astype(np.float32)
        return filled

    def decode(self, filled: Filled) -> list[int]:
        """The cheapest choice, of every node, where there is one."""
        choice = [0] * len(self.num_choices)
        for bucket in reversed(self.buckets):
            node, local = bucket.node, filled.costs[bucket.node]
            for part in bucket.parts:
                classes = self.factors[part.factor].classes
                at = tuple(slice(None) if w == node else each[choice[w]] for w, each in classes.items())
                local = local + filled.tables[part.factor][at][classes[node]]
            choice[node] = int(local.argmin())
        return choice

    def _schedule(self, most_cells: float) -> bool:
        """First the nodes whose table has the fewest cells more than those it takes the place of; the neighbours of an
        eliminated node are weighed again. False: it is too much work.
        """
        weighed = [self._growth(v) for v in range(len(self._at))]
        heap = [(growth, v) for v, growth in enumerate(weighed)]
        heapq.heapify(heap)
        gone: set[int] = set()
        while heap:
            growth, node = heapq.heappop(heap)
            if node in gone or growth != weighed[node]:
                continue
            gone.add(node)
            for other in self._eliminate(node):
                weighed[other] = self._growth(other)
                heapq.heappush(heap, (weighed[other], other))
            if self.cells > most_cells:
                return False
        return True

    def _joint(self, node: int) -> dict[int, IntArray]:
        """The joint classes of a node (first) and of its neighbours over its tables."""
        joint = {node: np.zeros(self.num_choices[node], dtype=np.int64)}
        for index in sorted(self._at[node]):
            for w, classes in self.factors[index].classes.items():
                joint[w] = joint_classes(joint[w], classes)[0] if w in joint else classes
        return joint

    def _growth(self, node: int) -> float:
        """The cells of the node's table, less those of what it takes the place of; the ends of chains come first."""
        around: dict[int, list[Factor]] = {}
        for index in sorted(self._at[node]):
            factor = self.factors[index]
            for w in factor.classes:
                around.setdefault(w, []).append(factor)
        around.pop(node, None)
        if len(around) < 2:
            return -math.inf
        sizes = (float(self._joint_size(w, factors)) for w, factors in around.items())
        return math.prod(sizes) - sum(self.factors[index].cells for index in self._at[node])

    def _joint_size(self, w: int, factors: Sequence[Factor]) -> int:
        """How many joint classes a node has over these tables: no more than choices, no fewer than in one of them."""
        most = max(factor.sizes[w] for factor in factors)
        if len(factors) == 1 or most == self.num_choices[w]:
            return most
        joint = factors[0].classes[w]
        for factor in factors[1:]:
            joint = joint_classes(joint, factor.classes[w])[0]
        return int(joint.max()) + 1

    def _eliminate(self, node: int) -> list[int]:
        """Plan the bucket of a node; returns its neighbours."""
        joint = self._joint(node)
        mine = joint.pop(node)
        factors = sorted(self._at[node])
        for index in factors:
            for w in self.factors[index].classes:
                self._at[w].discard(index)
        near = dict(sorted(joint.items(), key=lambda item: (-int(item[1].max()), item[0])))
        shape = tuple(int(classes.max()) + 1 for classes in (mine, *near.values()))
        self.cells += math.prod(map(float, shape))
        result = -1
        if near:
            result = len(self.factors)
            self.kept += math.prod(map(float, shape[1:]))
            self.factors.append(Factor(near, dict(zip(near, shape[1:], strict=True))))
            for w in near:
                self._at[w].add(result)
        self._planned.append(Planned({node: mine, **near}, factors, shape, result))
        return list(near)

    def _bucket(self, planned: Planned) -> Bucket:
        axis_of = {w: axis for axis, w in enumerate(planned.joint)}
        parts = [self._part(index, planned.joint, axis_of) for index in planned.factors]
        parts.sort(key=lambda part: math.prod(part.shape))
        node, mine = next(iter(planned.joint.items()))
        return Bucket(node, tuple(parts), mine, planned.shape, planned.result)

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
    mine = np.full(bucket.shape[0], np.inf)
    np.minimum.at(mine, bucket.joint, filled.costs[bucket.node])
    terms = [mine.reshape(-1, *[1] * (len(bucket.shape) - 1))]
    for part in bucket.parts:
        table = filled.tables[part.factor].transpose(part.axes)
        terms.append(table[np.ix_(*part.gather)].reshape(part.shape))
    result = np.empty(bucket.shape[1:])
    for block in _blocks(bucket.shape):
        total = terms[0][_within(block, terms[0].shape)]
        for term in terms[1:]:
            total = total + term[_within(block, term.shape)]
        result[block] = np.minimum.reduce(total, axis=0)
    return result


def _blocks(shape: Sequence[int]) -> Iterator[tuple[slice, ...]]:
    """Blocks of the axes of the neighbours (all but the first of `shape`) of not many more than BLOCK_CELLS cells."""
    if len(shape) < 2:
        yield ()
        return
    rest = math.prod(shape) // shape[1]
    step = max(1, BLOCK_CELLS // rest)
    if len(shape) == 2 or rest <= BLOCK_CELLS:
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
