"""The greedy schedule stays within memory, runs to its end, and beats the known ones where it should."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.machine.hardware import Link
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.check import check
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.greedy import greedy, there_and_back
from autopar.strategies.pipelining.simulate import peak_bytes, simulate
from tests.unit.pipelining import orders

amounts = st.floats(0.1, 5.0)
costs_of_a_stage = orders.costs_of_a_stage(
    amounts, input_s=st.one_of(st.just(0.0), amounts), input_bytes=st.just(0.1), kept_bytes=st.floats(0.0, 6.0)
)


def arrangements(num_ranks: int) -> st.SearchStrategy[Sequence[int]]:
    looped = st.integers(1, 3).map(lambda stages: tuple(range(num_ranks)) * stages)
    return st.one_of(looped, st.just(there_and_back(num_ranks)))


@pytest.mark.moderate
@given(st.data(), st.integers(1, 5), st.integers(1, 12), st.floats(1.0, 4.0), st.sampled_from([None, Link(3.0, 0.1)]))
@settings(max_examples=80, deadline=None)
def test_whatever_the_costs_it_runs_to_its_end_within_memory(
    data: st.DataObject, num_ranks: int, num_microbatches: int, spare: float, link: Link | None
) -> None:
    rank_of = data.draw(arrangements(num_ranks))
    costs = data.draw(st.lists(costs_of_a_stage, min_size=len(rank_of), max_size=len(rank_of)))
    memory = 20.0 * spare * len(rank_of) / num_ranks
    try:
        schedule = greedy(rank_of, num_microbatches, costs, memory, link)
    except AutoparError as error:
        assert "cannot hold one microbatch" in str(error)
        one = schedules.build("gpipe", len(rank_of), 1)
        alone = peak_bytes(one, costs)
        assert max(sum(alone[s] for s in range(len(rank_of)) if rank_of[s] == r) for r in range(num_ranks)) > memory / 2
        return
    check(schedule)
    assert schedule.rank_of == rank_of and schedule.num_microbatches == num_microbatches
    assert max(peak_bytes(schedule, costs)) <= memory * (1 + 1e-9)
    assert greedy(rank_of, num_microbatches, costs, memory, link).order == schedule.order


def equal(rank_of: Sequence[int]) -> list[StageCost]:
    """A microbatch of F = I = W = 1 on each rank, however many stages it has."""
    part = (max(rank_of) + 1) / len(rank_of)
    return [StageCost(part, 2 * part, part, part, saved_bytes=part)] * len(rank_of)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(4, 8), (4, 16), (8, 32)])
def test_with_the_memory_of_1f1b_it_takes_less_time(num_ranks: int, num_microbatches: int) -> None:
    """Half of 1f1b's idle seconds or less, which no known schedule reaches in this memory."""
    work = 3.0 * num_microbatches
    plain = schedules.build("1f1b", num_ranks, num_microbatches)
    ones = simulate(plain, equal(plain.rank_of))
    assert max(ones.peak_bytes) == num_ranks
    rank_of = there_and_back(num_ranks)
    best = simulate(greedy(rank_of, num_microbatches, equal(rank_of), num_ranks), equal(rank_of))
    assert max(best.peak_bytes) <= num_ranks
    assert best.makespan_s - work <= (ones.makespan_s - work) / 2


def test_there_and_back_without_a_limit_is_as_good_as_zbv() -> None:
    rank_of = there_and_back(4)
    zbv = simulate(schedules.build("zbv", 4, 16), equal(rank_of))
    assert simulate(greedy(rank_of, 16, equal(rank_of)), equal(rank_of)).makespan_s <= zbv.makespan_s
