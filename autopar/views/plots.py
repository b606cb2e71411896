"""Pictures of numbers, by matplotlib: the frontier of a search, where planning spends its time."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from autopar.base.errors import AutoparError
from autopar.planner.plan.record import PlanRecord
from autopar.planner.search.result import Found

_FITS, _TOO_MUCH, _BEST = "#5b7fa6", "#c9c9c9", "#c44e2f"
_PASSES = ("#4c72b0", "#dd8452", "#55a868", "#c44e52", "#8172b3", "#937860", "#da8bc3", "#8c8c8c", "#ccb974", "#64b5cd")


def draw_frontier(result: Found[PlanRecord], path: Path) -> Path:
    """Every estimate as a point, memory across, seconds up; those that nothing beats in both joined by a line, the
    plans named.

    Raises:
        AutoparError: no matplotlib, a kind of file that it does not write, a path that cannot be written.
    """
    figure, axes = new_figure(9, 5.5)
    fits = [each for each in result.candidates if each.fits]
    rest = [each for each in result.candidates if not each.fits]
    for some, colour, label in ((rest, _TOO_MUCH, "too much memory"), (fits, _FITS, "fits")):
        sizes = [each.peak_bytes / 2**30 for each in some]
        axes.scatter(sizes, [each.step_s for each in some], s=7, color=colour, alpha=0.5, linewidths=0, label=label)
    frontier = result.frontier
    axes.plot(
        [each.peak_bytes / 2**30 for each in frontier],
        [each.step_s for each in frontier],
        color="black", linewidth=1, drawstyle="steps-post", label="frontier of the estimates",
    )  # fmt: skip
    limit = result.memory_limit_bytes / 2**30
    axes.axvline(limit, color="black", linestyle=":", linewidth=1, label=f"memory limit, {limit:.4g} GiB")
    for number, (candidate, plan) in enumerate(result.planned):
        size, seconds = plan.cost.peak_memory_bytes / 2**30, plan.cost.step_time_s
        words = f"{number + 1}: {candidate.point} {' '.join(candidate.point.strategy.values())}"
        axes.scatter([size], [seconds], marker="*", s=90, color=_BEST, zorder=3, label=f"{words}, {seconds:.3g} s")
        place = (-4 + 9 * number, -16)
        axes.annotate(str(number + 1), (size, seconds), textcoords="offset points", xytext=place, fontsize=9)
    steps = [each.step_s for each in result.candidates]
    logarithmic(axes)
    axes.set_ylim(min(steps) * 0.9, min(max(steps), min(steps) * 4) * 1.1)
    axes.set_xlabel("peak memory of a rank, GiB")
    axes.set_ylabel("predicted step, s")
    axes.set_title(f"{len(result.candidates)} points on {result.cluster}", fontsize=11, loc="left")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return save_figure(figure, path)


def draw_times(rows: Sequence[tuple[str, Mapping[str, float]]], path: Path) -> Path:
    """One bar a plan, of the CPU seconds of its passes. rows: (name, pass -> seconds).

    Raises:
        AutoparError: as `draw_frontier`.
    """
    figure, axes = new_figure(9, 1.6 + 0.42 * len(rows))
    totals: dict[str, float] = {}
    for _, times in rows:
        for name, seconds in times.items():
            totals[name] = totals.get(name, 0.0) + seconds
    whole = sum(totals.values()) or 1.0
    shown = [name for name in totals if totals[name] >= 0.01 * whole]
    places = range(len(rows))
    left = [0.0] * len(rows)
    for number, name in enumerate([*shown, "others"]):
        widths = [
            times.get(name, 0.0) if name != "others" else sum(s for each, s in times.items() if each not in shown)
            for _, times in rows
        ]
        axes.barh(places, widths, left=left, height=0.65, color=_PASSES[number % len(_PASSES)], label=name)
        left = [a + b for a, b in zip(left, widths, strict=True)]
    for place, total in zip(places, left, strict=True):
        axes.annotate(f"{total:.1f} s", (total, place), textcoords="offset points", xytext=(4, -3), fontsize=8)
    axes.set_yticks(list(places), [name for name, _ in rows], fontsize=9)
    axes.invert_yaxis()
    axes.margins(x=0.1)
    axes.set_xlabel("CPU seconds")
    axes.legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return save_figure(figure, path)


def logarithmic(axes: Any) -> None:
    """Both axes, with plain numbers that are easy to read."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullLocator

    axes.set_xscale("log")
    axes.set_yscale("log")
    for axis in (axes.xaxis, axes.yaxis):
        axis.set_major_locator(LogLocator(subs=(1.0, 1.5, 2.0, 3.0, 4.0, 5.0, 7.0)))
        axis.set_major_formatter(FuncFormatter(lambda value, _: f"{value:g}"))
        axis.set_minor_locator(NullLocator())


def new_figure(width: float, height: float) -> tuple[Any, Any]:
    """A figure without a frame, of inches, with its axes; AutoparError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise AutoparError("drawing this needs matplotlib", remedy="pip install matplotlib") from error
    figure: Any = Figure(figsize=(width, height))
    axes = figure.subplots()
    for side in ("top", "right"):
        axes.spines[side].set_visible(False)
    return figure, axes


def save_figure(figure: Any, path: Path) -> Path:
    """Write a figure as its path's suffix says; AutoparError where that cannot be."""
    import matplotlib

    undated = {"metadata": {"Date": None}} if path.suffix == ".svg" else {}  # the same numbers give the same file
    try:
        with matplotlib.rc_context({"svg.hashsalt": "autopar"}):
            figure.savefig(path, bbox_inches="tight", dpi=150, **undated)
    except (OSError, ValueError) as error:
        raise AutoparError(
            "the picture cannot be written", where=str(path), values=str(error), remedy="use .svg, .png or .pdf"
        ) from error
    return path
