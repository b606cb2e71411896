"""Dropout as a function of each element's place in the whole tensor: any sharding draws the same mask."""

from __future__ import annotations

import struct
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.ir.positions import Split, _full


def _signed(value: int, bits: int) -> int:
    return (value + 2 ** (bits - 1)) % 2**bits - 2 ** (bits - 1)


_GAMMA, _MIX_1, _MIX_2 = (_signed(c, 64) for c in (0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9, 0x94D049BB133111EB))
_STEP, _ROUND_1, _ROUND_2 = (_signed(c, 32) for c in (0x9E3779B1, 0x7FEB352D, 0x846CA68B))
_CHUNK = 2**18
"""Elements whose factors are made at a time on CPU: two int32 tensors of them fit a core's cache."""


def dropout(
    x: Tensor, p: float, seed: Tensor, salt: int, positions: Sequence[Tensor], global_shape: Sequence[int]
) -> Tensor:
    """x with each element zeroed with probability p, the others divided by 1 - p; its own gradient, too.

    See `dropout_factors`. `positions` has, for each dim, the global index of each local element (int64, one dim);
    empty: x is the whole tensor.
    """
    if p >= 1:
        return torch.zeros_like(x)
    return x * dropout_factors(x, p, seed, salt, positions, global_shape)


def dropout_factors(
    x: Tensor, p: float, seed: Tensor, salt: int, positions: Sequence[Tensor], global_shape: Sequence[int]
) -> Tensor:
    """What dropout multiplies the elements of x by: 0 with probability p (less than 1), else 1 / (1 - p); in x's dtype.

    Which it is depends on `seed` (an int64 scalar), `salt` and the element's place in the tensor of `global_shape`
    alone: any sharding draws the same mask. Each row (of the last dim) has a key of 64 bits, SplitMix64 (Steele, Lea,
    Flood 2014) of its number. Within it, the column is hashed in 32 bits, which vector units multiply as fast as
    floats: the two rounds of lowbias32 (Wellons 2018, "Prospecting for Hash Functions"), half of the key added before
    each. Its last shift is left out: that would not reach the upper bits, which decide.
    """
    key = _mix(seed + _signed(salt * _GAMMA, 64))
    rows, columns = _places(x, positions, global_shape)
    keys = _mix(key + rows * _GAMMA).view(torch.int32).view(-1, 2)
    steps = columns.to(torch.int32) * _STEP
    factors = torch.empty((len(rows), len(columns)), dtype=torch.int32, device=x.device)
    chunk = len(rows) if x.device.type != "cpu" else max(1, _CHUNK // max(1, len(columns)))
    spare = torch.empty_like(factors[:chunk])
    for start in range(0, len(rows), max(1, chunk)):
        z, low, high = (each[start : start + chunk] for each in (factors, keys[:, :1], keys[:, 1:]))
        torch.add(low, steps, out=z)
        _shifted_xor_(z, 16, spare[: len(z)]).mul_(_ROUND_1).add_(high)
        _shifted_xor_(z, 15, spare[: len(z)]).mul_(_ROUND_2).bitwise_right_shift_(1)
        # All ones where the element is kept: no comparison, and no bytes, which take as long as all of the above.
        z.neg_().add_(drop_threshold(p) - 1).bitwise_right_shift_(31)
    return _as_factors(factors, 1 / (1 - p), x.dtype).view(x.shape)


def drop_threshold(p: float) -> int:
    """The least hash, halved, of an element that is kept: hashes are int32, so halves lie between -2^30 and 2^30."""
    return int(p * 2**31) - 2**30


def _as_factors(ones: Tensor, factor: float, dtype: torch.dtype) -> Tensor:
    """`factor` where an int32 has all bits set, 0 where it has none; in the memory of `ones` where it fits."""
    if dtype == torch.float32:
        (bits,) = struct.unpack("i", struct.pack("f", factor))
        return ones.bitwise_and_(bits).view(torch.float32)
    return ones.bitwise_and_(1).to(dtype).mul_(factor)


def _mix(z: Tensor) -> Tensor:
    """SplitMix64's finalizer; torch has no logical shift, so the sign's copies are masked off."""
    z = (z ^ ((z >> 30) & (2**34 - 1))) * _MIX_1
    z = (z ^ ((z >> 27) & (2**37 - 1))) * _MIX_2
    return z ^ ((z >> 31) & (2**33 - 1))


def _shifted_xor_(z: Tensor, by: int, spare: Tensor) -> Tensor:
    """z ^= z >> by, of int32 as if it had no sign; in place."""
    torch.bitwise_right_shift(z, by, out=spare)
    return z.bitwise_xor_(spare.bitwise_and_(2 ** (32 - by) - 1))


def _places(x: Tensor, positions: Sequence[Tensor], global_shape: Sequence[int]) -> tuple[Tensor, Tensor]:
    """The numbers of x's rows in the whole tensor, and of the columns: int64, one dim."""
    if x.dim() == 0:
        return torch.zeros(1, dtype=torch.int64, device=x.device), torch.zeros(1, dtype=torch.int64, device=x.device)
    if not positions:
        positions = [torch.arange(size, device=x.device) for size in x.shape]
    rows = torch.zeros((), dtype=torch.int64, device=x.device)
    for index, size in zip(positions[:-1], global_shape[:-1], strict=True):
        rows = rows.unsqueeze(-1) * size + index
    return rows.reshape(-1), positions[-1]


def positions(size: int, *splits: Split, device: torch.device | str | None = None) -> Tensor:
    """The global indices that a rank holds of a dim of `size`: int64, one dim, in the order in which it holds them.

    splits: in the order in which they apply (`autopar.ir.sharding`).
    """
    index = torch.arange(size, device=device)
    for coordinate, axis_size, outer, zigzag in map(_full, splits):
        stripes = index.view(outer, axis_size, -1)
        held = stripes[:, coordinate]
        if zigzag:
            held = torch.stack([held[::2], stripes[1::2, axis_size - 1 - coordinate]], 1)
        index = held.reshape(-1)
    return index


def resize(x: Tensor, dim: int, size: int) -> Tensor:
    """`x` with `size` elements along `dim`: cut, or padded with zeros, at the end; itself where it has them."""
    if x.shape[dim] >= size:
        return x.narrow(dim, 0, size)
    missing = list(x.shape)
    missing[dim] = size - x.shape[dim]
    return torch.cat([x, x.new_zeros(missing)], dim)
