"""The model's own `generate()` on real gloo processes."""

from __future__ import annotations

import pytest

from tests.dist import generation
from tests.dist.launch import launch


@pytest.mark.sampled(4)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [
        ("qwen2", "tensor"),
        ("gpt2", "ddp"),
        ("qwen2", "auto"),
        ("mamba", "tensor"),
        ("lfm2", "ddp"),
        ("t5", "tensor"),
        ("bart", "zero3"),
    ],
)
def test_every_rank_generates_the_tokens_of_one_process(name: str, strategy: str) -> None:
    """A cache that is not handed on, beams that take the cache or the recurrent state of others, a state that a model
    writes into as it reads it, draws that differ between ranks: other tokens than transformers' on one process.
    """
    want = generation.generated(*generation.model_and_prompt(name))
    for found in launch(generation.on_two_ranks, 2, name, strategy, timeout_s=240.0):
        assert found == want


@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "ddp", "auto"])
def test_what_was_planned_before_runs_as_planned(strategy: str) -> None:
    """Breaks if a shorter call gets programs of its own, if the phases lie otherwise than they were planned, or if a
    rank keeps a byte of the cache more or less than predicted.
    """
    model, prompt = generation.model_and_prompt("qwen2")
    want = [model.generate(**prompt, max_new_tokens=count, pad_token_id=0).tolist() for count in (3, 8, 12)]
    for tokens, programs, predicted, held in launch(generation.planned_before, 2, strategy, timeout_s=240.0):
        assert tokens == want
        assert programs == 2
        assert held == predicted


@pytest.mark.slow
def test_drafts_change_no_token() -> None:
    """Breaks if positions of drafts that were not taken are read, or a later token is written behind them."""
    want = generation.with_drafts(None)
    for found in launch(generation.with_drafts, 2, "tensor", timeout_s=240.0):
        assert found == want


@pytest.mark.slow
def test_habits_of_other_scripts() -> None:
    """Breaks if images, embeddings in the place of tokens, rules for tokens, or a cache that is handed in again give
    other tokens than on one process without a cache that is kept.
    """
    want = generation.habits(None)
    for found in launch(generation.habits, 2, "tensor", timeout_s=240.0):
        assert found == want
