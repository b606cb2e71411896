"""What is done along one dim of what lies in pieces, without the whole: rows of a cache that are taken by an index or
repeated, positions that are added behind.

    keys.index_select(0, rows)            [8, heads/tp, T, D]: each rank takes the rows of its own heads
    keys.repeat_interleave(4, 0)          rows in even pieces, too: each rank repeats its own
    F.pad(keys, (0, 0, 0, 64))            64 positions more, where no axis splits them
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import torch
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
    """As of torch, in pieces; None where an axis splits the dim, or there are several."""
    if type(dims) is not int or _ranks_along(x, dims) != 1:
        return None
    return _held(local_tensor(x).roll(shifts, dims), x, dims, x.shape[dims])


BY_NAME: dict[str, Callable[..., DTensor | None]] = {
    "index_select": index_select, "repeat_interleave": repeat_interleave, "pad": pad, "roll": roll
}  # fmt: skip
"""Functions of torch -> what they give of pieces: (pieces, their arguments)."""


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
