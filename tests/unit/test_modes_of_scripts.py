"""What a script's own modes of autograd have to do with what it asks of autopar: nothing."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from torch import nn

import autopar


@pytest.mark.parametrize("mode", [torch.no_grad, torch.inference_mode])
def test_a_training_step_is_planned_and_proven_with_gradients(mode: Callable[[], Any]) -> None:
    """Breaks if a program has no gradients, or a proof looks for none, where the script plans without any."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2)).eval()
    mesh, batch = autopar.Mesh.parse("dp=2", hardware="cpu"), (torch.randn(4, 4),)
    with mode():
        plan = autopar.plan(model, mesh, example_inputs=batch)
        inside = plan.verify()
    proof = plan.verify()
    assert plan.source == autopar.plan(model, mesh, example_inputs=batch).source
    assert inside.ok and proof.ok
    for each in (inside, proof):
        assert sum(comparison.name.startswith("gradient of") for comparison in each.comparisons) == 4


def test_a_proof_tells_of_gradients_that_the_plan_alone_has_not(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a plan that was traced without gradients is proven, since the proof traces the model once more."""
    monkeypatch.setattr("autopar.api.planning.with_gradients", lambda wanted: nullcontext())
    model, mesh = nn.Linear(4, 2), autopar.Mesh.parse("dp=2", hardware="cpu")
    with torch.no_grad():
        plan = autopar.plan(model, mesh, example_inputs=(torch.randn(4, 4),))
    proof = plan.verify()
    wrong = {row.name for row in proof.comparisons if not row.ok}
    assert {"gradient of weight (the plan has none)", "gradient of weight (the plan's own text)"} <= wrong
