"""A run that goes on by itself: from the last whole step, saving as it goes, and once more when it is to end."""

from __future__ import annotations

import logging
import os
import signal
from collections.abc import Callable, Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
import torch.distributed as dist

from autopar.base.errors import AutoparError
from autopar.runtime.checkpoint import folders
from autopar.runtime.checkpoint.background import Saving
from autopar.runtime.checkpoint.loading import tuple_of
from autopar.runtime.checkpoint.manifest import Damaged
from autopar.runtime.checkpoint.saving import prepare
from autopar.runtime.meeting import meet, told, with_all

logger = logging.getLogger("autopar")

WHAT = "look for checkpoints"
SIGNALS = (signal.SIGTERM, signal.SIGUSR1)
"""What schedulers of clusters send some time before they end a job."""


class SavedRun:
    """What `resume_or_start` gives. step: how many are done; the loop begins there. extra: as it was saved, or None."""

    def __init__(self, model: Any, folder: Path, every: int | None, wait: bool, options: dict[str, Any]) -> None:
        self.model, self.folder, self.every, self.wait, self.options = model, folder, every, wait, options
        self.step, self.extra = 0, None
        self._saved: int | None = None
        self._saving: Saving | None = None
        self._is_asked = self._ends = self._is_prepared = False
        self._device: torch.device = model.autopar.comm.device
        for number in SIGNALS:
            try:
                signal.signal(number, self._asked)
            except ValueError:  # not in the main thread
                logger.warning("autopar: no save at %s: it was not set up in the main thread", number.name)

    def after(self, step: int, extra: Any = None) -> bool:
        """Call it when `step` steps are done, after `optimizer.step()`. Saves where that is due, or where a rank got
        SIGTERM or SIGUSR1; then it is True, and the loop is to end. Collective.

        Raises:
            AutoparError: as `save`.
        """
        ends = self._agreed()
        if ends or (self.every is not None and step % self.every == 0):
            self._save(step, extra, self.wait or ends)
        elif self.every is not None and not self.wait and not self._is_prepared:
            prepare(self.model, self.model.autopar, tuple_of(self.options["optimizer"]))
        self._is_prepared = True
        self._ends = self._ends or ends
        return self._ends

    def save(self, step: int, extra: Any = None) -> None:
        """Save now, unless this step is saved; it is on the disk then. Collective."""
        self._save(step, extra, True)

    def _save(self, step: int, extra: Any, wait: bool) -> None:
        if self._saved == step and wait and self._saving is not None:
            saving, self._saving, self._saved = self._saving, None, None
            saving.wait()
        elif self._saved != step:
            found = self.model.save(self.folder, step=step, extra=extra, wait=wait, **self.options)
            self._saving = None if wait else found
        self._saved = step

    def _asked(self, number: int, frame: FrameType | None) -> None:
        if self._is_asked:  # for the second time: as if nobody listened
            signal.signal(number, signal.SIG_DFL)
            os.kill(os.getpid(), number)
        self._is_asked = True

    def _agreed(self) -> bool:
        """Whether any rank was asked to end: one number a step, so that all end after the same one."""
        if dist.get_world_size() == 1:
            return self._is_asked
        asked = torch.tensor(int(self._is_asked), dtype=torch.int32, device=self._device)
        with_all("end a step", lambda: dist.all_reduce(asked, dist.ReduceOp.MAX))
        return bool(asked)


def resume_or_start(
    model: Any,
    folder: str | Path,
    *,
    start: Callable[[], Any] | None = None,
    optimizer: Any = None,
    scheduler: Any = None,
    loader: Any = None,
    every: int | None = None,
    keep: int = 3,
    wait: bool = True,
) -> SavedRun:
    """Go on from the last whole step in `folder`, on this mesh, or start where there is none: the same script begins,
    goes on after a crash (`torchrun --max-restarts`), on other numbers of ranks, and ends when it is asked to.

        run = autopar.resume_or_start(model, folder, start=lambda: model.init_weights(seed=0), optimizer=optimizer,
                                      scheduler=rates, every=1000)
        for step in range(run.step, steps):
            …
            if run.after(step + 1):
                break

    A step that is damaged is told, and the one before it taken. Collective.

    Args:
        model: compiled. start: makes its weights where there is nothing to go on from.
        optimizer, scheduler, loader, keep: as in `save` and `load`.
        every: after how many steps to save; None for only where `run.save` is called or a signal comes.
        wait: False writes what is saved every so many steps while training goes on, as in `save`.

    Raises:
        AutoparError: steps of another model or optimizer; all there are are damaged.
    """
    folder, is_first = Path(folder), dist.get_rank() == 0
    if every is not None and every < 1:
        raise AutoparError("checkpoints are saved every 1 or more steps", values=f"every={every}")
    meet(f"look for checkpoints in {str(folder)!r}", model.autopar.comm.timeout_s, "Call resume_or_start on every rank")
    model.autopar.background.finish()
    found = told(WHAT, lambda: [saved.path for saved in folders.steps_in(folder)])
    options = {"optimizer": optimizer, "scheduler": scheduler, "loader": loader}
    run = SavedRun(model, folder, every, wait, {**options, "keep": keep})
    if not found:
        if start is not None:
            start()
        return run
    loaded = _last_whole(model, found, options)
    run.step, run.extra, run._saved = loaded.step, loaded.extra, loaded.step
    if is_first:
        logger.info("autopar: going on from step %d, %s", loaded.step, loaded.folder)
    return run


def _last_whole(model: Any, found: Sequence[Path], options: dict[str, Any]) -> Any:
    for path in reversed(found):
        try:
            return model.load(path, **options)
        except Damaged as error:
            if path == found[0]:
                raise
            if dist.get_rank() == 0:
                logger.warning("autopar: %s The step before it is taken.", error)
    raise AssertionError("one is there")
