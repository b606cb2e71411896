"""What runs on each process of test_quantized.py."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar


def llama() -> Any:
    import transformers

    config = transformers.LlamaConfig(
        vocab_size=64, hidden_size=32, intermediate_size=64, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, eos_token_id=None,
    )  # fmt: skip
    return transformers.LlamaForCausalLM(config)


def prompt() -> dict[str, Any]:
    ids = torch.randint(3, 60, (1, 5), generator=torch.Generator().manual_seed(0))
    return {"input_ids": ids, "attention_mask": torch.ones_like(ids), "max_new_tokens": 8, "do_sample": False}


def tokens_and_weights(folder: str) -> tuple[list[int], dict[str, list[int]], dict[str, Tensor]]:
    """Tokens of a model on meta that has the codes of a checkpoint, shapes of this rank's codes, and what a model that
    keeps weights reads of the same checkpoint.
    """
    with torch.device("meta"):
        model = autopar.store_weights(llama().float().eval(), like=folder)
        plain = llama().float()
    compiled: Any = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=("tp",)), strategy="tensor")
    compiled.load_pretrained(folder)
    tokens = compiled.generate(**prompt(), pad_token_id=0)[0].tolist()
    held = {name: list(p.to_local().shape) for name, p in compiled.named_parameters() if name.endswith("codes")}
    whole: Any = autopar.compile(plain, init_device_mesh("cpu", (2,), mesh_dim_names=("dp",)), strategy="zero3")
    whole.load_pretrained(folder)
    ids = prompt()["input_ids"].repeat(2, 1)
    whole(input_ids=ids, labels=ids)
    state = whole.state_dict()
    return tokens, held, {name: x.full_tensor() if hasattr(x, "full_tensor") else x for name, x in state.items()}
