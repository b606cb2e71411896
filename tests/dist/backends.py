"""What one rank does in the tests of `torch.compile(model, backend=autopar.backend(mesh))`."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist.training import batches, loss_of, message, model_and_batch


def prepared(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The model in float64, so that sums in another order do not show; without a cache in its outputs."""
    torch._dynamo.reset()
    model, batch = model_and_batch(name, torch.float64, 0.0)
    if hasattr(model, "config"):
        model.config.use_cache = False
    return model, batch


def steps(
    model: Any, parameters: list[nn.Parameter], batch: dict[str, Any], optimizer: str
) -> tuple[list[float], list[torch.Tensor]]:
    """Losses of three steps, and the gradients of the last."""
    made = getattr(torch.optim, optimizer)(parameters, lr=1e-2)
    losses = []
    for each in batches(batch, 3):
        made.zero_grad()
        loss = loss_of(model(**each))
        loss.backward()
        made.step()
        losses.append(float(loss.detach()))
    return losses, [p.grad.clone() for p in parameters if p.grad is not None]


def train(name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, optimizer: str) -> dict[str, Any]:
    model, batch = prepared(name)
    own = autopar.backend(init_device_mesh("cpu", sizes, mesh_dim_names=axes), strategy=strategy)
    own.comm.log = []
    compiled = torch.compile(model, backend=own, dynamic=False)
    losses, gradients = steps(compiled, list(model.parameters()), batch, optimizer)
    return {
        "losses": losses,
        "gradients": gradients,
        "num_plans": len(own.plans),
        "regions": [[(region.module, region.calls) for region in plan.regions] for plan in own.plans],
        "parameters": [entry.name for plan in own.plans for entry in plan.interface.parameters],
        "events": [str(event) for event in own.comm.log],
    }
