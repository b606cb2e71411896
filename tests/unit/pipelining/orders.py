"""What the tests of schedules share: draws of admitted schedules, and text of orders."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from hypothesis import strategies as st

from autopar.ir.schedule import Action, Schedule
from autopar.strategies.pipelining import schedules
from autopar.strategies.pipelining.costs import StageCost


def costs_of_a_stage(amounts: st.SearchStrategy[float], **others: st.SearchStrategy[float]) -> Any:
    """What a microbatch takes, each number from `amounts` or from what `others` have under its name."""
    drawn = [each.name for each in fields(StageCost) if each.name not in ("unshard_s", "reduce_s", "update_s", "add_s")]
    return st.builds(StageCost, **(dict.fromkeys(drawn, amounts) | others))


@st.composite
def admitted(draw: st.DrawFn, most_ranks: int = 5, most_microbatches: int = 12) -> Schedule:
    """A known schedule with numbers that it admits."""
    name = draw(st.sampled_from(schedules.NAMES))
    known = schedules.KNOWN[name]
    stages = draw(st.integers(known.fewest, known.most or 3))
    num_ranks = draw(st.integers(1, min(most_ranks, most_microbatches // stages if known.per_stage else most_ranks)))
    numbers = [m for m in range(1, most_microbatches + 1) if schedules.refusal(name, num_ranks, m, stages) is None]
    return schedules.build(name, num_ranks, draw(st.sampled_from(numbers)), stages)


def leaves(schedule: Schedule, rank: int) -> list[Action]:
    return [leaf for action in schedule.order[rank] for leaf in action.leaves]


def texts(schedule: Schedule) -> list[list[str]]:
    return [[str(action) for action in row] for row in schedule.order]
