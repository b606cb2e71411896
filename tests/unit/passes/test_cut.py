"""Cuts: the slowest stage is as fast as any cut makes it, within memory; refining never makes a step longer."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterator, Sequence

import pytest
from hypothesis import assume, given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.strategies.pipelining.cut import best_cut, ranges, refine


def all_cuts(num_calls: int, num_stages: int) -> Iterator[tuple[int, ...]]:
    return ((0, *rest) for rest in itertools.combinations(range(1, num_calls), num_stages - 1))


def stages_of(cut: Sequence[int], seconds: Sequence[float], extra: Sequence[float] | None = None) -> list[float]:
    more = [0.0, *(extra or [0.0] * len(seconds))[1:]]
    return [sum(seconds[first:stop]) + more[first] for first, stop in ranges(cut, len(seconds))]


def limited(weights: Sequence[int], limits: Sequence[int]) -> Callable[[int, int, int], bool]:
    return lambda stage, first, stop: sum(weights[first:stop]) <= limits[stage]


times = st.lists(st.integers(0, 30), min_size=1, max_size=9)


@pytest.mark.moderate
@settings(max_examples=200, deadline=None, derandomize=True)
@given(times, st.integers(1, 9), st.booleans(), st.data())
def test_no_cut_has_a_faster_slowest_stage(
    seconds: list[float], num_stages: int, bordered: bool, data: st.DataObject
) -> None:
    """Breaks if a cut is not the best of all, or not the most even, or not the first of those."""
    assume(num_stages <= len(seconds))
    size = len(seconds)
    extra = data.draw(st.lists(st.integers(0, 20), min_size=size, max_size=size)) if bordered else None

    def rank(cut: tuple[int, ...]) -> tuple[float, float, tuple[int, ...]]:
        stages = stages_of(cut, seconds, extra)
        return max(stages), sum(each**2 for each in stages), cut

    assert best_cut(seconds, num_stages, None, extra) == min(all_cuts(size, num_stages), key=rank)


@pytest.mark.moderate
@settings(max_examples=200, deadline=None, derandomize=True)
@given(times, st.integers(1, 5), st.data())
def test_cuts_fit_the_memory(seconds: list[float], num_stages: int, data: st.DataObject) -> None:
    """Breaks if a stage holds more than its rank, a cut that fits is overlooked, or the limits of stages are mixed."""
    assume(num_stages <= len(seconds))
    size = len(seconds)
    weights = data.draw(st.lists(st.integers(1, 9), min_size=size, max_size=size))
    limits = data.draw(st.lists(st.integers(5, 40), min_size=num_stages, max_size=num_stages))
    fits = limited(weights, limits)
    possible = [
        cut
        for cut in all_cuts(size, num_stages)
        if all(fits(stage, *bounds) for stage, bounds in enumerate(ranges(cut, size)))
    ]
    if not possible:
        with pytest.raises(DoesNotFit, match=f"no cut of {size} calls into {num_stages} stages"):
            best_cut(seconds, num_stages, fits)
        return
    found = best_cut(seconds, num_stages, fits)
    assert found in possible
    assert max(stages_of(found, seconds)) == min(max(stages_of(cut, seconds)) for cut in possible)


def test_a_heavy_head_gets_a_stage_to_itself() -> None:
    """Breaks if stages are made equal in layers where a vocabulary of 256k makes the head as slow as many of them."""
    seconds = [0.2, *[1.0] * 16, 6.0]
    cut = best_cut(seconds, 4)
    assert max(stages_of(cut, seconds)) == min(max(stages_of(each, seconds)) for each in all_cuts(18, 4)) == 6.0
    assert cut[-1] == 17
    seconds = [0.1, *[3.0] * 6, *[1.0] * 12, 0.5]  # an encoder wider than the decoder
    cut = best_cut(seconds, 6)
    assert max(stages_of(cut, seconds)) == min(max(stages_of(each, seconds)) for each in all_cuts(20, 6))
    assert [stop - first for first, stop in ranges(cut, 20)] == [2, 2, 2, 3, 5, 6]


@pytest.mark.moderate
def test_large_cuts() -> None:
    """Breaks if many calls and stages overflow, or the answer is not the equal parts that are there."""
    assert best_cut([1.0] * 128, 64) == tuple(range(0, 128, 2))
    assert best_cut([0.1] * 1000, 125) == tuple(range(0, 1000, 8))
    fits = limited([1] * 130, [4] * 64)
    assert all(stop - first <= 4 for first, stop in ranges(best_cut([0.0] * 100 + [1.0] * 30, 64, fits), 130))


def test_more_stages_than_calls() -> None:
    """Breaks if nobody learns how many stages there can be."""
    with pytest.raises(AutoparError, match=r"3 calls cannot be cut into 4 stages.*use 1 to 3 stages"):
        best_cut([1.0] * 3, 4)
    with pytest.raises(AutoparError, match="into 0 stages"):
        best_cut([1.0] * 3, 0)
    with pytest.raises(DoesNotFit, match="Call 1 does not fit on any stage, not even alone"):
        best_cut([1.0] * 3, 2, limited([1, 9, 1], [8, 8]))


@settings(max_examples=50, deadline=None, derandomize=True)
@given(st.lists(st.integers(1, 9), min_size=4, max_size=8), st.integers(2, 4), st.data())
def test_refining_ends_where_no_move_helps(seconds: list[float], num_stages: int, data: st.DataObject) -> None:
    """Breaks if a worse cut is taken, a move is overlooked, a cut is simulated twice, or bounds are left."""
    cuts = list(all_cuts(len(seconds), num_stages))
    start = data.draw(st.sampled_from(cuts))
    weights = data.draw(st.lists(st.integers(1, 5), min_size=num_stages, max_size=num_stages))
    asked: list[tuple[int, ...]] = []

    def value(cut: Sequence[int]) -> float:
        return sum(w * t**2 for w, t in zip(weights, stages_of(cut, seconds), strict=True))

    def makespan(cut: tuple[int, ...]) -> float:
        asked.append(cut)
        assert cut in cuts
        return value(cut)

    found = refine(start, len(seconds), makespan)
    assert value(found) <= value(start) and len(set(asked)) == len(asked)
    for place in range(1, num_stages):
        for step in (-2, -1, 1, 2):
            moved = (*found[:place], found[place] + step, *found[place + 1 :])
            assert moved not in cuts or value(found) <= value(moved)
    asked.clear()
    refine(start, len(seconds), makespan, evaluations=3)
    assert len(asked) <= 3


def test_refining_moves_calls_past_stages_that_are_full() -> None:
    """Breaks if a call cannot get from the first stage to the last because each stage between is full."""
    found = refine((0, 4, 6, 8), 10, lambda cut: max(stop - first for first, stop in ranges(cut, 10)))
    assert sorted(stop - first for first, stop in ranges(found, 10)) == [2, 2, 3, 3]
    assert refine((0, 1), 2, lambda _: math.inf) == (0, 1)
