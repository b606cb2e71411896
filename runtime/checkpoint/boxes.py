"""Boxes: contiguous parts of a tensor, by where they begin and how long they are in each dim."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import product
from typing import NamedTuple

MOST_SPLIT_DIMS = 8
"""Of one tensor: more axes split none, and the corners of a box double with each."""


class Box(NamedTuple):
    """offsets: the first index in each dim. sizes: how many."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        """How many elements; 1 of no dims."""
        return math.prod(self.sizes)

    def within(self, other: Box) -> Box:
        """The same elements, counted from where `other` begins."""
        return Box(tuple(a - b for a, b in zip(self.offsets, other.offsets, strict=True)), self.sizes)

    def slices(self) -> tuple[slice, ...]:
        """What picks it out of the whole."""
        return tuple(slice(start, start + size) for start, size in zip(self.offsets, self.sizes, strict=True))

    def __str__(self) -> str:
        """As in Python: [0:4, 8:16]."""
        return f"[{', '.join(f'{s.start}:{s.stop}' for s in self.slices())}]"


def whole_of(shape: Sequence[int]) -> Box:
    """All of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def intersection(one: Box, other: Box) -> Box | None:
    """What both have; None for nothing."""
    offsets, sizes = [], []
    for a, na, b, nb in zip(one.offsets, one.sizes, other.offsets, other.sizes, strict=True):
        start = max(a, b)
        size = min(a + na, b + nb) - start
        if size <= 0:
            return None
        offsets.append(start)
        sizes.append(size)
    return Box(tuple(offsets), tuple(sizes))


def covers(boxes: Sequence[Box], shape: Sequence[int]) -> bool:
    """Whether each element of the tensor is in exactly one box, and no box reaches beyond it.

    A function that is 0 far away is known by its differences along all dims. Those of a box's indicator are ±1 at its
    corners, so boxes add up to the whole exactly where their signed corners do: linear in the number of boxes.

    Raises:
        ValueError: boxes of other numbers of dims, or split along more than MOST_SPLIT_DIMS.
    """
    whole = whole_of(shape)
    if any(len(box.offsets) != len(shape) or len(box.sizes) != len(shape) for box in boxes):
        raise ValueError(f"a piece has another number of dims than {tuple(shape)}")
    if whole.numel == 0:
        return not any(box.numel for box in boxes)
    if any(size <= 0 for box in boxes for size in box.sizes):
        return False
    split = [
        dim for dim, size in enumerate(shape) if any((box.offsets[dim], box.sizes[dim]) != (0, size) for box in boxes)
    ]
    if not split or not boxes:
        return len(boxes) == 1
    if len(split) > MOST_SPLIT_DIMS:
        raise ValueError(f"its pieces are split along {len(split)} dims, at most {MOST_SPLIT_DIMS} are read")
    corners: Counter[tuple[int, ...]] = Counter()
    for box, sign in [*((box, 1) for box in boxes), (whole, -1)]:
        for ends in product((0, 1), repeat=len(split)):
            at = tuple(box.offsets[dim] + end * box.sizes[dim] for dim, end in zip(split, ends, strict=True))
            corners[at] += sign * (-1) ** sum(ends)
    return not any(corners.values())


def why_not(boxes: Sequence[Box], shape: Sequence[int]) -> str:
    """Of boxes that do not cover the tensor once: what is wrong, of the first few hundred."""
    some, whole = list(boxes)[:500], whole_of(shape)
    for number, box in enumerate(some):
        if any(size <= 0 for size in box.sizes) or intersection(box, whole) != box:
            return f"the piece {box} reaches beyond {tuple(shape)}"
        for other in some[:number]:
            shared = intersection(box, other)
            if shared is not None:
                return f"two pieces have {shared}"
    return f"the pieces have {sum(box.numel for box in boxes)} of its {whole.numel} elements"


def rows_of(sizes: Sequence[int], first: int, last: int) -> Iterator[Box]:
    """The elements `first … last` (row-major, without the last) of a tensor of these sizes, as boxes in that order."""
    if first >= last:
        return
    if not sizes:
        yield Box((), ())
        return
    row = math.prod(sizes[1:])
    begin, end = -(-first // row), last // row  # whole rows
    if begin > end or (begin == end and first // row == (last - 1) // row and last - first < row):
        yield from _in_row(sizes, first // row, first % row, first % row + last - first)
        return
    if first % row:
        yield from _in_row(sizes, first // row, first % row, row)
    if begin < end:
        yield Box((begin, *(0,) * (len(sizes) - 1)), (end - begin, *sizes[1:]))
    if last % row:
        yield from _in_row(sizes, end, 0, last % row)


def _in_row(sizes: Sequence[int], number: int, first: int, last: int) -> Iterator[Box]:
    for box in rows_of(sizes[1:], first, last):
        yield Box((number, *box.offsets), (1, *box.sizes))
