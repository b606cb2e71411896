"""What a collective takes, and what it gives: the meaning of `comm`'s methods, in types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from autopar.ir.redistribution import stripes_left
from autopar.ir.sharding import REPLICATE, Partial, Replicate, Shard, Step, code
from autopar.runtime.checker.types import Axes, Typed


def after(step: Step, given: Typed, axes: Axes) -> Typed | str:
    """The type of the result, or why there is none."""
    if axes.sizes[step.axis] == 1:
        return given
    now = given.sharding[step.axis]
    name = axes.names[step.axis]
    wants_terms = step.kind in ("all_reduce", "reduce_scatter")
    if wants_terms and now != Partial(step.op):
        return f"there are no terms of a {_NOUNS.get(step.op, step.op)} over {name} in it"
    if step.kind == "slice" and not isinstance(now, Replicate):
        return f"over {name} the ranks do not hold the whole of it"
    if step.kind == "all_reduce":
        return given.over(step.axis, REPLICATE)
    undone = given
    if step.kind in ("all_gather", "all_to_all"):
        is_gather = step.kind == "all_gather"
        own = (step.dim, step.outer, step.zigzag) if is_gather else (step.from_dim, step.from_outer, step.from_zigzag)
        if why := _no_pieces(given, step.axis, own, axes):
            return why
        undone = given.over(step.axis, REPLICATE)
        if is_gather:
            return _of_size(undone, step)
    found = _split(undone, step, axes)
    return found if isinstance(found, str) else _of_size(found, step)


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


def _split(given: Typed, step: Step, axes: Axes) -> Typed | str:
    """The axis's pieces of what is whole, or terms, over it."""
    later = [given.sharding[axis] for axis in range(step.axis + 1, len(axes.sizes))]
    parts = 1
    for placement, size in zip(later, axes.sizes[step.axis + 1 :], strict=True):
        parts *= size if isinstance(placement, Shard) and placement.dim == step.dim else 1
    for outer in dict.fromkeys((step.outer * parts, step.outer)):
        if step.zigzag and outer % 2:
            continue
        made = given.over(step.axis, Shard(step.dim, outer, step.zigzag))
        codes = [code(each) for each in made.sharding]
        if stripes_left(codes[step.axis], step.axis, codes, axes.sizes) == step.outer:
            return made
    return f"dim {step.dim} is split by {axes.names[step.axis]} after others that do not let it"


def _of_size(given: Typed, step: Step) -> Typed | str:
    if step.size and given.shape[step.dim] != step.size:
        return f"its dim {step.dim} has {given.shape[step.dim]} elements, not {step.size}"
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
    return Typed(tuple(shape), given.sharding, given.term)


def _same_blocks(before: int, now: int, pieces: int) -> bool:
    return -(-before // pieces) == -(-now // pieces)
