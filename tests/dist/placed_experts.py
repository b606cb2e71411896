"""What one rank does in the tests of experts that are placed by load. Importable by name."""

from __future__ import annotations

import copy
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, distribute_tensor

import autopar
from autopar.base.errors import AutoparError
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
    """Loads under which every other expert goes elsewhere, and one has more than a rank's part."""
    return {
        name: [1 + 10 * (number % 2) + number + 200 * (number == 3) for number in range(len(each))]
        for name, each in loads.items()
    }


def train(axes: tuple[str, ...], sizes: tuple[int, ...], strategy: Any, kind: str, folder: str) -> dict[str, Any]:
    """Ten steps of AdamW, before two of which experts move, and some visit others; what is seen and saved then."""
    model, batch = compiled(axes, sizes, strategy, kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    losses, counted, moves = [], {}, []
    model.expert_loads()
    for step, each in enumerate(batches(batch)):
        if step == FIRST:
            counted = model.expert_loads()
            moves += model.place_experts(counted)
        if step == SECOND:
            moves += model.place_experts(odd(counted), replicas=1)
        output = model.train_step(**each)
        losses.append(float(output.loss.detach()))
        optimizer.step()
        optimizer.zero_grad()
    model.save(folder, step=STEPS, optimizer=optimizer)
    parameter = dict(model.named_parameters()).get(WATCHED)
    row = None if parameter is None else parameter[5].full_tensor().clone()
    whole = None if parameter is None else parameter.detach().full_tensor()
    state = {name: torch.as_tensor(x).clone() for name, x in model.seen_state().items()}
    home = {name: torch.as_tensor(x).clone() for name, x in model.state_dict().items()}
    kept = optimizer.state_dict()["state"]
    averages = {name: kept[number]["exp_avg"].clone() for number, name in _numbered(model) if number in kept}
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
    model, _ = compiled(("dp",), (1,), "ddp", kind)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    model.load(Path(folder), optimizer=optimizer)
    kept = optimizer.state_dict()["state"]
    return {
        "state": {name: torch.as_tensor(x).clone() for name, x in model.state_dict().items()},
        "averages": {name: kept[number]["exp_avg"].full_tensor() for number, name in _numbered(model)},
    }


def _said(act: Any) -> str:
    try:
        act()
    except AutoparError as error:
        return str(error)
    return "nothing"


def refused() -> dict[str, Any]:
    """What is said of each thing that cannot be; and the loss before and after."""
    model, batch = compiled(("dp",), (2,), "expert", "Mixtral")
    layer, other = (f"model.layers.{number}.mlp.experts" for number in range(2))
    found: dict[str, Any] = {"before": float(model(**batch).loss.detach())}
    found["none"] = _said(lambda: model.place_experts())
    uneven = [9, 8, 1, 1] if dist.get_rank() == 0 else [1, 9, 1, 8]
    found["disagree"] = _said(lambda: model.place_experts({layer: uneven}))
    found["unknown"] = _said(lambda: model.place_experts({"model.layers.7.mlp": [9, 8, 1, 1]}))
    found["size"] = _said(lambda: model.place_experts({layer: [9, 8, 1, 1, 1]}))
    parameter = dict(model.named_parameters())[f"{layer}.down_proj"]
    handle = parameter.register_hook(lambda gradient: gradient * 1.0)
    found["hook"] = _said(lambda: model.place_experts({other: [9, 8, 1, 1], layer: [9, 8, 1, 1]}))
    handle.remove()
    optimizer = torch.optim.LBFGS([parameter], lr=0.0, max_iter=1)
    model(**batch).loss.backward()
    optimizer.step(lambda: torch.zeros(()))
    found["optimizer"] = _said(lambda: model.place_experts({other: [9, 8, 1, 1], layer: [9, 8, 1, 1]}))
    found["home"] = all(one.is_home for one in model.autopar.inner.experts.values())
    found["loss"] = float(model(**batch).loss.detach())
    dense, _ = compiled(("dp",), (2,), "ddp", "Mixtral")
    found["plan"] = _said(lambda: dense.place_experts({layer: [9, 8, 1, 1]}))
    return found


def loaded_into() -> dict[str, float]:
    """Differences that should not be there: of losses, parameters and states."""
    model, batch = compiled(("dp",), (2,), "expert", "Mixtral")
    layer = "model.layers.0.mlp.experts"
    heavy = {layer: [9, 8, 1, 1], "model.layers.1.mlp.experts": [1, 1, 9, 8]}
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)

    def step(one: Any = model, own: Any = None) -> float:
        loss = one(**batch).loss
        if own is not None:
            loss.backward()
            own.step()
            own.zero_grad()
        return float(loss.detach())

    step(model, optimizer)
    wanted, kept = _whole(model), _averages(optimizer)
    before, found = step(), dict[str, float]()
    average = copy.deepcopy(model)
    model.place_experts(heavy)
    found["it moved"] = float(model.autopar.inner.experts["model.layers.0"].is_home)
    slots = [model.autopar.inner.experts[f"model.layers.{number}"].slots for number in range(2)]
    found["each by its own loads"] = float(slots != [(0, 3, 2, 1), (2, 1, 0, 3)])
    found["loss of the copy"] = abs(step(average) - before)
    found["copy"] = _apart(_whole(average), wanted)
    alias = model.state_dict()
    found["a state has experts at home"] = float(not model.autopar.inner.experts["model.layers.0"].is_home)
    model.place_experts(heavy)
    kept_state = optimizer.state_dict()
    found["so has an optimizer's"] = float(not model.autopar.inner.experts["model.layers.0"].is_home)
    model.place_experts(heavy)
    state, states = copy.deepcopy(alias), copy.deepcopy(kept_state)
    piece: Any = alias[f"{layer}.down_proj"]
    found["a piece for itself"] = float("is wanted by itself" not in _said(lambda: piece.to_local()))
    step(model, optimizer)
    found["a copy"] = _apart(_seen(state), wanted)
    found["seen as it is now"] = _apart(_seen(alias), _whole(model))
    model.load_state_dict(state)
    found["loaded"] = _apart(_whole(model), wanted)
    model.place_experts(heavy)
    optimizer.load_state_dict(copy.deepcopy(states))
    found["states"] = _apart(_averages(optimizer), kept)
    model.place_experts(heavy)
    step(model, optimizer)
    after = _whole(model)
    model.load_state_dict(state)
    model.place_experts(heavy)
    fresh = torch.optim.AdamW(model.parameters(), lr=1e-2)
    fresh.load_state_dict(_in_pieces(states))
    step(model, fresh)
    found["states before the first step"] = _apart(_whole(model), after)
    model.place_experts(heavy)
    found["it moved again"] = float(model.autopar.inner.experts["model.layers.0"].is_home)
    parameter = dict(model.named_parameters())[f"{layer}.down_proj"]
    with torch.no_grad():
        marks = torch.arange(4.0, dtype=torch.float64)[:, None, None].expand(parameter.shape)
        parameter.copy_(marks)
        parameter[3] += 1.0
        parameter.mul_(marks + 1.0)
    rows = torch.as_tensor(model.state_dict()[f"{layer}.down_proj"])[:, 0, 0]
    found["written"] = float((rows - torch.tensor([0.0, 2.0, 6.0, 16.0])).abs().max())
    found["a sum with a plain tensor"] = float(
        ((parameter.detach() + marks)[:, 0, 0] - rows - marks[:, 0, 0]).abs().max()
    )
    parameter.data = marks.clone()
    model.experts_home()
    found["data"] = float((torch.as_tensor(model.state_dict()[f"{layer}.down_proj"]) - marks).abs().max())
    return found


def _in_pieces(states: dict[str, Any]) -> dict[str, Any]:
    """An optimizer's states as torch.distributed.checkpoint reads them: DTensors in the model's order."""

    def cut(x: Any) -> Any:
        if not isinstance(x, DTensor):
            return copy.deepcopy(x)
        return distribute_tensor(x.full_tensor(), x.device_mesh, x.placements)

    own = {key: {name: cut(x) for name, x in each.items()} for key, each in states["state"].items()}
    return {"state": own, "param_groups": copy.deepcopy(states["param_groups"])}


def _whole(model: Any) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(x).clone() for name, x in model.state_dict().items()}


def _seen(state: dict[str, Any]) -> dict[str, torch.Tensor]:
    return {name: torch.as_tensor(x) for name, x in state.items()}


def _averages(optimizer: torch.optim.Optimizer) -> dict[str, torch.Tensor]:
    return {str(key): torch.as_tensor(each["exp_avg"]).clone() for key, each in optimizer.state_dict()["state"].items()}


def _apart(found: dict[str, torch.Tensor], wanted: dict[str, torch.Tensor]) -> float:
    assert found.keys() == wanted.keys()
    return max(float((found[name].double() - wanted[name].double()).abs().max()) for name in found)
