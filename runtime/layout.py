"""Global tensors to pieces, pieces to global tensors, and from one sharding to another."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import product

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import Partial, Shard, Sharding, redistribution_steps, splits_of
from autopar.runtime.communicator import Communicator
from autopar.runtime.pieces import join, piece_of


def shard(x: Tensor, sharding: Sharding, comm: Communicator) -> Tensor:
    """The part of a global tensor that `comm`'s rank holds, contiguous. Replicated and partial axes leave it whole.

    Raises:
        AutoparError: a split that does not divide, of a dim that has stripes.
    """
    for axis, placement in zip(comm.axes, sharding, strict=True):
        if isinstance(placement, Shard):
            if _may_be_uneven(sharding, placement) and x.shape[placement.dim] % comm.size(axis):
                start, length = piece_of(x.shape[placement.dim], comm.size(axis), comm.index(axis))
                x = x.narrow(placement.dim, start, length).contiguous()
            else:
                x = comm.slice(x, axis, placement.dim, placement.outer, placement.zigzag)
    return x


def local_part_shape(
    global_shape: Sequence[int], sharding: Sharding, sizes: Sequence[int], coordinates: Sequence[int]
) -> tuple[int, ...]:
    """The shape of the part at `coordinates` of the mesh. A dim that is split contiguously need not divide.

    Raises:
        AutoparError: another split that does not divide.
    """
    local = list(global_shape)
    for placement, size, index in zip(sharding, sizes, coordinates, strict=True):
        if not isinstance(placement, Shard):
            continue
        if _may_be_uneven(sharding, placement):
            local[placement.dim] = piece_of(local[placement.dim], size, index)[1]
        elif local[placement.dim] % (placement.outer * size):
            raise AutoparError(
                f"dim {placement.dim} of {tuple(global_shape)} cannot be split over {size} ranks",
                values=f"{local[placement.dim]} elements in {placement.outer} stripes",
                remedy="choose an axis size that divides it",
            )
        else:
            local[placement.dim] //= size
    return tuple(local)


def _may_be_uneven(sharding: Sharding, placement: Shard) -> bool:
    """Whether no axis splits the dim in stripes. Each cuts what the axes before it left, as DTensor does."""
    return all(outer == 1 for _, outer, _ in splits_of(sharding, placement.dim))


def assemble(
    pieces: Sequence[Tensor], sharding: Sharding, sizes: Sequence[int], *, atol: float = 0.0, rtol: float = 0.0
) -> Tensor:
    """The global tensor of which each rank (row-major) holds a piece: the inverse of `shard`.

    Partial axes are reduced, in rank order; along replicated axes the first rank's is taken.

    Raises:
        AutoparError: replicas that differ by more than the tolerances (0: bit by bit, NaN equal to NaN).
    """
    held = dict(zip(product(*(range(size) for size in sizes)), pieces, strict=True))
    for axis in reversed(range(len(sizes))):
        placement = sharding[axis]
        merged: dict[tuple[int, ...], Tensor] = {}
        for rest in product(*(range(size) for size in sizes[:axis])):
            along = [held[(*rest, i)] for i in range(sizes[axis])]
            if isinstance(placement, Shard) and placement.outer == 1:
                merged[rest] = torch.cat(along, placement.dim)  # pieces may be of unequal lengths
            elif isinstance(placement, Shard):
                merged[rest] = join(torch.stack(along), placement.dim, placement.outer, placement.zigzag)
            elif isinstance(placement, Partial):
                merged[rest] = _reduced(along, placement.op)
            else:
                _check_replicas(along, axis, atol, rtol)
                merged[rest] = along[0]
        held = merged
    return held[()]


def redistribute(x: Tensor, source: Sharding, target: Sharding, comm: Communicator) -> Tensor:
    """A local piece under `source` to one under `target`, with the fewest moves (`sharding.redistribution_steps`).

    Raises:
        AutoparError: there is no way (nothing becomes Partial).
    """
    steps = redistribution_steps(source, target, comm.sizes)
    if steps is None:
        raise AutoparError(f"a tensor cannot go from {source} to {target}")
    for step in steps:
        axis = comm.axes[step.axis]
        if step.kind == "slice":
            x = comm.slice(x, axis, step.dim, step.outer, step.zigzag)
        elif step.kind == "all_gather":
            x = comm.all_gather(x, axis, step.dim, step.outer, step.zigzag)
        elif step.kind == "all_reduce":
            x = comm.all_reduce(x, axis, step.op)
        elif step.kind == "reduce_scatter":
            x = comm.reduce_scatter(x, axis, step.dim, step.outer, step.op, step.zigzag)
        else:
            ways = (step.zigzag, step.from_zigzag)
            x = comm.all_to_all(x, axis, step.dim, step.outer, step.from_dim, step.from_outer, *ways)
    return x


def _reduced(terms: list[Tensor], op: str) -> Tensor:
    if op == "sum":
        total = terms[0]
        for term in terms[1:]:
            total = total + term
        return total
    stacked = torch.stack(terms)
    return stacked.amax(0) if op == "max" else stacked.amin(0)


def _check_replicas(replicas: list[Tensor], axis: int, atol: float, rtol: float) -> None:
    first = replicas[0]
    for i, other in enumerate(replicas[1:], start=1):
        wide = torch.promote_types(first.dtype, torch.float64)
        if not torch.allclose(first.to(wide), other.to(wide), rtol=rtol, atol=atol, equal_nan=True):
            worst = (first.to(wide) - other.to(wide)).abs().max().item()
            raise AutoparError(
                f"replicas differ along mesh axis {axis}", values=f"places 0 and {i} by up to {worst:.3g}"
            )


def resized(x: Tensor, shape: Sequence[int]) -> Tensor:
    """`x` cut, or padded with zeros, at the end of each dim; itself where nothing is to be done."""
    for dim, size in enumerate(shape):
        if x.shape[dim] > size:
            x = x.narrow(dim, 0, size)
        elif x.shape[dim] < size:
            missing = list(x.shape)
            missing[dim] = size - x.shape[dim]
            x = torch.cat([x, x.new_zeros(missing)], dim)
    return x


def in_blocks(interface: ProgramInterface, state: dict[str, Tensor]) -> dict[str, Tensor]:
    """The state as the program takes it: uneven pieces padded with zeros."""
    padded = dict(state)
    for entry in interface.parameters:
        if entry.block is not None and entry.name in state:
            padded.update(dict.fromkeys((entry.name, *entry.aliases), resized(state[entry.name], entry.block)))
    return padded


def piece_of_block(comm: Communicator, value: Tensor, entry: TensorInterface) -> Tensor:
    """What this rank holds of a tensor, out of the program's block."""
    if entry.block is None:
        return value
    at = [comm.index(axis) for axis in comm.axes]
    return resized(value, local_part_shape(entry.shape, entry.sharding, comm.sizes, at))
