"""Sequences split over four real gloo processes: losses and gradient norms follow one process, sends are as planned."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from benchmarks.proofs.contexts import build
from benchmarks.training.count import CollectiveCounter
from tests.dist.launch import launch
from tests.dist.training import loss_of, train

STEPS = 4
Case = tuple[Mapping[str, int], Mapping[str, str]]
CASES: Mapping[str, Sequence[Case]] = {
    "llama": [
        ({"cp": 4}, {"cp": "ulysses"}),
        ({"cp": 4}, {"cp": "allgather_kv"}),
        ({"cp0": 2, "cp1": 2}, {"cp0": "ring", "cp1": "ulysses"}),
    ],
    "gpt2": [({"dp": 2, "cp": 2}, {"dp": "zero2", "cp": "ring"}), ({"cp": 2, "tp": 2}, {"cp": "ring", "tp": "tensor"})],
    "qwen3": [({"cp": 2, "tp": 2}, {"cp": "ulysses", "tp": "tensor"})],
    "mistral": [({"cp": 4}, {"cp": "ring"})],
    "bert": [({"cp": 4}, {"cp": "ulysses"}), ({"dp": 2, "cp": 2}, {"dp": "ddp", "cp": "allgather_kv"})],
}


def made(name: str) -> tuple[nn.Module, dict[str, Any]]:
    """The same model and batch in every process."""
    torch.manual_seed(0)
    return build(name)


def train_with_each(name: str, cases: Sequence[Case]) -> list[dict[str, Any]]:
    """Losses, norms, what a step sends and what was planned, of each case; on one rank."""
    found = []
    for axes, strategy in cases:
        model, batch = made(name)
        mesh = init_device_mesh("cpu", tuple(axes.values()), mesh_dim_names=tuple(axes))
        compiled: Any = autopar.compile(model, mesh, example_inputs=batch, strategy=strategy)
        losses, norms = train(compiled, batch, STEPS)
        with CollectiveCounter() as counter:
            loss_of(compiled(**batch)).backward()
        planned = sum(row.bytes_sent for row in compiled.plan.collectives)
        found.append({"losses": losses, "norms": norms, "sent": counter.total_bytes(), "planned": planned})
        assert dist.get_world_size() == 4
    return found


@pytest.mark.sampled(2)
@pytest.mark.parametrize("name", CASES)
def test_training_follows_one_process(name: str) -> None:
    """Breaks if a real exchange mixes up blocks, stripes or heads that simulated ranks tell apart."""
    losses, norms = train(*made(name), STEPS)
    for results in launch(train_with_each, 4, name, CASES[name], timeout_s=200.0):
        for case, result in zip(CASES[name], results, strict=True):
            assert result["losses"] == pytest.approx(losses, rel=2e-4), case
            assert result["norms"] == pytest.approx(norms, rel=2e-3), case
            assert result["sent"] == pytest.approx(result["planned"], rel=1e-9), case
