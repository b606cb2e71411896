"""Tasks run in a copy of the process: what kills it, or hangs, costs its own result alone."""

from __future__ import annotations

import os
import time
from functools import partial

import pytest
import torch

from autopar.base.forked import run_forked

pytestmark = pytest.mark.unit


def fail() -> int:
    raise ValueError("no result")


@pytest.mark.moderate
def test_a_task_that_dies_or_hangs_has_no_result_and_the_others_have() -> None:
    """Breaks if the others are lost, tried twice in the wrong place, or waited for without end."""
    tasks = [partial(int, 1), os.abort, partial(int, 3), partial(time.sleep, 60), partial(os._exit, 0), partial(int, 6)]
    begin = time.monotonic()
    assert run_forked(tasks, 0.5) == [1, None, 3, None, None, 6]  # type: ignore[arg-type]
    assert time.monotonic() - begin < 30


def test_what_a_task_raises_is_raised() -> None:
    """Breaks if our own errors are taken for the death of the child."""
    with pytest.raises(ValueError, match="no result"):
        run_forked([fail], 60.0)


def test_nothing_is_changed_here_and_large_results_come_whole() -> None:
    """Breaks if tasks run in the process itself, or if a pipe's worth of a result is taken for all of it."""
    here: list[int] = []
    assert run_forked([partial(here.append, 1), partial(bytes, 1 << 20)], 60.0) == [None, bytes(1 << 20)]
    assert here == []
    before = torch.get_num_threads()
    assert run_forked([torch.get_num_threads], 60.0) == [1]
    assert torch.get_num_threads() == before


def test_no_children_are_left_behind() -> None:
    """Breaks if a child is not waited for."""
    run_forked([partial(int, 1), os.abort], 60.0)
    with pytest.raises(ChildProcessError):
        os.waitpid(-1, os.WNOHANG)


def test_without_children_nothing_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a system that lets no more processes begin stops the planner."""

    def refused() -> int:
        raise BlockingIOError

    monkeypatch.setattr(os, "fork", refused)
    assert run_forked([partial(int, 1), partial(int, 2)], 60.0) == [None, None]
