"""What each rank does in test_engines.py: transformers loads the model by the plan that was exported for it."""

from __future__ import annotations

import json
from typing import Any

import torch


def logits(folder: str, plan: str, ids: list[list[int]]) -> tuple[torch.Tensor, tuple[int, ...]]:
    """Of transformers' own tensor parallelism, in float64, and the shape of a query projection's piece."""
    import transformers
    from transformers.distributed.configuration_utils import DistributedConfig

    config: Any = DistributedConfig(**json.loads(plan))
    auto: Any = transformers.AutoModelForCausalLM
    model: Any = auto.from_pretrained(folder, distributed_config=config, dtype=torch.float64).eval()
    with torch.no_grad():
        found = model(torch.tensor(ids)).logits
    found = found.full_tensor() if hasattr(found, "full_tensor") else found
    weight = model.model.layers[0].self_attn.q_proj.weight
    return found, tuple((weight.to_local() if hasattr(weight, "to_local") else weight).shape)
