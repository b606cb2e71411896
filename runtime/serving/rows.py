"""Caches whose rows come and go, in pieces: rows of one are written into another's, all rows move along.

Tensors are states as a program gives them, DTensors that are seen whole or plain ones.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.base.huggingface.reuse import position_dims
from autopar.base.torch_compat.distributed import local_tensor
from autopar.runtime.along import axis_along, window
from autopar.runtime.chosen_among import pieces_along
from autopar.runtime.seen_whole import SeenWhole, whole


@dataclass(frozen=True, slots=True)
class Move:
    """`count` positions of a row, from `begin`, to those of another cache's row from `at`."""

    row: int
    begin: int
    count: int
    to_row: int
    at: int


@torch.no_grad()
def put(cache: Any, source: Any, moves: Sequence[Move]) -> Any:
    """The cache with what `moves` write into it from another one; what does not grow is written whole.

    Tensors of the cache may be written in place: they are the caller's alone. Collective where positions lie in pieces,
    of which those that are written travel, and where a state lies otherwise than the source's does, which is gathered.
    """
    pairs = zip(cache.states(), source.states(), position_dims(cache), strict=True)
    return type(cache).of(cache.layouts(), [_put(x, y, dim, moves) for x, y, dim in pairs])


@torch.no_grad()
def moved(cache: Any, by: int) -> Any:
    """The cache with all positions `by` columns to the right, or to the left; what falls out comes in at the other
    side, and is nobody's.
    """
    states = [
        x if dim is None else torch.roll(x, by, dim)
        for x, dim in zip(cache.states(), position_dims(cache), strict=True)
    ]
    found = type(cache).of(cache.layouts(), states)
    found.advance(by)
    return found


def row_pieces(cache: Any) -> int:
    """In how many pieces the rows of a cache lie, where they lie in most."""
    states = [x for x in cache.states() if x.dim() and isinstance(x, DTensor)]
    return max((len(pieces_along(x, 0)[0]) for x in states), default=1)


def _put(x: Tensor, source: Tensor, dim: int | None, moves: Sequence[Move]) -> Tensor:
    if not x.dim():
        return x
    if not _lie_alike(x, source, dim, {0}):
        if dim is not None and _lie_alike(x, source, dim, {0, dim}) and None not in _axes(x, source, dim):
            return _put_in_pieces(x, source, dim, moves)
        target = whole(x).clone()
        _write(target, whole(source), dim, moves, 0, 0)
        return target
    if not isinstance(x, DTensor) or not isinstance(source, DTensor):
        _write(x, source, dim, moves, 0, 0)
        return x
    if local_tensor(x).is_meta:  # another stage keeps it
        return x
    first = [sum(sizes[:own]) for sizes, own in (pieces_along(x, 0), pieces_along(source, 0))]
    _write(local_tensor(x), local_tensor(source), dim, moves, *first)
    return x


def _axes(x: Any, source: Any, dim: int) -> set[int | None]:
    return {axis_along(x, dim), axis_along(source, dim)}


def _put_in_pieces(x: Any, source: Any, dim: int, moves: Sequence[Move]) -> Tensor:
    """Positions lie in pieces: those that are written go to all ranks of the axis, each of which writes its own."""
    axis, device_mesh = axis_along(x, dim), x.device_mesh
    assert axis is not None
    group, own = device_mesh.get_group(axis), device_mesh.get_local_rank(axis)
    target, given = local_tensor(x), local_tensor(source)
    first, first_given = own * target.shape[dim], own * given.shape[dim]
    at, given_at = (sum(sizes[:own]) for sizes, own in (pieces_along(x, 0), pieces_along(source, 0)))
    for move in moves:
        if not 0 <= move.to_row - at < len(target):  # so for all ranks of the axis
            continue
        found = window(given[move.row - given_at], dim - 1, move.begin, move.count, first_given, group)
        start, stop = max(move.at, first), min(move.at + move.count, first + target.shape[dim])
        if start < stop:
            into = target[move.to_row - at].narrow(dim - 1, start - first, stop - start)
            into.copy_(found.narrow(dim - 1, start - move.at, stop - start))
    return x


def _lie_alike(x: Tensor, source: Tensor, dim: int | None, free: set[int]) -> bool:
    """Whether each rank that has a row has what goes into it: pieces lie alike, cut along no dim but `free` whose sizes
    differ, and not along positions unless these are free.
    """
    if not isinstance(x, DTensor) or not isinstance(source, DTensor):
        return not isinstance(x, DTensor) and not isinstance(source, DTensor)
    if not all(isinstance(each, SeenWhole) and each._whole is None for each in (x, source)):
        return local_tensor(x).is_meta
    if any(type(each) not in (Shard, Replicate) for each in (*x.placements, *source.placements)):
        return False
    split = {each.dim for each in x.placements if isinstance(each, Shard)} - free
    alike = all(x.shape[each] == source.shape[each] for each in split)
    return x.placements == source.placements and dim not in split and alike


def _write(x: Tensor, source: Tensor, dim: int | None, moves: Sequence[Move], first: int, first_source: int) -> None:
    """first: the numbers of the rows with which these pieces begin."""
    for move in moves:
        row, to_row = move.row - first_source, move.to_row - first
        if not 0 <= to_row < x.shape[0]:
            continue
        assert 0 <= row < source.shape[0], "a lane serves the slots of the ranks that it lies on"
        if dim is None:
            x[to_row].copy_(source[row])
        else:
            given = source[row].narrow(dim - 1, move.begin, move.count)
            x[to_row].narrow(dim - 1, move.at, move.count).copy_(given)
