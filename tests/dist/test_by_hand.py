"""Calls of forward with caches, which a script makes by itself, on real gloo processes."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.dist import by_hand
from tests.dist.launch import launch


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "strategy", "axis"),
    [
        ("qwen2", "tensor", "x"),
        ("gpt2", "zero3", "x"),
        ("mamba", "tensor", "x"),
        ("lfm2", "ddp", "x"),
        ("qwen2", {"pp": "pipeline(1f1b)"}, "pp"),
    ],
)
def test_loops_have_the_logits_of_one_process(name: str, strategy: Any, axis: str) -> None:
    """A cache that a call does not write, or writes where somebody else reads it; positions or masks that are not those
    of one device; caches of a script's own that are forgotten.
    """
    want = by_hand.loops(name, None, axis)
    for found in launch(by_hand.loops, 2, name, strategy, axis, timeout_s=240.0):
        assert found.keys() == want.keys()
        for case, logits in want.items():
            assert torch.allclose(torch.tensor(found[case]), torch.tensor(logits), rtol=0, atol=1e-9), case
