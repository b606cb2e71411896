"""Rows and positions that a batch gets, and that leave no trace: outputs are cut back to what was given.

    3 rows on dp=2:            rows 0 1 | 2 2'     →  logits of 0 1 | 2;  the loss counts 0, 1 and 2
    7 positions, lengths=[8]:  tokens 0 … 6 6'     →  logits of 0 … 6;    the loss counts 0 to 6

What is added is a copy of the last one, but for inputs that say what counts (labels, masks). That it has no part in
anything that comes back is shown before: of rows by the model's graph (`autopar/passes/batching.py`), of positions by
running the model without them and with them (`autopar/api/lengths.py`).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import product
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement

from autopar.base.torch_compat.distributed import local_tensor
from autopar.base.torch_compat.tracing import tree_flatten, tree_leaves_with_path, tree_unflatten
from autopar.runtime.pieces import piece_of
from autopar.runtime.placements import contiguous_stride


@dataclass(frozen=True, slots=True)
class Grown:
    """A dim of an input that was `given` long and is `padded` long. fill: what stands there in the place of a copy."""

    dim: int
    given: int
    padded: int
    fill: int | None = None

    def grow(self, x: Tensor) -> Tensor:
        """The tensor with what is added; one in pieces is split along other dims."""
        if isinstance(x, DTensor):
            return _from_local(self.grow(local_tensor(x)), x, _with(x.shape, self.dim, self.padded))
        last = x.narrow(self.dim, self.given - 1, 1)
        last = last.expand(_with(x.shape, self.dim, self.padded - self.given))
        return torch.cat([x, last if self.fill is None else torch.full_like(last, self.fill)], self.dim)


@dataclass(frozen=True, slots=True)
class Added:
    """What is added to a batch. inputs: by name, one dim after the other. outputs: for each the dims that grew with
    them, and how long they are without.
    """

    inputs: Mapping[str, tuple[Grown, ...]]
    outputs: tuple[tuple[tuple[int, int], ...], ...]

    def pad(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The inputs, by name, with what is added."""
        return {name: self._padded(name, x) for name, x in tensors.items()}

    def pad_tree(self, inputs: Mapping[str, Any]) -> dict[str, Any]:
        """The same of nested inputs."""
        leaves, spec = tree_flatten(dict(inputs))
        paths = [path for path, _ in tree_leaves_with_path(dict(inputs))]
        found: dict[str, Any] = tree_unflatten([self._padded(p, x) for p, x in zip(paths, leaves, strict=True)], spec)
        return found

    def _padded(self, name: str, x: Any) -> Any:
        for grown in self.inputs.get(name, ()):
            x = grown.grow(x)
        return x

    def given(self, name: str, shape: Sequence[int]) -> tuple[int, ...]:
        """The shape that an input had which is of this shape now."""
        sizes = list(shape)
        for grown in self.inputs.get(name, ()):
            sizes[grown.dim] = grown.given
        return tuple(sizes)

    def then(self, other: Added) -> Added:
        """Both, one after the other."""
        names = dict.fromkeys((*self.inputs, *other.inputs))
        inputs = {name: (*self.inputs.get(name, ()), *other.inputs.get(name, ())) for name in names}
        return Added(inputs, tuple((*a, *b) for a, b in zip(self.outputs, other.outputs, strict=True)))

    def cut(self, outputs: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The outputs without it. Pieces stay where they are, the last ones are shorter; where an axis splits a dim in
        other pieces than those of what is left, ranks exchange them.
        """
        found = []
        for value, dims in zip(outputs, self.outputs, strict=True):
            for dim, size in dims:
                value = None if value is None else _cut(value, dim, size)
            found.append(value)
        return found


def _cut(value: Tensor, dim: int, size: int) -> Tensor:
    if not isinstance(value, DTensor):
        return value.narrow(dim, 0, size)
    axes = [axis for axis, p in enumerate(value.placements) if getattr(p, "dim", None) == dim]
    nums = [value.device_mesh.size(axis) for axis in axes]
    is_plain = all(type(value.placements[axis]) is TorchShard for axis in axes)
    if axes and not (is_plain and _stay(value.shape[dim], size, nums)):
        value = value.redistribute(placements=_elsewhere(value, dim, axes))
        axes, nums = [], []
    at = value.device_mesh.get_coordinate()
    assert at is not None
    length = size
    for axis, num in zip(axes, nums, strict=True):
        length = piece_of(length, num, at[axis])[1]
    local = value.to_local() if value.requires_grad else local_tensor(value)
    return _from_local(local.narrow(dim, 0, length), value, _with(value.shape, dim, size))


def _stay(before: int, after: int, nums: Sequence[int]) -> bool:
    """Whether pieces of a dim that gets shorter at its end begin where they began."""

    def starts(size: int) -> list[int | None]:
        found = []
        for places in product(*map(range, nums)):
            start, length = 0, size
            for num, place in zip(nums, places, strict=True):
                begin, length = piece_of(length, num, place)
                start += begin
            found.append(start if length else None)
        return found

    return all(one == other for one, other in zip(starts(before), starts(after), strict=True) if other is not None)


def _elsewhere(value: DTensor, dim: int, axes: Sequence[int]) -> list[Placement]:
    """Placements under which a dim is whole on every rank: another one is split in its place, if there is one."""
    found: list[Placement] = list(value.placements)
    taken = {dim, *(getattr(p, "dim", dim) for p in found)}
    for axis in axes:
        num = value.device_mesh.size(axis)
        free = [other for other, size in enumerate(value.shape) if other not in taken and size % num == 0]
        is_alone = len(axes) == 1 and type(found[axis]) is TorchShard
        found[axis] = TorchShard(free[0]) if free and is_alone else Replicate()
    return found


def _with(shape: Sequence[int], dim: int, size: int) -> tuple[int, ...]:
    return (*shape[:dim], size, *shape[dim + 1 :])


def _from_local(local: Tensor, like: DTensor, shape: Sequence[int]) -> DTensor:
    stride = contiguous_stride(shape)
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
