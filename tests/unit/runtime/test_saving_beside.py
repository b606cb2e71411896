"""A run that is saved while training goes on: what is written, what fails, and the memory of the copy."""

from __future__ import annotations

import subprocess
import sys
import threading
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import background, folders, writing
from autopar.runtime.checkpoint.snapshot import Memory
from tests.unit.runtime.saved_run import Run
from tests.unit.runtime.saved_run import one_rank as one_rank


@pytest.fixture
def slow_disk(monkeypatch: pytest.MonkeyPatch) -> threading.Event:
    """Nothing is written before the event."""
    may_write, write_file = threading.Event(), writing.write_file

    def when_it_may(*args: Any) -> Any:
        assert may_write.wait(60)
        return write_file(*args)

    monkeypatch.setattr(writing, "write_file", when_it_may)
    return may_write


@pytest.mark.moderate
def test_later_updates_do_not_reach_what_is_being_saved(tmp_path: Path, slow_disk: threading.Event) -> None:
    """Breaks if what is written is the parameter, state or entry itself, which a later step changes in place."""
    run = Run()
    run.train(range(2))
    extra = {"average": torch.full((5000,), 2.0), "list": [1]}
    saving = run.save(tmp_path, 2, extra=extra, wait=False)
    drawn = torch.rand(1)
    losses = run.train(range(2, 5))
    extra["average"].zero_()
    extra["list"].append(2)
    assert not saving.done and not folders.steps_in(tmp_path)
    slow_disk.set()
    path = saving.wait()
    assert saving.done and path == tmp_path / "step-000000002" == saving.wait()
    other = Run(seed=9)
    found = other.load(path)
    assert torch.equal(found.extra["average"], torch.full((5000,), 2.0)) and found.extra["list"] == [1]
    assert torch.equal(torch.rand(1), drawn) and other.train(range(2, 5)) == losses


@pytest.mark.moderate
def test_one_save_at_a_time(tmp_path: Path, slow_disk: threading.Event) -> None:
    """Breaks if a save begins in the memory of the one before, loses it, or a load does not wait for what is saved."""
    run = Run()
    run.train(range(1))
    first = run.save(tmp_path, 1, wait=False)
    whole = {name: value.full_tensor().clone() for name, value in run.model.named_parameters()}
    run.train(range(1, 2))
    threading.Timer(0.3, slow_disk.set).start()
    run.save(tmp_path, 2, wait=False)
    assert first.done and (tmp_path / "step-000000001").exists()
    assert run.load(tmp_path).step == 2
    assert run.load(tmp_path, step=1).step == 1
    assert all(torch.equal(value.full_tensor(), whole[name]) for name, value in run.model.named_parameters())


@pytest.mark.moderate
@pytest.mark.parametrize("next_one", ["save", "load", "wait"])
def test_what_failed_meanwhile_is_told_once(
    next_one: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """Breaks if a full disk goes unseen while training goes on, is told for ever, or costs the step before."""
    run = Run()
    path = run.save(tmp_path, 1)

    def full(*_: Any) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patch, caplog.at_level("WARNING", "autopar"):
        patch.setattr(writing, "write_file", full)
        saving = run.save(tmp_path, 2, wait=False)
        saving._thread.join()
    assert "step 2 was not saved: [Errno 28] No space left" in caplog.text
    said = r"rank 0 could not write step 2: OSError: \[Errno 28\] No space left"
    with pytest.raises(AutoparError, match=said):
        {"save": partial(run.save, tmp_path, 3), "load": partial(run.load, tmp_path), "wait": saving.wait}[next_one]()
    assert {each.name for each in tmp_path.iterdir()} == {path.name, ".lock"}
    assert run.load(tmp_path).step == 1
    assert run.save(tmp_path, 3, wait=False).wait().exists()


@pytest.mark.slow
def test_the_end_of_the_program_waits_for_what_is_saved(tmp_path: Path) -> None:
    """Breaks if a script that ends behind its last save, and without its process group, ends without that step."""
    script = f"""
import sys, time
sys.path.insert(0, {str(Path(__file__).parents[3])!r})
import torch.distributed as dist
from pathlib import Path
from autopar.runtime.checkpoint import writing
from tests.unit.runtime.saved_run import Run
dist.init_process_group("gloo", rank=0, world_size=1, store=dist.HashStore())
write_file = writing.write_file
writing.write_file = lambda *args: (time.sleep(0.5), write_file(*args))[1]
Run().save(Path({str(tmp_path)!r}), 7, wait=False)
dist.destroy_process_group()
"""
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr[-2000:]
    assert Run().load(tmp_path).step == 7


@pytest.mark.moderate
def test_ranks_that_leave_nothing_are_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if rank 0 waits for ever for a rank that is gone, or takes a step for whole that lacks its part."""
    run = Run()
    with monkeypatch.context() as patch:
        patch.setattr(writing.Job, "_leave", lambda *_: None)
        patch.setattr(background, "LOST_AFTER_S", 0.3)
        saving = run.save(tmp_path, 1, wait=False)
        with pytest.raises(AutoparError, match=r"rank 0 does not see what rank 0 wrote .*it waited 0\.3 s for 1 of 1"):
            saving.wait()
    assert not folders.steps_in(tmp_path) and not list(tmp_path.glob(".new*"))


@pytest.mark.moderate
def test_memory_of_the_copy_is_there_before_the_first_save(tmp_path: Path) -> None:
    """Breaks if the first save gets its memory itself, for which training stands still."""
    run = Run()
    options: dict[str, Any] = {"optimizer": run.optimizer, "scheduler": run.rates, "every": 2, "wait": False}
    saved = autopar.resume_or_start(run.model, tmp_path, **options)
    memory = run.model.autopar.background.memory
    run.train(range(1))
    assert not saved.after(1) and memory._getting is not None
    memory._getting.join()
    places = {name: (room.data_ptr(), room.numel()) for name, room in memory._held.items()}
    assert set(places) == {"model", "state"} and all(size > 1 << 20 for _, size in places.values())
    run.train(range(1, 2))
    saved.after(2, extra={"average": torch.full((5000,), 2.0)})
    assert {name: (room.data_ptr(), room.numel()) for name, room in memory._held.items()} == places
    whole = {name: value.full_tensor().clone() for name, value in run.model.named_parameters()}
    losses = run.train(range(2, 4))
    found = run.load(tmp_path)
    assert found.step == 2 and torch.equal(found.extra["average"], torch.full((5000,), 2.0))
    assert all(torch.equal(value.full_tensor(), whole[name]) for name, value in run.model.named_parameters())
    assert run.train(range(2, 4)) == losses


def test_more_than_was_reserved_gets_its_own_memory() -> None:
    """Breaks if a copy is larger than the memory that it is made in."""
    memory = Memory()
    memory.reserve({"state": 64}, pinned=False)
    assert memory.of("state", 64, pinned=False).numel() == 64
    assert memory.of("state", 4096, pinned=False).numel() == 4096
