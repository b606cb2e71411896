"""Work for test_late: a rank that is late, hangs, or does what takes long and is no reason to worry."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Any

import torch.distributed as dist

import autopar
from tests.dist.checkpoints import Setting, compiled, optimizer_of


def late(
    setting: Setting, how: str, rank: int, seconds: float, late_s: float
) -> list[tuple[int, tuple[int, ...], str]]:
    """What the watch of each rank found in a run of five steps, the third of which one rank has something to do."""
    model, batch = compiled("gpt2", setting)
    optimizer, _ = optimizer_of(model)
    watch = autopar.watch(model, late_s=late_s)
    for step in range(5):
        if step == 3 and dist.get_rank() == rank:
            HOWS[how](model, seconds)
        model.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    time.sleep(late_s)  # for what the last looks still have to tell
    watch.close()
    return [(each.step, each.ranks, each.text) for each in watch.late]


def _before(model: Any, seconds: float) -> None:
    time.sleep(seconds)  # the rows of this step


def _stopped(model: Any, seconds: float) -> None:
    """The process does nothing for some time, its threads neither."""
    wakes = f"import os, signal, time; time.sleep({seconds}); os.kill({os.getpid()}, signal.SIGCONT)"
    subprocess.Popen([sys.executable, "-c", wakes])
    os.kill(os.getpid(), signal.SIGSTOP)


def _within(model: Any, seconds: float) -> None:
    """The program itself hangs, before its third transfer."""
    comm = model.autopar.inner
    note = comm._note
    left = [3]

    def slow(event: Any) -> None:
        left[0] -= 1
        if left[0] == 0:
            time.sleep(seconds)
        note(event)

    comm._note = slow


def _plans(model: Any, seconds: float) -> None:
    engine = model.autopar
    prepare = engine.prepare

    def slow(*args: Any) -> Any:
        engine.prepare = prepare
        time.sleep(seconds)
        return prepare(*args)

    engine.prepare = slow


HOWS: dict[str, Callable[[Any, float], None]] = {
    "before": _before, "stopped": _stopped, "within": _within, "plans": _plans,
}  # fmt: skip


def busy(folder: str, late_s: float) -> list[str]:
    """What is found while all ranks evaluate for long, and one takes long to save."""
    from autopar.runtime.checkpoint import writing

    model, batch = compiled("gpt2", ({"dp": 2}, "zero2"))
    optimizer, _ = optimizer_of(model)
    watch = autopar.watch(model, late_s=late_s)
    write_file = writing.write_file

    def slow(*args: Any) -> Any:
        time.sleep(3 * late_s)
        return write_file(*args)

    for step in range(4):
        model.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
        if step == 1:
            time.sleep(3 * late_s)  # all evaluate
        if step == 2:
            writing.write_file = slow if dist.get_rank() == 1 else write_file
            model.save(folder, step=step)
            writing.write_file = write_file
    time.sleep(late_s)
    watch.close()
    return [each.text for each in watch.late]


def slow(rank: int) -> list[str]:
    """What rank 0 logs of a run in which a rank takes longer for each step."""
    import logging

    told: list[str] = []

    class Told(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            told.append(record.getMessage())

    model, batch = compiled("gpt2", ({"dp": 2}, "zero3"))
    optimizer, _ = optimizer_of(model)
    autopar.watch(model, every=10)
    logging.getLogger("autopar").addHandler(handler := Told())
    for _ in range(20):
        if dist.get_rank() == rank:
            time.sleep(0.2)
        model.train_step(**batch)
        optimizer.step()
        optimizer.zero_grad()
    logging.getLogger("autopar").removeHandler(handler)
    return told
