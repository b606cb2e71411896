"""The contest's problems in tables and pages: what iopddl.py found."""

from __future__ import annotations

import math
import os
import platform
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from datetime import date
from importlib import metadata
from pathlib import Path

from benchmarks import pages
from benchmarks.solver.iopddl_file import Contest

ROUNDING = 1e-9
"""Relative: what sums of float64 may be off by."""
UNKNOWN = Contest(None, None)
UNREADABLE = "cannot be read"


@dataclass(frozen=True, slots=True)
class Row:
    """One run. cost: what the file says, infinite without an answer. seconds: wall clock, reading not counted. rss_gib:
    the most that the process held.
    """

    instance: str
    time_limit_s: float
    status: str
    nodes: int = 0
    edges: int = 0
    cost: float = math.inf
    bound: float = -math.inf
    gap: float = math.inf
    seconds: float = 0.0
    rss_gib: float = 0.0

    @property
    def answered(self) -> bool:
        return self.status in ("optimal", "feasible")


def table(rows: Sequence[Row], contest: Mapping[str, Contest]) -> str:
    """A line for each instance, as Markdown: medians of its runs, and their range where they differ."""
    header = (
        "instance", "nodes", "edges", "cost", "bound", "gap", "best of the contest", "ratio", "seconds", "limit s",
        "GiB", "status",
    )  # fmt: skip
    lines = []
    for runs in _by_instance(rows):
        first, known = runs[0], contest.get(runs[0].instance, UNKNOWN).cost
        cells = (
            first.instance, f"{first.nodes:,}", f"{first.edges:,}", _spread([row.cost for row in runs], number),
            number(_median(row.bound for row in runs)), percent(_median(row.gap for row in runs)),
            "" if known is None else number(known), ratio_of(_median(row.cost for row in runs), known),
            _spread([row.seconds for row in runs], lambda s: f"{s:.1f}"), f"{first.time_limit_s:g}",
            f"{max(row.rss_gib for row in runs):.2f}", "; ".join(dict.fromkeys(row.status for row in runs)),
        )  # fmt: skip
        lines.append(cells)
    return pages.table(header, lines)


def outcome(rows: Sequence[Row], contest: Mapping[str, Contest]) -> str:
    """The table in a sentence or two."""
    runs = _by_instance(rows)
    answered = [each for each in runs if all(row.answered for row in each)]
    ratios: list[float] = []
    for each in answered:
        known = contest.get(each[0].instance, UNKNOWN).cost
        if known is not None and known > 0:
            ratios.append(_median(row.cost for row in each) / known)
    late = max((row.seconds - row.time_limit_s for row in rows), default=0.0)
    text = f"{len(answered)} of {len(runs)} instances answered."
    if late >= 0.05:
        text += f" The latest came {late:.1f} s after its limit."
    if not ratios or min(ratios) <= 0:
        return text
    level = sum(ratio <= 1 + ROUNDING for ratio in ratios)
    mean = math.exp(statistics.fmean(map(math.log, ratios)))
    return (
        f"{text} Cost against the best of the contest: geometric mean {mean:.5f}, at most {max(ratios):.5f}; "
        f"as low or lower on {level} of {len(ratios)}."
    )


def page(text: str, repeat: int) -> str:
    """The dated file."""
    runs = "1 run each" if repeat == 1 else f"{repeat} runs each, medians (range)"
    return (
        f"# Published assignment problems, {date.today()}\n\n{machine()}.\n\n"
        "Instances of the ASPLOS / EuroSys 2025 contest on intra-operator parallelism (github.com/google/iopddl), "
        "solved by `autopar.solver` alone (`python benchmarks/solver/iopddl.py FOLDER --write`). Seconds are wall "
        "clock from when the file was read, as the contest counts them; each run in a process of its own, one after "
        f"another; {runs}. Cost: added up from the file in whole numbers, its limit on memory checked at every time. "
        "Bound: proven, no answer costs less. Best of the contest: the lowest cost that any team reached, with 8 cores "
        "and 32 GB. GiB: the most that the process held, reading the file included.\n\n"
        f"{text}\n"
    )


def machine() -> str:
    """What it ran on: cores, processor, memory, versions."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count()
    information = Path("/proc/cpuinfo")
    lines = information.read_text().splitlines() if information.exists() else []
    models = [line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")]
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    versions = [f"Python {platform.python_version()}"]
    for name in ("numpy", "numba", "ortools"):
        try:
            versions.append(f"{name} {metadata.version(name)}")
        except metadata.PackageNotFoundError:
            continue
    return f"{cores} cores, {', '.join([*models[:1], platform.machine()])}, {memory:.0f} GiB; {', '.join(versions)}"


def _by_instance(rows: Sequence[Row]) -> list[list[Row]]:
    found: dict[str, list[Row]] = {}
    for row in rows:
        found.setdefault(row.instance, []).append(row)
    return list(found.values())


def _median(values: Iterable[float]) -> float:
    return statistics.median(values)


def _spread(values: Sequence[float], text: Callable[[float], str]) -> str:
    middle, least, most = text(_median(values)), text(min(values)), text(max(values))
    return middle if least == most else f"{middle} ({least}–{most})"


def gap_of(cost: float, bound: float) -> float:
    """Of the cost; infinite while there is no cost or no bound."""
    if not math.isfinite(cost) or bound == -math.inf:
        return math.inf
    if cost <= bound:
        return 0.0
    return (cost - bound) / abs(cost) if cost else math.inf


def number(value: float) -> str:
    if not math.isfinite(value):
        return "–"
    return f"{value:,.0f}" if abs(value) >= 1e4 or value == int(value) else f"{value:.6g}"


def percent(share: float) -> str:
    return f"{share:.3%}" if math.isfinite(share) else "–"


def ratio_of(cost: float, known: float | None) -> str:
    return f"{cost / known:.5f}" if known is not None and known > 0 and math.isfinite(cost) else ""
