"""What is done along one dim of what lies in pieces, without the whole: rows of a cache that are taken by an index or
repeated, positions that are added behind.

    keys.index_select(0, rows)            [8, heads/tp, T, D]: each rank takes the rows of its own heads
    keys.repeat_interleave(4, 0)          rows in even pieces, too: each rank repeats its own
    F.pad(keys, (0, 0, 0, 64))            64 positions more, where no axis splits them
    keys.roll(3, 2)                       positions in even pieces, too: each rank sends to two others
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.tensor import DTensor, Replicate, Shard

from autopar.base.torch_compat.distributed import local_tensor


def index_select(x: DTensor, input: Any, dim: int, index: Any) -> DTensor | None:
    """As of torch, in pieces; None where an axis splits the dim."""
    if not isinstance(index, Tensor) or isinstance(index, DTensor) or _ranks_along(x, dim) != 1:
        return None
    local = local_tensor(x)
    return _held(local.index_select(dim, index.to(local.device)), x, dim, index.numel())


def repeat_interleave(x: DTensor, input: Any, repeats: Any, dim: int | None = None) -> DTensor | None:
    """As of torch, in pieces; None where these are uneven, or the numbers differ from element to element."""
    if type(repeats) is not int or dim is None:
        return None
    ranks = _ranks_along(x, dim)
    if ranks is None or x.shape[dim] % ranks:
        return None
    return _held(local_tensor(x).repeat_interleave(repeats, dim), x, dim, x.shape[dim] * repeats)


def pad(x: DTensor, input: Any, pad: Sequence[int], mode: str = "constant", value: Any = None) -> DTensor | None:
    """As of torch, in pieces; None where an axis splits a dim that gets longer."""
    dims = [x.ndim - 1 - place // 2 for place, count in enumerate(pad) if count]
    if mode != "constant" or len(set(dims)) != 1 or _ranks_along(x, dims[0]) != 1:
        return None
    local = torch.nn.functional.pad(local_tensor(x), list(pad), mode, value)
    return _held(local, x, dims[0], local.shape[dims[0]])


def roll(x: DTensor, input: Any, shifts: Any, dims: Any = None) -> DTensor | None:
    """As of torch, in pieces; None where several axes split the dim, or unevenly, and where there are several dims."""
    if type(dims) is not int or type(shifts) is not int:
        return None
    axis = axis_along(x, dims)
    if axis is not None:
        return _held(_rolled(x, shifts, dims % x.ndim, axis), x, dims, x.shape[dims])
    if _ranks_along(x, dims) != 1:
        return None
    return _held(local_tensor(x).roll(shifts, dims), x, dims, x.shape[dims])


BY_NAME: dict[str, Callable[..., DTensor | None]] = {
    "index_select": index_select, "repeat_interleave": repeat_interleave, "pad": pad, "roll": roll
}  # fmt: skip
"""Functions of torch -> what they give of pieces: (pieces, their arguments)."""


def axis_along(x: DTensor, dim: int) -> int | None:
    """The number of the one mesh axis that cuts a dim into even pieces; None where there is no such."""
    axes = [axis for axis, each in enumerate(x.placements) if isinstance(each, Shard) and each.dim == dim % x.ndim]
    if len(axes) != 1 or _ranks_along(x, dim) is None or x.shape[dim] % x.device_mesh.size(axes[0]):
        return None
    return axes[0]


def window(piece: Tensor, dim: int, begin: int, count: int, first: int, group: dist.ProcessGroup) -> Tensor:
    """The elements from `begin` of a dim that lies in pieces over `group`, of which this one begins with `first`; the
    same on every rank, bit by bit. Collective.
    """
    shape = list(piece.shape)
    shape[dim] = count
    found = piece.new_zeros(shape)
    start, stop = max(begin, first), min(begin + count, first + piece.shape[dim])
    if start < stop:
        found.narrow(dim, start - begin, stop - start).copy_(piece.narrow(dim, start - first, stop - start))
    dist.all_reduce(found.view(torch.uint8), group=group)  # bytes are zero elsewhere: nothing is rounded
    return found


def _rolled(x: DTensor, by: int, dim: int, axis: int) -> Tensor:
    """This rank's piece of the rolled tensor: the end of one rank's, and the beginning of the next one's."""
    ranks, own = x.device_mesh.size(axis), x.device_mesh.get_local_rank(axis)
    piece = local_tensor(x).movedim(dim, 0).contiguous()
    size = len(piece)
    after, cut = divmod(-by % (ranks * size), size)
    end, begin = piece[cut:], piece[:cut]
    to_end, to_begin = (own - after) % ranks, (own - after - 1) % ranks
    sent = torch.cat([end, begin] if to_end < to_begin else [begin, end]).view(torch.uint8)
    sizes = [size - cut if rank == to_end else cut if rank == to_begin else 0 for rank in range(ranks)]
    of_end, of_begin = (own + after) % ranks, (own + after + 1) % ranks
    comes = [size - cut if rank == of_end else cut if rank == of_begin else 0 for rank in range(ranks)]
    found = torch.empty_like(sent)
    dist.all_to_all_single(found, sent, comes, sizes, group=x.device_mesh.get_group(axis))
    found = found.view(piece.dtype)
    if of_begin < of_end:
        found = torch.cat([found[cut:], found[:cut]])
    return found.movedim(0, dim).contiguous()


def _ranks_along(x: DTensor, dim: int) -> int | None:
    """How many pieces a dim is in; None where pieces do not follow one another, or there is no such dim."""
    if not -x.ndim <= dim < x.ndim or any(type(each) not in (Shard, Replicate) for each in x.placements):
        return None
    ranks = 1
    for axis, each in enumerate(x.placements):
        if isinstance(each, Shard) and each.dim == dim % x.ndim:
            ranks *= x.device_mesh.size(axis)
    return ranks


def _held(local: Tensor, like: DTensor, dim: int, size: int) -> DTensor:
    """A DTensor of this piece, placed as another one, that is `size` long along a dim."""
    shape = list(like.shape)
    shape[dim] = size
    stride = torch.empty(shape, device="meta").stride()
    return DTensor.from_local(
        local, like.device_mesh, like.placements, run_check=False, shape=torch.Size(shape), stride=stride
    )
