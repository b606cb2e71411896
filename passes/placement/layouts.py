"""What it costs to turn one layout of a tensor into another, and which layouts a tensor may have."""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

import numpy as np

from autopar.blocks import chunks_are_blocks
from autopar.cost import collective_time_s
from autopar.ir import ParameterLayout, TensorType, Variable
from autopar.mesh import Mesh
from autopar.sharding import (
    PARTIAL,
    REPLICATE,
    Partial,
    Placement,
    Shard,
    Sharding,
    is_valid,
    redistribution_steps,
)

MAX_ANSWERS = 2048
"""How many matrices of seconds are kept, of a few KB each."""

_KINDS = ("slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class _Table:
    """Moves between lists of layouts, for tensors of any size; arrays are [sources, targets].

    seconds = constant + slope·bytes + Σ_axes all_reduce(axis, fraction·bytes); `uses[axis]` has a bit per collective.
    levels: of each axis that all-reduces, the distinct fractions, and which of them each pair has.
    """

    constant: np.ndarray
    slope: np.ndarray
    fractions: np.ndarray
    uses: np.ndarray
    levels: tuple[tuple[int, np.ndarray, np.ndarray], ...] = ()


class Moves:
    """Times of redistributions on one mesh, remembered by lists of layouts.

    They are linear in the tensor's bytes but for the choice between ring and tree of an all-reduce, which is kept
    apart. A table is what `redistribution_steps` gives for every pair, worked out for all pairs at once.
    """

    def __init__(self, mesh: Mesh, latency: bool = True) -> None:
        self.mesh, self.sizes, self.latency = mesh, tuple(mesh.sizes), latency
        self._tables: dict[tuple[tuple[Sharding, ...], tuple[Sharding, ...]], _Table] = {}
        self._masks: dict[tuple[object, tuple[int, ...]], np.ndarray] = {}
        self._answers: dict[tuple[object, ...], np.ndarray] = {}
        self._linear = {(kind, axis): self._line(kind, axis) for kind in _KINDS[1:] for axis in range(len(self.sizes))}

    def seconds(
        self, num_bytes: float, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], allowed: Sequence[int]
    ) -> np.ndarray:
        """[sources, targets]: infinite where impossible, or where an axis may not use a collective (bits: allowed).

        Blocks that are alike ask again and again: what was answered is kept. Not to be written to.
        """
        asked = (num_bytes, tuple(allowed), sources, targets)
        found = self._answers.get(asked)
        if found is None:
            if len(self._answers) >= MAX_ANSWERS:
                self._answers.clear()
            found = self._answers[asked] = self._seconds(num_bytes, sources, targets, allowed)
            found.flags.writeable = False
        return found

    def _seconds(
        self, num_bytes: float, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], allowed: Sequence[int]
    ) -> np.ndarray:
        key = (sources, targets)
        if key not in self._tables:
            self._tables[key] = self._table(sources, targets)
        table = self._tables[key]
        total = table.constant + table.slope * num_bytes
        for axis, fractions, where in table.levels:
            times = [self._time("all_reduce", axis, f * num_bytes) if f else 0.0 for f in fractions]
            total += np.array(times)[where]
        total[self._forbidden(key, table, tuple(allowed))] = np.inf
        return total

    def _forbidden(self, key: object, table: _Table, allowed: tuple[int, ...]) -> np.ndarray:
        """[sources, targets] bool: some axis uses a collective that it may not."""
        found = self._masks.get((key, allowed))
        if found is None:
            bits = np.array(allowed, dtype=np.int64)[:, None, None]
            found = self._masks[(key, allowed)] = ((table.uses & ~bits) != 0).any(0)
        return found

    def _time(self, kind: str, axis: int, num_bytes: float) -> float:
        link = self.mesh.link(self.mesh.axis_names[axis])
        launch_s = self.mesh.hardware.collective_launch_s
        if not self.latency:
            link, launch_s = link.without_latency(), 0.0
        return collective_time_s(kind, num_bytes, self.sizes[axis], link, launch_s)  # type: ignore[arg-type]

    def _line(self, kind: str, axis: int) -> tuple[float, float]:
        """Seconds of a collective: a constant, and so many per byte."""
        least = self._time(kind, axis, 0.0)
        return least, (self._time(kind, axis, 1e9) - least) * 1e-9

    def _table(self, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> _Table:
        shape, axes = (len(sources), len(targets)), len(self.sizes)
        now, want = (np.repeat(_codes(sources), len(targets), 0), np.tile(_codes(targets), (len(sources), 1)))
        count = shape[0] * shape[1]
        table = _Table(
            np.zeros(count), np.zeros(count), np.zeros((axes, count)), np.zeros((axes, count), dtype=np.int64)
        )
        impossible = ((want < _R) & (now != want)).any(1)
        table.constant[impossible] = np.inf
        open_ = np.flatnonzero(~impossible & (now != want).any(1))
        while len(open_):
            self._step(now, want, open_, table)
            open_ = open_[(now[open_] != want[open_]).any(1)]
        levels = []
        for axis in np.flatnonzero(table.fractions.any(1)):
            fractions, where = np.unique(table.fractions[axis], return_inverse=True)
            levels.append((int(axis), fractions, where.reshape(shape)))
        return _Table(
            table.constant.reshape(shape),
            table.slope.reshape(shape),
            table.fractions.reshape(axes, *shape),
            table.uses.reshape(axes, *shape),
            tuple(levels),
        )

    def _step(self, now: np.ndarray, want: np.ndarray, open_: np.ndarray, table: _Table) -> None:
        """One step for every open pair: `sharding.redistribution_steps`, rule by rule."""
        pairs = _Pairs(now[open_], want[open_], self.sizes)
        left = np.ones(len(open_), dtype=bool)
        axes = range(len(self.sizes))
        for kind in ("slice", "reduce_scatter", "all_reduce", "all_to_all", "all_gather"):
            for axis in reversed(axes) if kind == "reduce_scatter" else axes:
                chosen = left & pairs.serves(kind, axis)
                if chosen.any():
                    left &= ~chosen
                    self._take(kind, axis, now, want, open_[chosen], table)
        assert not left.any(), "a pair of layouts without a way"

    def _take(self, kind: str, axis: int, now: np.ndarray, want: np.ndarray, rows: np.ndarray, table: _Table) -> None:
        table.uses[axis, rows] |= 1 << _KINDS.index(kind)
        if kind != "slice":
            # A collective handles the local operand, or the gathered result.
            pieces = np.where(now[rows] >= _FIRST_SPLIT, np.array(self.sizes), 1).prod(1)
            fraction = (self.sizes[axis] if kind == "all_gather" else 1) / pieces
            if kind == "all_reduce":
                table.fractions[axis, rows] = fraction
            else:
                least, per_byte = self._linear[(kind, axis)]
                table.constant[rows] += least
                table.slope[rows] += per_byte * fraction
        now[rows, axis] = _R if kind in ("all_reduce", "all_gather") else want[rows, axis]


_R, _FIRST_SPLIT = 0, 1
_TERMS = {"sum": -1, "max": -2}
_OUTERS = 1 << 20
"""Codes of placements: terms of each kind below 0, replicated 0, and from the first split on dim·_OUTERS + outer."""
_ZIGZAG = 1 << 19
"""Added to the code of a zigzag split."""


def _codes(layouts: Sequence[Sharding]) -> np.ndarray:
    """[layouts, axes] of codes."""
    codes = [[_code(placement) for placement in layout] for layout in layouts]
    return np.array(codes, dtype=np.int64).reshape(len(layouts), -1)


def _code(placement: Placement) -> int:
    if isinstance(placement, Shard):
        return _FIRST_SPLIT + placement.dim * _OUTERS + placement.outer + _ZIGZAG * placement.zigzag
    return _TERMS[placement.op] if isinstance(placement, Partial) else _R


class _Splits:
    """What codes say of splits, by axis: [pairs] each. dims: -1 for none."""

    def __init__(self, codes: np.ndarray) -> None:
        self.codes = codes.T.copy()
        placed = self.codes - _FIRST_SPLIT
        self.dims = np.where(placed >= 0, placed >> 20, -1)
        self.stripes = np.where(placed >= 0, placed & (_ZIGZAG - 1), 1)
        self.odd = np.where((placed >= 0) & (placed & _ZIGZAG > 0), 1, 0)
        """The bit of a number of stripes that is not to be set."""
        self.has_stripes = bool((self.stripes > 1).any())


class _Pairs:
    """Layouts that values have, and that they are to have."""

    def __init__(self, have: np.ndarray, aim: np.ndarray, sizes: Sequence[int]) -> None:
        self.have, self.aim, self.sizes = _Splits(have), _Splits(aim), sizes
        self.right = self.have.codes == self.aim.codes
        self._addable: dict[int, np.ndarray] = {}

    def serves(self, kind: str, axis: int) -> np.ndarray:
        """Which pairs a step of this kind on this axis would serve now."""
        own, wanted = self.have.codes[axis], self.aim.codes[axis]
        if kind == "all_reduce":
            return (own < _R) & (wanted >= _R)
        if kind == "all_gather":
            return (own >= _FIRST_SPLIT) & ~self._keeps(axis) & self._commutes(self.have, axis)
        if axis not in self._addable:
            self._addable[axis] = self._can_add(axis)
        if kind == "slice":
            return self._addable[axis] & (own == _R)
        if kind == "reduce_scatter":
            return self._addable[axis] & (own < _R)
        moves = (own >= _FIRST_SPLIT) & (self.have.dims[axis] != self.aim.dims[axis])
        return self._addable[axis] & moves & self._commutes(self.have, axis)

    def _commutes(self, splits: _Splits, axis: int, also: int = -1) -> np.ndarray:
        """Whether a split of `axis` commutes with those that later axes make of its dim now (`sharding.stripes_left`
        has it). also: a later axis whose split is the wanted one.
        """
        dim, stripes = splits.dims[axis], splits.stripes[axis]
        found = np.ones(len(dim), dtype=bool)
        for later in range(axis + 1, len(self.sizes)):
            source = self.aim if later == also else self.have
            beside = source.dims[later] == dim
            if not splits.has_stripes:
                found &= ~beside
                continue
            found &= ~beside | ((source.stripes[later] == 1) & (stripes % self.sizes[later] == 0))
            stripes = np.where(beside, stripes // self.sizes[later], stripes)
        return found & (stripes & splits.odd[axis] == 0)

    def _can_add(self, axis: int) -> np.ndarray:
        """Whether the wanted dim's other splits are the target's or, of earlier axes, can come in front of it later."""
        dim = self.aim.dims[axis]
        possible = (dim >= 0) & ~self.right[axis] & self._commutes(self.aim, axis)
        for other in range(len(self.sizes)):
            if other != axis:
                possible &= self.right[other] | (self.have.dims[other] != dim)
            if other < axis:
                comes = ~self.right[other] & (self.aim.dims[other] == dim)
                possible &= ~comes | self._commutes(self.aim, other, also=axis)
        return possible

    def _keeps(self, axis: int) -> np.ndarray:
        """Whether the split is the target's, and those of its dim by earlier axes are, or can become so before it."""
        found, dim = self.right[axis].copy(), self.have.dims[axis]
        for earlier in range(axis):
            for splits in (self.have, self.aim):
                beside = ~self.right[earlier] & (splits.dims[earlier] == dim)
                found &= ~beside | self._commutes(splits, earlier)
        return found


@lru_cache(maxsize=16)
def moves_on(mesh: Mesh, latency: bool) -> Moves:
    """The moves of a mesh, shared by the problems that are built for it."""
    return Moves(mesh, latency)


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
        allowed = self._any if free else self._allowed if type_.is_float else self._allowed_indices
        return self._moves.seconds(type_.num_bytes, sources, targets, allowed)


def layouts_of(
    type_: TensorType,
    sizes: Sequence[int],
    stripes: Mapping[str, Sequence[int]],
    *,
    zigzags: Mapping[int, Mapping[str, Sequence[int]]] = MappingProxyType({}),
    partial: bool = False,
) -> list[Sharding]:
    """Every sharding a value may have: each axis splits one dim (in any of its stripe counts), or none; or holds
    terms. zigzags: axis -> dim -> in how many stripes it may be split zigzag.
    """
    options: list[list[Placement]] = []
    for axis, size in enumerate(sizes):
        found: list[Placement] = [REPLICATE]
        if size > 1:
            for dim in range(len(type_.shape)):
                found += [Shard(dim, outer) for outer in (1, *stripes.get(str(dim), ()))]
                found += [Shard(dim, outer, True) for outer in zigzags.get(axis, {}).get(str(dim), ())]
            if partial:
                found.append(PARTIAL)
        options.append(found)
    return [layout for layout in itertools.product(*options) if is_valid(type_.shape, layout, sizes)]


@dataclass(frozen=True, slots=True)
class ParameterChoice:
    """How one parameter is stored, what is held during a step, and what operators see. `modes` says per axis:
    replicate, shard, gather, keep.
    """

    stored: Sharding
    held: Sharding
    compute: Sharding
    modes: tuple[str, ...]

    @property
    def layout(self) -> ParameterLayout:
        """The layouts, with the gradient as it is stored."""
        return ParameterLayout(self.stored, self.held, self.compute, self.stored)

    @property
    def is_whole_in_place(self) -> bool:
        """Whether operators see what is stored."""
        return self.stored == self.compute


def parameter_choices(
    variable: Variable, sizes: Sequence[int], stripes: Mapping[str, Sequence[int]], allowed: Sequence[frozenset[str]]
) -> list[ParameterChoice]:
    """Every way to keep a parameter: per axis whole, in pieces for good, or in pieces that are gathered for each use or
    once a step; where several axes gather one dim, also with the pieces of the first inside those of the others, so
    that it may gather first. Pieces are uneven only where an axis divides no dim, or where rows of padding make up for
    it.
    """
    type_ = variable.seen
    options: list[list[tuple[str, Placement]]] = []
    for size, permitted in zip(sizes, allowed, strict=True):
        found: list[tuple[str, Placement]] = [("replicate", REPLICATE)]
        for dim in range(len(type_.shape)) if size > 1 else ():
            if "shard" in permitted:
                found += [("shard", Shard(dim, outer)) for outer in (1, *stripes.get(str(dim), ()))]
            found += [(mode, Shard(dim)) for mode in ("gather", "keep") if mode in permitted]
        options.append(found)
    choices = []
    for picked in (each for one in itertools.product(*options) for each in _either_way(one, sizes)):
        modes = tuple(mode for mode, _ in picked)
        stored = tuple(placement for _, placement in picked)
        held = tuple(REPLICATE if mode == "keep" else placement for mode, placement in picked)
        compute = tuple(REPLICATE if mode == "gather" else p for mode, p in zip(modes, held, strict=True))
        if (
            all(_divides(variable, dim, stored, modes, sizes) for dim in range(len(type_.shape)))
            and _only_gathers(stored, held, sizes, modes, "keep")
            and _only_gathers(held, compute, sizes, modes, "gather")
        ):
            choices.append(ParameterChoice(stored, held, compute, modes))
    return choices


def _either_way(
    picked: tuple[tuple[str, Placement], ...], sizes: Sequence[int]
) -> Iterator[tuple[tuple[str, Placement], ...]]:
    """The modes and pieces of all axes; and again, with those of the first axis that gathers a dim inside those of the
    others that do: `Shard(dim, outer=n)` for n pieces of theirs.
    """
    yield picked
    for axis, (mode, placement) in enumerate(picked):
        if not isinstance(placement, Shard):
            continue
        later = [(own, sizes[axis + 1 + i]) for i, (own, each) in enumerate(picked[axis + 1 :]) if each == placement]
        alone = not any(isinstance(p, Shard) and p.dim == placement.dim for _, p in picked[:axis])
        if mode != "shard" and later and alone and all(own != "shard" for own, _ in later):
            inside = Shard(placement.dim, math.prod(size for _, size in later))
            yield (*picked[:axis], (mode, inside), *picked[axis + 1 :])
            return


def _divides(variable: Variable, dim: int, stored: Sharding, modes: Sequence[str], sizes: Sequence[int]) -> bool:
    """Whether a parameter may be stored in these pieces of one dim."""
    axes = [axis for axis, p in enumerate(stored) if isinstance(p, Shard) and p.dim == dim]
    size, seen = variable.type.shape[dim], variable.seen.shape[dim]
    if not axes:
        return True
    if size != seen and all(modes[axis] == "shard" for axis in axes):
        contiguous = all(stored[axis] == Shard(dim) for axis in axes)
        return contiguous and chunks_are_blocks(size, seen, [sizes[axis] for axis in axes])
    local = size
    for axis in axes:
        placement = stored[axis]
        assert isinstance(placement, Shard)
        if local % (placement.outer * sizes[axis]):
            break
        local //= sizes[axis]
    else:
        return size == seen or len(axes) == 1
    alone = len(axes) == 1 and modes[axes[0]] != "shard"
    return alone and dim == _uneven_dim(variable, sizes[axes[0]])


def _uneven_dim(variable: Variable, size: int) -> int:
    """The dim to cut into uneven pieces: the longest, where `size` ranks divide none and each gets something; or -1."""
    shape = variable.type.shape
    longest = max(range(len(shape)), key=lambda dim: shape[dim], default=-1)
    if longest < 0 or any(length % size == 0 for length in shape):
        return -1
    piece = -(-shape[longest] // size)
    return longest if piece * (size - 1) < shape[longest] else -1


def _only_gathers(source: Sharding, target: Sharding, sizes: Sequence[int], modes: Sequence[str], mode: str) -> bool:
    """Whether the way from one to the other is exactly the gathers of the axes in this mode (no piece moves)."""
    steps = redistribution_steps(source, target, tuple(sizes))
    wanted = {axis for axis, own in enumerate(modes) if own == mode}
    return steps is not None and all(s.kind == "all_gather" for s in steps) and {s.axis for s in steps} == wanted
