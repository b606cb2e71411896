"""A folder of steps: what is in it, a new one by one rename, old ones away, one job at a time.

folder/step-000001000       a whole one: it has this name since all of it is on the disk
folder/step-000001000.1     the same step, saved once more (a run that went on from it): the last one counts
folder/.new-000002000-…     being written; of a job that was killed where none is running
folder/.lock                held by the job that saves, as long as it lives
"""

from __future__ import annotations

import fcntl
import os
import re
import secrets
import shutil
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint.blocks import sync_folder
from autopar.runtime.checkpoint.manifest import NAME, damaged

_STEP = re.compile(r"step-(\d{9,18})(?:\.(\d{1,9}))?")
_NEW = ".new-"
_LOCK = ".lock"
PATIENCE_S = 10.0
"""For which a lock is waited for: workers of a job that was killed live on for some seconds."""
LARGEST_STEP = 10**18 - 1
_OWN = secrets.token_hex(4)
"""Of this process: other saves of it may be under way."""


class Saved(NamedTuple):
    """A whole step in a folder; later ones are larger."""

    step: int
    again: int
    path: Path


def steps_in(folder: Path) -> list[Saved]:
    """The whole steps of a folder, oldest first; none of a folder that is not there.

    Raises:
        OSError: a folder that cannot be read.
    """
    try:
        names = os.listdir(folder)
    except FileNotFoundError:
        return []
    matches = [(match, folder / name) for name in names if (match := _STEP.fullmatch(name))]
    return sorted(Saved(int(match[1]), int(match[2] or 0), path) for match, path in matches if path.is_dir())


def step_at(folder: Path, step: int | None = None) -> Path:
    """The folder of one step: the newest, or the one asked for; `folder` itself where that is one.

    Raises:
        AutoparError: none; says what there is.
    """
    if step is None and (folder / NAME).exists():
        return folder
    if step is None and _STEP.fullmatch(folder.name):
        raise damaged(folder, f"it has no {NAME}")
    try:
        found = steps_in(folder)
    except OSError as error:
        raise AutoparError(f"cannot read the folder of checkpoints {folder}", values=str(error)) from error
    wanted = [saved for saved in found if step in (None, saved.step)]
    if wanted:
        return wanted[-1].path
    there = ", ".join(str(number) for number in sorted({saved.step for saved in found})[-8:])
    raise AutoparError(
        "there is no checkpoint to load" if step is None else f"there is no checkpoint of step {step}",
        where=str(folder),
        values=f"steps {there}" if there else None,
        remedy="Give a folder that compiled.save has written; compiled.load_pretrained reads folders of *.safetensors",
    )


@contextmanager
def new_folder(out: Path) -> Iterator[Path]:
    """A folder under another name, which is `out` when all that was written into it is on the disk; else nothing is.

    Raises:
        AutoparError: `out` is there already, or cannot be written.
    """
    if out.exists() or out.is_symlink():
        raise AutoparError(f"{out} is there already", remedy="Give the name of a folder that is to be made")
    try:
        out.parent.mkdir(parents=True, exist_ok=True)
        made = Path(tempfile.mkdtemp(prefix=f".{out.name}-", dir=out.parent))
    except OSError as error:
        raise AutoparError(f"the folder {out} cannot be made", values=str(error)) from error
    try:
        yield made
        made.chmod(0o755)
        sync_folder(made)
        made.rename(out)
    except OSError as error:
        raise AutoparError("the weights cannot be written", where=str(out), values=str(error)) from error
    finally:
        shutil.rmtree(made, ignore_errors=True)


