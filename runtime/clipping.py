"""The norm of all gradients, each element counted once however it is placed, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from types import FrameType

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.distributed import is_split, local_tensor
from autopar.runtime.communicator import Communicator
from autopar.strategies.pipelining.spec import AXIS


@dataclass(frozen=True, slots=True, eq=False)
class Stages:
    """A pipeline, whose ranks hold different parameters: the whole mesh, its axis, the dtype of norms on all of them.

    copies: ids of the parameters that an earlier rank of the axis holds too, and counts.
    """

    comm: Communicator
    axis: str
    copies: Collection[int]
    dtype: torch.dtype


def check_asks_for_all(axes: Collection[str], asking: FrameType) -> None:
    """Raises an AutoparError where torch's own clipping goes through the parameters of a rank of a pipeline: it would
    clip each stage by a norm of its own. axes: of the mesh. asking: who goes through them.
    """
    is_torchs = AXIS in axes and asking.f_globals.get("__name__") == torch.nn.utils.clip_grad.__name__
    if is_torchs and asking.f_code.co_name == "clip_grad_norm_":
        raise _of_one_stage()


def mark_stage(mesh: DeviceMesh) -> None:
    """Note of the mesh of a stage that there are others beside it."""
    setattr(mesh, _OF_STAGE, True)


def check_of_all_stages(tensors: Sequence[Tensor]) -> None:
    """Raises an AutoparError where the norm is asked of several gradients, a list of the script's own, that lie on the
    ranks of one stage: ranks of other stages have others of the list.
    """
    if len(tensors) > 1 and any(isinstance(x, DTensor) and hasattr(x.device_mesh, _OF_STAGE) for x in tensors):
        raise _of_one_stage()


_OF_STAGE = "_autopar_of_stage"


def _of_one_stage() -> AutoparError:
    return AutoparError(
        "torch.nn.utils.clip_grad_norm_ sees the gradients of one rank's stages, and would scale each stage by a "
        "norm of its own",
        remedy="compiled.clip_grad_norm_(max_norm) takes the norm over all stages",
    )


def clip_grad_norm_(
    comm: Communicator,
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    stages: Stages | None = None,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`; the norm they had, a plain scalar tensor.

    As `torch.nn.utils.clip_grad_norm_`, over the global gradients: the same number on every rank. Collective. comm: of
    the mesh that the gradients lie on.

    Raises:
        AutoparError: a norm that is not finite, if asked to.
    """
    pairs = [(parameter, parameter.grad) for parameter in parameters if isinstance(parameter.grad, DTensor)]
    gradients = [gradient for _, gradient in pairs]
    counted = [gradient for parameter, gradient in pairs if stages is None or id(parameter) not in stages.copies]
    comm.at("clip_grad_norm_")
    total = global_norm(comm, counted, norm_type, stages)
    if error_if_nonfinite and not torch.isfinite(total):
        raise AutoparError(
            f"the gradients' norm is {total.item()}", remedy="Skip this step, or lower the learning rate"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_tensor(gradient)
        local.mul_(scale.to(local.dtype))
    return total


def global_norm(
    comm: Communicator, tensors: list[DTensor], norm_type: float = 2.0, stages: Stages | None = None
) -> Tensor:
    """The p-norm of all elements of all tensors; accumulates in float32, or float64 where a tensor has it.

    Raises:
        AutoparError: p is not positive.
    """
    if norm_type <= 0:
        raise AutoparError(f"norm_type is {norm_type}", remedy="Use a positive one, or math.inf")
    dtype = torch.float64 if any(x.dtype in (torch.float64, torch.complex128) for x in tensors) else torch.float32
    dtype = stages.dtype if stages is not None else dtype
    owned = [_real(local_tensor(x)) for x in tensors if is_owner(comm, x)]
    # vector_norm upcasts inside: no copies of the gradients.
    norms = [torch.linalg.vector_norm(x, norm_type, dtype=dtype) for x in owned if x.numel()]
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    else:
        total = torch.zeros((), dtype=dtype, device=comm.device)
    # What another rank counts adds nothing, but where it is NaN or infinite on this rank alone.
    others = [_real(local_tensor(x)) for x in tensors if not is_owner(comm, x)]
    norms = [torch.linalg.vector_norm(x, norm_type, dtype=dtype) for x in others if x.numel()]
    total = total + 0 * torch.stack(norms).sum() if norms else total
    is_max = math.isinf(norm_type)
    total = total if is_max else total**norm_type
    over = [(comm, axis) for axis in comm.axes]
    if stages is not None:
        stages.comm.at("clip_grad_norm_")
        over.append((stages.comm, stages.axis))
    for each, axis in over:
        total = each.all_reduce(total, axis, "max" if is_max else "sum")
    return total if is_max else total ** (1 / norm_type)


def _real(x: Tensor) -> Tensor:
    """Of complex numbers their absolute values, which a norm is of."""
    return x.abs() if x.is_complex() else x


def own_power(comm: Communicator, pairs: Iterable[tuple[Tensor, DTensor]], stages: Stages | None = None) -> Tensor:
    """This rank's part of the square of the gradients' norm, each element counted once over all ranks; float64. NaN
    or infinite where any of its gradients is, counted or not.

    pairs: parameters with their gradients.
    """
    norms = [torch.zeros((), dtype=torch.float64, device=comm.device)]
    for parameter, gradient in pairs:
        local = local_tensor(gradient)
        if local.numel():
            counts = (stages is None or id(parameter) not in stages.copies) and is_owner(comm, gradient)
            norm = torch.linalg.vector_norm(local, dtype=torch.promote_types(local.dtype, torch.float32)).double()
            norms.append(norm if counts else 0 * norm)
    return torch.stack(norms).square().sum()


def is_owner(comm: Communicator, x: DTensor) -> bool:
    """Of the ranks that hold the same elements, the first along each replicated axis counts them."""
    return all(is_split(placement) or comm.index(axis) == 0 for axis, placement in zip(comm.axes, x.placements))
