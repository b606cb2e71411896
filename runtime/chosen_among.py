"""The largest of what lies in pieces, without the whole: each rank's own, with where it is, and the best of these.

    logits[:, -1]               [8, 128256/tp]: a part of the pieces, nothing is sent
    logits[:, -1].argmax(-1)    8 pairs of a value and its place from each rank, where whole rows have 8 · 128256 values
    torch.topk(logits, 5)       5 pairs from each rank
    rows.argmax(-1)             where rows are split: pairs of each rank's rows

What comes out is whole, the same on every rank. Of equal values it is the first, as on one device.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard
from torch.distributed.tensor.placement_types import Placement

from autopar.base.torch_compat.distributed import dtensor_of, local_tensor
from autopar.runtime.communicator import Communicator


def is_plain_index(index: Any) -> bool:
    """Whether it is of numbers, slices, None and Ellipsis."""
    given = index if isinstance(index, tuple) else (index,)
    return all(type(each) in (int, slice, type(None), type(Ellipsis)) for each in given)


def part(x: DTensor, index: Any) -> DTensor | None:
    """`x[index]` in pieces, for an index of numbers, slices, None and Ellipsis that takes all of what is split; None
    for any other.
    """
    if not _is_plain(x) or not is_plain_index(index):
        return None
    index = index if isinstance(index, tuple) else (index,)
    taken = sum(type(each) in (int, slice) for each in index)
    rest = [slice(None)] * (x.ndim - taken)
    if any(each is Ellipsis for each in index):
        at = next(place for place, each in enumerate(index) if each is Ellipsis)
        if any(each is Ellipsis for each in index[at + 1 :]):
            return None
        index = (*index[:at], *rest, *index[at + 1 :])
    else:
        index = (*index, *rest)
    moved: dict[int, int] = {}
    shape: list[int] = []
    dim = 0
    for each in index:
        if type(each) is int:
            dim += 1
        elif each is None:
            shape.append(1)
        else:
            if each == slice(None):
                moved[dim] = len(shape)
            shape.append(len(range(*each.indices(x.shape[dim]))) if dim < x.ndim else 0)
            dim += 1
    if dim != x.ndim or any(type(each) is Shard and each.dim not in moved for each in x.placements):
        return None
    local = local_tensor(x)[index].detach()
    placements = [Shard(moved[each.dim]) if isinstance(each, Shard) else each for each in x.placements]
    return dtensor_of(local, x, placements, shape)


def argmax(
    x: DTensor, input: Any, dim: int | None = None, keepdim: bool = False, *, among: Communicator | None = None
) -> Tensor | None:
    """As of torch, whole; None where the pieces cannot tell it. among: who sends."""
    found = None if dim is None else _best(x, dim, 1, among)
    if found is None:
        return None
    values, places, dim = found
    best = places.gather(dim, values.argmax(dim, keepdim=True))
    return best if keepdim else best.squeeze(dim)


def topk(
    x: DTensor, input: Any, k: int, dim: int = -1, largest: bool = True, sorted: bool = True, *,
    among: Communicator | None = None,
) -> Any:  # fmt: skip
    """As of torch, whole; None where the pieces cannot tell it. among: who sends."""
    is_one = -x.ndim <= dim < x.ndim and 0 < k <= x.shape[dim] and largest and not x.requires_grad
    found = _best(x, dim, k, among) if is_one else None
    if found is None:
        return None
    values, places, dim = found
    best = torch.topk(values, k, dim, largest, sorted)
    return type(best)((best.values, places.gather(dim, best.indices)))


BY_NAME: dict[str, Callable[..., Any]] = {"argmax": argmax, "topk": topk}
"""Functions of torch -> what they give of pieces: (pieces, their arguments)."""


def called(function: Callable[..., Any], x: DTensor, args: Any, kwargs: Any, **more: Any) -> Any:
    """What one of such functions gives for a call; None where it is to be asked of the whole."""
    try:
        _signature(function).bind(x, *args, **kwargs)
    except TypeError:  # an `out`, or what is no call of it: torch says so
        return None
    return function(x, *args, **kwargs, **more)


@cache
def _signature(function: Callable[..., Any]) -> inspect.Signature:
    return inspect.signature(function)


def _is_plain(x: DTensor) -> bool:
    """Whether its pieces follow one another."""
    return all(type(each) in (Shard, Replicate) for each in x.placements)


def _best(x: DTensor, dim: int, count: int, among: Communicator | None = None) -> tuple[Tensor, Tensor, int] | None:
    """The `count` largest values of each rank's piece along a dim, whole, and where they are; and the dim, counted from
    the front. It is split, or others are: rows of which each rank has some.
    """
    if not -x.ndim <= dim < x.ndim or not x.is_floating_point() or not _is_plain(x):
        return None
    dim %= x.ndim
    if not any(type(each) is Shard for each in x.placements):
        return None
    sizes, own = pieces_along(x, dim)
    local, have = local_tensor(x).detach().movedim(dim, -1), min(count, sizes[own])
    if count == 1 and have:  # `topk` leaves open which of equal values it takes
        places = local.argmax(-1, keepdim=True)
        values = local.gather(-1, places)
    else:
        values, places = local.topk(have, -1)
    # Both are exact in float64, and go in one message; pieces of fewer values send some that are left out again.
    sent = torch.stack([values.double(), (places + sum(sizes[:own])).double()], -2)
    if have < count:
        sent = torch.nn.functional.pad(sent, (0, count - have))
    sent = sent.flatten(-2)
    shape = [*(size for place, size in enumerate(x.shape) if place != dim), len(sizes) * 2 * count]

    def at_the_end(placement: Placement) -> Placement:
        if not isinstance(placement, Shard):
            return placement
        return Shard(x.ndim - 1 if placement.dim == dim else placement.dim - (placement.dim > dim))

    held = dtensor_of(sent.to(x.device_mesh.device_type), x, [at_the_end(each) for each in x.placements], shape)
    every = None if among is None else _from_neighbours(held, among)
    if every is None:
        every = local_tensor(held.redistribute(placements=[Replicate()] * x.device_mesh.ndim)).to(local.device)
    pairs = every.unflatten(-1, (len(sizes), 2, count)).transpose(-2, -3).flatten(-2)
    if min(sizes) < count:
        kept = [number * count + place for number, size in enumerate(sizes) for place in range(min(count, size))]
        pairs = pairs[..., torch.tensor(kept, device=pairs.device)]
    values, places = pairs.unbind(-2)
    return values.to(x.dtype).movedim(-1, dim), places.long().movedim(-1, dim), dim


def _from_neighbours(held: DTensor, among: Communicator) -> Tensor | None:
    """All of it, where ranks exchange small messages by themselves (`nearby.py`); None where they do not, or pieces are
    of several sizes.
    """
    names, shape = held.device_mesh.mesh_dim_names or (), list(held.shape)
    split = [(name, each.dim) for name, each in zip(names, held.placements) if type(each) is Shard]
    for name, dim in split:
        if name not in among.axes or shape[dim] % among.size(name):
            return None
        shape[dim] //= among.size(name)
    found = local_tensor(held)
    for name, dim in reversed(split):
        pieces = among.beside(found, name)
        if pieces is None:
            return None
        found = torch.cat(pieces.unbind(), dim)
    return found


def pieces_along(x: DTensor, dim: int) -> tuple[list[int], int]:
    """The sizes of all pieces along a dim, in order, and which is this rank's; it is cut as `torch.chunk` cuts, axis by
    axis.
    """
    sizes, own = [x.shape[dim]], 0
    for axis, placement in enumerate(x.placements):
        if isinstance(placement, Shard) and placement.dim == dim:
            ranks = x.device_mesh.size(axis)
            sizes = [
                max(0, min(size, (rank + 1) * -(-size // ranks)) - rank * -(-size // ranks))
                for size in sizes
                for rank in range(ranks)
            ]
            own = own * ranks + x.device_mesh.get_local_rank(axis)
    return sizes, own
