"""The stages of a pipelined program."""

from __future__ import annotations

from dataclasses import dataclass

from autopar.ir.schedule import Schedule
from autopar.ir.values import ValueRef


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a program one rank of a pipeline holds, as far as is known before its stages are cut: an equal part.

    ranks: of the pipeline. in_flight: of how many microbatches a rank keeps the activations at once.
    """

    ranks: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: consecutive calls.

    calls: numbers of the program's calls that it runs, in order. recomputed: those among them that belong to an earlier
    stage, and that this one computes again for itself rather than receive their results. receives: values that come
    from the stage before; sends: those that go to the next one, some of them as they came.
    """

    calls: tuple[int, ...]
    recomputed: tuple[int, ...] = ()
    receives: tuple[ValueRef, ...] = ()
    sends: tuple[ValueRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Considered:
    """A schedule that was simulated: its stages on each rank, the seconds of a step, the share of them that ranks wait,
    the most bytes a rank holds, and whether that fits the memory limit.
    """

    schedule: str
    stages_per_rank: int
    step_s: float
    bubble: float
    peak_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a program, and what each rank of the mesh axis `axis` does when.

    `Program.mesh` is the mesh of one stage: the whole one without this axis. considered: the schedules that were tried,
    best first. keeps_outputs: a training step returns larger outputs too, such as logits, of all microbatches.
    """

    axis: str
    stages: tuple[Stage, ...]
    schedule: Schedule
    considered: tuple[Considered, ...] = ()
    keeps_outputs: bool = True

    @property
    def stages_per_rank(self) -> int:
        return len(self.stages) // self.schedule.num_ranks
