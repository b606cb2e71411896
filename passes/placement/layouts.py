"""What it costs to turn one layout of a tensor into another, and which layouts a tensor may have."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

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
    Step,
    is_valid,
    num_pieces,
    redistribution_steps,
)
from autopar.strategies import AxisStrategy


@dataclass(slots=True)
class Redistribution:
    """Costs of redistribution on one mesh, remembered. `strategies` bounds what activations may use on each axis."""

    mesh: Mesh
    strategies: Sequence[AxisStrategy]
    sizes: tuple[int, ...] = ()
    _matrices: dict[object, np.ndarray] = field(default_factory=dict)
    _seconds: dict[object, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.sizes = tuple(self.mesh.sizes)

    def step_bytes(self, type_: TensorType, before: Sharding, step: Step) -> float:
        """Bytes of the tensor that one collective handles on a rank: the gathered result, or the local operand."""
        pieces = num_pieces(before, self.sizes)
        local = type_.num_bytes / pieces
        return local * self.sizes[step.axis] if step.kind == "all_gather" else local

    def seconds(self, type_: TensorType, source: Sharding, target: Sharding, *, free: bool = False) -> float:
        """Time to redistribute once; infinite where it is impossible, or where a strategy forbids it (unless
        `free`).
        """
        key = (type_, source, target, free)
        if key not in self._seconds:
            self._seconds[key] = self._compute(type_, source, target, free)
        return self._seconds[key]

    def _compute(self, type_: TensorType, source: Sharding, target: Sharding, free: bool) -> float:
        if source == target:
            return 0.0
        steps = redistribution_steps(source, target)
        if steps is None:
            return np.inf
        total, current = 0.0, list(source)
        for step in steps:
            if step.kind != "slice":
                if not free and step.kind not in self.strategies[step.axis].collectives:
                    return np.inf
                axis = self.mesh.axis_names[step.axis]
                link = self.mesh.link(axis)
                size = self.step_bytes(type_, tuple(current), step)
                total += collective_time_s(
                    step.kind, size, self.sizes[step.axis], link, self.mesh.hardware.collective_launch_s
                )
            done = step.kind in ("all_gather", "all_reduce")
            current[step.axis] = REPLICATE if done else Shard(step.dim, step.outer)
        return total

    def matrix(
        self, type_: TensorType, sources: tuple[Sharding, ...], targets: tuple[Sharding, ...], *, free: bool = False
    ) -> np.ndarray:
        """[sources, targets] of seconds."""
        key = (type_, sources, targets, free)
        if key not in self._matrices:
            rows = [[self.seconds(type_, source, target, free=free) for target in targets] for source in sources]
            self._matrices[key] = np.array(rows)
        return self._matrices[key]


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
    """How one parameter is stored, and what operators see. `modes` says per axis: replicate, shard, gather."""

    stored: Sharding
    compute: Sharding
    modes: tuple[str, ...]


def parameter_choices(
    type_: TensorType, sizes: Sequence[int], stripes: Mapping[str, Sequence[int]], allowed: Sequence[frozenset[str]]
) -> list[ParameterChoice]:
    """Every way to keep a parameter: per axis whole, in pieces for good, or in pieces that are gathered for use."""
    options: list[list[tuple[str, Placement]]] = []
    for size, permitted in zip(sizes, allowed, strict=True):
        found: list[tuple[str, Placement]] = [("replicate", REPLICATE)]
        for dim in range(len(type_.shape)) if size > 1 else ():
            if "shard" in permitted:
                found += [("shard", Shard(dim, outer)) for outer in (1, *stripes.get(str(dim), ()))]
            if "gather" in permitted:
                found.append(("gather", Shard(dim)))
        options.append(found)
    choices = []
    for picked in itertools.product(*options):
        modes = tuple(mode for mode, _ in picked)
        stored = tuple(placement for _, placement in picked)
        compute = tuple(REPLICATE if mode == "gather" else placement for mode, placement in picked)
        if is_valid(type_.shape, stored, sizes) and _only_gathers(stored, compute, modes):
            choices.append(ParameterChoice(stored, compute, modes))
    return choices


def _only_gathers(stored: Sharding, compute: Sharding, modes: Sequence[str]) -> bool:
    """Whether use needs exactly the gathers of the axes in mode `gather` (no piece must change places)."""
    steps = redistribution_steps(stored, compute)
    wanted = {axis for axis, mode in enumerate(modes) if mode == "gather"}
    return steps is not None and all(s.kind == "all_gather" for s in steps) and {s.axis for s in steps} == wanted
