"""How gathers and reductions hide behind the compute, by hand."""

from __future__ import annotations

from typing import Any

import pytest

from autopar.cost.step_time import CallTime, Chain, Message, step_walk

GATHER: tuple[Chain, ...] = ((Message("network", 2.0),),)


def seconds(calls: list[CallTime], microbatches: int = 1, **options: Any) -> float:
    step: dict[str, Any] = {"prefetch": True, "at_end": False, "training": True, **options}
    return step_walk(calls, microbatches=microbatches, **step, events=False).seconds


def test_nothing_to_move() -> None:
    assert seconds([CallTime(1.0, 2.0)] * 3) == 9.0
    assert seconds([CallTime(1.0, 2.0)] * 3, 5) == 45.0


def test_gathers_hide_but_for_the_first() -> None:
    """Calls of 3 s forward and 4 s backward, gathered in 2 s: only the first gather is waited for."""
    call = CallTime(3.0, 4.0, gather=GATHER, again=GATHER)
    assert seconds([call] * 3) == 2.0 + 21.0
    assert seconds([call] * 3, prefetch=False) == 21.0 + 6 * 2.0


def test_what_takes_longer_than_the_compute_decides() -> None:
    """Gathers of 2 s beside calls of 1 s: the lane is never idle."""
    call = CallTime(1.0, 1.0, gather=GATHER, again=GATHER)
    assert seconds([call] * 3) == 6 * 2.0 + 1.0


def test_reductions_end_after_the_last_backward() -> None:
    call = CallTime(3.0, 4.0, reduce=GATHER)
    assert seconds([call] * 2) == 14.0 + 2.0
    assert seconds([call] * 2, at_end=True) == 14.0 + 4.0


def test_once_a_step() -> None:
    """What is gathered once is not gathered for the second microbatch."""
    call = CallTime(1.0, 1.0, once=GATHER)
    assert seconds([call], 2) == 2.0 + 4.0


def test_one_lane_carries_one_thing_at_a_time() -> None:
    """A call that talks for 1 s of its 3 s on the lane itself delays the next one's gather by as much."""
    quiet = CallTime(2.0, 0.0, gather=GATHER)
    busy = CallTime(2.0, 0.0, forward_inside={"network": 1.0}, gather=GATHER)
    assert seconds([quiet, quiet]) == 2.0 + 4.0
    assert seconds([busy, quiet]) == 2.0 + 3.0 + 2.0
    assert seconds([CallTime(2.0, 0.0, forward_inside={"node": 1.0}, gather=GATHER), quiet]) == 2.0 + 4.0


def test_what_travels_beside_slows_the_compute() -> None:
    """Gathers of 2 s beside calls of 3 and 4 s: the five that hide cost a quarter of their time each."""
    call = CallTime(3.0, 4.0, gather=GATHER, again=GATHER)
    slowed = seconds([call] * 3, slowdown=0.25)
    assert slowed == 2.0 + 21.0 + 5 * 0.25 * 2.0
    alone = seconds([call] * 3, prefetch=False, slowdown=0.25)
    assert alone == seconds([call] * 3, prefetch=False)
    inside = CallTime(3.0, 0.0, forward_inside={"network": 2.0})
    assert seconds([inside], slowdown=0.25) == 3.0


def test_many_microbatches_are_not_simulated_one_by_one() -> None:
    call = CallTime(1.0, 2.0, gather=GATHER, again=GATHER, reduce=GATHER)
    few = [seconds([call] * 4, number) for number in (3, 4, 5)]
    assert few[1] - few[0] == pytest.approx(few[2] - few[1])


def test_the_walk_says_what_its_seconds_are_made_of() -> None:
    """Breaks if seconds and events come from two simulations, or messages overlap on their lane."""
    call = CallTime(3.0, 4.0, {"network": 1.0}, gather=GATHER, again=GATHER, reduce=GATHER)
    walk = step_walk([call] * 3, microbatches=2, prefetch=True, at_end=False, training=True, slowdown=0.25)
    assert walk.seconds == seconds([call] * 3, 2, slowdown=0.25)
    assert walk.seconds == max(event.end_s for event in walk.events)
    phases = [(event.start_s, event.end_s) for event in walk.events if event.message is None]
    messages = [(event.start_s, event.end_s) for event in walk.events if event.message is not None]
    assert (len(phases), len(messages)) == (2 * 2 * 3, 2 * 2 * 3 + 3)
    for spans in (phases, messages):
        assert all(end <= start for (_, end), (start, _) in zip(sorted(spans), sorted(spans)[1:]))


def test_the_walk_of_many_microbatches_leaves_the_middle_out() -> None:
    call = CallTime(1.0, 2.0, gather=GATHER, again=GATHER, reduce=GATHER)
    walk = step_walk([call] * 4, microbatches=64, prefetch=True, at_end=False, training=True)
    assert walk.seconds == pytest.approx(seconds([call] * 4, 64))
    assert (walk.simulated, walk.repeated) == (3, 61)
    assert max(event.end_s for event in walk.events) + 61 * walk.period_s == pytest.approx(walk.seconds)
