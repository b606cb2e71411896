"""What runs on each process of test_by_hand.py: loops of calls of forward, as scripts write them."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

import autopar
from tests.dist import generation


def loops(name: str, strategy: Any, axis: str = "x") -> dict[str, list[list[float]]]:
    """Logits of each loop, by its name. strategy: None: on one process."""
    model, prompt = generation.model_and_prompt(name)
    plain, _ = generation.model_and_prompt(name)
    model.double().eval()
    plain.double().eval()
    if strategy is not None:
        model = autopar.compile(model, init_device_mesh("cpu", (2,), mesh_dim_names=(axis,)), strategy=strategy)
    ids = prompt["input_ids"][1:3].repeat(2, 1)
    cases: dict[str, Any] = {"asked": _asked}
    if name != "mamba":
        cases.update(made=_made, turns=_turns)
        if axis != "pp":  # logits of a call without a cache are on its last stage alone
            cases["by default"] = _by_default
    if name == "qwen2":
        cases["prefix"] = lambda model, ids: _made(model, ids, _prefix(plain, ids))
    return {case: loop(model, ids).double().flatten(1).tolist() for case, loop in cases.items()}


def _asked(model: Any, ids: Tensor) -> Tensor:
    found, cache = [], None
    name = "cache_params" if "Mamba" in type(model).__name__ else "past_key_values"
    with torch.no_grad():
        for _ in range(4):
            out = model(input_ids=ids, use_cache=True, **{name: cache})
            found.append(out.logits[:, -1:] + 0)
            cache, ids = out[name], found[-1][:, -1].argmax(-1, keepdim=True)
    return torch.cat(found, 1)


def _by_default(model: Any, ids: Tensor) -> Tensor:
    out = model(ids)  # with gradients, as many scripts have it
    found, cache = [out.logits[:, -1:] + 0], out.past_key_values
    for _ in range(6):  # long enough for the cache to be written where it lies
        out = model(found[-1][:, -1].argmax(-1, keepdim=True), past_key_values=cache)
        found.append(out.logits + 0)
    return torch.cat(found, 1).detach()


def _prefix(plain: Any, ids: Tensor) -> Any:
    with torch.no_grad():
        return plain(ids.flip(1), use_cache=True).past_key_values


def _made(model: Any, ids: Tensor, cache: Any = None) -> Tensor:
    import transformers

    cache, found = cache or transformers.DynamicCache(config=model.config), []
    with torch.no_grad():
        for _ in range(3):
            out = model(ids, past_key_values=cache)
            found.append(out.logits[:, -1:] + 0)
            ids = found[-1][:, -1].argmax(-1, keepdim=True)
    return torch.cat(found, 1)


def _turns(model: Any, ids: Tensor) -> Tensor:
    """A conversation whose cache is the script's."""
    import transformers

    cache = transformers.DynamicCache(config=model.config)
    said: dict[str, Any] = {"max_new_tokens": 3, "do_sample": False, "pad_token_id": 0, "eos_token_id": None}
    for number in range(2):
        ids = model.generate(ids, attention_mask=torch.ones_like(ids), past_key_values=cache, **said)
        assert int(cache.get_seq_length()) == ids.shape[1] - 1
        ids = torch.cat([ids, torch.full_like(ids[:, :2], 9 + number)], 1)
    return ids
