"""The stages of a pipeline: a lane for each of its ranks, side by side, and what they send to each other."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from typing import TYPE_CHECKING

from autopar.cost import collective_time_s
from autopar.pipelining.actions import Schedule
from autopar.report import format_bytes, format_count, format_time
from autopar.views.dot import Dot
from autopar.views.style import FAINT, FRAME, Style, shortened, tint

if TYPE_CHECKING:
    from autopar.pipelining.summary import PipelineSummary
    from autopar.plans import Plan


def draw_lanes(dot: Dot, plan: Plan, style: Style, phases: Sequence[str]) -> list[str]:
    """The stages in rows, the n-th of each rank in the n-th. Returns the last row's nodes."""
    summary = plan.pipeline
    assert summary is not None
    schedule = summary.schedule
    title = (
        f"pipeline: {schedule.name}, {schedule.num_microbatches} microbatches, a lane for each rank of {summary.axis}"
    )
    with dot.cluster(
        "pipeline", title, style="rounded,filled", fillcolor=FRAME, color=FAINT, fontsize="13", labeljust="l",
        margin="12", tooltip=f"{title}: {summary.timeline.bubble_share:.1%} of the step is waited",
    ):  # fmt: skip
        rows = _rows(schedule)
        for row in rows:
            for stage in row:
                _stage(dot, summary, stage, style)
        for row in rows:
            dot.row([f"stage:{stage}" for stage in row])
        for above, below in itertools.pairwise(rows):
            for first, second in zip(above, below, strict=False):
                dot.below(f"stage:{first}", f"stage:{second}", weight=20)
        launch_s = plan.mesh.hardware.collective_launch_s
        for stage, (first, second) in enumerate(itertools.pairwise(schedule.rank_of)):
            if first != second:
                costs = summary.stages[stage].cost, summary.stages[stage + 1].cost
                for phase, sent in (("forward", costs[0].forward_bytes), ("backward", costs[1].backward_bytes)):
                    if phase in phases and sent:
                        seconds = collective_time_s("permute", sent, 2, summary.link, launch_s)
                        _send(dot, style, summary.axis, schedule, stage, phase, sent, seconds)
    return [f"stage:{stage}" for stage in rows[-1]]


def _rows(schedule: Schedule) -> list[list[int]]:
    held = [schedule.stages_of(rank) for rank in range(schedule.num_ranks)]
    return [[stage for stage in row if stage is not None] for row in itertools.zip_longest(*held)]


def _stage(dot: Dot, summary: PipelineSummary, number: int, style: Style) -> None:
    stage, rank = summary.stages[number], summary.schedule.rank_of[number]
    runs = [shortened(part) for part in stage.runs.split(", ")]
    peak = format_bytes(summary.timeline.peak_bytes[rank])
    lines = [f"rank {rank} · stage {number}", *runs, f"{format_count(stage.parameters)} parameters"]
    times = f"forward {format_time(stage.cost.forward_s)}"
    if stage.cost.backward_s:
        times += f", backward {format_time(stage.cost.backward_s)}"
    lines += [times, f"{peak} on the rank"]
    colour = style.colour[summary.axis]
    tooltip = [f"stage {number} on rank {rank}: {stage.runs}", f"sends {stage.sends or 'nothing'}", times]
    dot.node(
        f"stage:{number}", lines, style="filled", fillcolor=tint(colour, 0.18), color=colour,
        tooltip="\n".join([*tooltip, *([f"computes again {stage.again}"] if stage.again else [])]),
    )  # fmt: skip


def _send(
    dot: Dot, style: Style, axis: str, schedule: Schedule, stage: int, phase: str, sent: float, seconds: float
) -> None:
    """An edge to the next stage, or back from it; it leads from the left to the right, and down, in the layout."""
    ends = [f"stage:{stage}", f"stage:{stage + 1}"]
    ranks = schedule.rank_of[stage], schedule.rank_of[stage + 1]
    row = [schedule.stages_of(rank).index(number) for rank, number in zip(ranks, (stage, stage + 1), strict=True)]
    turned = row[0] == row[1] and ranks[0] > ranks[1]
    source, target = ends if phase == "forward" else reversed(ends)
    colour, lines = style.colour[axis], [f"send {axis}", f"{format_bytes(sent)} · {format_time(seconds)}"]
    what = "activations of" if phase == "forward" else "gradients for"
    dot.edge(
        source, target, lines, (phase == "backward") is not turned, id=f"send:{source[6:]}>{target[6:]}",
        color=colour, fontcolor=colour, penwidth="1.8",
        tooltip=f"{what} one microbatch, {lines[1]}", **({} if phase == "forward" else {"style": "dashed"}),
    )  # fmt: skip
