"""Work for test_several_terms: a classifier whose loss has several terms, and class weights that a script changes."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

import autopar

CLASSES = 5


class Classifier(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 4)) for _ in range(2)])
        self.scores, self.value = nn.Linear(4, CLASSES), nn.Linear(4, 1)
        self.criterion = nn.CrossEntropyLoss(weight=torch.linspace(0.2, 2.0, CLASSES))

    def forward(self, x: Tensor, labels: Tensor, target: Tensor) -> dict[str, Tensor]:
        for layer in self.layers:
            x = x + layer(x)
        return {"loss": self.criterion(self.scores(x), labels) + F.mse_loss(self.value(x).squeeze(-1), target)}


def batch_of(seed: int, rows: int = 8) -> dict[str, Tensor]:
    """Of which the rows of one microbatch ignore their labels."""
    generator = torch.Generator().manual_seed(seed)
    labels = torch.randint(CLASSES, (rows,), generator=generator)
    labels[seed % 4 * 2 : seed % 4 * 2 + 2] = -100
    x, target = torch.randn(rows, 4, generator=generator), torch.randn(rows, generator=generator)
    return {"x": x.double(), "labels": labels, "target": target.double()}


def losses(axis: str, strategy: str, in_turn: bool) -> tuple[list[float], list[float]]:
    """Of some steps, compiled and eager; the weights of classes change on the way, and the last batch is longer."""
    torch.manual_seed(3)
    eager = Classifier().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=(axis,))
    model: Any = autopar.compile(copy.deepcopy(eager), mesh, strategy={axis: strategy}, microbatches=4)
    found, expected = [], []
    optimizers: list[torch.optim.Optimizer] = []
    for step in range(4):
        batch = batch_of(step, 16 if step == 3 else 8)
        if step == 2:
            for each in (eager, model):
                each.criterion.weight.mul_(torch.linspace(2.0, 0.5, CLASSES))
        loss = eager(**batch)["loss"]
        loss.backward()
        expected.append(float(loss.detach()))
        output = model.train_step(**batch) if in_turn else model(**batch)
        loss = output["loss"] if isinstance(output, dict) else output
        if not in_turn:
            loss.backward()
        found.append(float(loss.detach()))
        optimizers = optimizers or [torch.optim.AdamW(each.parameters(), lr=0.05) for each in (eager, model)]
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
    return found, expected


class Masked(nn.Module):
    """An average over a mask, by hand, and another output."""

    def __init__(self) -> None:
        super().__init__()
        self.value = nn.Linear(4, 1)

    def forward(self, x: Tensor, mask: Tensor) -> dict[str, Tensor]:
        v = self.value(x).squeeze(-1)
        return {"loss": (v.square() * mask).sum() / mask.sum(), "other": v.mean()}


def both() -> tuple[list[Tensor], list[Tensor]]:
    """Gradients where they come for both outputs, and the mask leaves out all rows of a microbatch."""
    torch.manual_seed(3)
    eager = Masked().double()
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("dp",))
    model: Any = autopar.compile(copy.deepcopy(eager), mesh, strategy="ddp", microbatches=2)
    mask = torch.tensor([0, 0, 1, 1, 0, 0, 1, 1]).double()
    batch = {"x": torch.randn(8, 4, generator=torch.Generator().manual_seed(1)).double(), "mask": mask}
    for each in (eager, model):
        output = each(**batch)
        (output["loss"] + output["other"]).backward()
    found = [p.grad for p in model.parameters()]
    return [x.full_tensor() if isinstance(x, DTensor) else x for x in found], [p.grad for p in eager.parameters()]
