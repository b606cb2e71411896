"""What `check` refuses, and that what it passes runs to its end, here and in the simulator."""

from __future__ import annotations

import random
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.base.errors import AutoparError
from autopar.ir.schedule import Action, Schedule
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.check import check
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import simulate
from tests.unit.pipelining import orders

GOOD = ["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1"]


@pytest.mark.parametrize(
    ("rows", "parts"),
    [
        (["0F0,0F1,0B0,0B1"], ["1 rows, the pipeline axis 2 ranks"]),
        ([*GOOD, "2F0"], ["3 rows"]),
        (["0F0,0F1,0B0,0B1", ",,", "1F0"], ["3 rows"]),
        (["0F0,0F1,0B0,0B1,1F0,1F1,1B0,1B1", ","], ["1 rows"]),
        (["0F0,0G1", GOOD[1]], ["'0G1' is no action", "row 1, column 2"]),
        (["0F0,0F", GOOD[1]], ["'0F' is no action"]),
        (["0F0,0UNSHARD1", GOOD[1]], ["'0UNSHARD1' is no action"]),
        (["0F0,0B0", GOOD[1]], ["0F1 is missing", "row of rank 0"]),
        (["0F0,0F1,0B0", GOOD[1]], ["Stage 0 has no backward of microbatch 1"]),
        (["0F0,0F1,0B0,0B1,0F1", GOOD[1]], ["0F1 is done twice"]),
        (["0F0,0F1,0B0,0B1,0F2", GOOD[1]], ["0F2 is of a microbatch that is not there", "3 microbatches"]),
        (["0F0,0F1,0B0,0B1", "2F0,2B0,2F1,2B1"], ["Stage 1 is nowhere computed"]),
        (["0F0,0F1,0B0,0B1", "1F0,1B0,1F1,1B1,0F1"], ["0F1 is in the row of rank 1", "Rank 0 computes stage 0"]),
        (["0F0,0F1,0B0,0I1,0B1,0W1", GOOD[1]], ["B and I of microbatch 1"]),
        (["0F0,0F1,0B0,0I1", GOOD[1]], ["I of microbatch 1, but no W"]),
        (["0F0,0F1,0B0,0W1,0I1", GOOD[1]], ["0W1 comes without 0I1 before it"]),
        (["0B0,0F0,0F1,0B1", GOOD[1]], ["0B0 comes without 0F0 before it"]),
        (["0F0,0B0,0F1,0B1", "1F1,1B1,1F0,1B0"], ["deadlocks", "rank 0 stands at 0B0, which waits for 1B0 of rank 1"]),
    ],
)
def test_what_is_wrong_with_a_schedule_of_computations_is_named(rows: list[str], parts: list[str]) -> None:
    with pytest.raises(AutoparError) as raised:
        schedules.from_csv("\n".join(rows), 2, 2)
    assert all(part in str(raised.value) for part in parts), str(raised.value)


def whole() -> list[list[str]]:
    return orders.texts(schedules.build("1f1b", 2, 2))


def refused(rows: list[list[str]]) -> str:
    with pytest.raises(AutoparError) as raised:
        schedules.from_csv("\n".join(",".join(row) for row in rows), 2, 2)
    return str(raised.value)


@pytest.mark.parametrize(
    ("rank", "edit", "parts"),
    [
        (0, lambda row: row.remove("0SEND_F1"), ["0SEND_F1 is missing", "Rank 1 waits for it in 1RECV_F1"]),
        (1, lambda row: row.remove("1RECV_F1"), ["1F1 comes without 1RECV_F1 before it"]),
        (0, lambda row: row.append("0SEND_F1"), ["0SEND_F1 is done twice"]),
        (0, lambda row: row.append("0SEND_B0"), ["no stage at its other end"]),
        (0, lambda row: row.remove("0UNSHARD"), ["0UNSHARD 0 times"]),
        (0, lambda row: row.append("0UNSHARD"), ["0UNSHARD 2 times"]),
        (0, lambda row: row.append(row.pop(0)), ["0UNSHARD comes after 0F0"]),
        (1, lambda row: row.insert(3, row.pop()), ["1REDUCE_GRAD comes before 1B1"]),
        (0, lambda row: row.insert(1, row.pop(row.index("0SEND_F0"))), ["before what it sends is computed"]),
    ],
)
def test_what_is_wrong_with_a_whole_schedule_is_named(rank: int, edit, parts: list[str]) -> None:
    rows = whole()
    edit(rows[rank])
    message = refused(rows)
    assert all(part in message for part in parts), message


