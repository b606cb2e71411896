"""Checkpoints that are written while training goes on: one at a time, by a thread that the interpreter waits for."""

from __future__ import annotations

import logging
import threading
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.runtime.checkpoint.folders import Known
from autopar.runtime.checkpoint.snapshot import Memory, Snapshot
from autopar.runtime.checkpoint.writing import LOST_AFTER_S, Job, OtherFailed
from autopar.runtime.meeting import gathered, together

logger = logging.getLogger("autopar")


class Saving:
    """A checkpoint that is being written. step: which one."""

    def __init__(self, job: Job, snapshots: Sequence[Snapshot]) -> None:
        self.step = job.step
        self._job, self._snapshots = job, snapshots
        self._path: Path | None = None
        self._error: Exception | None = None
        self.is_told = False
        # No daemon: at the end of the program the interpreter waits for it.
        self._thread = threading.Thread(target=self._run, name=f"autopar-save-{job.step}")
        self._thread.start()

    @property
    def done(self) -> bool:
        """Whether this rank has written its part; on rank 0, whether the step is there, or is not to be."""
        return not self._thread.is_alive()

    def wait(self) -> Path:
        """The folder of the step, when it is there. Collective.

        Raises:
            AutoparError: on all ranks, what one of them failed at. What was there before is as it was.
        """
        self._thread.join()
        if not self.is_told:
            self.is_told = True
            what = f"write step {self.step}"
            try:
                together(what, self._raise_own)
                self._path = Path(gathered(what, str(self._path))[0])
            except Exception as error:
                self._error = error
        if self._error is not None:
            raise self._error
        assert self._path is not None
        return self._path

    def _raise_own(self) -> None:
        if self._error is not None and not isinstance(self._error, OtherFailed):
            raise self._error

    def _run(self) -> None:
        job = self._job
        try:
            for each in self._snapshots:
                each.wait()
            job.write()
        except Exception as error:
            self._error = error
            job.fail(error)
        if job.rank == 0:
            try:
                self._path = job.commit(LOST_AFTER_S)
            except Exception as error:
                self._error = self._error or error
                job.discard()
        if self._error is not None:  # training goes on, and may end before anybody asks
            logger.warning("autopar: step %d was not saved: %s", self.step, self._error)


class Background:
    """Of a model: the checkpoint that is being written, the memory of its copy, and the steps of its run. plan: the
    last one that was saved, and its JSON.
    """

    def __init__(self) -> None:
        self.known = Known()
        self.memory = Memory()
        self.plan: tuple[Any, bytes] | None = None
        self._saving: Saving | None = None

    def start(self, job: Job, snapshots: Sequence[Snapshot]) -> Saving:
        """Write it."""
        self._saving = Saving(job, snapshots)
        return self._saving

    def finish(self) -> None:
        """Wait for what is being written. Collective.

        Raises:
            AutoparError: it failed, which nobody was told yet.
        """
        saving, self._saving = self._saving, None
        if saving is not None and not saving.is_told:
            saving.wait()
