"""Where the pieces of a dim lie: a *piece* is what one rank holds of a dim seen as (outer, n, rest), cut along n."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from autopar.base.errors import AutoparError


def coordinates(rank: int, sizes: Sequence[int]) -> tuple[int, ...]:
    """The place of a rank along each axis, row-major."""
    found: list[int] = []
    for size in reversed(sizes):
        found.append(rank % size)
        rank //= size
    return tuple(reversed(found))


def piece_of(size: int, num: int, index: int) -> tuple[int, int]:
    """Where the piece of one of `num` ranks begins in a dim that need not divide, and its length (0 when none is left).

    As torch.chunk and DTensor's Shard: ⌈size / num⌉ elements each, the last ranks fewer or none.
    """
    most = -(-size // num)
    start = min(index * most, size)
    return start, min(most, size - start)


def cut(x: Tensor, num: int, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
    """All pieces of `dim` seen as (outer, num, rest), stacked: [num, *piece_shape]. A view where it can be.

    zigzag: in stripes of odd number the pieces are dealt in reverse order.

    Raises:
        AutoparError: the dim does not divide by outer·num; zigzag with an odd number of stripes.
    """
    seen = _split(x, num, dim, outer, zigzag)
    if zigzag:
        even, odd = seen.unflatten(dim + 1, (outer // 2, 2)).unbind(dim + 2)
        seen = torch.stack([even, odd.flip(0)], dim + 2).flatten(dim + 1, dim + 2)
    return seen.flatten(dim + 1, dim + 2)


def take(x: Tensor, num: int, index: int, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
    """Entry `index` of `cut` alone. A view where it can be.

    Raises:
        AutoparError: as `cut`.
    """
    seen = _split(x, num, dim, outer, zigzag)
    piece = seen[index]
    if zigzag:
        even, odd = (seen[at].unflatten(dim, (outer // 2, 2)) for at in (index, num - 1 - index))
        piece = torch.stack([even.select(dim + 1, 0), odd.select(dim + 1, 1)], dim + 1).flatten(dim, dim + 1)
    return piece.flatten(dim, dim + 1)


def _split(x: Tensor, num: int, dim: int, outer: int, zigzag: bool) -> Tensor:
    """[..., outer·num·rest, ...] to a view [num, ..., outer, rest, ...]."""
    _check_zigzag(outer, zigzag)
    length = x.shape[dim]
    if length % (outer * num):
        raise AutoparError(
            f"dim {dim} of a tensor {tuple(x.shape)} cannot be cut into {num} pieces",
            values=f"{length} elements in {outer} stripes" if outer > 1 else f"{length} elements",
            remedy="choose an axis size that divides it",
        )
    return x.unflatten(dim, (outer, num, length // (outer * num))).movedim(dim + 1, 0)


def join(pieces: Tensor, dim: int, outer: int = 1, zigzag: bool = False) -> Tensor:
    """The inverse of `cut`: [num, *piece_shape] to the tensor with `dim` whole, contiguous.

    Raises:
        AutoparError: the pieces do not have `outer` stripes; zigzag with an odd number of them.
    """
    _check_zigzag(outer, zigzag)
    shape = pieces.shape[1:]
    if shape[dim] % outer:
        raise AutoparError(f"dim {dim} of pieces {tuple(shape)} does not have {outer} stripes")
    if zigzag:
        pairs = pieces.unflatten(dim + 1, (outer // 2, 2, shape[dim] // outer)).movedim(0, dim + 2)
        even, odd = pairs.unbind(dim + 1)
        return torch.stack([even, odd.flip(dim + 1)], dim + 1).flatten(dim, dim + 3)
    split = pieces.unflatten(dim + 1, (outer, shape[dim] // outer)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2).contiguous()


def _check_zigzag(outer: int, zigzag: bool) -> None:
    if zigzag and outer % 2:
        raise AutoparError(f"{outer} stripes cannot be dealt zigzag", remedy="give an even number of stripes")
