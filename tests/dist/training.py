"""What one rank does in the training tests: compile, train, measure. Importable by name, as `launch` needs it."""

from __future__ import annotations

import os
import tempfile
from collections.abc import Mapping
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.cli.models import catalogue
from benchmarks.training.count import CollectiveCounter
from tests.nodes import nodes_of_two

STEPS = 10
RATES = {"mlp": 0.1}
"""Factors of the learning rate: a loss that falls to nothing leaves nothing to compare."""
OPTIMIZERS = {"adamw": (torch.optim.AdamW, {"lr": 1e-2}), "sgd": (torch.optim.SGD, {"lr": 0.05, "momentum": 0.9})}


def model_and_batch(name: str, dtype: torch.dtype, dropout: float) -> tuple[nn.Module, dict[str, Any]]:
    loaded = catalogue.load(name, tiny=True, device="cpu", seed=0, dropout=dropout, dtype=dtype)
    loaded.model.train()
    return loaded.model, dict(loaded.batch)


def as_under_torchrun(is_one: bool = False) -> None:
    """What torchrun says to a process; a process alone is told nothing."""
    for name in ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        os.environ.pop(name, None)
    if not is_one:
        rank, num = str(dist.get_rank()), str(dist.get_world_size())
        os.environ.update(RANK=rank, LOCAL_RANK=rank, WORLD_SIZE=num, LOCAL_WORLD_SIZE=num)


def batches(batch: Mapping[str, Any], steps: int) -> list[dict[str, Any]]:
    """The batch, with its rows turned by one from step to step."""
    return [{key: value.roll(step, 0) for key, value in batch.items()} for step in range(steps)]


def loss_of(output: Any) -> torch.Tensor:
    return output["loss"] if isinstance(output, dict) else output.loss


