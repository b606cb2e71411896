"""Checkpoints of codes that other tools made, each rank reading its own pieces, on real gloo processes."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

import autopar
from tests.dist import quantized
from tests.dist.launch import launch
from tests.unit.runtime.test_quantized import awq, gptq


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["gptq", "awq"])
def test_ranks_read_their_pieces_of_codes(kind: str, tmp_path: Path) -> None:
    """Breaks if a rank reads codes, zeros or scales of another's rows or groups, or the whole of them is kept."""
    torch.manual_seed(0)
    model = quantized.llama().half()
    tensors: dict[str, Any] = {}
    wanted: dict[str, Any] = dict(model.state_dict())
    for name, value in model.state_dict().items():
        if not name.endswith("proj.weight"):
            tensors[name] = value
            continue
        parts, wanted[name] = (gptq if kind == "gptq" else awq)(*value.shape)
        tensors |= {f"{name.removesuffix('weight')}{part}": each for part, each in parts.items()}
    save_file(tensors, tmp_path / "model.safetensors")
    (tmp_path / "config.json").write_text(json.dumps({"model_type": "llama", "quantization_config": {}}))
    alone: Any = autopar.store_weights(quantized.llama().half(), like=tmp_path).float().eval()
    want = alone.generate(**quantized.prompt(), pad_token_id=0)[0].tolist()
    for tokens, held, plain in launch(quantized.tokens_and_weights, 2, str(tmp_path), timeout_s=240.0):
        assert tokens == want
        assert held["model.layers.0.mlp.up_proj.weight_codes"] == [32, 4, 4]
        assert held["model.layers.0.mlp.down_proj.weight_codes"] == [32, 4, 4]
        assert all(torch.equal(plain[name], value.float()) for name, value in wanted.items())
