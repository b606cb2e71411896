"""The fullest time of a step: what is held then, and that a plan keeps to its limit."""

from __future__ import annotations

import pytest
import torch
from torch import nn

import autopar
from autopar.base.errors import DoesNotFit
from autopar.cost.memory.step import step_peak_bytes

pytestmark = pytest.mark.unit
ROWS, WIDE, LAYERS = 64, 128, 3


class Chain(nn.Module):
    """Linear layers in a module list, and a mean."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDE, WIDE, bias=False) for _ in range(LAYERS))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.mean()


def planned(mesh: str, strategy: str, rows: int = ROWS, **options: object) -> autopar.Plan:
    batch = {"x": torch.zeros(rows, WIDE, device="meta")}
    with torch.device("meta"):
        model = Chain()
    options = {"example_inputs": batch, "strategy": strategy} | options
    return autopar.plan(model, autopar.Mesh.parse(mesh, hardware="cpu"), **options)  # type: ignore[arg-type]


@pytest.mark.moderate
def test_every_tensor_counts_from_when_it_is_made() -> None:
    """Breaks if gradients count before they are there, or anything that lives at the fullest time is left out."""
    plan = planned("dp=1", "ddp", rows=1024)
    value, weight = 4 * 1024 * WIDE, 4 * WIDE * WIDE
    # The last layer's backward: batch, two hidden states between layers, the gradients of its output and its input; the
    # output's and the input's gradients live while the weight's is made. The mean keeps no activation.
    assert plan.cost.memory.peak == pytest.approx(3 * LAYERS * weight + 5 * value + weight, rel=0.01)
    assert plan.cost.memory.peak < plan.program.result.peak_bytes  # type: ignore[union-attr]


@pytest.mark.moderate
def test_the_update_is_part_of_the_step() -> None:
    """Breaks if a model whose activations are small is thought to need no more than its backward does."""
    plan = planned("dp=1", "ddp", rows=1)
    weight = 4 * WIDE * WIDE
    assert plan.cost.memory.peak == pytest.approx(4 * LAYERS * weight + 2 * weight, rel=0.01)


@pytest.mark.moderate
def test_gathered_and_reduced_tensors_count_while_they_travel() -> None:
    """Breaks if ZeRO-3 is predicted without the parameters and gradients that are under way."""
    weight = 4 * WIDE * WIDE
    plan = planned("dp=2", "zero3", rows=2)
    # One region: when its backward is through, parameters lie gathered beside the gradients, these once as they were
    # made and once as they travel, and the pieces that will come of them.
    stored = 3 * LAYERS * weight / 2
    assert plan.cost.memory.peak == pytest.approx(stored + 3 * LAYERS * weight + LAYERS * weight / 2, rel=0.01)


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3", "tensor"])
def test_a_plan_keeps_to_its_limit(strategy: str) -> None:
    """Breaks if a plan is given that takes more than was allowed, whatever the placement thought of it."""
    mesh = "tp=2" if strategy == "tensor" else "dp=2"
    free = planned(mesh, strategy)
    assert free.program is not None
    assert free.cost.peak_memory_bytes == int(step_peak_bytes(free.program))
    for part in (1.2, 1.0, 0.98, 0.9):
        limit = part * free.cost.peak_memory_bytes
        try:
            assert planned(mesh, strategy, memory_limit=limit).cost.peak_memory_bytes <= limit
        except DoesNotFit as error:
            assert "limit" in str(error)


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_inference_keeps_to_its_limit_too(strategy: str) -> None:
    """Breaks if a forward alone is promised less memory than it takes: what the placement thought of it."""
    free = planned("dp=2", strategy, inference=True)
    assert free.program is not None and free.cost.memory.optimizer_states == 0
    assert free.cost.peak_memory_bytes == int(step_peak_bytes(free.program))
    peak = free.cost.peak_memory_bytes
    assert planned("dp=2", strategy, inference=True, memory_limit=peak).cost.peak_memory_bytes <= peak
    with pytest.raises(DoesNotFit, match="limit"):
        planned("dp=2", strategy, inference=True, memory_limit=0.3 * peak)


@pytest.mark.moderate
def test_inference_holds_two_values_between_layers() -> None:
    """Breaks if the forward's values are thought to live to its end, as the backward would need them."""
    plan = planned("dp=1", "ddp", rows=1024, inference=True)
    value, weight = 4 * 1024 * WIDE, 4 * WIDE * WIDE
    # The batch, a layer's input, its output.
    assert plan.cost.memory.peak == pytest.approx(LAYERS * weight + 3 * value, rel=0.01)
