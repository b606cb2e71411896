"""Tables that attention reads at the end of its keys, over a cache of a fixed length."""

from __future__ import annotations

from typing import Any

import pytest
import torch

import autopar
from autopar.base.errors import AutoparError

SIZES: dict[str, Any] = {
    "hidden_size": 16, "vocab_size": 32, "num_heads": 2, "num_layers": 2, "intermediate_size": 16,
    "max_position_embeddings": 24, "bos_token_id": 1, "eos_token_id": 2,
}  # fmt: skip


@pytest.mark.moderate
@pytest.mark.parametrize("window", [3, 12])
def test_a_window_by_a_table_is_told(window: int) -> None:
    """Breaks if a token's window lies at the end of the cache, where nothing is written, or a table that hides no more
    than the cache's own mask is refused.
    """
    import transformers

    torch.manual_seed(0)
    config = transformers.GPTNeoConfig(**SIZES, attention_types=[[["global", "local"], 1]], window_size=window)
    model = transformers.GPTNeoForCausalLM(config).double().eval()
    mesh, wanted = autopar.Mesh.parse("tp=2", hardware="cpu"), autopar.Generation(batch=2, prompt=6, new_tokens=4)
    if window < 6:
        with pytest.raises(
            AutoparError, match=r"h\.1\.attn\.attention\.bias at the end of its keys(.|\n)*use_cache=False"
        ):
            autopar.plan_generation(model, mesh, wanted, strategy="tensor")
    else:
        assert autopar.plan_generation(model, mesh, wanted, strategy="tensor").verify().ok
