"""Which step of a redistribution comes next: said once, for one pair of shardings and for arrays of pairs.

A placement is a number, its *code*: a split (dim + 1)·2²⁰ + zigzag·2¹⁹ + outer, replicated 0, terms -1 (a sum) and
-2 (a maximum). A sharding has one code an axis, in mesh order. Each code is an int, or an array of them [pairs]: all
below is arithmetic that reads alike for both (`x ^ True` is *not*), so that `sharding.redistribution_steps`, which the
runtime follows, and the table of what every move costs, which placement decides by, are made of the same rules.

Greedy, cheapest first: local slices shrink the tensor before anything is sent; terms are combined (scattering where the
target is split) before anything grows; pieces change dims by all-to-all; gathers come last. The first axes of a mesh
are its slow ones: scatters come last over them, and gathers first, so that they carry the least.

A split can only be made or undone when it commutes with those that later axes make of the same dim, and only be made
when the dim's other splits are already the target's, so every intermediate value is itself a sharding.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Literal, TypeAlias

StepKind = Literal["slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"]
Codes: TypeAlias = Any
"""An int, or an array of them; what asks gives 0 and 1. No type says that operators take both alike."""

MAX_STEPS_PER_AXIS = 4
"""No redistribution takes more: a term is combined, a split undone or moved twice, the wanted one made."""

REPLICATED = 0
TERMS = {"sum": -1, "max": -2}
_ZIGZAG, _DIM = 1 << 19, 1 << 20
_OUTER = _ZIGZAG - 1


def split_code(dim: int, outer: int, zigzag: bool) -> int:
    """The code of a split."""
    return (dim + 1) * _DIM + zigzag * _ZIGZAG + outer


def dim_of(code: Codes) -> Codes:
    """The dim that is split; negative for none."""
    return (code >> 20) - 1


def rename_dims(codes: Codes, dims: Codes) -> Codes:
    """The same splits, of these dims."""
    return codes + (dims - dim_of(codes)) * _DIM


def becomes_terms(have: Codes, want: Codes) -> Codes:
    """Whether an axis is to have terms of what is no sum there, to which there is no way."""
    return (want < REPLICATED) & (have != want)


def next_steps(
    have: Sequence[Codes], want: Sequence[Codes], sizes: Sequence[int]
) -> Iterator[tuple[StepKind, int, Codes]]:
    """(kind, axis, whether it serves now), best first: the first that serves is the next step."""
    axes = range(len(sizes))
    can_split = [_can_split(have, want, axis, sizes) for axis in axes]
    for axis in axes:
        yield "slice", axis, can_split[axis] & (have[axis] == REPLICATED)
    for axis in reversed(axes):
        yield "reduce_scatter", axis, can_split[axis] & (have[axis] < REPLICATED)
    for axis in axes:
        yield "all_reduce", axis, (have[axis] < REPLICATED) & (want[axis] >= REPLICATED)
    can_undo = [stripes_left(have[axis], axis, have, sizes) > 0 for axis in axes]
    for axis in axes:
        yield "all_to_all", axis, can_split[axis] & can_undo[axis] & (dim_of(have[axis]) != dim_of(want[axis]))
    for axis in axes:
        yield "all_gather", axis, can_undo[axis] & (_keeps(have, want, axis, sizes) ^ True)


def code_after(kind: StepKind, wanted: Codes) -> Codes:
    """What the axis of a step has after it, where the target has `wanted`."""
    return wanted * 0 if kind in ("all_gather", "all_reduce") else wanted


def stripes_left(split: Codes, axis: int, now: Sequence[Codes], sizes: Sequence[int]) -> Codes:
    """How many stripes of a split by `axis` a rank has where later axes split the same dim as `now` says; 0 where the
    split does not commute with theirs, or is none.
    """
    stripes, commutes = split & _OUTER, split > REPLICATED
    for later in range(axis + 1, len(sizes)):
        beside = commutes & (dim_of(now[later]) == dim_of(split))
        if _any(beside):
            is_whole = ((now[later] & _OUTER) == 1) & (stripes % sizes[later] == 0)
            commutes = commutes & ((beside ^ True) | is_whole)
            stripes = stripes // (1 + beside * (sizes[later] - 1))
    is_odd = ((split & _ZIGZAG) != 0) & (stripes % 2 != 0)
    return stripes * (commutes & (is_odd ^ True))


def _can_split(have: Sequence[Codes], want: Sequence[Codes], axis: int, sizes: Sequence[int]) -> Codes:
    """Whether the wanted split can be made of what is whole now: where all others of its dim are right or, of earlier
    axes, can come in front of it later.
    """
    found = (have[axis] != want[axis]) & (stripes_left(want[axis], axis, have, sizes) > 0)
    after = list(have)
    after[axis] = want[axis]
    for other in range(len(sizes)):
        if other == axis or not _any(found):
            continue
        is_wrong = have[other] != want[other]
        found = found & ((is_wrong & (dim_of(have[other]) == dim_of(want[axis]))) ^ True)
        comes = found & is_wrong & (dim_of(want[other]) == dim_of(want[axis]))
        if other < axis and _any(comes):
            found = found & ((comes ^ True) | (stripes_left(want[other], other, after, sizes) > 0))
    return found


def _keeps(have: Sequence[Codes], want: Sequence[Codes], axis: int, sizes: Sequence[int]) -> Codes:
    """Whether a split is the target's, and those of its dim by earlier axes are, or can become so in front of it."""
    found = have[axis] == want[axis]
    for earlier in range(axis):
        for placed in (have[earlier], want[earlier]):
            beside = found & (have[earlier] != want[earlier]) & (dim_of(placed) == dim_of(have[axis]))
            if _any(beside):
                found = found & ((beside ^ True) | (stripes_left(placed, earlier, have, sizes) > 0))
    return found


def _any(found: Codes) -> bool:
    return bool(found.any() if hasattr(found, "any") else found)
