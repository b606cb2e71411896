"""What a watch decides, without ranks: spikes, and which replicas differ."""

from __future__ import annotations

import math
from collections.abc import Mapping

import pytest

from autopar.runtime.watch.replicas import Grid, Kind, Odd, differing, odd_ones
from autopar.runtime.watch.verdicts import FIRST, MOST_SKIPPED, Judge, Numbers

GRID = Grid(("dp", "tp"), (3, 2))
BY_TP = Kind(("tp",))


def found(*values: int) -> list[Mapping[tuple[Kind, str], int]]:
    return [{(BY_TP, "w"): value} for value in values]


def test_pieces_that_differ_by_plan_are_no_replicas() -> None:
    """Breaks if ranks of an axis that splits a tensor are compared, or those of another one are not."""
    assert differing(GRID, [{BY_TP: number} for number in (1, 2, 1, 2, 1, 2)]) == []
    assert differing(GRID, [{BY_TP: number} for number in (1, 2, 1, 2, 1, 3)]) == [BY_TP]
    assert differing(GRID, [{Kind(("dp", "tp")): number} for number in range(6)]) == []


def test_the_majority_names_the_odd_one() -> None:
    """Breaks if a rank of the majority is blamed, or one of two is."""
    assert odd_ones(GRID, found(1, 2, 1, 2, 1, 3)) == [Odd("w", (5,), (1, 3))]
    assert odd_ones(GRID, found(1, 2, 4, 2, 5, 2)) == [Odd("w", (0, 2, 4), ())]
    two = Grid(("dp",), (2,))
    assert odd_ones(two, [{(Kind(()), "w"): number} for number in (7, 8)]) == [Odd("w", (0, 1), ())]


def test_stages_hold_their_own() -> None:
    """Breaks if ranks of a stage that does not hold a parameter are taken for replicas without it."""
    grid, kind = Grid(("pp", "dp"), (2, 2), "pp"), Kind((), (1,))
    assert grid.replicas(kind, 4) == [[2, 3]]
    assert differing(grid, [{}, {}, {kind: 1}, {kind: 1}]) == []
    assert differing(grid, [{}, {}, {kind: 1}, {kind: 2}]) == [kind]


def judged(judge: Judge, *losses: float) -> list[str | None]:
    return [judge.judge(Numbers(loss, 1.0)).policy for loss in losses]


def test_a_spike_is_far_from_the_usual() -> None:
    """Breaks if ordinary noise is a spike, a spike is none, or too few steps say what is usual."""
    judge = Judge("stop", "skip", 10.0)
    assert judged(judge, 4.0, 400.0) == [None, None]
    judge = Judge("stop", "skip", 10.0)
    usual = [4 + 0.2 * math.sin(7 * step) for step in range(FIRST)]
    assert set(judged(judge, *usual)) == {None}
    assert judged(judge, 4.5, 9.0, 4.1, 9.0, 3.0) == [None, "skip", None, "skip", None]


def test_what_is_skipped_does_not_become_usual() -> None:
    """Breaks if enough spikes make themselves the usual, or a run skips for ever."""
    judge = Judge("stop", "skip", 10.0)
    judged(judge, *([4.0] * 64))
    assert judged(judge, *([9.0] * (MOST_SKIPPED + 1))) == ["skip"] * MOST_SKIPPED + ["stop"]
    judge = Judge("stop", "skip", 10.0)
    judged(judge, *([4.0] * 64))
    for _ in range(16):
        assert judged(judge, *([9.0] * (MOST_SKIPPED - 1)), 4.0) == ["skip"] * (MOST_SKIPPED - 1) + [None]


@pytest.mark.parametrize("number", [math.nan, math.inf])
def test_a_number_that_is_none(number: float) -> None:
    """Breaks if NaN or infinity passes, of the loss or of the norm, or counts as usual."""
    judge = Judge("stop", "skip", 10.0)
    assert judge.judge(Numbers(number, 1.0)).what == f"the loss is {number}"
    assert judge.judge(Numbers(None, number)).what == f"the gradients' norm is {number}"
    assert Judge(None, None, 10.0).judge(Numbers(number, number)).policy is None
