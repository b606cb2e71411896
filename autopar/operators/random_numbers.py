"""Random numbers as a function of each element's place in the whole tensor: any sharding draws the same ones."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.operators.positional import _GAMMA, _mix, _places, _signed

BITS = {torch.float64: 53, torch.float32: 24, torch.float16: 11, torch.bfloat16: 8}
"""What a number below 1 has of each dtype, so that none is rounded up to 1."""


def random(
    x: Tensor, kind: str, seed: Tensor, salt: int, positions: Sequence[Tensor], global_shape: Sequence[int]
) -> Tensor:
    """Numbers in x's shape and dtype; of x nothing else counts.

    kind: `uniform` in [0, 1), `open` in (0, 1), `normal` with mean 0 and variance 1. Which they are depends on `seed`
    (an int64 scalar), `salt` and the element's place in the tensor of `global_shape` alone: 64 bits of SplitMix64
    (Steele, Lea, Flood 2014) of its number. `positions` has, for each dim, the global index of each local element
    (int64, one dim); empty: x is the whole tensor.
    """
    rows, columns = _places(x, positions, global_shape)
    width = global_shape[-1] if global_shape else 1
    key = _mix(seed + _signed(salt * _GAMMA, 64))
    z = _mix(key + (rows[:, None] * width + columns) * _GAMMA).view(x.shape)
    if kind == "uniform":
        bits = BITS.get(x.dtype, 53)
        return ((z >> (64 - bits)) & (2**bits - 1)).to(torch.float64).mul_(2.0**-bits).to(x.dtype)
    inside = ((z >> 12) & (2**52 - 1)).to(torch.float64).add_(0.5).mul_(2.0**-52)
    if kind == "open":
        return inside.to(x.dtype).clamp_(max=1 - torch.finfo(x.dtype).eps / 2)
    return inside.mul_(2).sub_(1).erfinv_().mul_(math.sqrt(2)).to(x.dtype)
