"""The simulator against published formulas, against bounds that no run can beat, and against a run by hand."""

from __future__ import annotations

import math
import pickle
from itertools import pairwise

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.ir.schedule import COMPUTE, Action, Kind, Schedule
from autopar.machine.hardware import Link
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import peak_bytes, simulate
from tests.unit.pipelining import orders

SECONDS = {Kind.FORWARD: "forward_s", Kind.BACKWARD: "backward_s", Kind.BACKWARD_INPUT: "input_s"}
SECONDS[Kind.BACKWARD_WEIGHT] = "weight_s"


def equal(num_stages: int, forward: float = 1.0, first: float = 1.0, second: float = 1.0) -> list[StageCost]:
    return [StageCost(forward, first + second, first, second)] * num_stages


def idle(name: str, num_ranks: int, num_microbatches: int, stages: int, *halves: float) -> float:
    """Seconds of the step beyond the work of one rank."""
    schedule = schedules.build(name, num_ranks, num_microbatches, stages)
    costs = equal(schedule.num_stages, *halves)
    work = num_microbatches * stages * (costs[0].forward_s + costs[0].backward_s)
    return simulate(schedule, costs).makespan_s - work


@pytest.mark.parametrize("halves", [(1.0, 1.0, 1.0), (1.0, 1.5, 0.5), (2.0, 1.0, 1.0), (1.0, 0.5, 1.5)])
@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 32), (8, 16)])
def test_idle_seconds_are_those_of_the_papers(num_ranks: int, num_microbatches: int, halves) -> None:
    forward, first, second = halves
    backward = first + second
    for name in ("gpipe", "1f1b"):  # (p − 1)(F + B): a share (p − 1) / m of the ideal step
        assert idle(name, num_ranks, num_microbatches, 1, *halves) == pytest.approx(
            (num_ranks - 1) * (forward + backward)
        )
    for stages in (2, 3):  # as much, of a step that is v times as long
        seconds = idle("interleaved", num_ranks, num_microbatches, stages, *halves)
        assert seconds == pytest.approx((num_ranks - 1) * (forward + backward))
    # ZB-H1's (p − 1)(F + B − 2W), B being both halves; but the last rank starts (p − 1) F after the first, which no W
    # can fill, so it is no less than that where W is longer than I.
    zero_bubble = (num_ranks - 1) * (forward + max(backward - 2 * second, 0.0))
    assert idle("zero_bubble", num_ranks, num_microbatches, 1, *halves) == pytest.approx(zero_bubble)


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 4), (4, 8), (4, 20), (8, 16)])
def test_what_zbv_and_dualpipev_leave_idle_with_equal_parts(num_ranks: int, num_microbatches: int) -> None:
    """ZB-V's ranks never stand still between their first and last action: what is left is when they start."""
    assert idle("zbv", num_ranks, num_microbatches, 2) == pytest.approx(num_ranks - 1)
    schedule = schedules.build("zbv", num_ranks, num_microbatches)
    timeline = simulate(schedule, equal(schedule.num_stages))
    for rank in range(num_ranks):
        own = [event for event in timeline.events if event.rank == rank and event.action.kind in COMPUTE]
        assert own[-1].end_s - own[0].start_s == pytest.approx(num_microbatches * 2 * 3)
    assert idle("dualpipev", num_ranks, num_microbatches, 2) == pytest.approx(2 * (num_ranks - 1))


@pytest.mark.parametrize(("num_ranks", "num_microbatches"), [(2, 8), (4, 8), (4, 3)])
def test_microbatches_in_flight(num_ranks: int, num_microbatches: int) -> None:
    costs = [StageCost(1.0, 2.0, 1.0, 1.0, static_bytes=100.0, saved_bytes=1.0)] * num_ranks
    ones = simulate(schedules.build("1f1b", num_ranks, num_microbatches), costs).peak_bytes
    assert ones == tuple(100.0 + min(num_ranks - rank, num_microbatches) for rank in range(num_ranks))
    gpipe = simulate(schedules.build("gpipe", num_ranks, num_microbatches), costs).peak_bytes
    assert gpipe == (100.0 + num_microbatches,) * num_ranks


def test_memory_by_hand() -> None:
    schedule = schedules.from_csv("0F0,0I0,0W0\n1F0,1B0", 2, 1)
    cost = StageCost(
        1.0,
        2.0,
        input_s=1.0,
        weight_s=3.0,
        static_bytes=1000.0,
        held_bytes=500.0,
        saved_bytes=100.0,
        input_bytes=70.0,
        kept_bytes=20.0,
        forward_working_bytes=7.0,
        backward_working_bytes=5.0,
    )
    timeline = simulate(schedule, [cost, cost])
    times, held = timeline.memory[0]
    # static; UNSHARD; F; then from 1 + 1 + 2 on: I with what it keeps, W; RESHARD.
    assert list(zip(times, held)) == [
        (0.0, 1000.0),
        (0.0, 1500.0),
        (0.0, 1500.0),
        (0.0, 1607.0),
        (1.0, 1600.0),
        (4.0, 1625.0),
        (5.0, 1550.0),
        (5.0, 1555.0),
        (8.0, 1500.0),
        (8.0, 1500.0),
        (8.0, 1000.0),
    ]
    assert timeline.peak == (0, 4.0, 1625.0) and timeline.peak_bytes == (1625.0, 1607.0)
    assert peak_bytes(schedules.forward_only(schedule), [cost, cost]) == (1507.0, 1507.0)


