"""The schedules that a user's wish stands for, with the numbers they go with."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from autopar.base.errors import AutoparError
from autopar.base.text import plural
from autopar.ir.schedule import Action, Schedule
from autopar.strategies.pipelining import greedy, schedules
from autopar.strategies.pipelining.schedules import Candidate
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec

MAX_STAGES_PER_RANK = 4
"""Of what is tried where no number is asked for, by a schedule's name as by `auto`; a user may ask for more."""

GREEDY_STAGES = range(1, 5)
"""Stages a rank of list schedules."""


def asked_schedule(spec: PipelineSpec, num_ranks: int, num_microbatches: int) -> Schedule:
    """The schedule of a wish that is not `auto`.

    Raises:
        AutoparError: one that these numbers do not go with, a CSV that does not run to its end.
    """
    if not spec.is_file:
        return schedules.build(spec.schedule, num_ranks, num_microbatches, stages_per_rank(spec, num_ranks))
    try:
        found = schedules.from_csv(spec.text() + "\n", num_ranks, num_microbatches)
    except AutoparError as error:
        where = (error.where or "").replace("from CSV", spec.schedule)
        raise AutoparError(error.what, where=where, values=error.values, remedy=error.remedy) from error
    return replace(found, name=spec.schedule)


def forwards(spec: PipelineSpec, num_ranks: int) -> Schedule:
    """The forward alone, of one microbatch, on the ranks on which a wish has its stages in training: parameters stay
    where they are. Where it leaves that open, a stage a rank: more would send more, and gain nothing.

    Raises:
        AutoparError: stages that its schedule does not take, a CSV that is no schedule for these ranks.
    """
    check_asked(spec, num_ranks)
    wanted = stages_per_rank(spec, num_ranks)
    if spec.rank_of:
        rank_of = spec.rank_of
    elif spec.schedule in ("auto", greedy.NAME):
        rank_of = tuple(range(num_ranks)) * (wanted or 1)
    else:
        num = num_microbatches_of(spec) if spec.is_file else num_ranks * (wanted or 2)
        rank_of = asked_schedule(spec, num_ranks, num).rank_of
    return schedules.forwards(num_ranks, rank_of)


def stages_per_rank(spec: PipelineSpec, num_ranks: int) -> int | None:
    """As asked, or as many as the cut makes; None for any."""
    if spec.stages_per_rank is not None or not spec.cut or (len(spec.cut) + 1) % num_ranks:
        return spec.stages_per_rank
    return (len(spec.cut) + 1) // num_ranks


def admitted(spec: PipelineSpec, num_ranks: int, num_microbatches: int, num_calls: int) -> Iterator[Candidate]:
    """The known schedules, with their stages a rank, that a wish leaves open."""
    is_auto = spec.schedule == "auto"
    wanted = stages_per_rank(spec, num_ranks) or (1 if num_ranks == 1 and is_auto else None)
    for each in schedules.candidates(num_ranks, num_microbatches, num_calls):
        suits = each.stages_per_rank <= MAX_STAGES_PER_RANK if wanted is None else each.stages_per_rank == wanted
        if suits and (is_auto or each.name == spec.schedule):
            yield each


def is_open(spec: PipelineSpec, num_ranks: int) -> bool:
    """Whether several numbers of stages, or several schedules, are what was asked for."""
    if spec.schedule == "auto":
        return True
    known = None if spec.is_file else schedules.KNOWN.get(spec.schedule)
    return known is not None and known.fewest != known.most and stages_per_rank(spec, num_ranks) is None


def fewest_stages(spec: PipelineSpec) -> int:
    """A rank's, of any schedule that a wish leaves open."""
    known = schedules.KNOWN.get(spec.schedule)
    return 1 if known is None else known.fewest


def refusal(spec: PipelineSpec, num_ranks: int, num_microbatches: int) -> AutoparError | None:
    """Why a wish does not go with these numbers, the model aside; None where it does."""
    if spec.is_file:
        own = num_microbatches_of(spec)
        if own == num_microbatches:
            return None
        return AutoparError(
            f"the pipeline schedule {spec.schedule} has {plural(own, 'microbatch', 'microbatches')}, not "
            f"{num_microbatches}",
            remedy=f"use microbatches={own}, or write the others into it",
        )
    wanted = stages_per_rank(spec, num_ranks)
    if wanted is not None and spec.schedule in ("auto", greedy.NAME) and wanted in GREEDY_STAGES:
        return None
    if spec.schedule == greedy.NAME:
        return None if wanted is None else _too_many_for_greedy(wanted)
    if spec.schedule != "auto":
        default = schedules.known_as(spec.schedule).default
        return schedules.refusal(spec.schedule, num_ranks, num_microbatches, default if wanted is None else wanted)
    if wanted is None or any(admitted(spec, num_ranks, num_microbatches, num_ranks * wanted)):
        return None
    return AutoparError(
        f"no schedule with {wanted} stages a rank takes {num_microbatches} microbatches",
        values=f"{AXIS}={num_ranks}",
        remedy=f"use a multiple of {num_ranks} microbatches, or another number of stages",
    )


def _too_many_for_greedy(wanted: int) -> AutoparError:
    return AutoparError(
        f"the schedule {greedy.NAME} takes {GREEDY_STAGES[0]} to {GREEDY_STAGES[-1]} stages per rank, not {wanted}",
        remedy="use fewer of them, or interleaved, which takes any number",
    )


def check_asked(spec: PipelineSpec, num_ranks: int) -> None:
    """What no batch mends: stages that a schedule does not take, a file that is no schedule for this axis.

    Raises:
        AutoparError: says which.
    """
    if spec.is_file:
        asked_schedule(spec, num_ranks, num_microbatches_of(spec))
    elif error := refusal(spec, num_ranks, num_ranks * (stages_per_rank(spec, num_ranks) or 2)):
        raise error  # a multiple of all stages is admitted wherever the stages are


def num_microbatches_of(spec: PipelineSpec) -> int:
    """How many microbatches a user's own schedule has; 1 where it has no action that can be read."""
    most = 0
    for cell in spec.text().replace("\n", ",").split(","):
        try:
            leaves = Action.parse(cell.strip()).leaves if cell.strip() else ()
        except AutoparError:
            continue
        most = max([most, *(leaf.microbatch for leaf in leaves if leaf.microbatch is not None)])
    return most + 1
