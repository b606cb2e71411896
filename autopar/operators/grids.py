"""Grids of images and volumes with a side of one point, of which torch makes a constant that no trace can hold."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def trace_affine_grid(theta: Tensor, size: Sequence[int], align_corners: bool) -> Any:
    """As `torch.nn.functional.affine_grid`: theta[N, k, k + 1], a size of N, C and k sides -> [N, *sides, k]."""
    sides = [int(each) for each in size[2:]]
    if min(sides) > 1:
        return _aten.affine_grid_generator.default(theta, size, align_corners)
    # The last side is the first coordinate.
    along = [_line(theta, sides, dim, align_corners) for dim in reversed(range(len(sides)))]
    points = torch.stack([*along, torch.ones_like(along[0])], -1).reshape(1, -1, len(sides) + 1)
    return (points @ theta.transpose(1, 2)).reshape(size[0], *sides, len(sides))


def _line(theta: Tensor, sides: Sequence[int], dim: int, align_corners: bool) -> Tensor:
    """The coordinate along a side at each point, from -1 to 1 between corners or between outer edges: [*sides]."""
    n = sides[dim]
    places = torch.arange(n, dtype=theta.dtype, device=theta.device)
    steps = max(n - 1, 1) if align_corners else n
    line = places * (2 / steps) - (n - 1) / steps
    return line.reshape([n if each == dim else 1 for each in range(len(sides))]).expand(sides)


AUTOGRAD = {_aten.affine_grid_generator.default: trace_affine_grid}
