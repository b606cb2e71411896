"""The model's own `generate()` on real gloo processes."""

from __future__ import annotations

import math
from typing import Any

import pytest

from tests.dist import architectures, generation
from tests.dist.launch import launch


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "cell"), architectures.pairs(stages=False))
def test_every_rank_generates_the_tokens_of_one_process(name: str, cell: str) -> None:
    """A cache that is not handed on, beams that take the cache or the recurrent state of others, a state that a model
    writes into as it reads it, draws that differ between ranks: other tokens than transformers' on one process.
    """
    _same_tokens(name, cell)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "cell"), architectures.pairs(stages=True))
def test_every_stage_generates_the_tokens_of_one_process(name: str, cell: str) -> None:
    """A rank that reads or reorders the cache of a layer that another one has, logits that do not come to all ranks, a
    token whose stages are cut elsewhere than those of the prompt, or that is placed as the prompt is though it has
    other calls: an error, or other tokens than transformers' on one process.
    """
    _same_tokens(name, cell)


def _same_tokens(name: str, cell: str) -> None:
    sizes, strategy = architectures.CELLS[cell]
    want = generation.generated(*architectures.model_and_prompt(name, architectures.GAIN))
    for found in launch(generation.on_ranks, math.prod(sizes.values()), name, sizes, strategy, timeout_s=240.0):
        assert found == want


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("qwen2", "zero3"), ("mixtral", "zero3+expert"), ("bart", "zero3")])
def test_prompts_that_the_ranks_do_not_divide(name: str, strategy: str) -> None:
    """Breaks if one prompt has to be as many as there are ranks, or a rank reads another's rows; or if tokens that no
    axis splits have no way to their experts.
    """
    want = generation.of_odd_prompts(name, None)
    for found in launch(generation.of_odd_prompts, 2, name, strategy, timeout_s=240.0):
        assert found == want


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "ddp", "auto", "split_kv"])
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


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "ddp", "split_kv"])
def test_a_prompt_in_chunks_changes_no_token(strategy: str) -> None:
    """Breaks if a chunk is not what was planned for, or reads otherwise than the whole prompt would."""
    model, prompt = generation.model_and_prompt("qwen2")
    prompt = generation.long_prompt(prompt, padded=strategy == "tensor")
    fixed: dict[str, Any] = {"pad_token_id": 0, "do_sample": False}
    want = [model.generate(**prompt, max_new_tokens=count, **fixed).tolist() for count in (3, 5)]
    for tokens, programs, counts, other in launch(generation.in_chunks, 2, strategy, timeout_s=240.0):
        assert tokens == want
        assert programs == 2
        assert counts == [4, 4, 4, 1, 1]
        assert other == want[1]


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize("strategy", ["tensor", "ddp", "split_kv"])
def test_caches_are_taken_up_again(strategy: str) -> None:
    """Breaks if a cache that is made longer, repeated or cut to some rows has another row's positions, if the one that
    was handed in is changed, or, where no axis splits rows or positions, if it is gathered for it.
    """
    want, _ = generation.reused(None)
    for found, in_pieces in launch(generation.reused, 2, strategy, timeout_s=240.0):
        assert found == want
        assert in_pieces or strategy in ("ddp", "split_kv")


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "cache"), [("tensor", "int8"), ("auto", "fp8"), ("ddp", "int4")])
def test_a_cache_of_codes_gives_the_tokens_of_one_that_rounds(strategy: str, cache: str) -> None:
    """A scale of another head, row, beam or rank, or codes that are gathered as something else: other tokens than
    transformers' on one process. A rank keeps what is predicted, to the byte.
    """
    want = generation.stored(None, cache)
    for found in launch(generation.stored, 2, strategy, cache, timeout_s=240.0):
        assert found == want
    for _, programs, predicted, held in launch(
        generation.planned_before, 2, strategy, {"x": 2}, cache, timeout_s=240.0
    ):
        assert programs == 2
        assert held == predicted


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("strategy", "way"), [("tensor", "int4"), ("zero3", "fp8"), ("pipeline", "int8")])
def test_weights_of_codes_give_the_tokens_of_one_process(strategy: str, way: str) -> None:
    """Breaks if codes are gathered as something else, a rank has the scales of another, or stages train them."""
    want = generation.with_stored_weights(None, way)
    for found in launch(generation.with_stored_weights, 2, strategy, way, timeout_s=240.0):
        assert found == want


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


@pytest.mark.slow
def test_stages_generate_without_a_cache() -> None:
    """Breaks if logits of a forward without a cache do not come to all stages, or positions of a token are others."""
    want = generation.without_a_cache(None)
    assert launch(generation.without_a_cache, 2, "pp", timeout_s=240.0) == [want] * 2


@pytest.mark.slow
def test_each_stage_keeps_the_bytes_that_were_predicted() -> None:
    """Breaks if a rank keeps a byte of a cache that is not its own, or another number than predicted."""
    model, prompt = generation.model_and_prompt("qwen2")
    want = [model.generate(**prompt, max_new_tokens=count, pad_token_id=0).tolist() for count in (3, 8, 12)]
    ran = launch(generation.planned_before, 2, "auto", {"pp": 2}, timeout_s=240.0)
    # A layer's keys and values [4, heads 2, positions 18, 8] in float32; every rank has the counts of all three layers.
    layer, counts = 2 * 4 * 2 * 18 * 8 * 4, 3 * 8
    assert [held for *_, held in ran] == [layer + counts, 2 * layer + counts]
    for tokens, programs, predicted, _ in ran:
        assert (tokens, programs, predicted) == (want, 2, 2 * layer + counts)


@pytest.mark.slow
def test_stages_are_trained_and_generate_in_turn() -> None:
    """Breaks if a prompt gets other stages than training, or is answered by weights of before the step."""
    losses, tokens = generation.in_turn(None, None)
    for found_losses, found_tokens in launch(generation.in_turn, 2, {"pp": 2}, "pipeline(1f1b)", timeout_s=240.0):
        assert found_losses == pytest.approx(losses, rel=1e-5)
        assert found_tokens == tokens
