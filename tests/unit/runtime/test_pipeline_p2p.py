from __future__ import annotations

import threading
import time
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.runtime import p2p
from autopar.runtime.comm import RecordingComm
from autopar.runtime.p2p import Departures, _Departure, connect
from autopar.runtime.simulated_comm import SimulatedComm, SimulatedMesh

pytestmark = pytest.mark.unit

PAIR = (((2,), torch.float32), ((), torch.bool))


@settings(max_examples=20, deadline=None)
@given(st.lists(st.integers(0, 2), min_size=1, max_size=8))
def test_messages_of_a_pair_keep_their_order(sizes: list[int]) -> None:
    """Breaks when a receive gets another message than the one of its turn, whoever is first."""

    def work(comm: Any) -> list[list[float]]:
        other = 1 - comm.rank
        pending = [comm.receive([((size,), torch.float64)], "pp", other, str(n)) for n, size in enumerate(sizes)]
        for n, size in enumerate(sizes):
            comm.send([torch.full((size,), 10.0 * comm.rank + n, dtype=torch.float64)], "pp", other, str(n))
        return [[float(v) for v in each.wait()[0]] for each in reversed(pending)][::-1]

    found = SimulatedMesh(("pp",), (2,), 20).run(work)
    for rank, received in enumerate(found):
        assert received == [[10.0 * (1 - rank) + n] * size for n, size in enumerate(sizes)]


def test_a_view_shows_the_other_axes() -> None:
    """Breaks when a stage's collectives reach ranks of another stage, or its events are not in the log."""

    def work(comm: SimulatedComm) -> tuple[Any, ...]:
        inner = comm.within(("dp", "tp"))
        alone = comm.within(("pp", "cp"))
        assert inner is comm.within(("dp", "tp")) and inner.axes == ("dp", "tp") and alone.size("cp") == 1
        total = inner.all_reduce(torch.tensor(float(comm.rank)), "tp")
        comm.log = []
        inner.at("here")
        inner.all_reduce(total, "dp")
        assert [event.where for event in comm.log] == ["here"]
        return inner.rank, float(total), alone.index("pp")

    found = SimulatedMesh(("dp", "pp", "tp"), (2, 3, 2), 20).run(work)
    for rank, (inner, total, place) in enumerate(found):
        dp, pp, tp = rank // 6, rank // 2 % 3, rank % 2
        assert (inner, total, place) == (dp * 2 + tp, 2 * (rank - tp) + 1, pp)
    recorder = RecordingComm(("dp", "pp", "tp"), (2, 3, 2), 7)
    assert recorder.within(("dp", "tp")).rank == 3 and recorder.rank_at("pp", 2) == 11


def test_messages_are_logged_and_checked() -> None:
    """Breaks when bytes are counted on both sides, a mask is sent as something else, or a wrong tag goes unseen."""

    def work(comm: SimulatedComm) -> list[Tensor]:
        comm.at(f"action of {comm.rank}")
        if comm.rank == 0:
            comm.send([torch.ones(2), torch.tensor(True)], "pp", 1, "1F0").wait()
            assert comm.log is not None and [event.bytes_sent for event in comm.log] == [8, 1]
            assert str(comm.log[0]) == "send of 1F0 (float32[2]) to place 1 of pp at action of 0"
            return []
        found = comm.receive(PAIR, "pp", 0, "1F0").wait()
        assert comm.log is not None and [event.bytes_sent for event in comm.log] == [0, 0]
        return found

    _, (ones, mask) = SimulatedMesh(("pp",), (2,), 20).run(work)
    assert torch.equal(ones, torch.ones(2)) and mask.dtype == torch.bool and bool(mask)
    recorder = RecordingComm(("pp",), (2,), 1)
    assert [tuple(x.shape) for x in recorder.receive(PAIR, "pp", 0, "1F0").wait()] == [(2,), ()]
    assert [event.kind for event in recorder.log or ()] == ["receive", "receive"]

    def other_tag(comm: SimulatedComm) -> None:
        if comm.rank == 0:
            comm.send([torch.ones(2)], "pp", 1, "1F1").wait()
        else:
            comm.receive([((2,), torch.float32)], "pp", 0, "1F0").wait()

    with pytest.raises(AutoparError, match=r"receives from rank 0 in another order.*send of 1F1.*receive of 1F0"):
        SimulatedMesh(("pp",), (2,), 20).run(other_tag)


