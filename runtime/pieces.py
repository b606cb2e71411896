"""Where the pieces of a dim lie: a *piece* is what one rank holds of a dim seen as (outer, n, rest), cut along n."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor

from autopar.errors import AutoparError


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


def cut(x: Tensor, num: int, dim: int, outer: int = 1) -> Tensor:
    """All pieces of `dim` seen as (outer, num, rest), stacked: [num, *piece_shape]. A view where it can be.

    Raises:
        AutoparError: the dim does not divide by outer·num.
    """
    return split(x, num, dim, outer).flatten(dim + 1, dim + 2)


def split(x: Tensor, num: int, dim: int, outer: int) -> Tensor:
    """[..., outer·num·rest, ...] to a view [num, ..., outer, rest, ...]."""
    length = x.shape[dim]
    if length % (outer * num):
        raise AutoparError(
            f"dim {dim} of a tensor {tuple(x.shape)} cannot be cut into {num} pieces",
            values=f"{length} elements in {outer} stripes" if outer > 1 else f"{length} elements",
            remedy="choose an axis size that divides it",
        )
    return x.unflatten(dim, (outer, num, length // (outer * num))).movedim(dim + 1, 0)


def join(pieces: Tensor, dim: int, outer: int = 1) -> Tensor:
    """The inverse of `cut`: [num, *piece_shape] to the tensor with `dim` whole, contiguous.

    Raises:
        AutoparError: the pieces do not have `outer` stripes.
    """
    shape = pieces.shape[1:]
    if shape[dim] % outer:
        raise AutoparError(f"dim {dim} of pieces {tuple(shape)} does not have {outer} stripes")
    split = pieces.unflatten(dim + 1, (outer, shape[dim] // outer)).movedim(0, dim + 1)
    return split.flatten(dim, dim + 2).contiguous()
