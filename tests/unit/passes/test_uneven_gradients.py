"""Gradients of parameters that are stored in uneven pieces, whatever they are split over when they are made."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional

import autopar
from autopar.machine.mesh import Mesh

pytestmark = pytest.mark.unit


class Classes(nn.Module):
    """A head of 18 classes: two ranks divide them, four do not."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.head = nn.Linear(8, 16), nn.Linear(16, 18, bias=False)
        self.bias = nn.Parameter(torch.randn(18))

    def forward(self, x: Tensor, labels: Tensor) -> dict[str, Tensor]:
        logits = self.head(torch.tanh(self.up(x))) + self.bias
        return {"loss": functional.cross_entropy(logits, labels), "logits": logits}


@pytest.mark.moderate
def test_a_gradient_that_is_gathered_before_it_is_cut() -> None:
    """Breaks if pieces of one axis are padded for another's before they are one tensor: the gradient of a bias whose
    product is split over `tp` and which is stored over `dp` was wrong, and nothing said so.
    """
    torch.manual_seed(0)
    batch = {"x": torch.randn(8, 8), "labels": torch.randint(0, 18, (8,))}
    pins = [
        autopar.pin("bias", dp=autopar.Shard(0), tp=autopar.Replicate()),
        autopar.pin("head.weight", dp=autopar.Replicate(), tp=autopar.Shard(0)),
        autopar.pin("logits", dp=autopar.Shard(0), tp=autopar.Shard(1)),
    ]
    mesh = Mesh({"dp": 4, "tp": 2}, hardware="cpu")
    plan = autopar.plan(
        Classes(), mesh, example_inputs=batch, strategy={"dp": "auto", "tp": "tensor"}, constraints=pins
    )
    assert "all_gather tp, slice dp" in plan.source and "(0, 1, 18)" in plan.source
    proof = plan.verify()
    assert proof.ok, str(proof)
