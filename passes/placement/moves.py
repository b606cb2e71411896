"""What it costs to turn one layout of a tensor into another, for all pairs of two lists of layouts at once.

    lists of layouts -> their numbers -> patterns: pairs with dims renamed in the order in which they occur
                     -> steps of each new pattern, once (`ir/redistribution.py`)
                     -> seconds of a pattern, for so many bytes -> [sources, targets]

What a move takes does not depend on which dims are split, only on which splits are of the same dim: (S(0), R) to
(R, S(0)) is as (S(2), R) to (R, S(2)). On four axes millions of pairs have some thousands of patterns.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.cost.roofline import CollectiveKind, collective_time_s
from autopar.ir.redistribution import (
    MAX_STEPS_PER_AXIS,
    REPLICATED,
    StepKind,
    becomes_terms,
    code_after,
    dim_of,
    next_steps,
    rename_dims,
)
from autopar.ir.sharding import Sharding, code
from autopar.ir.tensor_type import TensorType
from autopar.machine.mesh import Mesh

MAX_ANSWERS = 2048
MAX_ANSWER_CELLS = 3e7
"""How many matrices of seconds are kept, and how many numbers in them (a quarter of a GB)."""

_COLLECTIVES: tuple[CollectiveKind, ...] = ("all_gather", "all_reduce", "reduce_scatter", "all_to_all")
_KINDS = ("slice", *_COLLECTIVES)


@dataclass(frozen=True, slots=True)
class _Table:
    """The patterns that pairs of two lists have, and which of them each pair has [sources, targets]. splits: of each
    axis that all-reduces, over which axes the values are split then, as distinct numbers (`_Patterns`).
    """

    patterns: np.ndarray
    which: np.ndarray
    splits: tuple[tuple[int, tuple[int, ...]], ...]


class Moves:
    """Times of redistributions on one mesh, remembered by lists of layouts.

    They are linear in the tensor's bytes but for the choice between ring and tree of an all-reduce, which is kept
    apart. Steps are those that `redistribution.next_steps` gives for every pair.
    """

    def __init__(self, mesh: Mesh, latency: bool = True, shapes: _Shapes | None = None) -> None:
        """shapes: of the same mesh, whose moves take another time; None: of its own."""
        self.mesh, self.sizes, self.latency = mesh, tuple(mesh.sizes), latency
        self._shapes = _Shapes(mesh) if shapes is None else shapes
        self._answers: dict[tuple[float, tuple[int, ...], int, int], tuple[np.ndarray, bool]] = {}
        self._answer_cells = 0

    def seconds(
        self, num_bytes: float, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], allowed: Sequence[int]
    ) -> np.ndarray:
        """[sources, targets]: infinite where impossible, or where an axis may not use a collective (bits: allowed). Not
        to be written to.
        """
        return self.answer(num_bytes, sources, targets, allowed)[0]

    def answer(
        self, num_bytes: float, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], allowed: Sequence[int]
    ) -> tuple[np.ndarray, bool]:
        """As `seconds`, and whether any move takes time. Blocks that are alike ask again and again: what was answered
        is kept.
        """
        key = (self._shapes.listed(sources), self._shapes.listed(targets))
        asked = (num_bytes, tuple(allowed), *key)
        known = self._answers.get(asked)
        if known is None:
            table = self._shapes.table(key)
            found = self._seconds(num_bytes, table, tuple(allowed))[table.which]
            found.flags.writeable = False
            if len(self._answers) >= MAX_ANSWERS or self._answer_cells >= MAX_ANSWER_CELLS:
                self._answers.clear()
                self._answer_cells = 0
            known = self._answers[asked] = found, bool(found.any())
            self._answer_cells += found.size
        return known

    def _seconds(self, num_bytes: float, table: _Table, allowed: tuple[int, ...]) -> np.ndarray:
        """Of each pattern of the table."""
        known, patterns, row = self._shapes.patterns, table.patterns, int(self.latency)
        total: np.ndarray = known.constant[row, patterns] + known.slope[row, patterns] * num_bytes
        for axis, splits in table.splits:
            times = np.zeros(len(known.pieces))
            for split in splits:
                times[split] = self._time("all_reduce", axis, num_bytes / known.pieces[split])
            total += times[known.reduced[axis, patterns]]
        bits = np.array(allowed, dtype=np.int64)[:, None]
        total[((known.uses[:, patterns] & ~bits) != 0).any(0)] = np.inf
        return total

    def _time(self, kind: CollectiveKind, axis: int, num_bytes: float) -> float:
        return _time(self.mesh, self.latency, kind, axis, num_bytes)


class _Shapes:
    """What moves between lists of layouts have in common, whether or not latencies count."""

    def __init__(self, mesh: Mesh) -> None:
        linear: dict[tuple[str, int], tuple[np.ndarray, np.ndarray]] = {}
        for kind in _COLLECTIVES:
            for axis in range(len(mesh.sizes)):
                lines = [_line(mesh, latency, kind, axis) for latency in (False, True)]
                linear[kind, axis] = np.array([each[0] for each in lines]), np.array([each[1] for each in lines])
        self.patterns = _Patterns(mesh.sizes, linear)
        self._lists: dict[tuple[Sharding, ...], int] = {}
        self._numbers: list[np.ndarray] = []
        self._tables: dict[tuple[int, int], _Table] = {}

    def listed(self, layouts: tuple[Sharding, ...]) -> int:
        """The number of a list."""
        found = self._lists.get(layouts)
        if found is None:
            found = self._lists[layouts] = len(self._numbers)
            self._numbers.append(self.patterns.register(layouts))
        return found

    def table(self, key: tuple[int, int]) -> _Table:
        """The patterns between two lists, by their numbers."""
        if key not in self._tables:
            self._tables[key] = self.patterns.table(self._numbers[key[0]], self._numbers[key[1]])
        return self._tables[key]


def _time(mesh: Mesh, latency: bool, kind: CollectiveKind, axis: int, num_bytes: float) -> float:
    link = mesh.link(mesh.axis_names[axis])
    launch_s = mesh.hardware.collective_launch_s
    if not latency:
        link, launch_s = link.without_latency(), 0.0
    return collective_time_s(kind, num_bytes, mesh.sizes[axis], link, launch_s)


def _line(mesh: Mesh, latency: bool, kind: CollectiveKind, axis: int) -> tuple[float, float]:
    """Seconds of a collective: a constant, and so many per byte."""
    least = _time(mesh, latency, kind, axis, 0.0)
    return least, (_time(mesh, latency, kind, axis, 1e9) - least) * 1e-9


class _Patterns:
    """All patterns met so far, `count` of them; arrays are [patterns] or [axes, patterns], and longer; constant and
    slope [without and with latencies, patterns].

    seconds = constant + slope·bytes + Σ_axes all_reduce(axis, bytes / pieces[reduced[axis]]), where `reduced` has a bit
    for each axis that splits the value then, or is -1 (no all-reduce); `uses[axis]` has a bit per collective.
    A layout has a number; as a source, dims are named in its order; a target follows the names of its source, so that
    a pattern is a pair (named source, target named by its dims).
    """

    def __init__(self, sizes: Sequence[int], linear: Mapping[tuple[str, int], tuple[np.ndarray, np.ndarray]]) -> None:
        self.sizes, self._linear, axes = tuple(sizes), linear, len(sizes)
        self.count = 0
        self.constant, self.slope = np.zeros((2, 64)), np.zeros((2, 64))
        self.reduced, self.uses = np.zeros((axes, 64), dtype=np.int64), np.zeros((axes, 64), dtype=np.int64)
        bits = np.arange(2**axes)[:, None] >> np.arange(axes) & 1
        self.pieces = np.append(np.where(bits, np.array(sizes), 1).prod(1), 1)
        self._numbers: dict[Sharding, int] = {}
        self._codes = np.zeros((0, axes), dtype=np.int64)
        self._order = np.zeros(0, dtype=np.int64)
        self._orders: dict[tuple[int, ...], int] = {}
        self._named: dict[bytes, int] = {}
        self._names = np.zeros((64, axes), dtype=np.int64)
        """The codes of what a name is given to."""
        self._name = np.full((1, 64), -1, dtype=np.int32)
        """[orders, layouts]: how a layout is named where dims are named in this order."""
        self._pattern = np.full((64, 64), -1, dtype=np.int32)
        """[sources, named targets], of sources that are named alike."""
        self._sources: dict[int, int] = {}

    def register(self, layouts: Sequence[Sharding]) -> np.ndarray:
        """The numbers of layouts."""
        fresh = [each for each in dict.fromkeys(layouts) if each not in self._numbers]
        if fresh:
            codes = np.array([[code(placement) for placement in layout] for layout in fresh], dtype=np.int64)
            codes = codes.reshape(len(fresh), -1)
            for layout in fresh:
                self._numbers[layout] = len(self._numbers)
            self._codes = np.concatenate([self._codes, codes])
            orders = [tuple(dict.fromkeys(int(d) for d in row if d >= 0)) for row in dim_of(codes)]
            numbers = [self._orders.setdefault(order, len(self._orders)) for order in orders]
            self._order = np.concatenate([self._order, np.array(numbers, dtype=np.int64)])
            self._name = _room(self._name, (len(self._orders), len(self._numbers)))
        return np.array([self._numbers[layout] for layout in layouts], dtype=np.int64)

    def table(self, sources: np.ndarray, targets: np.ndarray) -> _Table:
        """The patterns of all pairs; new ones are worked out."""
        orders = self._order[sources]
        for order in np.unique(orders).tolist():
            self._name_layouts(order, np.concatenate([sources[orders == order], targets]))
        named = self._name[orders, sources].tolist()
        own = np.array([self._sources.setdefault(name, len(self._sources)) for name in named])
        others = self._name[orders[:, None], targets[None]]
        self._pattern = _room(self._pattern, (len(self._sources), len(self._named)))
        which = self._pattern[own[:, None], others]
        new = which < 0
        if new.any():
            names = len(self._named)
            met = np.unique(np.broadcast_to(own[:, None] * names, new.shape)[new] + others[new])
            rows, columns = met // names, met % names
            self._pattern[rows, columns] = np.arange(self.count, self.count + len(met))
            self._add(np.array(list(self._sources))[rows], columns)
            which = self._pattern[own[:, None], others]
        here = np.zeros(self.count, dtype=bool)
        here[which] = True
        patterns = np.flatnonzero(here)
        place = np.empty(self.count, dtype=np.int32)
        place[patterns] = np.arange(len(patterns))
        splits = []
        for axis, reduced in enumerate(self.reduced[:, patterns]):
            if found := np.flatnonzero(np.bincount(reduced + 1)[1:]).tolist():
                splits.append((axis, tuple(found)))
        return _Table(patterns, place[which], tuple(splits))

    def _name_layouts(self, order: int, layouts: np.ndarray) -> None:
        """Name layouts, with dims named in this order; others after them, as they come."""
        layouts = layouts[self._name[order, layouts] < 0]
        if not len(layouts):
            return
        layouts = np.unique(layouts)
        known = next(dims for dims, number in self._orders.items() if number == order)
        codes = self._codes[layouts]
        dims = np.maximum(dim_of(codes), -1)
        names = np.full(int(dims.max(initial=0)) + 1, -1)
        for name, dim in enumerate(known):
            if dim < len(names):
                names[dim] = name
        named = np.where(dims >= 0, names[dims], -1)
        following = np.full(len(layouts), len(known))
        for axis in range(dims.shape[1]):
            fresh = (dims[:, axis] >= 0) & (named[:, axis] < 0)
            same = fresh[:, None] & (dims == dims[:, axis][:, None])
            named = np.where(same, following[:, None], named)
            following += fresh
        renamed = np.where(dims >= 0, rename_dims(codes, named), codes)
        for layout, row in zip(layouts.tolist(), renamed, strict=True):
            key = row.tobytes()
            number = self._named.get(key)
            if number is None:
                number = self._named[key] = len(self._named)
                self._names = _room(self._names, (number + 1, len(row)))
                self._names[number] = row
            self._name[order, layout] = number

    def _add(self, sources: np.ndarray, targets: np.ndarray) -> None:
        """Work out what new patterns take, of these names [new]."""
        count, axes = len(sources), len(self.sizes)
        now, want = self._names[sources].T.copy(), self._names[targets].T.copy()
        uses = np.zeros((axes, count), dtype=np.int64)
        found = _Found(np.zeros((2, count)), np.zeros((2, count)), np.full_like(uses, -1), uses)
        impossible = becomes_terms(now, want).any(0)
        found.constant[:, impossible] = np.inf
        left = np.flatnonzero(~impossible & (now != want).any(0))
        for _ in range(MAX_STEPS_PER_AXIS * axes):
            if len(left):
                self._step(now, want, left, found)
                left = left[(now[:, left] != want[:, left]).any(0)]
        assert not len(left), f"{now[:, left[0]]} never becomes {want[:, left[0]]} on {self.sizes}"
        self.constant = _appended(self.constant, self.count, found.constant)
        self.slope = _appended(self.slope, self.count, found.slope)
        self.reduced = _appended(self.reduced, self.count, found.reduced)
        self.uses = _appended(self.uses, self.count, found.uses)
        self.count += count

    def _step(self, now: np.ndarray, want: np.ndarray, rows: np.ndarray, found: _Found) -> None:
        """The next step of each of these pairs: the first that serves it."""
        have, aim = list(now[:, rows]), list(want[:, rows])
        left = np.ones(len(rows), dtype=bool)
        for kind, axis, serves in next_steps(have, aim, self.sizes):
            chosen = left & serves
            if chosen.any():
                left &= ~chosen
                self._take(kind, axis, now, want, rows[chosen], found)
        assert not left.any(), f"no step from {now[:, rows[left][0]]} to {want[:, rows[left][0]]} on {self.sizes}"

    def _take(
        self, kind: StepKind, axis: int, now: np.ndarray, want: np.ndarray, rows: np.ndarray, found: _Found
    ) -> None:
        found.uses[axis, rows] |= 1 << _KINDS.index(kind)
        if kind != "slice":
            # A collective handles the local operand, or the gathered result.
            split = ((now[:, rows] > REPLICATED) << np.arange(len(self.sizes))[:, None]).sum(0)
            if kind == "all_reduce":
                found.reduced[axis, rows] = split
            else:
                fraction = (self.sizes[axis] if kind == "all_gather" else 1) / self.pieces[split]
                least, per_byte = self._linear[(kind, axis)]
                found.constant[:, rows] += least[:, None]
                found.slope[:, rows] += per_byte[:, None] * fraction
        now[axis, rows] = code_after(kind, want[axis, rows])


@dataclass(frozen=True, slots=True)
class _Found:
    """What `_Patterns` has of each pattern, being worked out."""

    constant: np.ndarray
    slope: np.ndarray
    reduced: np.ndarray
    uses: np.ndarray


def _room(array: np.ndarray, shape: tuple[int, int]) -> np.ndarray:
    """The array, with rows and columns of -1 added where it has fewer than these."""
    if array.shape[0] >= shape[0] and array.shape[1] >= shape[1]:
        return array
    larger = np.full([n if n >= m else 2 * m for n, m in zip(array.shape, shape, strict=True)], -1, dtype=array.dtype)
    larger[: array.shape[0], : array.shape[1]] = array
    return larger


def _appended(array: np.ndarray, count: int, more: np.ndarray) -> np.ndarray:
    """The array, with these columns after so many of its own."""
    if array.shape[-1] < count + more.shape[-1]:
        array = np.concatenate(
            [array[..., :count], np.zeros((*more.shape[:-1], count + 2 * more.shape[-1]), more.dtype)], -1
        )
    array[..., count : count + more.shape[-1]] = more
    return array


@lru_cache(maxsize=16)
def moves_on(mesh: Mesh, latency: bool) -> Moves:
    """The moves of a mesh, shared by the problems that are built for it."""
    return Moves(mesh, latency, _shapes_on(mesh))


@lru_cache(maxsize=8)
def _shapes_on(mesh: Mesh) -> _Shapes:
    return _Shapes(mesh)


class Redistribution:
    """Costs of redistribution where each axis may use some collectives.

    latency: count it. Without, the least bytes win, which is how the literature's strategies are stated: on a model so
    small that latency decides, `tensor+sequence` should still be `tensor+sequence`.
    """

    def __init__(self, mesh: Mesh, collectives: Sequence[frozenset[str]], latency: bool = True) -> None:
        self._moves = moves_on(mesh, latency)
        self._known: dict[tuple[object, ...], float] = {}
        self._any = [(1 << len(_KINDS)) - 1] * len(mesh.sizes)
        self._allowed = [sum(1 << _KINDS.index(kind) for kind in kinds) for kinds in collectives]
        self._allowed_indices = [bits | 1 << _KINDS.index("slice") for bits in self._allowed]

    def seconds(self, type_: TensorType, source: Sharding, target: Sharding, *, free: bool = False) -> float:
        """Time to redistribute once; infinite where it is impossible or forbidden (`free`: nothing is forbidden)."""
        key = (type_.num_bytes, type_.is_float, source, target, free)
        if key not in self._known:
            self._known[key] = float(self.matrix(type_, (source,), (target,), free=free)[0, 0])
        return self._known[key]

    def matrix(
        self, type_: TensorType, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], *, free: bool = False
    ) -> np.ndarray:
        """[sources, targets] of seconds."""
        return self._asked(type_, sources, targets, free=free)[0]

    def costing(
        self, type_: TensorType, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], *, free: bool = False
    ) -> np.ndarray | None:
        """As `matrix`; None where nothing takes any time."""
        found, is_any = self._asked(type_, sources, targets, free=free)
        return found if is_any else None

    def _asked(
        self, type_: TensorType, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], *, free: bool
    ) -> tuple[np.ndarray, bool]:
        allowed = self._any if free else self._allowed if type_.is_float else self._allowed_indices
        return self._moves.answer(type_.num_bytes, sources, targets, allowed)
