"""Ranks that are late: named, with the line at which they are, before the process group gives up."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.dist import late
from tests.dist.launch import launch

pytestmark = pytest.mark.dist

ZERO3 = ({"dp": 2}, "zero3")
MIXED = ({"dp": 2, "tp": 2}, {"dp": "zero3", "tp": "tensor"})
PIPELINE = ({"pp": 2, "dp": 2}, {"pp": "pipeline(1f1b)", "dp": "ddp"})


@pytest.mark.sampled(2)
@pytest.mark.parametrize(
    ("num", "setting", "how", "rank", "said"),
    [
        (2, ZERO3, "before", 1, "in _before: time.sleep(seconds)"),
        (2, ZERO3, "stopped", 0, "rank 0 does not answer"),
        (4, MIXED, "within", 2, "of autopar_program_"),
        (4, PIPELINE, "within", 3, "of autopar_program_"),
    ],
)
def test_a_rank_that_hangs_is_named(num: int, setting: Any, how: str, rank: int, said: str) -> None:
    """Breaks if another rank is blamed, nobody says where it hangs, or ranks that could hear of it do not."""
    found = launch(late.late, num, setting, how, rank, 5.0, 1.0, timeout_s=90.0)
    for told in found[:rank] + found[rank + 1 :]:
        assert told, found
        step, ranks, text = told[0]
        assert (step, ranks) == (3, (rank,)), text
        assert said in text, text
        assert any(place in text for place in ("at the beginning of a step", " over ", " of pp ")), text


def test_what_takes_long_is_no_alarm(tmp_path: Path) -> None:
    """Breaks if a rank that plans or saves, or ranks that all evaluate, are told to be late."""
    assert launch(late.late, 2, ZERO3, "plans", 0, 3.0, 0.5, timeout_s=60.0) == [[], []]
    assert launch(late.busy, 2, str(tmp_path), 0.5, timeout_s=60.0) == [[], []]


def test_planning_that_does_not_end(tmp_path: Path) -> None:
    """Breaks if a rank that plans for ten times as long as a rank may be waited for is not told with its line."""
    for told in launch(late.late, 2, ZERO3, "plans", 0, 6.0, 0.2, timeout_s=60.0):
        step, ranks, text = told[0]
        assert (step, ranks) == (3, (0,)) and text.startswith("rank 0 plans for "), told
        assert "in slow: time.sleep(seconds)" in text and "rank 1 waits at" in text, text


def test_a_rank_that_is_slow_in_every_step(tmp_path: Path) -> None:
    """Breaks if a rank for which all wait a little, step by step, is not found, or one of the others is named."""
    told = launch(late.slow, 2, 1, timeout_s=60.0)
    assert len(told[0]) == 2 and not told[1]
    for text in told[0]:
        assert "rank 1 is slow: in the last 10 steps the others waited" in text
        assert "most of all at the beginning of a step" in text
