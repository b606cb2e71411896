"""Where a rank's pieces of a dim begin in the whole tensor, as operators are told it."""

from __future__ import annotations

import math

from autopar.base.errors import AutoparError

Split = tuple[int, int, int] | tuple[int, int, int, bool]
"""How one axis splits a dim: (the rank's coordinate, the size of the axis, outer stripes, zigzag: no if left out)."""


def starts(size: int, *splits: Split) -> list[int]:
    """Where the runs of consecutive elements begin that a rank holds of a dim of `size`.

    All runs are equally long, and there are equally many on every rank: as few as these splits need (one where all are
    contiguous, `outer` where one axis splits in stripes). splits: as for `positions`.

    Raises:
        AutoparError: a split that does not divide.
    """
    begins, length = [0], size
    for coordinate, axis_size, outer, zigzag in map(_full, splits):
        if axis_size == 1:
            continue
        held = len(begins) * length
        if held % (outer * axis_size):
            raise AutoparError(
                f"{held} elements cannot be split over {axis_size} ranks",
                values=f"{outer} stripes, of a dim of {size}",
                remedy="choose an axis size that divides it",
            )
        piece = held // (outer * axis_size)
        unit = math.gcd(piece, length)
        begins, length = [begin + i for begin in begins for i in range(0, length, unit or 1)], unit
        count = piece // (unit or 1)
        places = [axis_size - 1 - coordinate if zigzag and stripe % 2 else coordinate for stripe in range(outer)]
        first = [(stripe * axis_size + place) * count for stripe, place in enumerate(places)]
        begins = [begin for at in first for begin in begins[at : at + count]]
    return begins


def _full(split: Split) -> tuple[int, int, int, bool]:
    return (*split, False) if len(split) == 3 else split