def train(
    model: nn.Module, batch: dict[str, Any], steps: int, optimizer_name: str = "adamw", rate: float = 1.0
) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of some steps with clipping."""
    kind, options = OPTIMIZERS[optimizer_name]
    optimizer = kind(model.parameters(), **{**options, "lr": rate * options["lr"]})
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
    name: str,
    axes: tuple[str, ...],
    sizes: tuple[int, ...],
    strategy: Any,
    dtype: torch.dtype,
    lazy: bool = False,
    memory_limit: float | None = None,
    optimizer_name: str = "adamw",
) -> dict[str, Any]:
    """Train the compiled model; losses, norms, what was sent in one step, bytes of state."""
    model, batch = model_and_batch(name, dtype, 0.0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    options: dict[str, Any] = {} if lazy else {"example_inputs": batch}
    with tempfile.TemporaryDirectory() as folder:
        hardware = str(nodes_of_two(folder)) if "node" in axes else None
        compiled = autopar.compile(
            model, mesh, strategy=strategy, memory_limit=memory_limit, hardware=hardware, **options
        )
    assert compiled is model and isinstance(compiled, type(model).__mro__[2])
    losses, norms = train(compiled, batch, STEPS, optimizer_name, RATES.get(name, 1.0))
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


def train_with_each(name: str, cases: list[tuple[tuple[str, ...], tuple[int, ...], Any, str]]) -> list[dict[str, Any]]:
    """Train under several meshes and strategies, one after the other."""
    return [
        train_compiled(name, axes, sizes, strategy, torch.float32, optimizer_name=optimizer)
        for axes, sizes, strategy, optimizer in cases
    ]


def compile_tiny(name: str, sizes: tuple[int, ...] = (2,), **options: Any) -> tuple[nn.Module, dict[str, Any]]:
    axes = ("dp", "tp")[: len(sizes)]
    model, batch = model_and_batch(name, torch.float32, 0.0)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    return autopar.compile(model, mesh, **options), batch


def other_shape() -> list[float]:
    """Loss on the planned batch, on half of its tokens, and on the first again."""
    compiled, batch = compile_tiny("llama", strategy="zero3")
    short = {key: value[:, :8].contiguous() for key, value in batch.items()}
    return [float(compiled(**each).loss.detach()) for each in (batch, short, batch)]


def different_batches() -> str:
    compiled, batch = compile_tiny("llama", strategy="ddp")
    batch["input_ids"] = (batch["input_ids"] + dist.get_rank()) % 100
    return message(lambda: compiled(**batch))


def wrong_world() -> str:
    model, _ = model_and_batch("mlp", torch.float32, 0.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)) if dist.get_world_size() == 2 else None
    if mesh is None:
        said = message(
            lambda: autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
        )
        dist.barrier()  # who has no part in the mesh would close what those that have are still connecting to
        return said
    return ""


def old_optimizer() -> str:
    model, batch = model_and_batch("llama", torch.float32, 0.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    compiled = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="ddp")
    compiled(**batch).loss.backward()
    return message(optimizer.step)


def evaluation() -> tuple[float, float, list[str]]:
    """Training loss, loss under no_grad in eval mode, placements of the logits."""
    compiled, batch = compile_tiny("gpt2", (2,), strategy="tensor")
    train_loss = float(compiled(**batch).loss.detach())
    compiled.eval()
    with torch.no_grad():
        output = compiled(**batch)
    return train_loss, float(output.loss), [str(p) for p in output.logits.placements]


def own_loss() -> tuple[float, float]:
    """A loss that the user computes on the logits: its value and the gradient norm."""
    compiled, batch = compile_tiny("llama", (2,), strategy="ddp")
    labels = batch.pop("labels")
    logits = compiled(**batch).logits
    loss = logits.float().pow(2).mean() if labels is not None else logits.sum()
    loss = loss.full_tensor() if isinstance(loss, DTensor) else loss
    loss.backward()
    return float(loss.detach()), float(compiled.clip_grad_norm_(1e9))


def edited_program(path: str) -> tuple[float, float]:
    """The loss of the generated program, and of an edited one that doubles it, which has to be asked for."""
    compiled, batch = compile_tiny("llama", strategy="ddp")
    plain = float(compiled(**batch).loss.detach())
    source = compiled.plan.source
    lines = source.splitlines()
    start = next(i for i, line in enumerate(lines) if line.startswith("def forward(comm, state"))
    last = next(i for i in range(start, len(lines)) if lines[i].startswith("    return ("))
    first = lines[last].split("(", 1)[1].split(",", 1)[0]
    lines[last] = lines[last].replace(f"({first},", f"({first} * 2,", 1)
    if dist.get_rank() == 0:
        with open(path, "w") as file:
            file.write("\n".join(lines) + "\n")
    dist.barrier()
    again, batch = compile_tiny("llama", strategy="ddp", program=path)
    try:
        again(**batch)
        raise AssertionError("another loss than was planned ran without a word")
    except autopar.AutoparError as error:
        assert "AUTOPAR_CHECK=types" in str(error), error
    os.environ["AUTOPAR_CHECK"] = "types"
    try:
        again, batch = compile_tiny("llama", strategy="ddp", program=path)
        return plain, float(again(**batch).loss.detach())
    finally:
        del os.environ["AUTOPAR_CHECK"]


def saved_plan(path: str) -> tuple[float, float]:
    """The loss under a fresh plan, and under the same plan read from a file."""
    compiled, batch = compile_tiny("llama", (2, 2), strategy={"dp": "zero3", "tp": "tensor"})
    first = float(compiled(**batch).loss.detach())
    if dist.get_rank() == 0:
        compiled.plan.save(path)
    dist.barrier()
    again, batch = compile_tiny("llama", (2, 2), plan=autopar.Plan.load(path))
    return first, float(again(**batch).loss.detach())


def infeasible_everywhere() -> str:
    model, batch = model_and_batch("llama", torch.float32, 0.0)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    return message(lambda: autopar.compile(model, mesh, strategy="ddp", memory_limit=1e5, example_inputs=batch))


def from_meta() -> float:
    """A model built on meta, initialized after compile: the loss."""
    loaded = catalogue.load("llama", tiny=True, device="meta", dropout=0.0)
    _, batch = model_and_batch("llama", torch.float32, 0.0)
    mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
    compiled = autopar.compile(loaded.model, mesh, strategy="zero3", example_inputs=batch)
    compiled.init_weights(seed=3)
    return float(compiled.train_step(**batch).loss.detach())


def regions_compiled(strategy: str, compile_regions: bool | str | None, layers: int = 2) -> dict[str, Any]:
    """Three steps of a Llama whose regions go through torch.compile: losses, what was sent, graphs compiled so far."""
    from torch._dynamo.utils import counters

    torch._dynamo.reset()
    counters.clear()
    loaded = catalogue.load("llama", tiny=True, device="cpu", dropout=0.0, overrides={"num_hidden_layers": layers})
    batch = dict(loaded.batch)
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    compiled: Any = autopar.compile(loaded.model, mesh, strategy=strategy, compile_regions=compile_regions)
    compiled.autopar.comm.log = []
    graphs, losses = [], []
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-2)
    for each in batches(batch, 3):
        loss = loss_of(compiled(**each))
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
        graphs.append(counters["stats"]["unique_graphs"])
    plan = compiled.plan
    return {
        "losses": losses,
        "events": [str(event) for event in compiled.autopar.comm.log],
        "graphs": graphs,
        "recompiles": dict(counters["recompiles"]),
        "regions": [(region.name, region.calls) for region in plan.regions],
        "source": plan.source,
    }


def message(action: Any) -> str:
    """The text of the AutoparError that an action raises."""
    try:
        action()
    except autopar.AutoparError as error:
        return str(error)
    return "no error"
