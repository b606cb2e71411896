"""Requests that come and go over slots, on real gloo processes."""

from __future__ import annotations

import pytest

from tests.dist import serving
from tests.dist.launch import launch


@pytest.mark.sampled(2)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy"),
    [("qwen2", "tensor"), ("gpt2", "ddp"), ("lfm2", "tensor"), ("qwen2", "stages"), ("qwen2", "split_kv")],
)
def test_each_request_has_the_tokens_of_its_own_generate(name: str, strategy: str) -> None:
    """Breaks if a request sees keys of the one that had its slot before or that stands before it in its lane, has
    positions of another row, loses keys when rows move, is overtaken, if slots need programs of their own, or a
    cache, or the logits of a token, are gathered. Or if a request that is cancelled goes on, or others notice.
    """
    want = serving.alone(name)
    assert len({len(tokens) < new for tokens, (_, new) in zip(want, serving.SIZES[name], strict=True)}) == 2
    for tokens, order, programs, said in launch(serving.served, 2, name, strategy, timeout_s=300.0):
        assert tokens == want
        assert order == [list(range(len(want)))] * 2
        # A token of all slots, and a chunk of prompts; alone, prompts of each length.
        assert programs == (1 + len({size for size, _ in serving.SIZES[name]}) if name == "lfm2" else 2)
        assert "request 0 is longer than what a slot has room for" in said


@pytest.mark.sampled(1)
@pytest.mark.slow
@pytest.mark.parametrize(("name", "strategy"), [("qwen2", "tensor"), ("lfm2", "ddp")])
def test_each_request_draws_as_its_own_generate(name: str, strategy: str) -> None:
    """Breaks if requests share draws, take options or ends of others, or ranks draw each its own."""
    want = serving.alone(name, serving.drawing)
    assert want != serving.alone(name)
    asked = serving.drawing(name)
    assert any(each.eos_token_id and len(own) < each.max_new_tokens for each, own in zip(asked, want, strict=True))
    assert launch(serving.drawn, 2, name, strategy, timeout_s=300.0) == [want] * 2


@pytest.mark.slow
def test_ranks_go_by_one_clock() -> None:
    """Breaks if a request that waits for its slot longer than it has time is served, or ranks go by clocks of their own
    (their batches differ then, which is an error).
    """
    assert launch(serving.late, 2, timeout_s=120.0) == [[(1, True), (0, False), (2, False)]] * 2
