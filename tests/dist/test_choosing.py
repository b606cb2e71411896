"""The largest of what lies in pieces, without the whole, on real gloo processes."""

from __future__ import annotations

import pytest

from tests.dist import choosing, generation
from tests.dist.launch import launch


@pytest.mark.slow
def test_the_largest_of_pieces_is_that_of_the_whole() -> None:
    """Breaks if a piece's own place is taken for that in the whole, if of equal values another than the first is taken,
    if what is no number is passed over, or if the whole is gathered.
    """
    for wrong in launch(choosing.of_pieces, 4, timeout_s=240.0):
        assert wrong == []


@pytest.mark.slow
def test_positions_in_pieces_move_as_those_of_the_whole() -> None:
    """Breaks if a piece is sent to another rank, if the two of which a new one is made are joined the wrong way round,
    if numbers are rounded on their way, or if the whole is gathered.
    """
    for wrong in launch(choosing.along_positions, 4, timeout_s=240.0):
        assert wrong == []


@pytest.mark.slow
def test_greedy_tokens_need_no_whole_logits() -> None:
    """Breaks if `generate()` gathers the vocabulary for each token, or takes other tokens without."""
    model, prompt = generation.model_and_prompt("qwen2")
    want = model.generate(**prompt, max_new_tokens=6, do_sample=False, pad_token_id=0).tolist()
    for tokens, said, in_pieces in launch(choosing.greedily, 2, timeout_s=240.0):
        assert tokens == want
        assert in_pieces
        assert not said
