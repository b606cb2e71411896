"""What a collective takes, and what it gives: the meaning of `comm`'s methods, in types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from autopar.ir.redistribution import stripes_left
from autopar.ir.sharding import REPLICATE, Partial, Replicate, Shard, code
from autopar.runtime.checker.types import Axes, Typed


class Move(NamedTuple):
    """One collective over one axis, as `comm`'s methods are called. size: of an uneven dim, else None."""

    kind: str
    axis: int
    dim: int = 0
    outer: int = 1
    from_dim: int = 0
    from_outer: int = 1
    op: str = "sum"
    zigzag: bool = False
    from_zigzag: bool = False
    size: int | None = None


def after(move: Move, given: Typed, axes: Axes) -> Typed | str:
    """The type of the result, or why there is none."""
    if axes.sizes[move.axis] == 1:
        return given
    now = given.sharding[move.axis]
    name = axes.names[move.axis]
    wants_terms = move.kind in ("all_reduce", "reduce_scatter")
    if wants_terms and now != Partial(move.op):
        return f"there are no terms of a {_NOUNS.get(move.op, move.op)} over {name} in it"
    if move.kind == "slice" and not isinstance(now, Replicate):
        return f"over {name} the ranks do not hold the whole of it"
    if move.kind == "all_reduce":
        return given.over(move.axis, REPLICATE)
    undone = given
    if move.kind in ("all_gather", "all_to_all"):
        is_gather = move.kind == "all_gather"
        own = (move.dim, move.outer, move.zigzag) if is_gather else (move.from_dim, move.from_outer, move.from_zigzag)
        if why := _no_pieces(given, move.axis, own, axes):
            return why
        undone = given.over(move.axis, REPLICATE)
        if is_gather:
            return _of_size(undone, move)
    found = _split(undone, move, axes)
    return found if isinstance(found, str) else _of_size(found, move)


_NOUNS: Mapping[str, str] = {"sum": "sum", "max": "maximum", "min": "minimum"}


def _no_pieces(given: Typed, axis: int, own: tuple[int, int, bool], axes: Axes) -> str:
    """Why the axis's split is not the one that is undone; "" where it is."""
    now, (dim, outer, zigzag) = given.sharding[axis], own
    name = axes.names[axis]
    if not isinstance(now, Shard):
        return f"{name} does not split it"
    left = stripes_left(code(now), axis, [code(each) for each in given.sharding], axes.sizes)
    if now.dim != dim:
        return f"{name} splits its dim {now.dim}, not {dim}"
    if left != outer or now.zigzag != zigzag:
        return f"{name} splits dim {dim} in other stripes"
    return ""


def _split(given: Typed, move: Move, axes: Axes) -> Typed | str:
    """The axis's pieces of what is whole, or terms, over it."""
    later = [given.sharding[axis] for axis in range(move.axis + 1, len(axes.sizes))]
    parts = 1
    for placement, size in zip(later, axes.sizes[move.axis + 1 :], strict=True):
        parts *= size if isinstance(placement, Shard) and placement.dim == move.dim else 1
    for outer in dict.fromkeys((move.outer * parts, move.outer)):
        if move.zigzag and outer % 2:
            continue
        made = given.over(move.axis, Shard(move.dim, outer, move.zigzag))
        codes = [code(each) for each in made.sharding]
        if stripes_left(codes[move.axis], move.axis, codes, axes.sizes) == move.outer:
            return made
    return f"dim {move.dim} is split by {axes.names[move.axis]} after others that do not let it"


def _of_size(given: Typed, move: Move) -> Typed | str:
    if move.size is not None and given.shape[move.dim] != move.size:
        return f"its dim {move.dim} has {given.shape[move.dim]} elements, not {move.size}"
    return given


def resized(given: Typed, dim: int, size: int, axes: Axes) -> Typed | str:
    """Of `ops.resize`: a dim cut or padded at its end, locally; of a dim that is split, where the blocks stay."""
    pieces = 1
    for placement, ranks in zip(given.sharding, axes.sizes, strict=True):
        if isinstance(placement, Partial):
            continue
        if isinstance(placement, Shard) and placement.dim == dim:
            if placement.outer != 1:
                return f"dim {dim} is split in stripes, which have no end of their own"
            pieces *= ranks
    if pieces > 1 and not _same_blocks(given.shape[dim], size * pieces, pieces):
        return f"blocks of {size} of its dim {dim} would begin elsewhere"
    shape: Sequence[int] = (*given.shape[:dim], size * pieces, *given.shape[dim + 1 :])
    return Typed(tuple(shape), given.sharding)


def _same_blocks(before: int, now: int, pieces: int) -> bool:
    return -(-before // pieces) == -(-now // pieces)
