"""Pieces that are not all alike: what a rank's program sees of a dim that its axis does not divide.

A dim of 50257 rows over 4 ranks is stored as `torch.chunk` (and DTensor's Shard) cuts it: 12565, 12565, 12565, 12562.
The program of every rank sees a *block*, the longest piece, short ones padded with zeros; the runtime pads and trims.
"""

from __future__ import annotations

from collections.abc import Sequence

from autopar.ir.placement import ParameterLayout
from autopar.ir.sharding import Shard, Sharding, local_shape
from autopar.ir.values import Variable


def block_shape(variable: Variable, layout: ParameterLayout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The local shape in which a program is given a stored parameter."""
    block = []
    for dim, (size, seen) in enumerate(zip(variable.type.shape, variable.seen.shape, strict=True)):
        axes = _axes_of(layout.stored, dim)
        length = seen if all(layout.compute[axis] == layout.stored[axis] for axis in axes) else size
        for axis in axes:
            length = -(-length // sizes[axis])
        block.append(length)
    return tuple(block)


def stored_shape(variable: Variable, layout: ParameterLayout, sizes: Sequence[int]) -> tuple[int, ...]:
    """The shape of the piece that the first rank of every axis stores; no rank stores more."""
    shape = list(variable.type.shape)
    for dim in range(len(shape)):
        for axis in _axes_of(layout.stored, dim):
            shape[dim] = -(-shape[dim] // sizes[axis])
    return tuple(shape)


def is_uneven(variable: Variable, layout: ParameterLayout, sizes: Sequence[int]) -> bool:
    """Whether some rank's stored piece is shorter than its block."""
    for dim, (size, block) in enumerate(zip(variable.type.shape, block_shape(variable, layout, sizes), strict=True)):
        pieces = 1
        for axis in _axes_of(layout.stored, dim):
            pieces *= sizes[axis]
        if block * pieces != size:
            return True
    return False


def resizes(variable: Variable, layout: ParameterLayout, sizes: Sequence[int]) -> tuple[tuple[int, int, int], ...]:
    """(dim, gathered, seen): dims of which the gathered blocks are longer or shorter than what operators see, locally.

    A gathered parameter is cut or padded to `seen`; its gradient to `gathered` before it is scattered.
    """
    found = []
    seen = local_shape(variable.seen.shape, layout.compute, sizes)
    for dim, length in enumerate(block_shape(variable, layout, sizes)):
        for axis in _axes_of(layout.stored, dim):
            length *= sizes[axis] if layout.compute[axis] != layout.stored[axis] else 1
        if length != seen[dim]:
            found.append((dim, length, seen[dim]))
    return tuple(found)


def chunks_are_blocks(size: int, padded: int, axis_sizes: Sequence[int]) -> bool:
    """Whether axes that split a padded dim one after the other cut it where `torch.chunk` cuts the unpadded one.

    axis_sizes: of the axes that split the dim, in mesh order. Where it holds, what DTensor's Shard stores of a dim of
    `size` is the beginning of the rank's block of `padded`.
    """
    if not axis_sizes:
        return True
    pieces, *rest = axis_sizes
    if padded % pieces or (size and -(-size // pieces) != padded // pieces):
        return False
    block = padded // pieces
    ends = {min(max(size - i * block, 0), block) for i in range(pieces)}
    return all(chunks_are_blocks(end, block, rest) for end in ends)


def may_split_padded(logical: Sequence[int], seen: Sequence[int], sharding: Sharding, sizes: Sequence[int]) -> bool:
    """Whether every padded dim is split only where the blocks begin with the stored chunks."""
    return all(
        size == padded or chunks_are_blocks(size, padded, [sizes[axis] for axis in _axes_of(sharding, dim)])
        for dim, (size, padded) in enumerate(zip(logical, seen, strict=True))
    )


def _axes_of(sharding: Sharding, dim: int) -> list[int]:
    return [axis for axis, placement in enumerate(sharding) if isinstance(placement, Shard) and placement.dim == dim]