def test_transfers_gathers_and_reductions_by_hand() -> None:
    schedule = schedules.build("gpipe", 2, 2)
    link = Link(bandwidth_bytes_per_s=10.0, latency_s=0.25)
    first = StageCost(1.0, 2.0, forward_bytes=20.0, unshard_s=3.0, reduce_s=4.0)
    second = StageCost(1.0, 2.0, backward_bytes=5.0, unshard_s=1.0)
    timeline = simulate(schedule, [first, second], link)
    starts = {str(event.action): (event.start_s, event.end_s) for event in timeline.events}
    assert starts["0UNSHARD"] == (0.0, 3.0) and starts["0F0"] == (3.0, 4.0) and starts["0F1"] == (4.0, 5.0)
    # 2.25 s a message; rank 1 comes to the receive of microbatch 1 after 1F0.
    assert starts["0SEND_F0"] == (4.0, 6.25) and starts["1F0"] == (6.25, 7.25)
    assert starts["0SEND_F1"] == starts["1RECV_F1"] == (7.25, 9.5) and starts["1F1"] == (9.5, 10.5)
    # 0.75 s a message back; rank 0 comes to the receive of microbatch 1 after 0B0.
    assert starts["1B0"] == (10.5, 12.5) and starts["0B0"] == (13.25, 15.25)
    assert starts["1B1"] == (12.5, 14.5) and starts["0RECV_B1"] == (15.25, 16.0) and starts["0B1"] == (16.0, 18.0)
    assert starts["0REDUCE_GRAD"] == (18.0, 22.0) and timeline.makespan_s == 22.0
    assert timeline.busy_s == (6.0, 6.0) and timeline.bubble_share == pytest.approx(1 - 6 / 22)


def test_transfers_from_one_rank_to_another_follow_each_other() -> None:
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1RECV_F1,1F0,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ]
    schedule = schedules.from_csv("\n".join(rows), 2, 2)
    costs = [StageCost(1.0, 1.0, forward_bytes=3.0), StageCost(1.0, 1.0)]
    starts = {str(event.action): event.start_s for event in simulate(schedule, costs, Link(1.0, 0.5)).events}
    assert starts["0SEND_F0"] == 1.0 and starts["1F0"] == 4.5 and starts["0SEND_F1"] == 4.5 and starts["1F1"] == 8.0


def test_a_transfer_starts_when_both_its_ends_are_posted() -> None:
    """Rank 1 comes to its receive of microbatch 1 only after a computation that takes long."""
    rows = [
        "0F0,0SEND_F0,0F1,0SEND_F1,0RECV_B0,0B0,0RECV_B1,0B1",
        "1RECV_F0,1F0,1RECV_F1,1F1,1B0,1SEND_B0,1B1,1SEND_B1",
    ]
    schedule = schedules.from_csv("\n".join(rows), 2, 2)
    timeline = simulate(schedule, [StageCost(1.0, 1.0, forward_bytes=1.0), StageCost(10.0, 1.0)], Link(1.0, 0.0))
    starts = {str(event.action): (event.start_s, event.end_s) for event in timeline.events}
    assert starts["1F0"] == (2.0, 12.0) and starts["0SEND_F1"] == (12.0, 13.0) and starts["1F1"] == (13.0, 23.0)


def test_a_message_alone_has_the_wire() -> None:
    schedule = schedules.build("gpipe", 2, 1)
    costs = [StageCost(1.0, 1.0, forward_bytes=8.0)] * 2
    ring, wire = Link(8.0, 0.0), Link(8.0, 0.0, wire_bandwidth_bytes_per_s=2.0)
    assert simulate(schedule, costs, wire).makespan_s - simulate(schedule, costs, ring).makespan_s == 3.0


def test_launches_take_time_of_their_rank() -> None:
    schedule = schedules.build("gpipe", 1, 1)
    assert orders.texts(schedule) == [["0UNSHARD", "0F0", "0B0", "0RESHARD", "0REDUCE_GRAD"]]
    assert simulate(schedule, [StageCost(1.0, 2.0)], launch_s=0.25).makespan_s == pytest.approx(4.0)


