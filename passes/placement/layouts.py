"""What it costs to turn one layout of a tensor into another, and which layouts a tensor may have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np

from autopar.cost import collective_time_s
from autopar.ir import TensorType
from autopar.mesh import Mesh
from autopar.sharding import (
    PARTIAL,
    REPLICATE,
    Placement,
    Shard,
    Sharding,
    is_valid,
    num_pieces,
    redistribution_steps,
)
from autopar.strategies import AxisStrategy

_KINDS = ("slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all")


@dataclass(frozen=True, slots=True)
class _Table:
    """Moves between lists of layouts, for tensors of any size; arrays are [sources, targets].

    seconds = constant + slope·bytes + Σ_axes all_reduce(axis, fraction·bytes); `uses[axis]` has a bit per collective.
    """

    constant: np.ndarray
    slope: np.ndarray
    fractions: np.ndarray
    uses: np.ndarray


class Moves:
    """Times of redistributions on one mesh, remembered by pairs of layouts.

    They are linear in the tensor's bytes but for the choice between ring and tree of an all-reduce, which is kept
    apart.
    """

    def __init__(self, mesh: Mesh) -> None:
        self.mesh, self.sizes = mesh, tuple(mesh.sizes)
        self._pairs: dict[tuple[Sharding, Sharding], tuple[float, float, dict[int, float], dict[int, int]]] = {}
        self._tables: dict[tuple[tuple[Sharding, ...], tuple[Sharding, ...]], _Table] = {}

    def seconds(
        self, num_bytes: float, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], allowed: Sequence[int]
    ) -> np.ndarray:
        """[sources, targets]: infinite where impossible, or where an axis may not use a collective (bits: allowed)."""
        key = (sources, targets)
        if key not in self._tables:
            self._tables[key] = self._table(sources, targets)
        table = self._tables[key]
        total = table.constant + table.slope * num_bytes
        for axis, allowed_bits in enumerate(allowed):
            if table.fractions[axis].any():
                fractions, where = np.unique(table.fractions[axis], return_inverse=True)
                times = [self._time("all_reduce", axis, f * num_bytes) if f else 0.0 for f in fractions]
                total = total + np.array(times)[where].reshape(total.shape)
            total = np.where(table.uses[axis] & ~allowed_bits, np.inf, total)
        return total

    def _time(self, kind: str, axis: int, num_bytes: float) -> float:
        link = self.mesh.link(self.mesh.axis_names[axis])
        launch_s = self.mesh.hardware.collective_launch_s
        return collective_time_s(kind, num_bytes, self.sizes[axis], link, launch_s)  # type: ignore[arg-type]

    def _table(self, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...]) -> _Table:
        shape, axes = (len(sources), len(targets)), len(self.sizes)
        table = _Table(
            np.zeros(shape), np.zeros(shape), np.zeros((axes, *shape)), np.zeros((axes, *shape), dtype=np.int64)
        )
        for i, source in enumerate(sources):
            for j, target in enumerate(targets):
                pair = (source, target)
                if pair not in self._pairs:
                    self._pairs[pair] = self._pair(source, target)
                constant, slope, fractions, uses = self._pairs[pair]
                table.constant[i, j], table.slope[i, j] = constant, slope
                for axis, fraction in fractions.items():
                    table.fractions[axis, i, j] = fraction
                for axis, bits in uses.items():
                    table.uses[axis, i, j] = bits
        return table

    def _pair(self, source: Sharding, target: Sharding) -> tuple[float, float, dict[int, float], dict[int, int]]:
        steps = redistribution_steps(source, target)
        if steps is None:
            return np.inf, 0.0, {}, {}
        constant = slope = 0.0
        fractions: dict[int, float] = {}
        uses: dict[int, int] = {}
        current = list(source)
        for step in steps:
            uses[step.axis] = uses.get(step.axis, 0) | 1 << _KINDS.index(step.kind)
            if step.kind != "slice":
                # A collective handles the local operand, or the gathered result.
                fraction = 1.0 / num_pieces(tuple(current), self.sizes)
                fraction *= self.sizes[step.axis] if step.kind == "all_gather" else 1
                if step.kind == "all_reduce":
                    fractions[step.axis] = fraction
                else:
                    least = self._time(step.kind, step.axis, 0.0)
                    constant += least
                    slope += (self._time(step.kind, step.axis, 1e9) - least) * 1e-9 * fraction
            done = step.kind in ("all_gather", "all_reduce")
            current[step.axis] = REPLICATE if done else Shard(step.dim, step.outer)
        return constant, slope, fractions, uses


@lru_cache(maxsize=4)
def moves_on(mesh: Mesh) -> Moves:
    """The moves of a mesh, shared by the problems that are built for it."""
    return Moves(mesh)


class Redistribution:
    """Costs of redistribution under strategies, which bound the collectives that activations may use on each axis."""

    def __init__(self, mesh: Mesh, strategies: Sequence[AxisStrategy]) -> None:
        self._moves = moves_on(mesh)
        self._any = [(1 << len(_KINDS)) - 1] * len(mesh.sizes)
        self._allowed = [sum(1 << _KINDS.index(kind) for kind in strategy.collectives) for strategy in strategies]
        self._allowed_indices = [bits | 1 << _KINDS.index("slice") for bits in self._allowed]

    def seconds(self, type_: TensorType, source: Sharding, target: Sharding, *, free: bool = False) -> float:
        """Time to redistribute once; infinite where it is impossible or forbidden (`free`: nothing is forbidden)."""
        return float(self.matrix(type_, (source,), (target,), free=free)[0, 0])

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
    partial: bool = False,
) -> list[Sharding]:
    """Every sharding a value may have: each axis splits one dim (in any of its stripe counts), or none; or holds
    terms.
    """
    options: list[list[Placement]] = []
    for size in sizes:
        found: list[Placement] = [REPLICATE]
        if size > 1:
            for dim in range(len(type_.shape)):
                found += [Shard(dim, outer) for outer in (1, *stripes.get(str(dim), ()))]
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
    def is_whole_in_place(self) -> bool:
        """Whether operators see what is stored."""
        return self.stored == self.compute


def parameter_choices(
    type_: TensorType, sizes: Sequence[int], stripes: Mapping[str, Sequence[int]], allowed: Sequence[frozenset[str]]
) -> list[ParameterChoice]:
    """Every way to keep a parameter: per axis whole, in pieces for good, or in pieces that are gathered for each use or
    once a step.
    """
    options: list[list[tuple[str, Placement]]] = []
    for size, permitted in zip(sizes, allowed, strict=True):
        found: list[tuple[str, Placement]] = [("replicate", REPLICATE)]
        for dim in range(len(type_.shape)) if size > 1 else ():
            if "shard" in permitted:
                found += [("shard", Shard(dim, outer)) for outer in (1, *stripes.get(str(dim), ()))]
            found += [(mode, Shard(dim)) for mode in ("gather", "keep") if mode in permitted]
        options.append(found)
    choices = []
    for picked in itertools.product(*options):
        modes = tuple(mode for mode, _ in picked)
        stored = tuple(placement for _, placement in picked)
        held = tuple(REPLICATE if mode == "keep" else placement for mode, placement in picked)
        compute = tuple(REPLICATE if mode == "gather" else p for mode, p in zip(modes, held, strict=True))
        if (
            is_valid(type_.shape, stored, sizes)
            and _only_gathers(stored, held, modes, "keep")
            and _only_gathers(held, compute, modes, "gather")
        ):
            choices.append(ParameterChoice(stored, held, compute, modes))
    return choices


def _only_gathers(source: Sharding, target: Sharding, modes: Sequence[str], mode: str) -> bool:
    """Whether the way from one to the other is exactly the gathers of the axes in this mode (no piece changes places)."""
    steps = redistribution_steps(source, target)
    wanted = {axis for axis, own in enumerate(modes) if own == mode}
    return steps is not None and all(s.kind == "all_gather" for s in steps) and {s.axis for s in steps} == wanted
