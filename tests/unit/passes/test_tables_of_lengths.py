"""Tables that attention reads at the end of its keys, over a cache of a fixed length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar

SIZES: dict[str, Any] = {
    "hidden_size": 16, "vocab_size": 32, "num_heads": 2, "num_layers": 2, "intermediate_size": 16,
    "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize("window", [3, 12])
def test_a_window_by_a_table_is_of_the_tokens(window: int) -> None:
    """Breaks if a token's window lies at the end of the cache, where nothing is written, or if rows are taken of a
    table that hides no more than the cache's own mask.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(**SIZES, attention_types=[[["global", "local"], 1]], window_size=window)
    model = transformers.GPTNeoForCausalLM(config).double().eval()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(6.0)
    mesh = autopar.Mesh.parse("tp=2", hardware="cpu")
    wanted = autopar.Generation(batch=2, prompt=6, new_tokens=4, padded=True)
    plan = autopar.plan_generation(model, mesh, wanted, strategy="tensor")
    assert plan.verify().ok
    assert ("index_select" in plan.decode.source) == (window < 6)
