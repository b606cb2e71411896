"""What one rank does in the tests of experts that are placed by load. Importable by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import mixture

STEPS = 10
FIRST, SECOND = 4, 7
"""The steps before which experts move."""
WATCHED = "model.layers.1.mlp.experts.down_proj"
Case = tuple[tuple[str, ...], tuple[int, ...], Any]


def batches(batch: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value.roll(step, 0) for key, value in batch.items()} for step in range(STEPS)]


def compiled(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, kind: str) -> tuple[Any, dict[str, Any]]:
    model, batch = mixture.model_and_batch(kind)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes)
    return autopar.compile(model, mesh, strategy=strategy, example_inputs=batch), batch


def odd(loads: dict[str, list[int]]) -> dict[str, list[int]]:
    """Loads under which every other expert goes elsewhere."""
    return {name: [1 + 10 * (number % 2) + number for number in range(len(each))] for name, each in loads.items()}


def train(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, kind: str, folder: str) -> dict[str, Any]:
    """Ten steps of AdamW, before two of which experts move; what is seen and saved then."""
    model, batch = compiled(axes, sizes, strategy, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, counted, moves = [], {}, []
    model.expert_loads()
    for step, each in enumerate(batches(batch)):
        if step == FIRST:
            counted = model.expert_loads()
            moves += model.place_experts(counted)
        if step == SECOND:
            moves += model.place_experts(odd(counted))
        output = model.train_step(**each)
        losses.append(float(output.loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    model.save(folder, step=STEPS, optimizer=optimizer)
    state = {name: torch.as_tensor(x).clone() for name, x in model.state_dict().items()}
    kept = optimizer.state_dict()["state"]
    averages = {name: kept[number]["exp_avg"].clone() for number, name in _numbered(model) if number in kept}
    parameter = dict(model.named_parameters()).get(WATCHED)
    row = None if parameter is None else parameter[5].full_tensor().clone()
    whole = None if parameter is None else parameter.detach().full_tensor()
    model.experts_home()
    home = {name: torch.as_tensor(x).clone() for name, x in model.state_dict().items()}
    return {"losses": losses, "loads": counted, "moves": moves, "state": state, "averages": averages, "row": row,
            "whole": whole, "home": home}  # fmt: skip


def _numbered(model: nn.Module) -> list[tuple[int, str]]:
    return [(number, name) for number, (name, _) in enumerate(model.named_parameters())]


def train_with_each(cases: list[tuple[Any, ...]]) -> list[Any]:
    """One after the other."""
    return [train(*case) for case in cases]


def eager(kind: str) -> dict[str, Any]:
    """The same steps in one process."""
    model, batch = mixture.model_and_batch(kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, counts, hooks = [], {}, []
    for name, module in model.named_modules():
        if hasattr(module, "gate_up_proj"):
            counts[name] = torch.zeros(module.num_experts, dtype=torch.int64)

            def count(_: Any, given: Any, made: Any, total: torch.Tensor = counts[name]) -> None:
                total += torch.bincount(given[1].flatten(), minlength=len(total))

            hooks.append(module.register_forward_hook(count))
    for step, each in enumerate(batches(batch)):
        if step == FIRST:
            for hook in hooks:
                hook.remove()
        loss = model(**each).loss
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    kept = optimizer.state_dict()["state"]
    return {
        "losses": losses, "loads": {name: x.tolist() for name, x in counts.items()}, "state": model.state_dict(),
        "averages": {name: kept[number]["exp_avg"] for number, name in _numbered(model) if number in kept},
    }  # fmt: skip


def loaded(folder: str, kind: str) -> dict[str, Any]:
    """What one process reads of it, and the loss of the next step."""
    model, batch = compiled(("dp",), (1,), "ddp", kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load(Path(folder), optimizer=optimizer)
    kept = optimizer.state_dict()["state"]
    return {
        "state": {name: torch.as_tensor(x).clone() for name, x in model.state_dict().items()},
        "averages": {name: kept[number]["exp_avg"].clone() for number, name in _numbered(model)},
    }
