"""Work for test_script_states: what users save and load."""

from __future__ import annotations

import copy
import os
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor, nn
from torch.distributed.checkpoint.state_dict import (
    StateDictOptions,
    get_model_state_dict,
    set_model_state_dict,
)
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime import meeting
from tests.dist import training
from tests.dist.script import adam, compiled_model, run


def continued(folder: str) -> dict[str, Any]:
    """Losses of two steps from a checkpoint: of the model that wrote it, of a plain one, of another compiled one."""
    path = Path(folder)
    model, batch = compiled_model("gpt2")
    optimizer = adam(model)
    first = run(model, optimizer, batch, 2)
    own = str(path / f"checkpoint-{dist.get_rank()}.pt")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict()}, own)
    model.save_pretrained(path / "saved")
    held = torch.load(own)
    on = run(model, optimizer, batch, 2)

    plain, _ = training.model_and_batch("gpt2", torch.float64, 0.0)
    plain.load_state_dict(held["model"])
    plain_optimizer = adam(plain)
    plain_optimizer.load_state_dict(held["optimizer"])
    torch.manual_seed(9)
    other, _ = training.model_and_batch("gpt2", torch.float64, 0.0)
    for parameter in other.parameters():
        parameter.data.normal_(0, 0.02)
    again, _ = compiled_model("gpt2", model=other)
    again.load_state_dict(held["model"])
    again_optimizer = adam(again)
    again_optimizer.load_state_dict(torch.load(own)["optimizer"])  # torch does not copy what it loads
    read = type(plain).from_pretrained(path / "saved", dtype=torch.float64)
    reread = read(**batch).loss.item()
    read.load_state_dict(model.state_dict())
    return {
        "kinds": {type(value).__name__ for value in held["model"].values()},
        "tied": held["model"]["lm_head.weight"].data_ptr() == held["model"]["transformer.wte.weight"].data_ptr(),
        "first": first,
        "on": on,
        "plain": run(plain, plain_optimizer, batch, 2),
        "again": run(again, again_optimizer, batch, 2),
        "read": reread,
        "copied": read(**batch).loss.item(),
        "now": model(**batch).loss.item(),
        "files": sorted(os.listdir(path)) + sorted(os.listdir(path / "saved")),
    }


def loaded_by_torch(folder: str) -> list[float]:
    """Losses of models that torch's own tools have moved a state between."""
    model, batch = compiled_model("gpt2")
    run(model, adam(model), batch, 1)
    dcp.save({"model": model.state_dict()}, checkpoint_id=folder)
    options = StateDictOptions(full_state_dict=True, cpu_offload=True)
    full = get_model_state_dict(model, options=options)
    found = [model(**batch).loss.item()]
    for how in ("dcp", "full"):
        again, _ = compiled_model("gpt2")
        if how == "dcp":
            state = {"model": again.state_dict()}
            dcp.load(state, checkpoint_id=folder)
            again.load_state_dict(state["model"])
        else:
            given = full if dist.get_rank() == 0 else {}
            set_model_state_dict(
                again, given, options=StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)
            )
        found.append(again(**batch).loss.item())
    held = copy.deepcopy(model.state_dict())
    run(model, adam(model), batch, 1)
    model.load_state_dict(held)
    model.state_dict()["lm_head.weight"].mul_(1.0)
    found.append(model(**batch).loss.item())
    return found


def saved_by_one(folder: str) -> tuple[str, str, list[str]]:
    """What is said where rank 0 alone saves; what is on disk then."""
    meeting.PATIENCE_S = 1.0
    model, _ = compiled_model("gpt2")
    texts = ["not asked", "not asked"]
    if dist.get_rank() == 0:
        texts = [
            training.message(lambda: model.save_pretrained(f"{folder}/saved")),
            training.message(lambda: model.state_dict()["lm_head.weight"].numpy()),
        ]
    meeting.PATIENCE_S = 120.0
    return texts[0], texts[1], os.listdir(folder)


def saved_stages(folder: str) -> tuple[float, float]:
    """The loss of a pipeline, and of the plain model that it saved."""
    model, batch = compiled_model("gpt2", {"pp": "pipeline"}, ("pp",))
    model.train_step(**batch)
    model.save_pretrained(folder)
    with torch.no_grad():
        loss = float(model(**batch).loss)
    kind = type(model).__mro__[2]
    return loss, float(kind.from_pretrained(folder, dtype=torch.float64)(**batch).loss.detach())


class Tied(nn.Module):
    """A table with two names, a norm with statistics."""

    def __init__(self) -> None:
        super().__init__()
        self.table, self.norm = nn.Embedding(6, 4), nn.BatchNorm1d(4)
        self.head = nn.Linear(4, 6, bias=False)
        self.head.weight = self.table.weight

    def forward(self, ids: Tensor) -> Tensor:
        return self.head(self.norm(self.table(ids)))


@torch.no_grad()
def written_through_states(compiled: bool) -> dict[str, list[float]]:
    """An average of a model that is kept by `state_dict()`, by lists of tensors as timm keeps it and one by one."""
    torch.manual_seed(0)
    model: nn.Module = Tied().double()
    if compiled:
        mesh = init_device_mesh("cpu", (dist.get_world_size(),), mesh_dim_names=("dp",))
        model = autopar.compile(model, mesh, strategy="zero3", example_inputs=torch.arange(6))
    average = copy.deepcopy(model)
    for parameter in model.parameters():
        parameter.mul_(1.5).add_(1)
    names = [name for name, value in model.state_dict().items() if value.is_floating_point()]
    mine, now = ([each.state_dict()[name] for name in names] for each in (average, model))
    torch._foreach_lerp_(mine, now, weight=0.25)
    torch._foreach_mul_(mine, scalar=0.5)
    torch._foreach_add_(mine, now, alpha=2.0)
    torch._foreach_add_(mine, [torch.ones_like(each) for each in mine])
    own = average.state_dict()
    own["norm.weight"].lerp_(model.state_dict()["norm.weight"], 0.125)
    own["norm.bias"][1] = 7
    torch.sub(own["norm.bias"], model.state_dict()["norm.weight"], out=own["norm.bias"])
    with torch.inference_mode():
        torch.mul(own["norm.running_mean"], 3, out=own["norm.running_mean"])
        own["norm.running_var"].add_(own["norm.running_mean"])
    return {name: torch.as_tensor(value).flatten().tolist() for name, value in average.state_dict().items()}
