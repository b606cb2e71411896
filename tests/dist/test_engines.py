"""A plan exported for transformers, which splits the model by it on two gloo processes: logits of one process."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

import autopar
from autopar.cli.models import catalogue
from tests.dist import engines
from tests.dist.launch import launch

IDS = [[5, 9, 2, 60, 31, 7, 7], [1, 88, 3, 4, 11, 90, 2]]


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_transformers_runs_the_plan(name: str, tmp_path: Path) -> None:
    """Breaks if a style splits a matrix along another dim than the plan, or a sum is left out."""
    loaded = catalogue.load(name, tiny=True, device="cpu", dropout=0.0)
    loaded.model.save_pretrained(tmp_path)
    mesh = autopar.Mesh.parse("tp=2", hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="tensor")
    with torch.no_grad():
        wanted = loaded.model.double().eval()(torch.tensor(IDS)).logits
    whole = loaded.model.model.layers[0].self_attn.q_proj.weight.shape
    for found, shape in launch(engines.logits, 2, str(tmp_path), plan.export("transformers-tp-plan").text, IDS):
        torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-12)
        assert shape == (whole[0] // 2, whole[1])
