"""What a batch's tensors look like in memory, and whether there is anything in them, makes no difference to a step."""

from __future__ import annotations

import pytest

from tests.dist import odd_batches
from tests.dist.launch import launch

RUNS = [(case, "zero3") for case in odd_batches.CASES]
RUNS += [(case, "ddp") for case in ("laid otherwise", "no rows", "masks, in microbatches")]


@pytest.mark.sampled(6)
@pytest.mark.parametrize(("case", "strategy"), RUNS)
def test_odd_batches_are_as_in_one_process(case: str, strategy: str) -> None:
    """Breaks if a cut takes elements as they lie, if a batch of no rows has no program, if masks of microbatches are
    weighed by rows, if a norm is in the mode that the module was in before forward, or if images in a list are given
    a channel more for the axis to divide what is no batch by rows.
    """
    assert launch(odd_batches.on_ranks, 2, case, strategy, timeout_s=150.0) == [[], []]
