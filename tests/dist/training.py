"""What one rank does in the training tests: compile, train, measure. Importable by name, as `launch` needs it."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.models import catalogue
from autopar.runtime.count import CollectiveCounter

STEPS = 10


def model_and_batch(name: str, dtype: torch.dtype, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    loaded = catalogue.load(name, tiny=True, device="cpu", seed=0, dropout=dropout, dtype=dtype)
    loaded.model.train()
    return loaded.model, dict(loaded.batch)


def batches(batch: dict[str, Any], steps: int) -> list[dict[str, Any]]:
    """The batch, with its rows turned by one from step to step."""
    return [{key: value.roll(step, 0) for key, value in batch.items()} for step in range(steps)]


def loss_of(output: Any) -> torch.Tensor:
    return output["loss"] if isinstance(output, dict) else output.loss


def train(model: nn.Module, batch: dict[str, Any], steps: int, lr: float = 1e-2) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of some AdamW steps with clipping."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=lr)
    clip = getattr(model, "clip_grad_norm_", None)
    losses, norms = [], []
    for each in batches(batch, steps):
        loss = loss_of(model(**each))
        loss.backward()
        norm = clip(1.0) if clip else torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        norms.append(float(norm))
    return losses, norms


def local_bytes(tensors: list[Any]) -> int:
    """Bytes that this rank holds of DTensors."""
    local = [tensor.to_local() for tensor in tensors]
    return sum(tensor.numel() * tensor.element_size() for tensor in local)


def train_compiled(
    name: str, axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, dtype: torch.dtype, lazy: bool = False,
    memory_limit: float | None = None,
) -> dict[str, Any]:
    """Train the compiled model; losses, norms, what was sent in one step, bytes of state."""
    model, batch = model_and_batch(name, dtype, 0.0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    options = {} if lazy else {"example_inputs": batch}
    compiled = autopar.compile(model, mesh, strategy=strategy, memory_limit=memory_limit, **options)
    assert compiled is model and isinstance(compiled, type(model).__mro__[2])
    losses, norms = train(compiled, batch, STEPS)
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-3)
    with CollectiveCounter() as counter:
        loss_of(compiled(**batch)).backward()
    optimizer.step()
    plan = compiled.plan
    predicted = sum(row.bytes_sent for row in plan.collectives)
    parameters = list(compiled.parameters())
    assert all(isinstance(p, DTensor) for p in parameters)
    states = [v for state in optimizer.state.values() for key, v in state.items() if key != "step"]
    memory = plan.cost.memory
    return {
        "gradient_bytes": local_bytes([p.grad for p in parameters]),
        "state_bytes": local_bytes(states),
        "planned_gradient_bytes": memory.gradients,
        "planned_state_bytes": memory.optimizer_states,
        "losses": losses,
        "norms": norms,
        "sent": counter.total_bytes(),
        "predicted": predicted,
        "parameter_bytes": local_bytes(parameters),
        "planned_parameter_bytes": memory.parameters,
        "limit_bytes": plan.memory_limit_bytes,
        "peak_bytes": memory.peak,
        "rank": dist.get_rank(),
    }
