"""Dropout as a function of each element's place in the whole tensor: any sharding draws the same mask."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.errors import AutoparError


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


_GAMMA, _MIX_1, _MIX_2 = (_int64(c) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))


def dropout(
    x: Tensor, p: float, seed: Tensor, salt: int, positions: Sequence[Tensor], global_shape: Sequence[int]
) -> Tensor:
    """x with each element zeroed with probability p, the others divided by 1 - p; its own gradient, too.

    Whether an element is kept depends on `seed` (an int64 scalar), `salt` and the element's place in the tensor of
    `global_shape` alone: any sharding draws the same mask. `positions` has, for each dim, the global index of each
    local element (int64, one dim); empty: x is the whole tensor. The generator is SplitMix64 (Steele, Lea, Flood 2014)
    over the linear position.
    """
    if p >= 1:
        return torch.zeros_like(x)
    key = _mix(seed + _int64(salt * _GAMMA))
    random = _mix(key + _linear_position(x, positions, global_shape) * _GAMMA)
    keep = ((random >> 11) & (2**53 - 1)) >= int(p * 2**53)
    return x * (keep.to(x.dtype) * (1 / (1 - p)))


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer; torch has no logical shift, so the sign's copies are masked off."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def _linear_position(x: Tensor, positions: Sequence[Tensor], global_shape: Sequence[int]) -> Tensor:
    if not positions:
        return torch.arange(x.numel(), device=x.device).view(x.shape)
    linear_position = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, size in zip(positions, global_shape, strict=True):
        linear_position = linear_position.unsqueeze(-1) * size + index
    return linear_position


Split = tuple[int, int, int] | tuple[int, int, int, bool]
"""How one axis splits a dim: (the rank's coordinate, the size of the axis, outer stripes, zigzag: no if left out)."""


def positions(size: int, *splits: Split, device: torch.device | str | None = None) -> Tensor:
    """The global indices that a rank holds of a dim of `size`: int64, one dim, in the order in which it holds them.

    splits: in the order in which they apply (`autopar.sharding`).
    """
    index = torch.arange(size, device=device)
    for coordinate, axis_size, outer, zigzag in map(_full, splits):
        stripes = index.view(outer, axis_size, -1)
        held = stripes[:, coordinate]
        if zigzag:
            held = torch.stack([held[::2], stripes[1::2, axis_size - 1 - coordinate]], 1)
        index = held.reshape(-1)
    return index


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


def resize(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with `size` elements along `dim`: cut, or padded with zeros, at the end; itself where it has them."""
    if x.shape[dim] >= size:
        return x.narrow(dim, 0, size)
    missing = list(x.shape)
    missing[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim)
