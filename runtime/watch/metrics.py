"""What a watched run writes down: a line of JSON for every step, an OpenMetrics file of now, TensorBoard's events.

    folder/metrics.jsonl       one line a step; of a step that was done twice (a run that went on) the last line counts
    folder/metrics.prom        the newest numbers, replaced by a rename: a node exporter's textfile collector reads it
    folder/events.out.…        where `torch.utils.tensorboard` can be imported

Rank 0 writes. What it writes of other ranks came with the numbers that every step sends anyway.
"""

from __future__ import annotations

import json
import logging
import math
import os
import resource
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import IO, Any

import torch
from torch import Tensor

from autopar.runtime.added import Added

logger = logging.getLogger("autopar")

LINES, NOW = "metrics.jsonl", "metrics.prom"
EVERY_S = 1.0
"""The file of the newest numbers is written no more often."""


@dataclass(frozen=True, slots=True)
class Row:
    """Of a step. time_s: since 1970. loss, norm: None where they are not looked at, or are no numbers: `said` tells.

    step_s: since the step before. plans_s, saves_s: of these, seconds in which it was planned, and in which training
    stood still for a save. waited_s: the longest that a rank waited for others, least_by: the rank that waited least
    (on CPUs: a host does not wait for a GPU). tokens: elements of the step's first input of whole numbers, over all
    ranks; without one, rows. memory_bytes: the most that a rank has held so far. rate: of the optimizer's first group.
    skipped: whether the step was left out; num_skipped, num_late: so far.
    """

    step: int
    time_s: float
    loss: float | None
    norm: float | None
    step_s: float
    plans_s: float
    saves_s: float
    waited_s: float
    least_by: int
    tokens: int
    tokens_per_s: float
    memory_bytes: int
    rate: float | None
    skipped: bool
    num_skipped: int
    num_late: int
    said: str = ""


_NOW: tuple[tuple[str, str, str, str], ...] = (
    ("step", "", "gauge", "The last step."),
    ("loss", "", "gauge", "Of the last step."),
    ("norm", "gradient_norm", "gauge", "Before it is clipped."),
    ("step_s", "step_seconds", "gauge", "Of the last step."),
    ("plans_s", "planning_seconds", "counter", "In which it was planned."),
    ("saves_s", "save_stall_seconds", "counter", "In which training stood still for saves."),
    ("waited_s", "waited_seconds", "counter", "The longest that a rank waited for others, summed over steps."),
    ("tokens", "tokens", "counter", "Trained with."),
    ("tokens_per_s", "tokens_per_second", "gauge", "Of the last step."),
    ("memory_bytes", "memory_bytes", "gauge", "The most that a rank has held."),
    ("rate", "learning_rate", "gauge", "Of the optimizer's first group."),
    ("num_skipped", "skipped_steps", "counter", "Left out."),
    ("num_late", "late_ranks", "counter", "How often a rank was late."),
)
_SUMMED = ("plans_s", "saves_s", "waited_s", "tokens")


