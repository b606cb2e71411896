"""What could take the process down with it, run in a copy of the process."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import struct
import time
from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

import torch

from autopar.base.torch_compat.warned import without_warnings

Result = TypeVar("Result")
_LENGTH = struct.Struct("!Q")


def run_forked(tasks: Sequence[Callable[[], Result]], limit_s: float) -> list[Result | None]:
    """What each task returns (something that can be pickled), run in a forked child; None where the child dies of it,
    or it takes longer than `limit_s`: the others are run in another child. What a task raises is raised here.

    A child computes on one thread of the CPU, says nothing, and runs nobody's cleanup. What tasks change in memory
    stays there. Where the system has no fork, they run here; where it refuses one, all that is left is None.
    """
    if not hasattr(os, "fork"):
        return [task() for task in tasks]
    results: list[Result | None] = []
    while len(results) < len(tasks):
        try:
            results += _in_child(tasks[len(results) :], limit_s)
        except OSError:
            break
        results += [None] * (len(results) < len(tasks))
    return results + [None] * (len(tasks) - len(results))


def _in_child(tasks: Sequence[Callable[[], Result]], limit_s: float) -> list[Result]:
    """The results of as many tasks as one child lives to see."""
    reader, writer = os.pipe()
    with without_warnings():  # that other threads do not live on in the child: it needs none
        child = os.fork()
    if not child:
        os.close(reader)
        _answer(tasks, writer)
    os.close(writer)
    try:
        return [_result(data) for data in _messages(reader, len(tasks), limit_s)]
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def _result(data: bytes) -> Result:  # type: ignore[type-var]
    answer, error = pickle.loads(data)  # our own child's
    if error is not None:
        raise error
    found: Result = answer
    return found


def _answer(tasks: Sequence[Callable[[], object]], writer: int) -> None:
    """In the child. Never returns."""
    try:
        gc.disable()  # what else is garbage belongs to the parent
        faulthandler.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)
        for task in tasks:
            try:
                answer: tuple[object, Exception | None] = (task(), None)
            except Exception as error:  # the parent's
                answer = (None, error)
            data = pickle.dumps(answer)
            left = memoryview(_LENGTH.pack(len(data)) + data)
            while left:
                left = left[os.write(writer, left) :]
    finally:
        os._exit(0)


def _messages(reader: int, count: int, limit_s: float) -> Iterator[bytes]:
    """Up to `count`, until one is late, or the other side is gone."""
    for _ in range(count):
        deadline_s = time.monotonic() + limit_s
        head = _read(reader, _LENGTH.size, deadline_s)
        data = _read(reader, _LENGTH.unpack(head)[0], deadline_s) if head else b""
        if not data:
            return
        yield data


def _read(reader: int, size: int, deadline_s: float) -> bytes:
    data = b""
    while len(data) < size:
        if not select.select([reader], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            return b""
        part = os.read(reader, size - len(data))
        if not part:
            return b""
        data += part
    return data
