"""Work for test_script_copies: copies and averages of compiled models."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

import autopar
from tests.dist import training
from tests.dist.script import Model, adam, compiled_model, run


def averaged(make: Callable[[], tuple[Model, dict[str, Any]]]) -> dict[str, Any]:
    """Training with averaged weights beside, and a copy that goes its own way with a loss of its own."""
    model, batch = make()
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.5))
    optimizer = adam(model)
    losses = []
    for _ in range(3):
        losses += run(model, optimizer, batch, 1)
        average.update_parameters(model)
    other = copy.deepcopy(model)
    own = []
    other_optimizer = adam(other)
    for _ in range(2):
        logits = other(input_ids=batch["input_ids"]).logits
        loss = F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
        loss.backward()
        other_optimizer.step()
        other_optimizer.zero_grad()
        own.append(loss.item())
    with torch.no_grad():
        average_loss = float(average(**batch).loss)
        held = {name: value.cpu() for name, value in average.state_dict().items()}
    again = copy.deepcopy(average)
    again.load_state_dict(held)
    losses += [average_loss, float(again(**batch).loss.detach()), *own, float(model(**batch).loss.detach())]
    return {"losses": losses, "tied": other.lm_head.weight is other.transformer.wte.weight, "keys": sorted(held)}


def copied_before_it_is_planned() -> list[float]:
    """The same number of a copy that reads first, and of the model that trains, on batches of other sizes."""
    torch.manual_seed(0)
    model = autopar.compile(nn.Linear(4, 4), init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), strategy="tensor")
    other = copy.deepcopy(model)
    model(torch.ones(8, 4)).sum().backward()
    with torch.no_grad():
        found = [other(torch.ones(8, 4))[0], model(torch.ones(6, 4))[0], other(torch.ones(4, 4))[0]]
    return [float(each.sum()) for each in found]


def copied() -> tuple[dict[str, Any], dict[str, Any], list[float], str, list[float]]:
    """Of a model planned at once, and at its first batch; losses through torch.compile; what a second compile says;
    `copied_before_it_is_planned`.
    """
    at_once = averaged(lambda: compiled_model("gpt2"))
    later = averaged(lambda: compiled_model("gpt2", example=False))
    model, batch = compiled_model("gpt2")
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    text = training.message(lambda: autopar.compile(nn.Sequential(model), mesh, strategy="ddp"))
    wrapped = torch.compile(model, backend="aot_eager")
    optimizer: Any = adam(model)
    optimizer.step = torch.compile(optimizer.step, backend="eager")
    losses = run(wrapped, optimizer, batch, 3)
    own, _ = training.model_and_batch("gpt2", torch.float64, 0.5)
    model, _ = compiled_model("gpt2", model=own)
    still = copy.deepcopy(model).eval()
    with torch.no_grad():
        losses += [float(still(**batch).loss), float(model.eval()(**batch).loss)]
    return at_once, later, losses, text, copied_before_it_is_planned()
