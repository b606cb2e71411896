"""A step as pictures for a page that cannot move: who does what when, and what a rank holds meanwhile."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from autopar.base.errors import AutoparError
from autopar.base.text import format_time
from autopar.base.trace import MemoryCurve
from autopar.planner.plan.record import PlanRecord
from autopar.views.plots import new_figure, save_figure
from autopar.views.timeline import KINDS, timeline_data

# Okabe and Ito's colours, which colour-blind people tell apart.
COLOURS = {
    "forward": "#56b4e9", "backward": "#e69f00", "backward_input": "#e69f00", "backward_weight": "#f0e442",
    "gather": "#009e73", "reduce": "#cc79a7", "collective": "#0072b2", "send": "#d55e00", "optimizer": "#8a8f98",
    "repeated": "#c3ccd6",
}  # fmt: skip
CATEGORIES = ("#0072b2", "#56b4e9", "#009e73", "#e69f00", "#d55e00", "#cc79a7", "#8c8c8c", "#f0e442")
MOST_RANKS = 32
_THIN = 0.32
"""Height of a track of communication, where one of compute has 1."""


def draw_timeline(plan: PlanRecord, path: str | Path) -> Path:
    """The predicted step: a row for each rank (of a pipeline) or track, time across.

    Raises:
        AutoparError: a plan that was saved by an older version, no matplotlib, a path that cannot be written.
    """
    data = timeline_data(plan) if plan.views is not None or plan.pipeline is not None else None
    if data is None:
        raise _nothing()
    ranks = data["ranks"][:MOST_RANKS]
    rows = [
        (rank["name"] if number == 0 else "", track, 1.0 if track["name"] == "compute" else _THIN)
        for rank in ranks
        for number, track in enumerate(rank["tracks"])
    ]
    figure, axes = new_figure(11, 1.2 + 0.34 * sum(height for _, _, height in rows))
    at, ticks, used = 0.0, [], dict[str, None]()
    unit, scale = ("s", 1.0) if data["step_s"] >= 1 else ("ms", 1e3)
    for name, track, height in rows:
        for kind in dict.fromkeys(event[3] for event in track["events"]):
            spans = [(event[0] * scale, event[1] * scale) for event in track["events"] if event[3] == kind]
            edge = 0.2 if height == 1.0 else 0.0  # an edge would hide what is short
            axes.broken_barh(spans, (at, 0.9 * height), facecolors=COLOURS[kind], edgecolor="white", linewidth=edge)
            used[kind] = None
        ticks.append((at + 0.45 * height, name or (track["name"] if len(ranks) == 1 else "")))
        at += height
    if len(ranks) == 1:
        ticks = [(place, track["name"]) for (place, _), (_, track, _) in zip(ticks, rows, strict=True)]
    axes.set_yticks([place for place, name in ticks if name], [name for _, name in ticks if name], fontsize=9)
    axes.set_ylim(at, -0.1)
    axes.set_xlim(0, data["step_s"] * scale)
    axes.set_xlabel(f"predicted time, {unit}")
    axes.set_title(_title(plan), fontsize=11, loc="left")
    for kind in (kind for kind in KINDS if kind in used):
        axes.barh([0], [0], color=COLOURS[kind], label=KINDS[kind])
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return save_figure(figure, Path(path))


def draw_memory(plan: PlanRecord, path: str | Path) -> Path:
    """What the fullest rank holds over the predicted step, by category, with the memory limit.

    Raises:
        AutoparError: as `draw_timeline`.
    """
    if plan.views is None or not plan.views.memory:
        raise _nothing()
    curve = max(plan.views.memory, key=lambda each: each.peak_bytes)
    figure, axes = new_figure(9, 4.2)
    unit, scale = ("s", 1.0) if plan.cost.step_time_s >= 1 else ("ms", 1e3)
    end = max(plan.cost.step_time_s, curve.times_s[-1])
    times = [time * scale for time in (*curve.times_s, end)]
    names = [name for name, values in curve.series.items() if max(values)]
    sizes = [[value / 2**30 for value in (*curve.series[name], curve.series[name][-1])] for name in names]
    colours = [CATEGORIES[number % len(CATEGORIES)] for number in range(len(names))]
    axes.stackplot(times, *sizes, labels=names, colors=colours, step="post", linewidth=0)
    peak = curve.peak_bytes / 2**30
    limit = plan.memory_limit_bytes
    limit = limit if limit is not None and limit < 8 * curve.peak_bytes else None
    if limit is not None:
        axes.axhline(limit / 2**30, color="black", linestyle=":", linewidth=1, label=f"limit, {limit / 2**30:.4g} GiB")
    place = sum(_peak_place(curve, end)) / 2 * scale
    axes.annotate(
        f"{peak:.3g} GiB", (place, peak), textcoords="offset points", xytext=(7, 5), fontsize=9, fontweight="bold",
        bbox={"facecolor": "white", "edgecolor": "none", "pad": 1.0},
    )  # fmt: skip
    axes.plot([place], [peak], marker="v", color="black", markersize=5)
    axes.set_xlim(0, end * scale)
    axes.set_ylim(0, 1.15 * max(peak, (limit or 0) / 2**30))
    axes.set_xlabel(f"predicted time, {unit}")
    where = f" ({plan.pipeline.axis} rank {curve.rank})" if plan.pipeline is not None else ""
    axes.set_ylabel(f"held by the fullest rank{where}, GiB")
    handles, labels = axes.get_legend_handles_labels()
    axes.legend(handles[::-1], labels[::-1], fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    axes.set_title(_title(plan), fontsize=11, loc="left")
    return save_figure(figure, Path(path))


def _peak_place(curve: MemoryCurve, end: float) -> tuple[float, float]:
    """From when to when it is fullest."""
    sums: Sequence[float] = [sum(values) for values in zip(*curve.series.values(), strict=True)]
    at = sums.index(max(sums))
    return curve.times_s[at], (*curve.times_s, end)[at + 1]


def _title(plan: PlanRecord) -> str:
    schedule = f", {plan.pipeline.schedule.name}" if plan.pipeline is not None else ""
    step: Any = format_time(plan.cost.step_time_s)
    return f"{plan.title} on {plan.mesh}{schedule}: {step} a step predicted"


def _nothing() -> AutoparError:
    return AutoparError(
        "this plan's file has no timeline: it was saved by an older version", remedy="make the plan again and save it"
    )
