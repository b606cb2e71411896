"""Between autopar's shardings and DTensors."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Size, Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Partial as TorchPartial
from torch.distributed.tensor import Replicate as TorchReplicate
from torch.distributed.tensor import Shard as TorchShard
from torch.distributed.tensor.placement_types import Placement as TorchPlacement

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import StridedShard, can_redistribute_strided, enable_strided_shards
from autopar.ir.sharding import REPLICATE, Partial, Placement, Shard, Sharding, format_sharding, replicated
from autopar.runtime.layout import local_part_shape


def to_dtensor_placements(
    sharding: Sharding, global_shape: Sequence[int], sizes: Sequence[int]
) -> tuple[TorchPlacement, ...]:
    """The DTensor placements under which every rank holds the same elements as under `sharding`.

    Both apply splits of one dim in mesh order, each to what the earlier ones left: the map goes placement by placement.

    Raises:
        AutoparError: a split that does not divide, of a dim with stripes; a zigzag one, which DTensor has no word for;
            or one that this torch would gather wrongly.
    """
    axes = [f"axis{i}" for i in range(len(sharding))]
    if any(isinstance(p, Shard) and p.zigzag for p in sharding):
        raise AutoparError(
            f"a tensor {tuple(global_shape)} that is split zigzag cannot be a DTensor",
            values=format_sharding(sharding, axes),
            remedy="redistribute it first (autopar.runtime.layout.redistribute), or hand in or take out the whole",
        )
    try:
        local_part_shape(global_shape, sharding, sizes, (0,) * len(sizes))
    except AutoparError:
        raise AutoparError(
            f"a tensor {tuple(global_shape)} cannot be split evenly",
            values=f"{format_sharding(sharding, axes)} over {tuple(sizes)} ranks",
        ) from None
    strided = [p for p in sharding if isinstance(p, Shard) and p.outer > 1]
    if strided:
        enable_strided_shards()
    if strided and not can_redistribute_strided():
        raise AutoparError(
            "this version of torch cannot gather a dim that is split in stripes", remedy="Use torch 2.11 to 2.13"
        )
    return tuple(_to_torch(placement) for placement in sharding)


def from_dtensor_placements(placements: Sequence[TorchPlacement]) -> Sharding:
    """The inverse of `to_dtensor_placements`.

    Raises:
        AutoparError: a placement that autopar has no word for.
    """
    return tuple(_from_torch(placement) for placement in placements)


def make_dtensor(local: Tensor, device_mesh: DeviceMesh, sharding: Sharding, global_shape: Sequence[int]) -> DTensor:
    """A DTensor around this rank's piece; nothing is sent or compared. Differentiable with respect to `local`."""
    return DTensor.from_local(
        local,
        device_mesh,
        to_dtensor_placements(sharding, global_shape, tuple(device_mesh.shape)),
        run_check=False,
        shape=Size(global_shape),
        stride=contiguous_stride(global_shape),
    )


def contiguous_stride(shape: Sequence[int]) -> tuple[int, ...]:
    """Row-major strides."""
    strides: list[int] = []
    step = 1
    for size in reversed(shape):
        strides.append(step)
        step *= max(size, 1)
    return tuple(reversed(strides))


def _to_torch(placement: Placement) -> TorchPlacement:
    if isinstance(placement, Shard):
        if placement.outer == 1:
            return TorchShard(placement.dim)
        return StridedShard(placement.dim, split_factor=placement.outer)
    if isinstance(placement, Partial):
        return TorchPartial(placement.op)
    return TorchReplicate()


def _from_torch(placement: TorchPlacement) -> Placement:
    if isinstance(placement, StridedShard):
        return Shard(placement.dim, int(placement.split_factor))
    if isinstance(placement, TorchShard):
        return Shard(placement.dim)
    if isinstance(placement, TorchReplicate):
        return REPLICATE
    if isinstance(placement, TorchPartial) and placement.reduce_op in ("sum", "max"):
        return Partial(placement.reduce_op)
    raise AutoparError(
        f"a DTensor placed as {placement} cannot be used", remedy="Redistribute it to Shard or Replicate"
    )


def as_parameter(
    local: Tensor, device_mesh: DeviceMesh, sharding: Sharding | None, original: nn.Parameter
) -> nn.Parameter:
    """A Parameter(DTensor) in the place of `original`: its requires_grad and whatever users hung on it."""
    placed = sharding or replicated(device_mesh.ndim)
    dtensor = make_dtensor(local.detach(), device_mesh, placed, original.shape)
    parameter = nn.Parameter(dtensor, requires_grad=original.requires_grad)
    vars(parameter).update(vars(original))
    parameter._autopar_placed = True  # type: ignore[attr-defined]
    return parameter