def test_a_schedule_travels_without_what_was_worked_out_of_it() -> None:
    schedule = schedules.build("1f1b", 2, 3)
    simulate(schedule, equal(2))
    copied = pickle.loads(pickle.dumps(schedule))
    assert copied == schedule and not copied.tables and schedule.tables


def test_one_cost_a_stage() -> None:
    with pytest.raises(AutoparError, match="1 costs and 2 stages"):
        simulate(schedules.build("1f1b", 2, 2), [StageCost(1.0, 1.0)])


def test_an_order_that_deadlocks_is_refused() -> None:
    good = schedules.build("1f1b", 2, 2)
    row = list(good.order[1])
    a, b = row.index(Action.parse("1SEND_B0")), row.index(Action.parse("1RECV_F1"))
    row[a], row[b] = row[b], row[a]
    at, to = row.index(Action.parse("1RECV_F0")), row.index(Action.parse("1F0"))
    row[at], row[to] = row[to], row[at]
    with pytest.raises(AutoparError, match="1F0 comes without 1RECV_F0"):
        simulate(Schedule("mine", 2, (0, 1), (good.order[0], tuple(row))), equal(2))


beside = st.sampled_from([0.0, 1.0])
costs_of_a_stage = orders.costs_of_a_stage(
    st.floats(0.01, 10.0), unshard_s=beside, reduce_s=beside, saved_bytes=st.floats(10.0, 20.0)
)


@pytest.mark.slow
@given(orders.admitted(), st.data(), st.sampled_from([None, Link(5.0, 0.1)]))
@settings(max_examples=150, deadline=None)
def test_no_step_is_shorter_than_its_work_or_its_chains(schedule: Schedule, data: st.DataObject, link) -> None:
    costs = data.draw(st.lists(costs_of_a_stage, min_size=schedule.num_stages, max_size=schedule.num_stages))
    timeline = simulate(schedule, costs, link)
    work = [
        math.fsum(
            getattr(costs[each.stage], SECONDS[each.kind])
            for each in orders.leaves(schedule, rank)
            if each.kind in COMPUTE
        )
        for rank in range(schedule.num_ranks)
    ]
    assert timeline.busy_s == pytest.approx(work)
    assert timeline.makespan_s >= max(work) * (1 - 1e-9)
    assert timeline.makespan_s >= chain(schedule, costs, link) * (1 - 1e-9)
    assert 0 <= timeline.bubble_share < 1
    ends = {(event.rank, str(event.action)): event.end_s for event in timeline.events}
    starts = {(event.rank, str(event.action)): event.start_s for event in timeline.events}
    for (rank, text), start in starts.items():
        action = Action.parse(text)
        sender = action.stage - 1
        if action.kind is Kind.FORWARD and action.stage:
            assert start >= ends[schedule.rank_of[sender], f"{sender}F{action.microbatch}"] - 1e-9
            if schedule.rank_of[sender] != rank:
                assert start >= ends[rank, f"{action.stage}RECV_F{action.microbatch}"] - 1e-9


def chain(schedule: Schedule, costs: list[StageCost], link: Link | None) -> float:
    """One microbatch through all stages and back."""
    seconds = 0.0
    split = schedule.splits_backward
    for stage, cost in enumerate(costs):
        seconds += cost.forward_s + (min(cost.input_s, cost.backward_s) if split else cost.backward_s)
        for other, sent in ((stage + 1, cost.forward_bytes), (stage - 1, cost.backward_bytes)):
            if link and 0 <= other < len(costs) and schedule.rank_of[other] != schedule.rank_of[stage]:
                seconds += link.latency_s + sent / link.bandwidth_bytes_per_s
    return seconds


@pytest.mark.slow
@given(orders.admitted(), st.data())
@settings(max_examples=100, deadline=None)
def test_memory_comes_back_to_what_is_there_all_the_time(schedule: Schedule, data: st.DataObject) -> None:
    costs = data.draw(st.lists(costs_of_a_stage, min_size=schedule.num_stages, max_size=schedule.num_stages))
    timeline = simulate(schedule, costs, Link(5.0, 0.1))
    for rank, (times, held) in enumerate(timeline.memory):
        static = sum(costs[stage].static_bytes for stage in schedule.stages_of(rank))
        assert held[0] == pytest.approx(static) and held[-1] == pytest.approx(static)
        assert all(a <= b for a, b in pairwise(times)) and times[-1] <= timeline.makespan_s
        assert min(held) >= static - 1e-6
    assert timeline.peak_bytes == peak_bytes(schedule, costs) == tuple(max(held) for _, held in timeline.memory)
    most = [
        sum(costs[stage].saved_bytes * schedule.in_flight[stage] for stage in schedule.stages_of(rank))
        for rank in range(schedule.num_ranks)
    ]
    assert all(
        peak >= 0.5 * bound / len(schedule.stages_of(rank))
        for rank, (peak, bound) in enumerate(zip(timeline.peak_bytes, most))
    )
