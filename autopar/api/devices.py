"""The devices that a program is to run on, from what a caller gives as the mesh."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh


def devices_of(mesh: DeviceMesh | str | Mapping[str, int], asks: str) -> DeviceMesh:
    """The torch DeviceMesh that is meant: itself, or one with these axes over all ranks (``"dp=2,tp=2"``,
    ``{"dp": 2, "tp": 2}``), of GPUs where there are any. Collective; starts torch.distributed where nobody has.

    asks: `compile`, for the message.

    Raises:
        AutoparError: axes that are none, or not as many as there are ranks; no ranks; an `autopar.Mesh`, which is of
            some hardware and of no devices.
    """
    if isinstance(mesh, Mesh):
        raise AutoparError(
            f"{asks} needs the devices: a torch DeviceMesh",
            values=f"given autopar.Mesh {mesh}",
            remedy=f"use {_call_of(mesh)}, or {_axes_of(mesh)!r}, under torchrun; autopar.plan takes this mesh",
        )
    if not isinstance(mesh, str | Mapping):
        return mesh
    asked = Mesh(mesh, hardware="cpu")
    if not dist.is_initialized():
        try:
            dist.init_process_group()
        except ValueError as error:  # torch's own, of the variables that torchrun sets
            raise AutoparError(
                f"{asks} was given the mesh {_axes_of(asked)}, and no ranks were started",
                values=str(error),
                remedy=f"start it by torchrun --nproc-per-node {asked.num_devices}; autopar.plan needs no ranks",
            ) from error
    if dist.get_world_size() != asked.num_devices:
        raise AutoparError(
            f"the mesh has {asked.num_devices} ranks, {dist.get_world_size()} processes were started",
            values=f"mesh {asked}",
            remedy=f"use torchrun --nproc-per-node {asked.num_devices}, or a mesh of {dist.get_world_size()}",
        )
    return init_device_mesh(_device_type(), asked.sizes, mesh_dim_names=asked.axis_names)


def _device_type() -> str:
    """What the process group reduces: GPUs where it can."""
    on_gpus = torch.cuda.is_available() and dist.get_backend() != dist.Backend.GLOO
    return "cuda" if on_gpus else "cpu"


def _axes_of(mesh: Mesh) -> str:
    return ",".join(f"{name}={size}" for name, size in mesh.axes)


def _call_of(mesh: Mesh) -> str:
    """The call that makes the devices of a mesh, as one writes it."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    return f'torch.distributed.init_device_mesh("{device}", {mesh.sizes}, mesh_dim_names={mesh.axis_names})'
