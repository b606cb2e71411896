"""Loops that call the same modules at every step: their rounds are calls of one region."""

from __future__ import annotations

from collections import Counter
from typing import Any

import pytest
import torch
from torch import Tensor, nn

import autopar

WIDTH, WORDS, STEPS = 8, 12, 12


class Decoder(nn.Module):
    """Each step is fed what the step before chose, and ends the loop early where every row has chosen the last word."""

    def __init__(self, steps: int = STEPS, p: float = 0.0) -> None:
        super().__init__()
        self.steps, self.cell, self.head = steps, nn.GRUCell(WIDTH + WORDS, WIDTH), nn.Linear(WIDTH, WORDS)
        self.read, self.drop = nn.Linear(WIDTH, WIDTH), nn.Dropout(p)

    def forward(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        hidden, read = features.new_zeros(len(features), WIDTH), self.read(features)
        chosen, ids, logits = target[:, 0], [], []
        for _ in range(self.steps):
            given = torch.cat([read, nn.functional.one_hot(chosen, WORDS).to(read.dtype)], 1)
            hidden = self.cell(given, self.drop(hidden))
            logits.append(self.head(hidden))
            chosen = logits[-1].argmax(1)
            ids.append(chosen)
            if torch.stack(ids, 1).eq(WORDS - 1).any(-1).all():
                break
        every = torch.stack(logits, 1)
        return {"loss": nn.functional.cross_entropy(every.flatten(0, 1), target.flatten()), "logits": every}


class Growing(nn.Module):
    """Every step reads one value more than the step before."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Linear(WIDTH, WIDTH)

    def forward(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        found = [features]
        for _ in range(STEPS):
            found.append(self.mix(torch.stack(found, 1)).mean(1))
        return {"loss": found[-1].pow(2).mean() + 0 * target.sum()}


class Counting(nn.Module):
    """A block with batch norm, which every step calls."""

    def __init__(self) -> None:
        super().__init__()
        self.block = nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.BatchNorm1d(WIDTH))

    def forward(self, features: Tensor, target: Tensor) -> dict[str, Tensor]:
        for _ in range(STEPS):
            features = features + self.block(features).tanh()
        return {"loss": features.pow(2).mean() + 0 * target.sum()}


def plan(model: nn.Module, mesh: dict[str, int], strategy: Any, steps: int = STEPS, **options: Any) -> autopar.Plan:
    torch.manual_seed(0)
    batch = {"features": torch.randn(8, WIDTH), "target": torch.randint(WORDS - 1, (8, steps))}
    return autopar.plan(model, autopar.Mesh(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy, **options)


def calls(found: autopar.Plan) -> Counter[str]:
    assert found.program is not None
    return Counter(call.region for call in found.program.calls)


@pytest.mark.sampled(2)
@pytest.mark.moderate
@pytest.mark.parametrize(
    ("mesh", "strategy"),
    [
        ({"dp": 2, "tp": 2}, "ddp"),
        ({"dp": 2, "tp": 2}, "zero3"),
        ({"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "tensor"}),
        ({"dp": 2, "tp": 2}, "auto"),
        ({"pp": 2, "dp": 2}, {"pp": "pipeline(gpipe)", "dp": "ddp"}),
    ],
)
def test_the_rounds_of_a_loop_are_calls_of_one_region(mesh: dict[str, int], strategy: Any) -> None:
    found = plan(Decoder(p=0.3), mesh, strategy)
    assert calls(found)["loop"] == STEPS - 1, calls(found)  # what follows the last call is the epilogue
    assert found.verify().ok


@pytest.mark.moderate
def test_inference_calls_the_same_region() -> None:
    found = plan(Decoder().eval(), {"dp": 2, "tp": 2}, {"dp": "ddp", "tp": "tensor"}, inference=True)
    assert calls(found)["loop"] == STEPS - 1
    assert found.verify().ok


@pytest.mark.moderate
def test_a_loop_that_updates_a_buffer() -> None:
    """Statistics go from round to round; how many rounds there were is counted after the last."""
    found = plan(Counting(), {"dp": 2}, "ddp")
    assert calls(found)["loop"] >= STEPS - 2
    assert found.verify().ok


@pytest.mark.moderate
def test_a_longer_loop_makes_a_problem_little_larger() -> None:
    sizes = []
    for steps in (STEPS, 2 * STEPS):
        found = plan(Decoder(steps), {"dp": 2, "tp": 2}, "ddp", steps)
        assert found.program is not None and found.program.result is not None
        sizes.append(found.program.result.num_nodes)
    assert sizes[1] - sizes[0] < 15 * STEPS, sizes  # of a round, some 60; what is left tells whether the loop ends


@pytest.mark.moderate
def test_a_short_loop_stays_whole() -> None:
    assert max(calls(plan(Decoder(6), {"dp": 2}, "ddp", 6)).values()) == 1


@pytest.mark.moderate
def test_a_loop_whose_rounds_differ_stays_whole() -> None:
    found = plan(Growing(), {"dp": 2}, "ddp")
    assert len(calls(found)) == 1
    assert found.verify().ok
