"""Caches of `generate()` on a mesh of one rank, where everything is as on many but that nothing is sent."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh

import autopar


@pytest.fixture
def mesh() -> Iterator[DeviceMesh]:
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    yield init_device_mesh("cpu", (1,), mesh_dim_names=("tp",))
    dist.destroy_process_group()


def _next_turn(model: Any, ids: torch.Tensor) -> list[list[int]]:
    """Tokens behind a first turn, of which the last one and others are handed in: nine positions are written."""
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0}
    first = model.generate(ids, max_length=10, return_dict_in_generate=True, **options)
    new = torch.cat([first.sequences[:, -1:], ids[:, :2]], 1)
    mask = torch.ones(len(ids), 9 + 3, dtype=torch.long)
    found: list[list[int]] = model.generate(
        new, attention_mask=mask, past_key_values=first.past_key_values, max_length=9, **options
    ).tolist()
    return found


def test_what_is_new_is_handed_in_with_the_length_of_all(mesh: DeviceMesh) -> None:
    """Breaks if a call that says max_length= and hands in what is new alone has no room for all its tokens."""
    import transformers

    torch.manual_seed(0)
    config = transformers.LlamaConfig(
        hidden_size=16, intermediate_size=24, num_hidden_layers=1, num_attention_heads=2, vocab_size=32
    )
    model = transformers.LlamaForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    ids = torch.randint(3, 32, (2, 7))
    want = _next_turn(copy.deepcopy(model), ids)
    assert len(want[0]) == 9
    assert _next_turn(autopar.compile(model, mesh, strategy="tensor"), ids) == want


@pytest.mark.parametrize(("prompt", "new_tokens"), [(16, 1), (16, 8), (5, 8)])
def test_a_prompt_beyond_the_window_that_only_caches_know(mesh: DeviceMesh, prompt: int, new_tokens: int) -> None:
    """Breaks if a model that masks no window itself has its prompt windowed; or if tokens behind it see more than the
    caches of transformers keep.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.MoshiConfig(
        vocab_size=64, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=4, head_dim=8,
        sliding_window=6, ffn_dim=64, max_position_embeddings=64, tie_word_embeddings=False, audio_vocab_size=32,
        num_codebooks=2,
    )  # fmt: skip
    model = transformers.MoshiForCausalLM(config).eval()
    model.generation_config.eos_token_id = None
    options: dict[str, Any] = {"do_sample": False, "pad_token_id": 0, "max_new_tokens": new_tokens}
    ids = torch.randint(3, 64, (2, prompt))
    mask = torch.ones_like(ids)
    mask[0, :2] = 0
    want = copy.deepcopy(model).generate(ids, attention_mask=mask, **options)
    assert torch.equal(
        autopar.compile(model, mesh, strategy="tensor").generate(ids, attention_mask=mask, **options), want
    )
