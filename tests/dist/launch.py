"""Run a function on several local gloo processes: `launch(work, 4, *args)` -> results in rank order.

The processes are forked off one that has imported what most need (`imported.py`) and done nothing else; they are kept,
and each call gets a process group of its own. `work` must be importable by name; arguments and results are pickled.
"""

from __future__ import annotations

import atexit
import multiprocessing
import pickle
import tempfile
import time
import traceback
from collections.abc import Callable
from datetime import timedelta
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

_workers: list[tuple[BaseProcess, Connection]] = []


class ChildError(Exception):
    """A rank raised: its number and traceback are the message."""


def launch(
    work: Callable[..., Any], num_ranks: int, *args: Any, timeout_s: float = 60.0, gives_up: bool = False
) -> list[Any]:
    """`work(*args)` on ranks 0 … num_ranks-1 of a new gloo process group (`torch.distributed` is initialised).

    gives_up: ranks leave collectives behind that nobody answered. The processes are not kept, as after an error:
    gloo's destructor waits for such collectives, whenever the garbage collector comes by.

    Raises:
        ChildError: what the ranks raised, or that one died or did not end in time.
    """
    _start(num_ranks)
    with tempfile.TemporaryDirectory() as folder:
        store = str(Path(folder, "store"))
        for rank in range(num_ranks):
            _workers[rank][1].send_bytes(pickle.dumps((work, args, rank, num_ranks, store, timeout_s)))
        answers = _answers(num_ranks, time.monotonic() + timeout_s)
    errors = [f"rank {rank}: {answer}" for rank, (well, answer) in enumerate(answers) if not well]
    if gives_up or errors:
        stop()
    if errors:
        raise ChildError("\n".join(errors))
    return [answer for _, answer in answers]


def _answers(num_ranks: int, deadline: float) -> list[tuple[bool, Any]]:
    answers: dict[int, tuple[bool, Any]] = {}
    while len(answers) < num_ranks and time.monotonic() < deadline:
        for rank, (process, connection) in enumerate(_workers[:num_ranks]):
            if rank not in answers and connection.poll(0.01):
                try:
                    answers[rank] = pickle.loads(connection.recv_bytes())
                except EOFError:
                    process.join(5)
                    answers[rank] = False, f"died with exit code {process.exitcode}"
                if not answers[rank][0]:
                    # The others may be waiting for this one in a collective.
                    deadline = min(deadline, time.monotonic() + 10)
    return [answers.get(rank, (False, "did not end in time")) for rank in range(num_ranks)]


def _start(num_ranks: int) -> None:
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["tests.dist.imported"])
    started = len(_workers)
    while len(_workers) < num_ranks:
        here, there = context.Pipe()
        process = context.Process(target=_serve, args=(there,), daemon=True)
        process.start()
        there.close()
        _workers.append((process, here))
    for _, connection in _workers[started:]:
        connection.recv_bytes()  # the time that work may take begins when all is imported


@atexit.register
def stop() -> None:
    """End the processes; the next `launch` starts new ones."""
    for process, connection in _workers:
        connection.close()
        process.kill()
        process.join()
    _workers.clear()


def _serve(connection: Connection) -> None:
    import numpy as np
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    connection.send_bytes(b"")
    np.random.seed()  # as processes that were started one by one: Python reseeds its own numbers itself
    while True:
        try:
            work, args, rank, num_ranks, store, timeout_s = pickle.loads(connection.recv_bytes())
        except EOFError:
            return
        try:
            dist.init_process_group(
                "gloo",
                init_method=f"file://{store}",
                rank=rank,
                world_size=num_ranks,
                timeout=timedelta(seconds=timeout_s),
            )
            dist.barrier()  # a rank that ends at once would close what another is still connecting to
            answer = pickle.dumps((True, work(*args)))
        except BaseException:
            answer = pickle.dumps((False, traceback.format_exc()))
        finally:
            if dist.is_initialized():
                dist.destroy_process_group()
        connection.send_bytes(answer)
