"""Work for test_seeds: what a user does with torch's generator, and the losses that come of it."""

from __future__ import annotations

import copy
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist.training import compile_tiny, model_and_batch


def again(sizes: tuple[int, ...], strategy: Any) -> dict[str, list[float]]:
    """Losses of pairs of forwards with dropout. Each rank's generator is where it likes at first."""
    axes = ("dp", "pp") if strategy == "pipeline" else ("dp", "tp")
    model, batch = model_and_batch("gpt2", torch.float64, 0.2)
    mesh = init_device_mesh("cpu", sizes, mesh_dim_names=axes[: len(sizes)])
    named = {"dp": "ddp", "pp": "pipeline"} if strategy == "pipeline" else strategy
    compiled = autopar.compile(model, mesh, strategy=named)

    def losses() -> list[float]:
        with torch.no_grad():
            return [float(compiled(**batch).loss) for _ in range(2)]

    torch.manual_seed(5)
    found = {"seeded": losses()}
    kept = torch.get_rng_state()
    found["after"] = losses()
    torch.manual_seed(5)
    found["seeded again"] = losses()
    torch.set_rng_state(kept)
    found["restored"] = losses()
    torch.manual_seed(5 + dist.get_rank())
    found["own seeds"] = losses()
    return found


def left_alone() -> bool:
    """Whether a model that draws nothing leaves the generator as it was, planning included."""
    compiled, batch = compile_tiny("gpt2", (2,), strategy="ddp", example_inputs=None)
    before = torch.get_rng_state()
    compiled(**batch).loss.backward()
    return bool(torch.equal(before, torch.get_rng_state()))


class Drops(nn.Module):
    """Leaves layers out by draws, and counts its steps."""

    def __init__(self) -> None:
        super().__init__()
        self.layers, self.calls = nn.ModuleList(nn.Linear(8, 8) for _ in range(3)), 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += 1
        for layer in self.layers:
            if torch.rand(1) < 0.4:
                continue
            x = x + torch.tanh(layer(x))
        return x.square().mean() * min(1.0, self.calls / 3)


def told(strategy: str) -> tuple[list[float], list[float]]:
    """Losses of steps for which ranks are seeded differently, and eager's for rank 0's seed."""
    torch.manual_seed(0)
    model = Drops().double()
    compiled = autopar.compile(
        copy.deepcopy(model), init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy=strategy
    )
    batches = torch.randn(4, 4, 8, generator=torch.Generator().manual_seed(1), dtype=torch.float64)

    def losses(trained: Any, seed: int) -> list[float]:
        optimizer, found = torch.optim.AdamW(trained.parameters(), lr=0.1), []
        torch.manual_seed(seed)
        for batch in batches:
            loss = trained(batch)
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            found.append(float(loss.detach()))
        return [*found, trained.calls]

    return losses(compiled, 5 + dist.get_rank()), losses(model, 5)
