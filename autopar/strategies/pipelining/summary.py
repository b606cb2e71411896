"""What a plan says of its pipeline: the stages with their costs, and how the schedule was chosen."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from functools import cached_property
from typing import Any

from autopar.ir.schedule import Action, Schedule
from autopar.ir.stages import Considered
from autopar.machine.hardware import Link
from autopar.strategies.pipelining.costs import StageCost
from autopar.strategies.pipelining.simulate import Timeline, simulate


@dataclass(frozen=True, slots=True)
class StageSummary:
    """One stage: what it runs in words, what it computes again, what it hands on, and its costs on one rank.

    parameters: how many elements, of all ranks of the stage together. launch_s: the part of its forward that more rows
    would not lengthen.
    """

    runs: str
    again: str
    sends: str
    parameters: int
    cost: StageCost
    launch_s: float = 0.0


@dataclass(frozen=True)
class PipelineSummary:
    """The pipeline of a plan.

    schedule: every rank's actions. link: what carries a send. considered: the schedules that were simulated, best
    first.
    """

    axis: str
    schedule: Schedule
    stages: tuple[StageSummary, ...]
    link: Link
    considered: tuple[Considered, ...] = ()

    @cached_property
    def timeline(self) -> Timeline:
        """The simulated step."""
        return simulate(self.schedule, [stage.cost for stage in self.stages], self.link)

    def to_data(self) -> dict[str, Any]:
        """JSON-ready."""
        schedule = self.schedule
        return {
            "axis": self.axis,
            "schedule": schedule.name,
            "microbatches": schedule.num_microbatches,
            "rank_of": list(schedule.rank_of),
            "order": [",".join(map(str, actions)) for actions in schedule.order],
            "stages": [asdict(stage) for stage in self.stages],
            "link": asdict(self.link),
            "considered": [asdict(each) for each in self.considered],
        }

    @staticmethod
    def from_data(data: Mapping[str, Any]) -> PipelineSummary:
        """The inverse of `to_data`."""
        stages = tuple(StageSummary(**{**row, "cost": StageCost(**row["cost"])}) for row in data["stages"])
        considered = tuple(Considered(**row) for row in data["considered"])
        return PipelineSummary(data["axis"], schedule_from(data), stages, Link(**data["link"]), considered)


def schedule_from(data: Mapping[str, Any]) -> Schedule:
    """A schedule from its plain data: `schedule`, `microbatches`, `rank_of`, `order`."""
    order = tuple(tuple(Action.parse(text) for text in row.split(",") if text) for row in data["order"])
    return Schedule(data["schedule"], int(data["microbatches"]), tuple(data["rank_of"]), order)
