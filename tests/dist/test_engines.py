"""Plans exported with weights, which transformers and autopar load on two gloo processes: logits of one process."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.cli.models import catalogue
from tests.dist import engines
from tests.dist.launch import launch

IDS = [[5, 9, 2, 60, 31, 7, 7], [1, 88, 3, 4, 11, 90, 2]]


@pytest.mark.parametrize("name", ["qwen3", "mistral"])
def test_transformers_and_autopar_load_what_was_exported(name: str, tmp_path: Path) -> None:
    """Breaks if a style splits a matrix along another dim than the plan, or a sum is left out; if a rank is given
    another's part, or reads a file of another, though its own has all that it holds.
    """
    loaded = catalogue.load(name, tiny=True, device="cpu", dropout=0.0)
    model: Any = loaded.model
    source, theirs, own = (str(tmp_path / each) for each in ("hf", "theirs", "own"))
    model.double().eval().save_pretrained(source)
    mesh = autopar.Mesh.parse("tp=2", hardware="cpu")
    plan = autopar.plan(loaded.model, mesh, example_inputs=loaded.batch, strategy="tensor")
    exported = plan.export("transformers-tp-plan", weights=source, folder=theirs)
    assert json.loads(exported.text)["tp_size"] == 2
    with torch.no_grad():
        wanted = model(torch.tensor(IDS)).logits
    whole = model.model.layers[0].self_attn.q_proj.weight.shape
    for found, shape in launch(engines.logits, 2, theirs, IDS):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        assert shape == (whole[0] // 2, whole[1])
    sizes = plan.export("autopar", weights=source, folder=own).bytes_by_rank
    batch = {**loaded.batch, "input_ids": torch.tensor(IDS), "labels": torch.tensor(IDS)}
    ran = launch(engines.own_logits, 2, own, name, batch, IDS)
    for rank, (found, held, files) in enumerate(ran):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=1e-14)
        assert held == sizes[rank] == plan.cost.memory.parameters
        assert files == {f"rank-0000{rank}-of-00002.safetensors"}
