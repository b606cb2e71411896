"""The folder that a run saves into: whose it is, and what a disk, its owner and a clock may do to it."""

from __future__ import annotations

import errno
import os
import resource
import shutil
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
import torch

import autopar
from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import folders
from tests.unit.runtime.saved_run import Run
from tests.unit.runtime.saved_run import one_rank as one_rank


def steps(folder: Path) -> list[int]:
    return [saved.step for saved in folders.steps_in(folder)]


def bits(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


@pytest.mark.moderate
@pytest.mark.parametrize("wait", [True, False])
def test_a_folder_belongs_to_one_run(wait: bool, tmp_path: Path) -> None:
    """Breaks if of two models that save into one folder each removes the other's steps, or goes on from them."""
    one, other = Run(), Run(seed=1)
    one.save(tmp_path, 5)
    with pytest.raises(AutoparError, match=r"checkpoints of another run, or of another model .*step-000000005"):
        other.save(tmp_path, 1, keep=1, wait=wait)
    assert steps(tmp_path) == [5]
    other.load(tmp_path)  # goes on from it: now the run is this one's, too
    found = other.save(tmp_path, 6, wait=wait)
    assert (found if wait else found.wait()).exists() and steps(tmp_path) == [5, 6]
    with pytest.raises(AutoparError, match="step-000000006: this model neither saved them"):
        one.save(tmp_path, 7, wait=wait)


@pytest.mark.moderate
def test_a_run_that_begins_anew_has_a_folder_of_its_own(tmp_path: Path) -> None:
    """Breaks if a job that does not go on from what is there prunes it, or one that does is refused."""
    Run().save(tmp_path / "run", 900)
    again = Run()
    with pytest.raises(AutoparError, match="load it first"):
        again.save(tmp_path / "run", 1)
    assert again.save(tmp_path / "other", 1).exists()
    (tmp_path / "link").symlink_to(tmp_path / "run")
    third = Run()
    run = autopar.resume_or_start(third.model, tmp_path / "link", optimizer=third.optimizer, scheduler=third.rates)
    assert run.step == 900
    run.save(901)
    assert steps(tmp_path / "run") == [900, 901]


@pytest.mark.moderate
@pytest.mark.parametrize("wait", [True, False])
def test_a_disk_that_is_full(wait: bool, tmp_path: Path) -> None:
    """Breaks if the kernel's refusal of a write costs the step before, or is not told by its name."""
    run = Run()
    run.save(tmp_path, 1)
    before = bits(tmp_path)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, hard))  # less than a header: every file system refuses the rest
    try:
        with pytest.raises(
            AutoparError, match=r"rank 0 could not (save a checkpoint|write step 2): OSError: .*too large"
        ):
            run.save(tmp_path, 2) if wait else run.save(tmp_path, 2, wait=False).wait()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    assert bits(tmp_path) == before
    assert run.save(tmp_path, 2).exists() and run.load(tmp_path).step == 2


@pytest.mark.moderate
@pytest.mark.skipif(os.geteuid() != 0, reason="another user's rights are tried as root alone")
def test_rights_that_are_lost() -> None:
    """Breaks if a folder that may no longer be written, or a step that may not be read, ends in anything but an error
    that names it, or takes the step before with it.
    """
    place = Path(tempfile.mkdtemp(prefix="rights-"))
    try:
        place.chmod(0o777)
        run = Run()
        folder = place / "run"
        run.save(place / "other", 1)  # reads of the package, to which the other user may have no right
        os.seteuid(65534)
        try:
            run.save(folder, 1)
            folder.chmod(0o555)
            with pytest.raises(AutoparError, match=rf"rank 0 could not save a checkpoint: PermissionError: .*{folder}"):
                run.save(folder, 2)
            assert run.load(folder).step == 1
            (folder / "step-000000001" / "model-00000.safetensors").chmod(0)
            with pytest.raises(AutoparError, match=r"cannot read a file of the checkpoint, model-00000.*denied"):
                run.load(folder)
            (folder / "step-000000001" / "model-00000.safetensors").chmod(0o644)
            folder.chmod(0o755)
            run.save(folder, 2)
        finally:
            os.seteuid(0)
        assert steps(folder) == [1, 2]
    finally:
        shutil.rmtree(place)


@pytest.mark.moderate
@pytest.mark.parametrize("number", [errno.ESTALE, errno.EIO, errno.EXDEV])
def test_a_rename_that_fails(number: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a step whose name a network disk refuses is taken for saved, or what was written stays behind."""
    run = Run()
    run.save(tmp_path, 1)
    before = bits(tmp_path)

    def fails(*_: Any) -> None:
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, "rename", fails)
        with pytest.raises(AutoparError, match=os.strerror(number)):
            run.save(tmp_path, 2)
    assert bits(tmp_path) == before and steps(tmp_path) == [1]
    assert run.save(tmp_path, 2).exists()


@pytest.mark.moderate
def test_a_rename_that_is_done_and_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if a step that has its name, but whose folder's sync failed, is another run's at the next save."""
    run, sync = Run(), folders.sync_folder

    def fails(folder: Path) -> None:
        if folder == tmp_path:
            raise OSError(errno.EIO, "Input/output error")
        sync(folder)

    with monkeypatch.context() as patch:
        patch.setattr(folders, "sync_folder", fails)
        with pytest.raises(AutoparError, match="Input/output error"):
            run.save(tmp_path, 1)
    run.save(tmp_path, 2)
    assert 2 in steps(tmp_path) and run.load(tmp_path).step == 2


@pytest.mark.moderate
def test_clocks_that_go_wrong(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Breaks if which step is the newest, or kept, is asked of a clock or of the times of files."""
    run, now = Run(), time.time()
    for step in (1, 2, 3, 4):
        monkeypatch.setattr(time, "time", lambda step=step: now - 1e6 * step)
        path = run.save(tmp_path, step, keep=2)
        for each in (path, *path.iterdir()):
            os.utime(each, (now - 1e6 * step, now - 1e6 * step))
    assert steps(tmp_path) == [3, 4]
    other = Run(seed=3)
    found = autopar.resume_or_start(other.model, tmp_path, optimizer=other.optimizer, scheduler=other.rates)
    assert found.step == 4
    assert torch.equal(other.model.first.weight.full_tensor(), run.model.first.weight.full_tensor())
