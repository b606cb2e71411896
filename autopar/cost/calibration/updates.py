"""What a step takes of the host for each parameter: the optimizer's operators, and what autograd and DTensor add."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.tensor import DTensor, Replicate

from autopar.base.torch_compat.distributed import dtensor_like, local_tensor

NUM_SMALL = 32


def optimizer_step(dtype: torch.dtype, device: torch.device) -> tuple[Callable[[], object], int]:
    """A step of torch.optim.AdamW with its defaults on this device, and the bytes of the parameters."""
    num, size = (32, 2**21) if device.type == "cuda" else (8, 2**19)
    parameters = [torch.nn.Parameter(torch.randn(size, device=device).to(dtype)) for _ in range(num)]
    for parameter in parameters:
        parameter.grad = torch.randn_like(parameter)
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)
    return optimizer.step, num * size * dtype.itemsize


def small_step(dtype: torch.dtype) -> Callable[[], object]:
    """A training step of `NUM_SMALL` parameters of a few bytes, on CPU, as programs run it: DTensors, gradients from
    one node of the graph, AdamW. There must be a process group.
    """
    mesh = dist.init_device_mesh("cpu", (dist.get_world_size(),))
    parameters = [
        torch.nn.Parameter(DTensor.from_local(torch.randn(8).to(dtype), mesh, [Replicate()])) for _ in range(NUM_SMALL)
    ]
    optimizer = torch.optim.AdamW(parameters, lr=1e-6)

    def step() -> None:
        _Step.apply(*parameters).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


class _Step(torch.autograd.Function):
    """As the runtime's node (runtime/step.py): DTensors in, a loss out, and a gradient for each."""

    @staticmethod
    def forward(ctx: Any, *parameters: DTensor) -> torch.Tensor:
        ctx.parameters = parameters
        return local_tensor(parameters[0]).sum()

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        return tuple(dtensor_like(each, torch.zeros_like(local_tensor(each))) for each in ctx.parameters)


@contextlib.contextmanager
def process_group() -> Iterator[None]:
    """The one there is, else one of this process alone."""
    if dist.is_initialized():
        yield
        return
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        yield
    finally:
        dist.destroy_process_group()
