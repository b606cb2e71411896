"""torch's schedule runtime with functions and stages of ours, for all ranks in threads, without a process group."""

from __future__ import annotations

import logging
import queue
import threading
from collections import defaultdict
from types import SimpleNamespace

import pytest

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.pipelining import make_runtime
from autopar.ir.schedule import TRANSFERS, Action, Kind, Schedule
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.check import awaited
from tests.unit.pipelining import orders

PLAIN = [kind for kind in Kind if kind not in TRANSFERS and kind is not Kind.OVERLAP_F_B]


class Ranks:
    """All ranks of a schedule; what each did, and mail between stages."""

    def __init__(self, schedule: Schedule, fail: dict[str, Exception] | None = None, runs: int = 2) -> None:
        self.schedule, self.fail, self.runs = schedule, fail or {}, runs
        self.done: list[list[str]] = [[] for _ in schedule.order]
        self.mail: dict[object, queue.Queue[int]] = defaultdict(queue.Queue)
        self.errors: dict[int, BaseException] = {}

    def run(self) -> Ranks:
        with threading.Lock():
            for stage in range(self.schedule.num_stages):
                for microbatch in range(self.schedule.num_microbatches):
                    for kind in (Kind.SEND_F, Kind.SEND_B):
                        self.mail[kind, stage, microbatch]
        threads = [threading.Thread(target=self.main, args=(rank,)) for rank in range(self.schedule.num_ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(30)
            assert not thread.is_alive()
        return self

    def main(self, rank: int) -> None:
        try:
            stages = [self.stage(stage, rank) for stage in self.schedule.stages_of(rank)]
            functions = {kind: lambda text: self.act(rank, Action.parse(text)) for kind in PLAIN}
            texts = orders.texts(self.schedule)
            runtime = make_runtime(stages, self.schedule.num_microbatches, texts, rank, functions)
            for _ in range(self.runs):
                runtime.run()
        except BaseException as error:
            self.errors[rank] = error

    def act(self, rank: int, action: Action) -> None:
        message = awaited(self.schedule, action)
        if message is not None:
            self.mail[tuple(message)].get(timeout=20)
        self.note(rank, str(action))

    def note(self, rank: int, text: str) -> None:
        self.done[rank].append(text)
        if text in self.fail:
            raise self.fail[text]

    def stage(self, stage: int, rank: int) -> SimpleNamespace:
        def transfer(kind: Kind):
            def act(microbatch: int) -> list:
                self.note(rank, f"{stage}{kind}{microbatch}")
                if kind in (Kind.SEND_F, Kind.SEND_B):
                    self.mail[kind, stage, microbatch].put(0)
                return []

            return act

        return SimpleNamespace(
            stage_index=stage,
            num_stages=self.schedule.num_stages,
            group_size=self.schedule.num_ranks,
            group_rank=rank,
            submod=None,
            is_first=stage == 0,
            is_last=stage == self.schedule.num_stages - 1,
            has_backward=True,
            output_chunks=[],
            clear_runtime_states=lambda: None,
            get_fwd_send_ops=transfer(Kind.SEND_F),
            get_fwd_recv_ops=transfer(Kind.RECV_F),
            get_bwd_send_ops=transfer(Kind.SEND_B),
            get_bwd_recv_ops=transfer(Kind.RECV_B),
        )


@pytest.mark.parametrize("forward_only", [False, True])
@pytest.mark.parametrize("name", schedules.NAMES)
def test_every_schedule_runs_twice_in_its_order(name: str, forward_only: bool) -> None:
    schedule = schedules.build(name, 3, 6)
    schedule = schedules.forward_only(schedule) if forward_only else schedule
    ranks = Ranks(schedule).run()
    assert not ranks.errors
    assert ranks.done == [[str(leaf) for leaf in orders.leaves(schedule, rank)] * 2 for rank in range(3)]


@pytest.mark.parametrize("text", ["0B1", "0SEND_F1", "0RECV_B0", "0UNSHARD"])
def test_errors_come_out_as_they_are_and_torch_logs_nothing(text: str, caplog: pytest.LogCaptureFixture) -> None:
    error = AutoparError("Rank 0 waited too long", remedy="Look at rank 1")
    schedule = schedules.build("1f1b", 2, 2)
    with caplog.at_level(logging.WARNING):
        ranks = Ranks(schedule, {text: error}, runs=1)
        threading.Thread(target=ranks.main, args=(1,), daemon=True).start()
        ranks.main(0)
    assert ranks.errors[0] is error and not caplog.records
    assert ranks.done[0][-1] == text
    ranks.fail = {}
    for queued in ranks.mail.values():
        queued.put(0)


def test_other_errors_say_where_they_were_raised() -> None:
    schedule = schedules.build("gpipe", 1, 2)
    ranks = Ranks(schedule, {"0B0": RuntimeError("broken")}).run()
    assert isinstance(ranks.errors[0], RuntimeError)
    assert ranks.errors[0].__notes__ == ["in a pipeline schedule, action 0B0 of rank 0"]


def test_a_run_after_an_error_starts_anew() -> None:
    schedule = schedules.build("1f1b", 2, 2)
    ranks = Ranks(schedule)
    stages = [ranks.stage(1, 1)]
    fail = [True]

    def act(text: str) -> None:
        if fail and text == "1F0":
            fail.clear()
            raise AutoparError("once")

    runtime = make_runtime(stages, 2, orders.texts(schedule), 1, dict.fromkeys(PLAIN, act))
    with pytest.raises(AutoparError, match="once"):
        runtime.run()
    runtime.run()


def test_an_overlap_can_have_a_function_of_its_own() -> None:
    schedule = schedules.build("dualpipev", 1, 2)
    seen: list[str] = []
    functions = dict.fromkeys([*PLAIN, Kind.OVERLAP_F_B], seen.append)
    ranks = Ranks(schedule)
    stages = [ranks.stage(stage, 0) for stage in (0, 1)]
    make_runtime(stages, 2, orders.texts(schedule), 0, functions).run()
    done = tuple(map(Action.parse, seen))
    assert done == schedule.order[0] and any(action.parts for action in done)
