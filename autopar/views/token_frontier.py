"""What a search for `generate()` found: a table and a picture of latency against throughput."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from autopar.base.text import format_bytes, format_count, format_time, new_table
from autopar.planner.search.tokens import TokenCandidate
from autopar.views.plots import logarithmic, new_figure, save_figure

MOST_ROWS = 16
"""Of a frontier, printed."""
_SIZES = "#5b7fa6", "#dd8452", "#55a868", "#8172b3", "#937860", "#da8bc3", "#ccb974", "#64b5cd"


def frontier_table(frontier: Sequence[TokenCandidate], planned: Sequence[TokenCandidate]) -> Table:
    """The frontier, the fewest seconds a token first; those that were planned have a star. Of a long one as many rows
    are left out in the middle as do not fit a screen, but none with a star.
    """
    table = new_table(
        "frontier: nothing is faster and makes more tokens", "", "mesh", "strategy", ">sequences", ">a token",
        ">tokens/s/device", ">tokens/s a sequence", ">first token", ">cache", ">peak",
    )  # fmt: skip
    kept = set(range(len(frontier)))
    if len(frontier) > MOST_ROWS:
        step = (len(frontier) - 1) / (MOST_ROWS - 1)
        kept = {round(number * step) for number in range(MOST_ROWS)}
        kept |= {number for number, each in enumerate(frontier) if each in planned}
    for number in sorted(kept):
        each = frontier[number]
        table.add_row(
            "*" if each in planned else "", str(each.point), _strategy(each), str(each.batch),
            format_time(each.time_per_token_s), format_count(each.tokens_per_s_per_device),
            format_count(1 / each.time_per_token_s), format_time(each.time_to_first_token_s),
            format_bytes(int(each.cache_bytes)), format_bytes(int(each.peak_bytes)),
        )  # fmt: skip
    return table


def planned_table(rows: Sequence[tuple[TokenCandidate, float, float, float]]) -> Table:
    """What was planned, beside its estimate. rows: with seconds to the first token, for each other one, and bytes."""
    table = new_table(
        "planned, beside the estimate", "mesh", ">sequences", ">first token", ">estimated", ">a token", ">estimated",
        ">tokens/s/device", ">peak", ">estimated",
    )  # fmt: skip
    for each, first_s, then_s, size in rows:
        total_s = first_s + (each.new_tokens - 1) * then_s
        rate = each.batch * each.new_tokens / total_s / each.point.num_devices
        table.add_row(
            str(each.point), str(each.batch), format_time(first_s), format_time(each.time_to_first_token_s),
            format_time(then_s), format_time(each.time_per_token_s), format_count(rate), format_bytes(int(size)),
            format_bytes(int(each.peak_bytes)),
        )  # fmt: skip
    return table


def others_table(rows: Sequence[tuple[TokenCandidate, str, str, float, float, float]]) -> Table:
    """Other ways on the meshes that were planned. rows: with the mesh and what its axes do, seconds to the first token,
    for each other one, and bytes.
    """
    table = new_table(
        "other ways on these devices", "of", "mesh", "strategy", ">sequences", ">first token", ">a token",
        ">tokens/s/device", ">peak",
    )  # fmt: skip
    for each, mesh, strategy, first_s, then_s, size in rows:
        rate = each.batch * each.new_tokens / (first_s + (each.new_tokens - 1) * then_s) / each.point.num_devices
        table.add_row(
            str(each.point), mesh, strategy, str(each.batch), format_time(first_s), format_time(then_s),
            format_count(rate), format_bytes(int(size)),
        )  # fmt: skip
    return table


def _strategy(each: TokenCandidate) -> str:
    return " ".join(each.point.strategy.values())


def draw_token_frontier(
    candidates: Sequence[TokenCandidate], frontier: Sequence[TokenCandidate], title: str, path: Path
) -> Path:
    """Every estimate that fits as a point of its batch's colour: milliseconds across, tokens a second and device up; on
    the left those of a token with the frontier, on the right those to the first token.

    Raises:
        AutoparError: no matplotlib, a kind of file that it does not write, a path that cannot be written.
    """
    figure, first = new_figure(12, 5)
    first.remove()
    panes: list[Any] = list(figure.subplots(1, 2, sharey=True))
    fits = [each for each in candidates if each.fits]
    batches = sorted({each.batch for each in fits})
    for pane, seconds, label in (
        (panes[0], "time_per_token_s", "a token, ms"),
        (panes[1], "time_to_first_token_s", "first token, ms"),
    ):
        for number, batch in enumerate(batches):
            own = [each for each in fits if each.batch == batch]
            pane.scatter(
                [1e3 * getattr(each, seconds) for each in own], [each.tokens_per_s_per_device for each in own],
                s=14, linewidths=0, color=_SIZES[number % len(_SIZES)], alpha=0.7,
                label=f"{batch} sequences" if batch > 1 else "1 sequence",
            )  # fmt: skip
        pane.scatter(
            [1e3 * getattr(each, seconds) for each in frontier], [each.tokens_per_s_per_device for each in frontier],
            s=46, facecolors="none", edgecolors="black", linewidths=0.9, label="on the frontier", zorder=3,
        )  # fmt: skip
        logarithmic(pane)
        pane.set_xlabel(label)
        for side in ("top", "right"):
            pane.spines[side].set_visible(False)
    panes[0].plot(
        [1e3 * each.time_per_token_s for each in frontier], [each.tokens_per_s_per_device for each in frontier],
        color="black", linewidth=1, drawstyle="steps-post", zorder=2,
    )  # fmt: skip
    for number in sorted({0, len(frontier) // 2, len(frontier) - 1}):
        each = frontier[number]
        place = (1e3 * each.time_per_token_s, each.tokens_per_s_per_device)
        panes[0].annotate(str(each.point), place, textcoords="offset points", xytext=(-6, 6), fontsize=8, ha="right")
    panes[0].set_ylabel("tokens/s a device, predicted")
    panes[0].set_title(title, fontsize=11, loc="left")
    panes[1].legend(fontsize=8, frameon=False, loc="upper left", bbox_to_anchor=(1.01, 1.0))
    return save_figure(figure, path)
