"""What a user asks of the pipeline axis: a schedule, or any; how many stages a rank, or any."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from pathlib import Path

from autopar.base.errors import AutoparError
from autopar.base.files import MIB, read_text
from autopar.base.text import did_you_mean

AXIS = "pp"
"""The mesh axis of this name is the pipeline's."""

MOST_BYTES = 32 * MIB
"""Of a CSV of actions: 64 ranks with 4,096 microbatches in two stages each have twenty."""

SCHEDULES = ("gpipe", "1f1b", "interleaved", "zero_bubble", "zbv", "dualpipev", "greedy")


@dataclass(frozen=True, slots=True)
class PipelineSpec:
    """schedule: `auto` (whichever is predicted fastest), one of `SCHEDULES`, or the path of a CSV of actions.
    stages_per_rank: None for the schedule's own number, or any that is best. cut: the first block of each stage but the
    first (`model.layers.8`; `model.layers.8#2` where it is used for the second time; or the number of a call); empty:
    where it balances. rows: the text of the CSV, once it is read: a saved plan needs no file. rank_of: stage -> rank,
    of a schedule that may have them in several ways.
    """

    schedule: str = "auto"
    stages_per_rank: int | None = None
    cut: tuple[str | int, ...] = ()
    rows: str = ""
    rank_of: tuple[int, ...] = ()

    @property
    def is_file(self) -> bool:
        """Whether the schedule is a user's own."""
        return self.schedule.endswith(".csv")

    def text(self) -> str:
        """The rows of the user's own schedule.

        Raises:
            AutoparError: no such file.
        """
        return self.rows or read_rows(self.schedule)

    def read(self) -> PipelineSpec:
        """With the rows of its file, where it has one.

        Raises:
            AutoparError: no such file.
        """
        return replace(self, rows=self.text()) if self.is_file else self

    def __str__(self) -> str:
        inner = [] if self.schedule == "auto" and not self.stages_per_rank else [self.schedule]
        inner += [str(self.stages_per_rank)] if self.stages_per_rank else []
        return f"pipeline({', '.join(inner)})" if inner else "pipeline"


def nth_of(name: str, before: int) -> str:
    """A block as a cut names it that stands `before` times in front of it already."""
    return f"{name}#{before + 1}" if before else name


def read_rows(path: str | Path) -> str:
    """The text of a CSV of actions.

    Raises:
        AutoparError: no such file, no regular one, one of more than `MOST_BYTES`.
    """
    remedy = "name a CSV file with a row of actions for each rank, such as 0F0,0F1,0B0,0B1"
    try:
        found = Path(path).expanduser()
    except RuntimeError as error:  # ~name of nobody
        raise AutoparError(f"cannot read the pipeline schedule {path}", values=str(error), remedy=remedy) from error
    return read_text(found, "pipeline schedule", most_bytes=MOST_BYTES, remedy=remedy)


def parse_spec(text: str) -> PipelineSpec | None:
    """`pipeline`, `pipeline(1f1b)`, `pipeline(interleaved, 2)`, or a schedule's name alone; None for another strategy.

    Raises:
        AutoparError: a pipeline with an unknown schedule.
    """
    if text in SCHEDULES:
        return PipelineSpec(text)
    match = re.fullmatch(r"pipeline(?:\(\s*([^,()]*?)\s*(?:[,:]\s*(\d+)\s*)?\))?", text.strip())
    if match is None:
        return None
    schedule = match[1] or "auto"
    if schedule not in ("auto", *SCHEDULES) and not schedule.endswith(".csv"):
        raise AutoparError(
            f"unknown pipeline schedule {schedule!r}",
            values=f"known: auto, {', '.join(SCHEDULES)}",
            remedy=did_you_mean(schedule, SCHEDULES) + "write one of these, as in pipeline(1f1b), or the path of a CSV",
        )
    return PipelineSpec(schedule, int(match[2]) if match[2] else None)
