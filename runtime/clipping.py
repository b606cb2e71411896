"""The norm of all gradients, each element counted once however it is placed, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from autopar.errors import AutoparError
from autopar.runtime.comm import Communicator
from autopar.torch_compat.distributed import is_split, local_tensor


def clip_grad_norm_(
    comm: Communicator,
    parameters: Iterable[Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
) -> Tensor:
    """Scale the gradients in place so that their norm is at most `max_norm`; the norm they had, a plain scalar tensor.

    As `torch.nn.utils.clip_grad_norm_`, over the global gradients: the same number on every rank. Collective.

    Raises:
        AutoparError: a norm that is not finite, if asked to.
    """
    gradients = [parameter.grad for parameter in parameters if isinstance(parameter.grad, DTensor)]
    comm.at("clip_grad_norm_")
    total = global_norm(comm, gradients, norm_type)
    if error_if_nonfinite and not torch.isfinite(total):
        raise AutoparError(
            f"the gradients' norm is {total.item()}", remedy="Skip this step, or lower the learning rate"
        )
    scale = torch.clamp(max_norm / (total + 1e-6), max=1.0)
    for gradient in gradients:
        local = local_tensor(gradient)
        local.mul_(scale.to(local.dtype))
    return total


def global_norm(comm: Communicator, tensors: list[DTensor], norm_type: float = 2.0) -> Tensor:
    """The p-norm of all elements of all tensors; accumulates in float32, or float64 where a tensor has it.

    Raises:
        AutoparError: p is not positive.
    """
    if norm_type <= 0:
        raise AutoparError(f"norm_type is {norm_type}", remedy="Use a positive one, or math.inf")
    dtype = torch.float64 if any(x.dtype == torch.float64 for x in tensors) else torch.float32
    owned = [local_tensor(x) for x in tensors if _is_owner(comm, x)]
    # vector_norm upcasts inside: no copies of the gradients.
    norms = [torch.linalg.vector_norm(x, norm_type, dtype=dtype) for x in owned if x.numel()]
    if norms:
        total = torch.linalg.vector_norm(torch.stack(norms), norm_type)
    else:
        total = torch.zeros((), dtype=dtype, device=comm.device)
    if math.isinf(norm_type):
        for axis in comm.axes:
            total = comm.all_reduce(total, axis, "max")
        return total
    total = total**norm_type
    for axis in comm.axes:
        total = comm.all_reduce(total, axis)
    return total ** (1 / norm_type)


def _is_owner(comm: Communicator, x: DTensor) -> bool:
    """Of the ranks that hold the same elements, the first along each replicated axis counts them."""
    return all(is_split(placement) or comm.index(axis) == 0 for axis, placement in zip(comm.axes, x.placements))