def test_receives_in_another_order_than_the_sends_deadlock() -> None:
    rows = whole()
    first, second = rows[1].index("1RECV_F0"), rows[1].index("1RECV_F1")
    rows[1][first], rows[1][second] = rows[1][second], rows[1][first]
    rows[1].insert(first, rows[1].pop(rows[1].index("1RECV_F0")))
    assert rows[1][first : first + 2] == ["1RECV_F0", "1RECV_F1"]
    rows[1][first : first + 2] = ["1RECV_F1", "1RECV_F0"]
    message = refused(rows)
    assert "deadlocks: 2 of its 2 ranks" in message
    assert "rank 1 stands at 1F0, which waits for 0SEND_F0 of rank 0" in message
    assert "the transfers of rank 1 stand at 1RECV_F1, to which rank 0 has not come" in message


def test_messages_that_cross_deadlock() -> None:
    """NCCL makes the transfers of a pair of ranks, in both directions, one after the other."""
    rows = [
        ["0F0", "0SEND_F0", "0F1", "0SEND_F1", "0RECV_B0", "0B0", "0RECV_B1", "0B1"],
        ["1RECV_F0", "1F0", "1B0", "1SEND_B0", "1RECV_F1", "1F1", "1B1", "1SEND_B1"],
    ]
    message = refused(rows)
    assert "the transfers of rank 0 stand at 0SEND_F1" in message
    assert "the transfers of rank 1 stand at 1SEND_B0" in message


def test_a_long_deadlock_names_the_first_ranks() -> None:
    num_ranks = 12
    rows = [[f"{rank}F0", f"{rank}F1", f"{rank}B0", f"{rank}B1"] for rank in range(num_ranks)]
    rows[-1] = [f"{num_ranks - 1}{each}" for each in ("F1", "B1", "F0", "B0")]
    rows[0] = ["0F0", "0B0", "0F1", "0B1"]
    with pytest.raises(AutoparError, match=r"deadlocks: 12 of its 12 ranks .*; and 4 more"):
        schedules.from_csv("\n".join(map(",".join, rows)), num_ranks, 2)


def test_a_forward_only_schedule_has_no_backward() -> None:
    schedule = schedules.build("gpipe", 2, 2)
    with pytest.raises(AutoparError, match="Only forwards run"):
        check(schedule, backward=False)
    with pytest.raises(AutoparError, match="no backward of microbatch 0"):
        check(schedules.forward_only(schedule))


def test_parts_that_overlap_do_not_need_each_other() -> None:
    with pytest.raises(AutoparError, match="comes without 0F0 before it"):
        schedules.from_csv("(0F0;1F0)OVERLAP_F_B,1B0,0B0", 1, 1)


@pytest.mark.moderate
@given(orders.admitted(most_ranks=4, most_microbatches=6), st.integers(0, 2**32), st.integers(1, 3), st.booleans())
@settings(max_examples=200, deadline=None)
def test_swapped_actions_run_to_the_end_or_are_refused(
    schedule: Schedule, seed: int, swaps: int, neighbours: bool
) -> None:
    """Nothing that `check` passes hangs; what it refuses is an AutoparError."""
    draw = random.Random(seed)
    order: list[list[Action]] = [list(row) for row in schedule.order]
    for _ in range(swaps):
        row = draw.choice(order)
        a = draw.randrange(len(row))
        b = min(a + 1, len(row) - 1) if neighbours else draw.randrange(len(row))
        row[a], row[b] = row[b], row[a]
    swapped = replace(schedule, order=tuple(map(tuple, order)))
    try:
        check(swapped)
    except AutoparError as error:
        assert schedule.name in str(error)
        return
    timeline = simulate(swapped, [StageCost(1.0, 2.0, 1.0, 1.0)] * schedule.num_stages)
    assert timeline.makespan_s >= 3 * schedule.num_microbatches * schedule.num_stages / schedule.num_ranks
