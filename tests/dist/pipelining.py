"""What one rank does in the tests of whole models in pipelines. Importable by name, as `launch` needs it."""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar
from autopar.estimate import collectives
from autopar.models import catalogue
from autopar.promote import only
from autopar.torch_compat.distributed import local_tensor

STEPS = 10
LAYERS: dict[str, dict[str, int]] = {
    "llama": {"num_hidden_layers": 8},
    "gpt2": {"n_layer": 8},
    "t5": {"num_layers": 3, "num_decoder_layers": 3},
    "gemma2": {"num_hidden_layers": 6},
}
Case = tuple[dict[str, int], dict[str, str], int]
"""Sizes of the mesh's axes, strategies by axis, microbatches."""


def model_and_batch(name: str, dtype: torch.dtype, dead_row: bool = True) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model, and a batch of 8 rows each of which has another number of labels; one has none."""
    loaded = catalogue.load(name, tiny=True, device="cpu", seed=0, dropout=0.0, dtype=dtype, overrides=LAYERS[name])
    loaded.model.to(dtype).train()  # rotary frequencies too
    batch = dict(loaded.batch)
    labels = batch["labels"].clone()
    for row in range(labels.shape[0]):
        labels[row, : 2 * row] = -100
    if dead_row:
        labels[3] = -100
    return loaded.model, {**batch, "labels": labels}


def casts(dtype: torch.dtype) -> AbstractContextManager[object]:
    """A float64 model is to be one throughout: what its code casts to float32 would differ by float32's rounding."""
    return only(dtype) if dtype == torch.float64 else nullcontext()


def batches(batch: Mapping[str, Any], steps: int) -> list[dict[str, Any]]:
    """The batch, with its rows turned by one from step to step."""
    return [{key: value.roll(step, 0) for key, value in batch.items()} for step in range(steps)]


def make_optimizer(model: nn.Module, steps: int) -> tuple[torch.optim.Optimizer, Any]:
    """AdamW, with a schedule of its learning rate."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    return optimizer, torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, steps)


def train_eager(name: str, dtype: torch.dtype, steps: int = STEPS) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of the model in one process."""
    model, batch = model_and_batch(name, dtype)
    optimizer, rates = make_optimizer(model, steps)
    losses, norms = [], []
    for each in batches(batch, steps):
        with casts(dtype):
            loss = model(**each).loss
        loss.backward()
        norms.append(float(nn.utils.clip_grad_norm_(model.parameters(), 1.0)))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    return losses, norms


def compile_case(name: str, case: Case, dtype: torch.dtype, **options: Any) -> tuple[Any, dict[str, Any]]:
    """A compiled model and its batch."""
    sizes, strategy, num = case
    model, batch = model_and_batch(name, dtype)
    mesh = init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))
    if "plan" not in options:
        options |= {"strategy": strategy, "microbatches": num}
    with casts(dtype):
        compiled = autopar.compile(model, mesh, example_inputs=batch, **options)
    assert compiled is model
    return compiled, batch


def train(compiled: Any, batch: Mapping[str, Any], steps: int = STEPS) -> dict[str, Any]:
    """Losses and norms of some steps; what this rank holds then."""
    optimizer, rates = make_optimizer(compiled, steps)
    losses, norms = [], []
    for each in batches(batch, steps):
        loss = compiled.train_step(**each).loss
        norms.append(float(compiled.clip_grad_norm_(1.0)))
        optimizer.step()
        rates.step()
        optimizer.zero_grad()
        losses.append(float(loss.detach()))
    parameters = dict(compiled.named_parameters())
    assert all(isinstance(parameter, DTensor) for parameter in parameters.values())
    return {
        "losses": losses,
        "norms": norms,
        "held": {name: digest(parameter) for name, parameter in parameters.items()},
        "states": sorted(name for name, parameter in parameters.items() if optimizer.state.get(parameter)),
        "place": compiled.autopar.comm.index("pp"),
        "inner": compiled.autopar.inner.rank,
    }


def digest(x: Tensor) -> str:
    """Of the bits of this rank's piece."""
    return hashlib.sha256(local_tensor(x.detach()).contiguous().numpy().tobytes()).hexdigest()[:16]


def sent_in_a_step(compiled: Any, batch: Mapping[str, Any]) -> dict[tuple[str, str], float]:
    """Bytes that this rank sends in a training step, by kind and axis; every row has labels."""
    full = {**batch, "labels": batch["labels"].abs()}
    compiled.autopar.comm.log = events = []
    compiled.train_step(**full)
    compiled.autopar.comm.log = None
    sent: Counter[tuple[str, str]] = Counter()
    for event in events:
        if event.kind != "receive" and event.where != "outputs":
            sent[event.kind, event.axis] += event.bytes_sent  # type: ignore[assignment]
    return {key: value for key, value in sent.items() if value}


def said_of_a_step(compiled: Any) -> list[dict[tuple[str, str], float]] | None:
    """The same as the plan says it, by pipeline rank; on the rank that planned."""
    program = compiled.plan.program
    if program is None:
        return None
    found = []
    for rank in range(len(compiled.plan.interface.pipeline.order)):
        said: Counter[tuple[str, str]] = Counter()
        for row in collectives(program, rank):
            said[row.kind, row.axis] += row.bytes_sent  # type: ignore[assignment]
        found.append({key: value for key, value in said.items() if value})
    return found


def train_cases(name: str, cases: list[Case], dtype: torch.dtype) -> list[dict[str, Any]]:
    """Train under several meshes and schedules, one after the other."""
    results = []
    for case in cases:
        compiled, batch = compile_case(name, case, dtype)
        result = train(compiled, batch)
        result["sent"], result["said"] = sent_in_a_step(compiled, batch), said_of_a_step(compiled)
        result["stages"] = [stage.parameters for stage in compiled.plan.interface.pipeline.stages]
        result["rank_of"] = compiled.plan.interface.pipeline.rank_of
        result["schedule"] = compiled.plan.interface.pipeline.schedule
        results.append(result)
    return results
