"""Which layouts a tensor may have, and the ways to keep a parameter."""

from __future__ import annotations

import itertools
import math
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from types import MappingProxyType

from autopar.ir.placement import ParameterLayout
from autopar.ir.sharding import PARTIAL, REPLICATE, Placement, Shard, Sharding, is_valid, redistribution_steps
from autopar.ir.tensor_type import TensorType
from autopar.ir.uneven import chunks_are_blocks
from autopar.ir.values import Variable


def layouts_of(
    type_: TensorType,
    sizes: Sequence[int],
    stripes: Mapping[str, Sequence[int]],
    *,
    zigzags: Mapping[int, Mapping[str, Sequence[int]]] = MappingProxyType({}),
    again: Collection[int] = (),
    partial: bool = False,
) -> list[Sharding]:
    """Every sharding a value may have: each axis splits one dim (in any of its stripe counts), or none; or holds
    terms. zigzags: axis -> dim -> in how many stripes it may be split zigzag. again: axes that may cut what earlier
    ones left of stripes: tokens of rows over dp=2, each row over cp, are S(0) and S(0, outer=rows/2).
    """
    options: list[list[Placement]] = []
    left = {1}
    for axis, size in enumerate(sizes):
        found: list[Placement] = [REPLICATE]
        if size > 1:
            for dim in range(len(type_.shape)):
                counts = stripes.get(str(dim), ())
                if axis in again:
                    counts = sorted({n // part for n in counts for part in left if n % part == 0} - {1})
                found += [Shard(dim, outer) for outer in (1, *counts)]
                found += [Shard(dim, outer, True) for outer in zigzags.get(axis, {}).get(str(dim), ())]
            if partial:
                found.append(PARTIAL)
        options.append(found)
        left |= {part * size for part in left}
    return [
        layout
        for layout in itertools.product(*options)
        if is_valid(type_.shape, layout, sizes) and all(_is_left(layout, axis, sizes, stripes) for axis in again)
    ]


def _is_left(layout: Sharding, axis: int, sizes: Sequence[int], stripes: Mapping[str, Sequence[int]]) -> bool:
    """Whether an axis cuts as many stripes as there are, or what contiguous cuts of earlier axes left of them."""
    placement = layout[axis]
    if not isinstance(placement, Shard) or placement.zigzag or placement.outer == 1:
        return True
    cut = math.prod(sizes[earlier] for earlier in range(axis) if layout[earlier] == Shard(placement.dim))
    return placement.outer * cut in stripes.get(str(placement.dim), ())


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
    known = tuple((dim, tuple(counts)) for dim, counts in sorted(stripes.items()))
    return list(_parameter_choices(variable.type.shape, variable.seen.shape, tuple(sizes), known, tuple(allowed)))


@lru_cache(maxsize=1024)
def _parameter_choices(
    shape: tuple[int, ...],
    seen: tuple[int, ...],
    sizes: tuple[int, ...],
    stripes: tuple[tuple[str, tuple[int, ...]], ...],
    allowed: tuple[frozenset[str], ...],
) -> tuple[ParameterChoice, ...]:
    """Hundreds of norms have one shape, and a model is placed many times."""
    counts = dict(stripes)
    options: list[list[tuple[str, Placement]]] = []
    for size, permitted in zip(sizes, allowed, strict=True):
        found: list[tuple[str, Placement]] = [("replicate", REPLICATE)]
        for dim in range(len(seen)) if size > 1 else ():
            if "shard" in permitted:
                found += [("shard", Shard(dim, outer)) for outer in (1, *counts.get(str(dim), ()))]
            found += [(mode, Shard(dim)) for mode in ("gather", "keep") if mode in permitted]
        options.append(found)
    choices = []
    for picked in (each for one in itertools.product(*options) for each in _either_way(one, sizes)):
        modes = tuple(mode for mode, _ in picked)
        stored = tuple(placement for _, placement in picked)
        held = tuple(REPLICATE if mode == "keep" else placement for mode, placement in picked)
        compute = tuple(REPLICATE if mode == "gather" else p for mode, p in zip(modes, held, strict=True))
        if (
            all(_divides(shape, seen, dim, stored, modes, sizes) for dim in range(len(seen)))
            and _only_gathers(stored, held, sizes, modes, "keep")
            and _only_gathers(held, compute, sizes, modes, "gather")
        ):
            choices.append(ParameterChoice(stored, held, compute, modes))
    return tuple(choices)


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


def _divides(
    shape: Sequence[int], rows: Sequence[int], dim: int, stored: Sharding, modes: Sequence[str], sizes: Sequence[int]
) -> bool:
    """Whether a parameter may be stored in these pieces of one dim. rows: its shape with padding."""
    axes = [axis for axis, p in enumerate(stored) if isinstance(p, Shard) and p.dim == dim]
    size, seen = shape[dim], rows[dim]
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
    return alone and dim == _uneven_dim(shape, sizes[axes[0]])


def _uneven_dim(shape: Sequence[int], size: int) -> int:
    """The dim to cut into uneven pieces: the longest, where `size` ranks divide none and each gets something; or -1."""
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
