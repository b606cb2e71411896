"""What the processes of the dist tests run (importable by name, so that they can be sent to)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor

from autopar.ir.sharding import Shard
from autopar.runtime.executable import Executable
from autopar.runtime.module import CompiledModule, take_over
from tests.unit.runtime.programs import PLANS, make_batch, make_mlp, mlp_interface, mlp_source

INPUTS = ("x", "y")


def make_mesh(sizes: dict[str, int]) -> DeviceMesh:
    return init_device_mesh("cpu", tuple(sizes.values()), mesh_dim_names=tuple(sizes))


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    return dict(zip(INPUTS, args)) | kwargs


def rebuild_output(values: Any) -> dict[str, Any]:
    return {"loss": values[0], "logits": values[1]}


def mlp_executable(
    plan: str,
    edit: Callable[[str], str] = lambda text: text,
    dtype: str = "float64",
    microbatches: int = 1,
    compile_regions: bool | str = False,
) -> Executable:
    sizes, zero3 = PLANS[plan]
    source = edit(mlp_source(sizes, zero3, microbatches))
    interface = mlp_interface(sizes, zero3, dtype, microbatches)
    return Executable(interface, source, "<mlp>", rebuild_output, flatten_inputs, compile_regions)


def uneven_executable(microbatches: int = 1) -> Executable:
    """zero3 on four ranks, where up.weight [16, 6] is split along its columns: 2, 2, 2 and none."""
    source = mlp_source({"dp": 4}, True, microbatches)
    for place in ('(state["up.weight"], 0)', '(g["up.weight"], 0)'):
        assert place in source
        source = source.replace(place, place.replace(" 0)", " (1, 1, 6))"))
    interface = mlp_interface({"dp": 4}, True, microbatches=microbatches)
    first, *others = interface.parameters
    interface = replace(interface, parameters=(replace(first, sharding=(Shard(1),)), *others))
    return Executable(interface, source, "<mlp>", rebuild_output, flatten_inputs)


def uneven_mlp(model: nn.Module | None = None, microbatches: int = 1) -> Any:
    executable = uneven_executable(microbatches)
    model = make_mlp() if model is None else model
    return take_over(model, make_mesh({"dp": 4}), lambda args, kwargs: executable, executable.interface)


def compiled_mlp(plan: str, model: nn.Module | None = None, lazy: bool = False, **options: Any) -> Any:
    executable = mlp_executable(plan, **options)
    mesh = make_mesh(PLANS[plan][0])
    model = make_mlp() if model is None else model
    return take_over(model, mesh, lambda args, kwargs: executable, None if lazy else executable.interface)


def full(value: Any) -> Tensor:
    return value.full_tensor().detach() if isinstance(value, DTensor) else value.detach()


def make_optimizer(name: str, parameters: Any) -> torch.optim.Optimizer:
    if name.startswith("sgd"):
        return torch.optim.SGD(parameters, lr=0.1, momentum=0.9, foreach=name.endswith("foreach"))
    return torch.optim.AdamW(parameters, lr=0.05, foreach=name.endswith("foreach"))


def train(model: Any, optimizer_name: str, clip: Callable[[], Tensor], num_steps: int = 5) -> dict[str, Any]:
    """Steps with clipping on a new batch each; losses, norms and the last parameters, global."""
    optimizer = make_optimizer(optimizer_name, model.parameters())
    losses, norms = [], []
    for step in range(num_steps):
        output = model(**make_batch(step))
        output["loss"].backward()
        norms.append(float(clip()))
        optimizer.step()
        optimizer.zero_grad()
        losses.append(float(output["loss"].detach()))
    return {"losses": losses, "norms": norms, "weights": {n: full(p) for n, p in model.named_parameters()}}


def train_compiled(plan: str, optimizer_name: str, lazy: bool = False) -> dict[str, Any]:
    model = compiled_mlp(plan, lazy=lazy)
    assert isinstance(model, CompiledModule)
    return train(model, optimizer_name, lambda: model.clip_grad_norm_(0.1))


def train_eager(optimizer_name: str) -> dict[str, Any]:
    model = make_mlp()
    return train(model, optimizer_name, lambda: nn.utils.clip_grad_norm_(model.parameters(), 0.1))
