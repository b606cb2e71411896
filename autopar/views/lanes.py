"""The stages of a pipeline: a lane for each of its ranks, side by side, and what they send to each other."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence

from autopar.base.text import format_bytes, format_count, format_time, microbatches_text
from autopar.cost.roofline import collective_time_s
from autopar.ir.schedule import Schedule
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.summary import PipelineSummary
from autopar.views.dot import Dot, joined
from autopar.views.style import FAINT, FRAME, Style, shortened, tint

MOST_STAGES = 12
"""Of more stages, each rank is one box."""
MOST_RANKS = 8
"""Of more ranks the first ones and the last ones are drawn."""
MOST_LABELS = 5
"""Graphviz fails on many labels within a row; of more messages boxes say what they send."""


def draw_lanes(dot: Dot, plan: PlanRecord, style: Style, phases: Sequence[str]) -> list[str]:
    """The stages in rows, the n-th of each rank in the n-th. Returns a box that what follows stands below."""
    summary = plan.pipeline
    assert summary is not None
    schedule = summary.schedule
    parts = microbatches_text(schedule.num_microbatches, plan.interface.together)
    title = f"pipeline: {schedule.name}, {parts}, a lane for each rank of {summary.axis}"
    with dot.cluster(
        "pipeline", title, style="rounded,filled", fillcolor=FRAME, color=FAINT, fontsize="13", labeljust="l",
        margin="12", tooltip=f"{title}: {summary.timeline.bubble_share:.1%} of the step is waited",
    ):  # fmt: skip
        if schedule.num_stages > MOST_STAGES:
            return _short_lanes(dot, plan, style, phases)
        rows = _rows(schedule)
        for row in rows:
            for stage in row:
                _stage(dot, summary, stage, style)
        for above, below in itertools.pairwise(rows):
            for first, second in zip(above, below, strict=False):
                dot.below(f"stage:{first}", f"stage:{second}", weight=20)
        within: list[_Messages] = []
        across: list[_Messages] = []
        for stage, (first, second) in enumerate(itertools.pairwise(schedule.rank_of)):
            if first != second:
                costs = summary.stages[stage].cost, summary.stages[stage + 1].cost
                sent = {"forward": [costs[0].forward_bytes], "backward": [costs[1].backward_bytes]}
                row = [schedule.stages_of(rank).index(stage + at) for at, rank in enumerate((first, second))]
                ends = f"stage:{stage}", f"stage:{stage + 1}"
                own = {phase: sent[phase] for phase in phases if any(sent[phase])}
                turned = row[0] == row[1] and first > second
                (within if row[0] == row[1] else across).append(_Messages(plan, style, *ends, own, turned))
        for row in rows:
            dot.row([f"stage:{stage}" for stage in row])
        for messages in within:
            messages.draw(dot, labelled=len(within) <= MOST_LABELS)
        for messages in across:  # as constraints, they would put a row's ranks out of order
            messages.draw(dot, labelled=len(within) <= MOST_LABELS, constraint="false")
    return [f"stage:{rows[-1][0]}"]


def _short_lanes(dot: Dot, plan: PlanRecord, style: Style, phases: Sequence[str]) -> list[str]:
    """A box for each rank, with all its stages; in the middle of many ranks a gap."""
    summary = plan.pipeline
    assert summary is not None
    schedule = summary.schedule
    ranks = list(range(schedule.num_ranks))
    half = MOST_RANKS // 2
    shown = ranks if len(ranks) <= MOST_RANKS else [*ranks[:half], -1, *ranks[-half + 1 :]]
    for rank in shown:
        if rank < 0:
            rest = schedule.num_ranks - len(shown) + 1
            dot.node("lane:more", [f"{rest} more ranks", "alike"], style="filled", fillcolor=FRAME, color=FRAME)
        else:
            _lane(dot, summary, rank, style)
    names = ["lane:more" if rank < 0 else f"lane:{rank}" for rank in shown]
    found = []
    for (first, second), ends in zip(itertools.pairwise(shown), itertools.pairwise(names), strict=True):
        sent = {phase: _sent_between(summary, first, second, phase) for phase in phases}
        found.append(_Messages(plan, style, *ends, {phase: each for phase, each in sent.items() if each}))
    dot.row(names)
    for messages in found:
        messages.draw(dot, labelled=False)
    return names[:1]


def _lane(dot: Dot, summary: PipelineSummary, rank: int, style: Style) -> None:
    numbers = summary.schedule.stages_of(rank)
    stages = [summary.stages[number] for number in numbers]
    runs = [shortened(stage.runs) for stage in stages]
    lines = [f"rank {rank} · stages {', '.join(map(str, numbers))}"]
    lines += runs if len(runs) <= 3 else [*runs[:2], f"… {len(runs) - 2} more"]
    lines.append(f"{format_count(sum(stage.parameters for stage in stages))} parameters")
    forward_s, backward_s = (sum(getattr(s.cost, name) for s in stages) for name in ("forward_s", "backward_s"))
    lines.append(f"forward {format_time(forward_s)}, backward {format_time(backward_s)}")
    lines.append(f"{format_bytes(summary.timeline.peak_bytes[rank])} on the rank")
    if sent := [each for stage in numbers for each in [summary.stages[stage].cost.forward_bytes] if each]:
        lines.append(f"sends {len(sent)} × {format_bytes(sum(sent) / len(sent))} on")
    colour = style.colour[summary.axis]
    tooltip = "\n".join(f"stage {number}: {stage.runs}" for number, stage in zip(numbers, stages, strict=True))
    dot.node(f"lane:{rank}", lines, style="filled", fillcolor=tint(colour, 0.18), color=colour, tooltip=tooltip)


def _sent_between(summary: PipelineSummary, left: int, right: int, phase: str) -> list[float]:
    """Bytes of each message of a microbatch from one rank to the next (backward: the other way), stage by stage."""
    rank_of, found = summary.schedule.rank_of, []
    for stage, ends in enumerate(itertools.pairwise(rank_of)):
        own, others = summary.stages[stage].cost, summary.stages[stage + 1].cost
        if set(ends) == {left, right}:
            found.append(own.forward_bytes if phase == "forward" else others.backward_bytes)
    return [each for each in found if each]


def num_lane_boxes(summary: PipelineSummary) -> int:
    """Of the pipeline's boxes that are drawn."""
    schedule = summary.schedule
    return schedule.num_stages if schedule.num_stages <= MOST_STAGES else min(schedule.num_ranks, MOST_RANKS)


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


