"""Calls that repeat the last one's kind: nothing of what they leave out may be missed."""

from __future__ import annotations

import pytest

from tests.dist import generation, repeats
from tests.dist.launch import launch


@pytest.mark.slow
@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("way", "ranks"), [("plain", 1), ("plain", 2), ("graphs", 1), ("none", 1), ("compiled", 1), ("compiled", 2)]
)
@pytest.mark.parametrize("name", ["qwen2", "gpt2", "mamba", "lfm2", "t5"])
def test_tokens_are_those_of_one_process(name: str, way: str, ranks: int) -> None:
    """Breaks if an input of a repeat goes elsewhere, if a state is another's, if a graph's memory is not what a call
    was given, or if no call is a repeat.
    """
    want = generation.generated(*generation.model_and_prompt(name))
    for found, runs in launch(repeats.tokens, ranks, name, way, timeout_s=240.0):
        assert found == want
        assert runs > 10


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [1, 2])
def test_tokens_of_compiled_pieces_are_those_of_one_process(ranks: int) -> None:
    """Breaks if a compiler's code between two sends gives other tokens, if tokens go past it, or if what sends nothing
    is more than one piece.
    """
    want = generation.generated(*generation.model_and_prompt("qwen2"))
    for found, numbers in launch(repeats.tokens_of_pieces, ranks, "compiled", timeout_s=240.0):
        assert found == want
        assert numbers and all(pieces == sent + 1 and (sent > 3) == (ranks > 1) for pieces, sent in numbers)


@pytest.mark.slow
@pytest.mark.parametrize("way", ["graphs", "plain", "compiled"])
def test_what_a_script_keeps_is_not_written(way: str) -> None:
    """Breaks if a graph, or a program that writes in place, writes into a cache of an earlier run that somebody holds,
    or hands out its own logits.
    """
    for found in launch(repeats.kept_by_a_script, 1, way, timeout_s=240.0):
        assert all(found)


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("way", "ranks", "counts"), [("plain", 2, [5, 6]), ("compiled", 1, [5, 7]), ("compiled", 2, [5, 7])]
)
def test_caches_are_written_in_place_within_one_call(way: str, ranks: int, counts: list[int]) -> None:
    """Breaks if tokens copy their caches, or if a cache that is taken up again is written by what takes it up."""
    for found, same in launch(repeats.written_in_place, ranks, way, timeout_s=240.0):
        assert found == counts  # of 7 tokens behind the prompt: what is new is looked up, and then looked at, once
        assert same


@pytest.mark.slow
def test_what_changes_between_calls_is_seen() -> None:
    """Breaks if a repeat goes on with a number, weights or tokens of before."""
    for found in launch(repeats.changed_between_calls, 2, timeout_s=240.0):
        assert max(found.values()) < 1e-12, found


@pytest.mark.slow
def test_ranks_that_differ_at_a_repeat_are_told() -> None:
    """Breaks if a repeat does not compare what ranks are about to run."""
    for found in launch(repeats.differing_tokens, 2, timeout_s=120.0):
        assert "input_ids" in found and "values of the inputs" in found


@pytest.mark.slow
def test_one_tensor_under_two_names_and_then_two() -> None:
    """Breaks if a repeat takes tokens for labels, as they were one tensor in the call before."""
    for found in launch(repeats.labels_of_their_own, 2, timeout_s=120.0):
        assert max(found) < 1e-6, found


@pytest.mark.slow
def test_train_and_eval_are_no_repeats_of_each_other() -> None:
    """Breaks if a program without dropout runs in training mode, or the other way round."""
    for found in launch(repeats.modes, 2, timeout_s=120.0):
        assert found == [True, True, False, True]


@pytest.mark.slow
def test_inference_mode_comes_first() -> None:
    """Breaks if parameters that are cut under `torch.inference_mode` cannot be trained, or are traced in it."""
    for found in launch(repeats.evaluated_first, 2, timeout_s=120.0):
        assert max(found) < 1e-5, found  # float32, after two steps
