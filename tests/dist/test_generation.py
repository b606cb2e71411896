"""The model's own `generate()` on real gloo processes."""

from __future__ import annotations

import pytest

from tests.dist import generation
from tests.dist.launch import launch


@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("qwen2", "tensor"), ("gpt2", "ddp"), ("qwen2", "auto")])
def test_every_rank_generates_the_tokens_of_one_process(name: str, strategy: str) -> None:
    """A cache that is not handed on, beams that take the cache of others, draws that differ between ranks: other
    tokens than transformers' on one process.
    """
    want = generation.generated(*generation.model_and_prompt(name))
    for found in launch(generation.on_two_ranks, 2, name, strategy, timeout_s=240.0):
        assert found == want
