"""What could take the process down with it, run in a copy of the process."""

from __future__ import annotations

import faulthandler
import gc
import os
import pickle
import select
import signal
import time
from collections.abc import Callable
from typing import TypeVar

import torch

from autopar.base.torch_compat.tracing import without_warnings

Result = TypeVar("Result")


def apart(function: Callable[[], Result], limit_s: float) -> Result | None:
    """What `function` returns (something that can be pickled) in a forked child; None where that dies, or takes longer
    than `limit_s`. What it raises is raised here. Where the system has no fork, it runs here.

    The child computes on one thread of the CPU, says nothing, and runs nobody's cleanup. What `function` changes in
    memory stays there.
    """
    if not hasattr(os, "fork"):
        return function()
    reader, writer = os.pipe()
    with without_warnings():  # that other threads do not live on in the child: it needs none
        child = os.fork()
    if not child:
        os.close(reader)
        _answer(function, writer)
    os.close(writer)
    try:
        data = _read(reader, time.monotonic() + limit_s)
    finally:
        os.close(reader)
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if not data:
        return None
    answer, error = pickle.loads(data)  # our own child's
    if error is not None:
        raise error
    found: Result = answer
    return found


def _answer(function: Callable[[], object], writer: int) -> None:
    """In the child. Never returns."""
    try:
        gc.disable()  # what else is garbage belongs to the parent
        faulthandler.disable()
        silence = os.open(os.devnull, os.O_WRONLY)
        os.dup2(silence, 1)
        os.dup2(silence, 2)
        torch.set_num_threads(1)
        try:
            answer: tuple[object, Exception | None] = (function(), None)
        except Exception as error:  # the parent's
            answer = (None, error)
        data = memoryview(pickle.dumps(answer))
        while data:
            data = data[os.write(writer, data) :]
    finally:
        os._exit(0)


def _read(reader: int, deadline_s: float) -> bytes:
    """All that comes until the other side closes; nothing where that is too late."""
    data = b""
    while True:
        if not select.select([reader], [], [], max(0.0, deadline_s - time.monotonic()))[0]:
            return b""
        part = os.read(reader, 1 << 16)
        if not part:
            return data
        data += part
