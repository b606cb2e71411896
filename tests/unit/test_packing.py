"""Experts packed on ranks by their loads."""

from __future__ import annotations

import itertools

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.machine.packing import busiest, hosts_of, packed, replicated

pytestmark = pytest.mark.unit


def test_the_heaviest_goes_to_the_lightest_rank() -> None:
    """Breaks if experts are packed by number, or a rank gets more of them than it has room for."""
    assert packed([9, 8, 1, 1], 2, range(4)) == (0, 3, 2, 1)
    assert busiest([9, 8, 1, 1], 2, range(4)) == 17
    assert busiest([9, 8, 1, 1], 2, packed([9, 8, 1, 1], 2, range(4))) == 10


def test_what_gains_nothing_stays() -> None:
    """Breaks if experts move where all ranks have the same already."""
    assert packed([1] * 8, 4, (1, 0, 2, 3, 4, 5, 7, 6)) == (1, 0, 2, 3, 4, 5, 7, 6)
    assert packed([0] * 4, 2, range(4)) == (0, 1, 2, 3)


def test_groups_go_where_most_of_them_are() -> None:
    """Breaks if a group moves as a whole because its number is another one: two experts are enough here."""
    loads = [5, 5, 1, 1, 3, 3]
    now = (0, 1, 2, 3, 4, 5)
    found = packed(loads, 3, now)
    assert sum(one // 2 != other // 2 for one, other in zip(now, found, strict=True)) == 2


@pytest.mark.moderate
@given(st.data())
@settings(max_examples=150, deadline=None)
def test_is_a_permutation_that_is_no_worse(data: st.DataObject) -> None:
    """Breaks if two experts get one slot, if a move makes the busiest rank busier, or by more than a third from the
    best of all placements (4/3 is Graham's bound without room; with it, of two a rank, the heaviest with the lightest).
    """
    ranks, room = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    num = ranks * room
    loads = data.draw(st.lists(st.integers(0, 50), min_size=num, max_size=num))
    now = data.draw(st.permutations(range(num)))
    found = packed(loads, ranks, now)
    assert sorted(found) == list(range(num))
    least = min(busiest(loads, ranks, each) for each in itertools.permutations(range(num)))
    assert busiest(loads, ranks, found) <= min(busiest(loads, ranks, now), 4 / 3 * least + 1e-9)


def test_a_hot_expert_visits_the_others() -> None:
    """Breaks if an expert with more than a rank's part stays on one rank, a rank has more guests than it may, or guests
    that relieve nobody come.
    """
    loads, now = [90, 2, 2, 2, 2, 2], range(6)
    guests = replicated(loads, 3, now, 1)
    assert sorted(map(len, guests)) == [0, 1, 1] and hosts_of(6, 3, now, guests)[0] == (0, 1, 2)
    assert busiest(loads, 3, now, guests) == 34
    assert replicated(loads, 3, now, 0) == ((), (), ())
    assert replicated([5] * 6, 3, now, 2) == ((), (), ())


@given(st.lists(st.integers(0, 99), min_size=8, max_size=8), st.integers(0, 3))
@settings(max_examples=100, deadline=None)
def test_guests_never_make_it_worse(loads: list[int], most: int) -> None:
    """Breaks if an expert visits its own rank, or one twice, or makes the busiest rank busier."""
    guests = replicated(loads, 4, range(8), most)
    assert busiest(loads, 4, range(8), guests) <= busiest(loads, 4, range(8))
    for rank, own in enumerate(guests):
        assert len(own) <= most and len(set(own)) == len(own) and all(expert // 2 != rank for expert in own)
