"""An index whose rows a mask chooses: what it takes of a tensor, and where rows come from."""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, fx

from autopar.base.torch_compat import tracing as compat
from autopar.passes.said import COPIES, shape_of

_aten = torch.ops.aten


@dataclass(frozen=True, slots=True)
class Rows:
    """Rows that a mask chooses, as an index has them. dims: those of the mask that it counts along, which the tensor's
    from `at` on are; new: dims before that the index adds to the tensor; rest: what else is to be taken of the rows.
    """

    mask: Tensor
    at: int
    dims: tuple[int, ...]
    new: tuple[int, ...]
    rest: tuple[Any, ...]

    @property
    def is_plain(self) -> bool:
        """Whether it counts along all dims of the mask, in order, and asks for nothing else."""
        return self.dims == tuple(range(self.mask.dim())) and not (self.new or self.rest)

    @property
    def others(self) -> tuple[int, ...]:
        """The mask's dims that it does not count along."""
        return tuple(dim for dim in range(self.mask.dim()) if dim not in self.dims)

    def seen(self, x: Tensor) -> Tensor | None:
        """x with all dims of the mask from `at` on, in order; None where it has others."""
        for place in self.new:
            x = x.unsqueeze(place)
        shape, at = tuple(self.mask.shape), self.at
        if tuple(x.shape[at : at + len(self.dims)]) != tuple(shape[dim] for dim in self.dims):
            return None
        order = sorted(range(len(self.dims)), key=lambda each: self.dims[each])
        if order != list(range(len(order))):
            x = x.permute([*range(at), *(at + each for each in order), *range(at + len(order), x.dim())])
        for dim in self.others:
            x = x.unsqueeze(at + dim)
        return x.expand(*x.shape[:at], *shape, *x.shape[at + len(shape) :]) if self.others else x

    def summed(self, rows: Tensor) -> Tensor:
        """[mask, …] summed over the dims that it does not count along, in its own order of the others."""
        if self.others:
            rows = rows.sum(self.others)
        kept = sorted(self.dims)
        order = [kept.index(dim) for dim in self.dims]
        behind = range(len(order), rows.dim())
        return rows if order == sorted(order) else rows.permute([*order, *behind])


def seen_along(x: Tensor, mask: Tensor, dim: int = 0) -> Tensor:
    """x with one dim, from `dim` on, for those that it has of a mask."""
    return x if mask.dim() == 1 else x.flatten(dim, dim + mask.dim() - 1)


def marks_once(mask: Tensor, dims: Sequence[int]) -> bool:
    """Whether a mask is set once at most along a dim: where the numbers of a `topk` along it, which differ, are one."""
    node = compat.node_of(mask)
    if node is None or len(dims) != 1 or node.target not in (_aten.eq.Scalar, _aten.eq.Tensor):
        return False
    numbers, other = node.args[0], node.args[1]
    if isinstance(other, fx.Node) and math.prod(shape_of(other)) != 1:
        return False
    while isinstance(numbers, fx.Node) and numbers.target in COPIES:
        numbers = numbers.args[0]
    if not isinstance(numbers, fx.Node) or numbers.target is not operator.getitem or numbers.args[1] != 1:
        return False
    chosen = numbers.args[0]
    if not isinstance(chosen, fx.Node) or chosen.target is not _aten.topk.default:
        return False
    along = chosen.args[2] if len(chosen.args) > 2 else chosen.kwargs.get("dim", -1)
    return isinstance(along, int) and along % mask.dim() == dims[0] and shape_of(numbers) == tuple(mask.shape)