class Metrics:
    """Writes rows into a folder. What cannot be written is a warning, once: training goes on."""

    def __init__(self, folder: Path, labels: Mapping[str, str]) -> None:
        self.folder, self.labels = folder, labels
        self._lines: IO[str] | None = None
        self._board: Any = None
        self._sums: dict[str, float] = dict.fromkeys(_SUMMED, 0.0)
        self._last: Row | None = None
        self._written_at = -math.inf
        self._has_failed = False
        self._tried(self._open)

    def write(self, row: Row) -> None:
        """The next step's."""
        for name in _SUMMED:
            self._sums[name] += getattr(row, name)
        self._last = row
        self._tried(lambda: self._line(row))
        if time.monotonic() - self._written_at >= EVERY_S:
            self._tried(self._now)
        if self._board is not None:
            self._tried(lambda: self._events(row))

    def close(self) -> None:
        """The newest numbers are there, and no more come."""
        if self._last is not None:
            self._tried(self._now)
        for each in (self._lines, self._board):
            if each is not None:
                with suppress(OSError):
                    each.close()
        self._lines = self._board = self._last = None

    def _tried(self, act: Callable[[], object]) -> None:
        try:
            act()
        except OSError as error:
            if not self._has_failed:
                logger.warning("autopar: metrics are not written into %s: %s", self.folder, error)
            self._has_failed = True

    def _open(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        path = self.folder / LINES
        self._lines = open(path, "a", encoding="utf-8")  # noqa: SIM115  (until the run ends)
        if path.stat().st_size and not _ends_a_line(path):  # of a run that was killed while it wrote
            self._lines.write("\n")
        try:
            from torch.utils.tensorboard.writer import SummaryWriter
        except ImportError:
            return
        self._board = SummaryWriter(str(self.folder))

    def _line(self, row: Row) -> None:
        if self._lines is not None:
            self._lines.write(json.dumps(asdict(row), allow_nan=False) + "\n")
            self._lines.flush()

    def _now(self) -> None:
        self._written_at = time.monotonic()
        hidden = self.folder / f".{NOW}.{os.getpid()}"
        assert self._last is not None
        hidden.write_text(openmetrics(self._last, self._sums, self.labels), encoding="utf-8")
        os.replace(hidden, self.folder / NOW)

    def _events(self, row: Row) -> None:
        for name, value in asdict(row).items():
            if name not in ("step", "time_s", "said") and value is not None:
                self._board.add_scalar(f"autopar/{name}", float(value), row.step, walltime=row.time_s)


def openmetrics(row: Row, sums: Mapping[str, float], labels: Mapping[str, str]) -> str:
    """The newest numbers as OpenMetrics 1.0 (RFC draft-richih-opsawg-openmetrics), without timestamps, as textfile
    collectors want it.
    """
    inner = ",".join(f'{name}="{_escaped(value)}"' for name, value in labels.items())
    lines = []
    for field, given, kind, text in _NOW:
        name = f"autopar_{given or field}"
        value = sums.get(field, getattr(row, field))
        value = math.nan if value is None else value
        unit = next((unit for unit in ("seconds", "bytes") if name.endswith(f"_{unit}")), "")
        lines.append(f"# TYPE {name} {kind}")
        lines += [f"# UNIT {name} {unit}"] if unit else []
        lines.append(f"# HELP {name} {text}")
        number = "NaN" if math.isnan(value) else repr(float(value)).replace("inf", "Inf")
        lines.append(f"{name}{'_total' if kind == 'counter' else ''}{{{inner}}} {number}")
    return "\n".join([*lines, "# EOF", ""])


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _ends_a_line(path: Path) -> bool:
    with open(path, "rb") as file:
        file.seek(-1, os.SEEK_END)
        return file.read(1) == b"\n"


@dataclass(slots=True)
class Clock:
    """What a rank has spent so far, seconds, at the moment `at_s` (`time.monotonic`)."""

    at_s: float
    plans_s: float = 0.0
    saves_s: float = 0.0
    waited_s: float = 0.0


def tokens_in(inputs: Mapping[str, Tensor], added: Added | None) -> int:
    """Of a batch, whole: the elements of its first input of whole numbers with rows and positions, else its rows."""
    rows = 0
    for name, x in inputs.items():
        if not x.ndim:
            continue
        given = x.shape if added is None else added.given(name, x.shape)
        if x.ndim > 1 and not x.is_floating_point() and not x.is_complex() and x.dtype != torch.bool:
            return math.prod(given)
        rows = rows or given[0]
    return rows


def held_bytes(device: torch.device) -> int:
    """The most memory that this rank has held: of its GPU, as torch counts it, or of the process."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)  # the host's count: nothing is waited for
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * (1 if sys.platform == "darwin" else 1024)


def most_waited(waited: Sequence[float]) -> tuple[float, int]:
    """The longest, and the rank of the shortest: for it the others waited."""
    return max(waited), min(range(len(waited)), key=lambda rank: waited[rank])