class Known:
    """Of one model: which steps of a folder are its run's, as it has saved them, or went on from what was there.

    A folder belongs to one run: of two, one would prune the other's steps, and go on from them.
    """

    def __init__(self) -> None:
        self._steps: dict[str, set[str]] = {}

    def add(self, folder: Path, path: Path | None = None) -> None:
        """A step that was saved; without one, all that are there, as one of them was loaded.

        Raises:
            OSError: a folder that cannot be read.
        """
        own = self._steps.setdefault(os.path.realpath(folder), set())
        own.update([path.name] if path is not None else [saved.path.name for saved in steps_in(folder)])

    def check(self, folder: Path) -> None:
        """Before a save.

        Raises:
            AutoparError: there are steps of another run. OSError: a folder that cannot be read.
        """
        own = self._steps.get(os.path.realpath(folder), set())
        others = [saved.path.name for saved in steps_in(folder) if saved.path.name not in own]
        if others:
            raise AutoparError(
                "this folder has checkpoints of another run, or of another model",
                where=str(folder),
                values=f"{', '.join(others[-3:])}: this model neither saved them nor went on from them",
                remedy="Give each run and model a folder of its own; to go on from what is there, load it first "
                "(compiled.load, autopar.resume_or_start)",
            )


def begin(folder: Path, step: int, known: Known) -> Path:
    """A new folder to write a step into. What a job that was killed had begun is removed. known: the steps of this run.

    Raises:
        OSError: a folder that cannot be made.
        AutoparError: another job saves into this folder, or there are steps of another run.
    """
    folder.mkdir(parents=True, exist_ok=True)
    lock(folder)
    known.check(folder)
    for name in os.listdir(folder):
        if name.startswith(_NEW) and _OWN not in name:
            discard(folder / name)
    made = folder / f"{_NEW}{step:09d}-{_OWN}{secrets.token_hex(2)}"
    made.mkdir()
    return made


def discard(made: Path) -> None:
    """What was begun is not to be."""
    shutil.rmtree(made, ignore_errors=True)


def commit(made: Path, step: int, known: Known) -> Path:
    """Give a written step its name, and note it as this run's. It is on the disk before, and its name is afterwards.

    Raises:
        OSError: it cannot be renamed.
    """
    folder = made.parent
    sync_folder(made)
    taken = {saved.again for saved in steps_in(folder) if saved.step == step}
    name = f"step-{step:09d}"
    final = folder / (f"{name}.{max(taken) + 1}" if taken else name)
    os.rename(made, final)
    known.add(folder, final)
    sync_folder(folder)
    return final


def prune(folder: Path, keep: int, new: Path | None = None) -> list[Path]:
    """Remove all steps but the newest `keep` and `new`, and of a step that was saved twice the first; what was removed.

    Raises:
        OSError: one that cannot be removed.
    """
    found = steps_in(folder)
    newest = {saved.step: saved for saved in found}  # the last one of a step counts
    kept = {newest[step].path for step in sorted(newest)[-keep:]} | {new}
    gone = [saved.path for saved in found if saved.path not in kept]
    for path in gone:
        # Under a name that is no step's, at once: a step that is half gone is none.
        hidden = path.parent / f"{_NEW}old-{_OWN}{secrets.token_hex(2)}"
        os.rename(path, hidden)
        shutil.rmtree(hidden)
    return gone


_locks: dict[str, int] = {}
"""The folders that this process saves into, and what holds their locks: the kernel lets go when the process ends."""


def lock(folder: Path) -> None:
    """This job alone saves into the folder from now on.

    Raises:
        AutoparError: another process has it.
    """
    key = os.path.realpath(folder)
    if key in _locks:
        return
    descriptor = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o666)
    until = time.monotonic() + PATIENCE_S
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            if time.monotonic() < until:
                time.sleep(0.1)
                continue
            os.close(descriptor)
            raise AutoparError(
                "another job saves into this folder",
                where=str(folder),
                remedy="Give each job a folder of its own, or end the other one",
            ) from error
        except OSError:  # a file system without locks
            pass
        _locks[key] = descriptor
        return


def unlock(folder: Path) -> None:
    """Let others save into the folder."""
    descriptor = _locks.pop(os.path.realpath(folder), None)
    if descriptor is not None:
        os.close(descriptor)
