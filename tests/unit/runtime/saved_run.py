"""A run on one rank that is saved and goes on."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.runtime.checkpoint import folders


class Net(nn.Module):
    """Two layers with a tied weight, a number of no dims, buffers, one of them not to be saved."""

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(6, 6)
        self.norm = nn.BatchNorm1d(6)
        self.scale = nn.Parameter(torch.tensor(1.5))
        self.last = nn.Linear(6, 6)
        self.last.weight = self.first.weight
        self.register_buffer("passing", torch.ones(2), persistent=False)

    def reset_parameters(self) -> None:
        nn.init.constant_(self.scale, 1.5)
        self.passing.fill_(1)  # type: ignore[operator]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        hidden = self.norm(self.first(x)).relu() * self.scale
        return self.last(hidden).square().mean()


class Run:
    """A compiled model with all that a script has beside it."""

    def __init__(self, seed: int = 0) -> None:
        torch.manual_seed(seed)
        mesh = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",))
        self.model: Any = autopar.compile(Net(), mesh, example_inputs={"x": torch.zeros(4, 6)}, strategy="ddp")
        self.optimizer = torch.optim.AdamW(self.model.parameters(), lr=0.1)
        self.rates = torch.optim.lr_scheduler.MultiStepLR(self.optimizer, [2, 3])

    def train(self, steps: range) -> list[float]:
        losses = []
        for step in steps:
            loss = self.model(x=torch.randn(4, 6) + step)
            loss.backward()
            self.optimizer.step()
            self.optimizer.zero_grad()
            self.rates.step()
            losses.append(float(loss))
        return losses

    def save(self, folder: Path, step: int, **options: Any) -> Any:
        found = self.model.save(folder, step=step, optimizer=self.optimizer, scheduler=self.rates, **options)
        return found

    def load(self, folder: Path, **options: Any) -> Any:
        return self.model.load(folder, optimizer=self.optimizer, scheduler=self.rates, **options)


@pytest.fixture(autouse=True)
def one_rank() -> Iterator[None]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        yield
    finally:
        dist.destroy_process_group()
        for key in list(folders._locks):
            folders.unlock(Path(key))