class _Messages:
    """What two stages, or ranks, send to each other. sent: by phase the bytes of each message of a microbatch.

    turned: the forward leads from the right to the left.
    """

    def __init__(
        self, plan: PlanRecord, style: Style, source: str, target: str, sent: Mapping[str, Sequence[float]],
        turned: bool = False,
    ) -> None:  # fmt: skip
        assert plan.pipeline is not None
        self.source, self.target, self.turned = source, target, turned
        self.axis, self.colour = plan.pipeline.axis, style.colour[plan.pipeline.axis]
        self.what = "pair of microbatches" if plan.interface.together > 1 else "microbatch"
        self.texts: dict[str, str] = {}
        for phase, sizes in sent.items():
            launch_s = plan.mesh.hardware.collective_launch_s
            seconds = sum(collective_time_s("permute", each, 2, plan.pipeline.link, launch_s) for each in sizes)
            count = f"{len(sizes)} × " if len(sizes) > 1 else ""
            self.texts[phase] = f"{count}{format_bytes(sum(sizes) / len(sizes))} · {format_time(seconds)}"

    def draw(self, dot: Dot, *, labelled: bool, **attributes: str) -> None:
        """An edge for each phase; it leads from the left to the right, and down, in the layout."""
        for phase, text in self.texts.items():
            is_back = phase == "backward"
            first, last = (self.target, self.source) if is_back else (self.source, self.target)
            id = f"send:{first}>{last}".replace("stage:", "")
            said = {"label": joined([f"send {self.axis}", text])} if labelled else {}
            dot.edge(
                first, last, (), is_back is not self.turned, id=id, **said, **attributes,
                color=self.colour, fontcolor=self.colour, penwidth="1.8",
                tooltip=f"{phase} of one {self.what}: {text}", **({"style": "dashed"} if is_back else {}),
            )  # fmt: skip
