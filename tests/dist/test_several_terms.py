"""Losses of several terms train in microbatches as eager does, batch after batch."""

from __future__ import annotations

import pytest
import torch

from tests.dist import several_terms
from tests.dist.launch import launch


@pytest.mark.parametrize(
    ("axis", "strategy", "in_turn"),
    [("dp", "ddp", False), ("dp", "zero3", True), ("pp", "pipeline(1f1b)", True)],
    ids=["ddp", "in-turn", "stages"],
)
def test_several_terms(axis: str, strategy: str, in_turn: bool) -> None:
    """Breaks if a step divides by the number of labels of an earlier one, or with class weights as they were, or if a
    batch of another length reads that of the first.
    """
    for found, expected in launch(several_terms.losses, 2, axis, strategy, in_turn, timeout_s=180.0):
        assert found == pytest.approx(expected, rel=1e-12)


def test_a_microbatch_without_weight_beside_another_output() -> None:
    """Breaks if what a microbatch computes as 0 / 0, which has no part in the average, meets another output's gradient:
    all parameters had gradients that were no numbers.
    """
    for found, expected in launch(several_terms.both, 2, timeout_s=180.0):
        for own, wanted in zip(found, expected, strict=True):
            # Sums of 8 numbers of at most 10: each addition is off by at most 80 times half an epsilon, 9e-15.
            torch.testing.assert_close(own, wanted, rtol=0.0, atol=8 * 9e-15)
