"""What the processes of the pipeline tests run (importable by name, so that they can be sent to)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from autopar.interface import ProgramInterface
from autopar.runtime.executable import Executable
from autopar.runtime.module import take_over
from tests.dist.runtime.work import full, make_mesh, make_optimizer
from tests.unit.runtime.pipelines import (
    Chain,
    chain_batch,
    chain_interface,
    chain_source,
    make_chain,
    run_chain,
    schedule_of,
)

NAMES = ("loss", "logits", "first", "number")


def flatten_inputs(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Tensor]:
    return dict(zip(("ids", "labels"), args)) | kwargs


def rebuild_output(values: Any) -> dict[str, Any]:
    return dict(zip(NAMES, values, strict=True))


def chain_executable(
    name: str,
    sizes: dict[str, int],
    num: int,
    zero: bool = False,
    edit: Callable[[str], str] = lambda text: text,
    change: Callable[[ProgramInterface], ProgramInterface] = lambda interface: interface,
) -> Executable:
    schedule, rows = schedule_of(name, sizes["pp"], num), 4 * num
    interface = change(chain_interface(schedule, rows, sizes.get("dp", 1), zero, tuple(sizes)))
    source = edit(chain_source(schedule.num_stages, rows, num, zero))
    return Executable(interface, source, "<chain>", rebuild_output, flatten_inputs)


def compiled_chain(
    name: str, sizes: dict[str, int], num: int, model: nn.Module | None = None, lazy: bool = False, **options: Any
) -> Any:
    executable = chain_executable(name, sizes, num, **options)
    assert executable.interface.pipeline is not None
    model = make_chain(len(executable.interface.pipeline.stages) + 1) if model is None else model
    torch.manual_seed(3)
    interface = None if lazy else executable.interface
    return take_over(model, make_mesh(sizes), lambda args, kwargs: executable, interface)


def train_chain(name: str, sizes: dict[str, int], num: int, zero: bool, lazy: bool, steps: int = 4) -> dict[str, Any]:
    """Losses, norms and outputs of some steps, the last weights and buffers of this rank, global."""
    model = compiled_chain(name, sizes, num, zero=zero, lazy=lazy)
    found: dict[str, Any] = {"losses": [], "norms": [], "logits": [], "first": [], "numbers": []}
    optimizer = make_optimizer("adamw", model.parameters())
    for step in range(steps):
        output = model.train_step(**chain_batch(4 * num, step))
        found["norms"].append(float(model.clip_grad_norm_(0.1)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(output["loss"]))
        found["numbers"].append(int(output["number"]))
        for key in ("logits", "first"):
            found[key].append(None if output[key] is None else full(output[key]))
    found["weights"] = {key: full(value) for key, value in model.named_parameters()}
    found["state"] = list(model.state_dict())
    found["seen"] = float(model.seen)
    return found


def train_eager(num_layers: int, num: int, groups: int, steps: int = 4) -> dict[str, Any]:
    model: Chain = make_chain(num_layers)
    found: dict[str, Any] = {"losses": [], "norms": [], "logits": [], "first": [], "numbers": []}
    optimizer = make_optimizer("adamw", model.parameters())
    for step in range(steps):
        output = run_chain(model, chain_batch(4 * num, step), num, groups, seed=3 + step)
        output["loss"].backward()
        found["norms"].append(float(nn.utils.clip_grad_norm_(model.parameters(), 0.1)))
        optimizer.step()
        optimizer.zero_grad()
        found["losses"].append(float(output["loss"].detach()))
        found["numbers"].append(int(output["number"]))
        for key in ("logits", "first"):
            found[key].append(output[key].detach())
    found["weights"] = {key: value.detach() for key, value in model.named_parameters()}
    found["seen"] = float(model.seen)
    return found


def with_order(interface: ProgramInterface, order: tuple[tuple[str, ...], ...]) -> ProgramInterface:
    assert interface.pipeline is not None
    return replace(interface, pipeline=replace(interface.pipeline, order=order))