def waits_for_one_that_ended(comm: SimulatedComm) -> None:
    comm.at("1RECV_F0")
    if comm.rank == 1:
        comm.receive([((2,), torch.float32)], "pp", 0, "1F0").wait()


def sends_to_one_that_ended(comm: SimulatedComm) -> None:
    comm.at("0SEND_F0")
    if comm.rank == 0:
        comm.send([torch.ones(2)], "pp", 1, "1F0").wait()


def waits_in_a_circle(comm: SimulatedComm) -> None:
    comm.at(f"action {comm.rank}")
    comm.receive([((), torch.float32)], "pp", (comm.rank + 1) % 3, "x").wait()


def message_against_collective(comm: SimulatedComm) -> None:
    comm.at(f"action {comm.rank}")
    if comm.rank == 0:
        comm.receive([((), torch.float32)], "pp", 1, "x").wait()
    else:
        comm.all_reduce(torch.ones(()), "pp")


@pytest.mark.parametrize(
    ("work", "num", "message"),
    [
        (waits_for_one_that_ended, 2, r"rank 1 waits over axis pp for rank 0, which has ended \(1RECV_F0\)"),
        (sends_to_one_that_ended, 2, r"rank 0 waits over axis pp for rank 1, which has ended \(0SEND_F0\)"),
        (waits_in_a_circle, 3, r"rank 0 waits over axis pp for rank 1, which waits in receive of x .* at action 1"),
        (message_against_collective, 2, r"rank 0 waits over axis pp for rank 1, which waits in all_reduce sum over pp"),
    ],
)
def test_who_waits_for_whom_is_told_at_once(work: Any, num: int, message: str) -> None:
    """Breaks when simulated ranks wait in a circle until the timeout."""
    begun = time.monotonic()
    with pytest.raises(AutoparError, match=message):
        SimulatedMesh(("pp",), (num,), 60).run(work)
    assert time.monotonic() - begun < 30


def test_sent_tensors_are_let_go() -> None:
    """Breaks when what has left is kept until the end of the step, or one failed send stops the next ones."""

    class Work:
        def __init__(self, fails: bool) -> None:
            self.may_end, self.fails = threading.Event(), fails

        def wait(self, timeout: Any) -> None:
            assert self.may_end.wait(timeout.total_seconds())
            if self.fails:
                raise RuntimeError("gone")

    departures = Departures()
    works = [Work(False), Work(True), Work(False)]
    sent = [_Departure(work, torch.ones(1), 20.0) for work in works]
    for each in sent:
        departures.add(each)
    works[0].may_end.set()
    assert sent[0].is_done.wait(20) and not hasattr(sent[0], "tensor") and hasattr(sent[1], "tensor")
    works[1].may_end.set()
    works[2].may_end.set()
    assert sent[2].is_done.wait(20) and sent[2].error is None and str(sent[1].error) == "gone"
    again = _Departure(works[0], torch.ones(1), 20.0)
    departures.add(again)
    assert again.is_done.wait(20)


class _Meeting:
    """Of one pair: a message of which both ends wait for each other, as NCCL's do while the pair is connected."""

    def __init__(self) -> None:
        self.ends = threading.Barrier(2)

    def wait(self) -> None:
        self.ends.wait(5)


@pytest.mark.parametrize("num", [2, 4, 5])
def test_pairs_are_connected_without_a_circle(num: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if ranks of a ring connect their pairs each in an order of its own: all would wait for the next."""
    meetings: dict[tuple[int, int], _Meeting] = {}
    lock, done = threading.Lock(), []
    here = threading.local()

    def meet(peer: int) -> _Meeting:
        pair = (min(here.rank, peer), max(here.rank, peer))
        with lock:
            return meetings.setdefault(pair, _Meeting())

    monkeypatch.setattr(p2p.dist, "isend", lambda x, group, group_dst: meet(group_dst))
    monkeypatch.setattr(p2p.dist, "irecv", lambda x, group, group_src: meet(group_src))

    def work(rank: int) -> None:
        here.rank = rank
        peers = list(dict.fromkeys([(rank + 1) % num, (rank - 1) % num]))
        group: Any = None
        connect(RecordingComm(("pp",), (num,), rank, "cpu"), group, "pp", peers)
        done.append(rank)

    threads = [threading.Thread(target=work, args=(rank,), daemon=True) for rank in range(num)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert sorted(done) == list(range(num))
    assert len(meetings) == (1 if num == 2 else num)
