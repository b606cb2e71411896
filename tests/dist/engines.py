"""What each rank does in test_engines.py: transformers, and autopar, load the folders that were exported for them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.torch_compat.distributed import local_tensor
from autopar.cli.models import catalogue
from autopar.runtime.checkpoint import blocks


def logits(folder: str, ids: list[list[int]]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Of transformers' own tensor parallelism, in float64, and the shape of a query projection's piece."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    config: Any = DistributedConfig(**json.loads(Path(folder, "distributed_config.json").read_text()))
    auto: Any = transformers.AutoModelForCausalLM
    model: Any = auto.from_pretrained(folder, distributed_config=config, dtype=torch.float64).eval()
    with torch.no_grad():
        found = model(torch.tensor(ids)).logits
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    weight = model.model.layers[0].self_attn.q_proj.weight
    return found, tuple((weight.to_local() if hasattr(weight, "to_local") else weight).shape)


def own_logits(
    folder: str, name: str, batch: dict[str, Any], ids: list[list[int]]
) -> tuple[torch.Tensor, int, set[str]]:
    """Of the compiled model, in float64, with the weights of the ranks' files; bytes of parameters that this rank
    holds, and the files that it opened for them.
    """
    mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
    model = catalogue.load(name, tiny=True, device="cpu", dropout=0.0).model.double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    compiled: Any = autopar.compile(model, mesh, example_inputs=batch, strategy="tensor")
    opened: set[str] = set()
    check = blocks.Files.check
    with mock.patch.object(blocks.Files, "check", lambda self, file: (opened.add(file), check(self, file))):
        compiled.load(folder)
        tokens = torch.tensor(ids)
        found = compiled(**{**batch, "input_ids": tokens, "labels": tokens}).logits
    held = sum(local_tensor(each).nbytes for each in compiled.parameters())
    return found.full_tensor().detach(), held, opened - {"plan.json"}
