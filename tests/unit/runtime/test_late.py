"""Who is late: what is made of the ranks' reports, of how long they waited, and of a thread's stack."""

from __future__ import annotations

import sys
import threading
import time
from types import SimpleNamespace
from typing import Any

import pytest
import torch.distributed as dist

from autopar.runtime.trail import Trail
from autopar.runtime.watch.late import Report, Watchdog, verdict
from autopar.runtime.watch.slow import Waited, slow_one


def _waits(rank: int, issued: int = 5, what: str = "all_reduce over dp", for_s: float = 60.0) -> Report:
    return Report(rank, 7, issued, what, for_s, "", "line 3 of program.py")


def _at(rank: int, for_s: float = 70.0, does: str = "") -> Report:
    return Report(rank, 7, 4, "", for_s, does, "line 9 of train.py, in load", "host", 42)


def _verdict(reports: list[Report], num: int) -> Any:
    return verdict(reports, num, 7, 60.0, 0.5, 600.0)


def test_who_waits_for_nobody_is_waited_for() -> None:
    """Breaks if a rank that waits, or one that is only under way between two waits, is named."""
    late = _verdict([_waits(0), _at(1), _waits(2, what="all_gather over tp"), _at(3, for_s=0.1)], 4)
    assert late.ranks == (1,)
    assert "ranks 0, 2 waited 60 s for it at step 7; a step takes 0.5 s" in late.text
    assert "line 9 of train.py, in load" in late.text and "py-spy dump --pid 42 on host" in late.text


def test_who_does_not_answer() -> None:
    """Breaks if a rank that is gone or stopped is taken for one that does nothing wrong."""
    late = _verdict([_waits(0), _waits(2)], 3)
    assert late.ranks == (1,) and "rank 1 does not answer" in late.text


def test_all_wait() -> None:
    """Breaks if ranks that wait in a circle, or for a link, are told nothing, or the one ahead is named."""
    late = _verdict([_waits(0, issued=6), _waits(1, issued=5, what="receive from place 0 of pp")], 2)
    assert late.ranks == (1,) and "wait for each other" in late.text and "receive from place 0" in late.text
    assert _verdict([_waits(0), _waits(1)], 2).ranks == ()


def test_what_is_no_reason_to_worry() -> None:
    """Breaks if a rank is told to be late while one plans, saves or compiles, or when all do the same for long."""
    assert _verdict([_waits(0), _at(1, does="saves")], 2) is None
    assert _verdict([_at(0), _at(1)], 2) is None


def test_what_takes_long_takes_too_long() -> None:
    """Breaks if a rank that plans, saves or loads for ever is never told, or those that wait for it are named."""
    reports = [_at(0, for_s=700.0, does="plans"), _waits(1), _at(2, for_s=700.0, does="plans")]
    late = verdict(reports, 4, 7, 700.0, 0.5, 1800.0, 600.0)
    assert late is not None and late.ranks == (3, 0, 2)
    assert late.text.startswith(
        "ranks 0, 2 plan for 700 s at step 7. ranks 0, 2 at line 9 of train.py, in load (plans)"
    )
    assert "rank 3 does not answer" in late.text and "rank 1 waits at all_reduce" in late.text
    assert verdict(reports, 3, 7, 700.0, 0.5, 1800.0, 800.0) is None


def _dogs(late_s: float, num: int = 2) -> list[Watchdog]:
    store = dist.HashStore()
    return [Watchdog(Trail(), store, rank, num, late_s, 600.0, "test") for rank in range(num)]


def test_nobody_looks_once_the_process_group_has_ended() -> None:
    """Breaks if the thread goes on to ask a store that is gone, as in a notebook that begins anew: torch then prints
    the stack of its own client.
    """
    dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
    try:
        dog = _dogs(0.01)[0]
        dog.start()
        dog._thread.join(0.2)
        assert dog._thread.is_alive()
    finally:
        dist.destroy_process_group()
    dog._thread.join(20.0)
    assert not dog._thread.is_alive()


def test_one_of_those_who_wait_asks() -> None:
    """Breaks if nobody asks, everybody does, the same wait is told again at every look, or a short one is told."""
    dogs = _dogs(0.05, 3)
    with dogs[0].trail.waiting("the beginning of a step"), dogs[2].trail.waiting("the beginning of a step"):
        for dog in dogs:
            dog.look()
        assert not dogs[0].found
        time.sleep(0.06)
        for _ in range(4):
            for dog in dogs:
                dog.look()
        assert [len(dog.found) for dog in dogs] == [1, 1, 1] and dogs[1].found[0].ranks == (1,)
        assert dogs[0].store.add("autopar/late/test/asked", 0) == 1
    for dog in dogs:
        dog.look()
    assert len(dogs[0].found) == 1


def test_all_that_save_for_ever_are_told() -> None:
    """Breaks if nobody asks where no rank waits in a step, because all hang in what takes long by itself."""
    dogs = _dogs(0.01)
    with dogs[0].trail.doing("saves"), dogs[1].trail.doing("saves"):
        time.sleep(0.05)
        dogs[0].look()
        assert dogs[0].store.add("autopar/late/test/asked", 0) == 0
        time.sleep(0.06)
        for _ in range(4):
            for dog in dogs:
                dog.look()
    assert dogs[1].found[0].text.startswith("ranks 0, 1 save for 0.1")


@pytest.mark.moderate
def test_the_line_of_the_generated_program() -> None:
    """Breaks if a hang within the program is told at a line of ours, or at one of the loop around it."""
    namespace: dict[str, Any] = {"__name__": "autopar_program", "wait": threading.Event().wait, "at": SimpleNamespace()}
    exec(compile("def forward():\n    at.there = True\n    wait(1.0)\n", "program_7.py", "exec"), namespace)
    thread = threading.Thread(target=namespace["forward"])
    thread.start()
    while not hasattr(namespace["at"], "there"):
        time.sleep(0.01)
    report = _dogs(1.0)[0].report()
    thread.join()
    assert report.line == "line 3 of program_7.py, in forward"
    assert _dogs(1.0)[0].report().line.startswith("line ") and sys.gettrace() is None


def test_a_compiler_at_work() -> None:
    """Breaks if a rank that compiles is told to be late, or one that runs what was compiled never is."""
    for name, does in (("torch._inductor.compile_fx", "compiles"), ("torch._dynamo.eval_frame", "")):
        said: list[Report] = []
        namespace: dict[str, Any] = {"__name__": name, "report": lambda said=said: said.append(_dogs(1.0)[0].report())}
        exec("def compile_it():\n    report()\n", namespace)
        namespace["compile_it"]()
        assert said[0].does == does


def test_a_rank_for_which_others_wait_a_little() -> None:
    """Breaks if the slow rank is not found, one that waits most is named, or stages of a pipeline are compared."""
    rows = [Waited(10.0, 4.0, "x"), Waited(10.0, 0.5, "y"), Waited(10.0, 3.0, "z"), Waited(10.0, 3.0, "z")]
    text = slow_one(rows, [[0, 1, 2, 3]], 100)
    assert text is not None and text.startswith("rank 1 is slow: in the last 100 steps the others waited 25%")
    assert "most of all at x" in text
    assert slow_one(rows, [[0], [1], [2, 3]], 100) is None
    assert slow_one([rows[0], rows[2], rows[3]], [[0, 1, 2]], 100) is None
