"""Words, sizes and times as people read them, and the width of what is printed."""

from __future__ import annotations

import difflib
import io
import math
import re
from collections.abc import Iterable

from rich import box
from rich.console import Console, RenderableType
from rich.table import Table

WIDTH = 120
_CONTROL = re.compile("[\x00-\x08\x0b-\x1f\x7f-\x9f]")
"""What a terminal would obey: names of modules may hold it."""


def plain_text(tables: RenderableType) -> str:
    """What a rich console of 120 columns without colours shows, and a line's end."""
    stream = io.StringIO()
    console = Console(
        file=stream, width=WIDTH, color_system=None, force_terminal=False, highlight=False, emoji=False, markup=False
    )
    console.print(tables)
    text = _CONTROL.sub("\N{REPLACEMENT CHARACTER}", stream.getvalue())
    return "\n".join(line.rstrip() for line in text.splitlines()).rstrip() + "\n"


def did_you_mean(name: str, known: Iterable[str]) -> str:
    """`did you mean gpt2 or gpt2-xl? ` for the beginning of a remedy; empty where no known name is like it."""
    names = sorted(known)
    lower = {each.lower(): each for each in reversed(names)}
    close = [lower[each] for each in difflib.get_close_matches(name.lower(), lower, n=3, cutoff=0.6)]
    close += [each for each in names if name and each.lower().startswith(name.lower()) and each not in close]
    return f"did you mean {' or '.join(close[:3])}? " if close else ""


def format_bytes(num_bytes: float) -> str:
    """`0 B`, `512 B`, `1.50 KiB`, `53.1 GiB`: three digits and a binary unit."""
    size, unit = float(num_bytes), 0
    while size >= 1000 and unit < 5:
        size, unit = size / 1024, unit + 1
    text = f"{size:.0f}" if unit == 0 else _three_digits(size)
    return f"{text} {('B', 'KiB', 'MiB', 'GiB', 'TiB', 'PiB')[unit]}"


def format_time(seconds: float) -> str:
    """`12.3 µs`, `1.20 ms`, `2.50 s`: three digits."""
    if not math.isfinite(seconds) or seconds == 0:
        return f"{seconds:g} s"
    for scale, unit in ((1, "s"), (1e3, "ms"), (1e6, "µs")):
        if abs(seconds) * scale >= 0.9995:
            return f"{_three_digits(seconds * scale)} {unit}"
    return f"{_three_digits(seconds * 1e9)} ns"


def format_count(count: float) -> str:
    """`950`, `8.03 billion`."""
    for scale, unit in ((1e12, "trillion"), (1e9, "billion"), (1e6, "million")):
        if count >= scale:
            return f"{_three_digits(count / scale)} {unit}"
    return f"{count:.0f}"


def _three_digits(value: float) -> str:
    digits = max(0, 2 - math.floor(math.log10(abs(value)))) if value else 0
    return f"{value:.{digits}f}"


def new_table(title: str, *columns: str) -> Table:
    """Columns that begin with `>` hold numbers."""
    table = Table(
        title=title, title_justify="left", title_style="bold", box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False
    )
    for column in columns:
        right = column.startswith(">")
        table.add_column(column.removeprefix(">"), justify="right" if right else "left", overflow="fold")
    return table


def microbatches_text(runs: int, together: int = 1) -> str:
    """How often a step runs a program, and of what: `4 microbatches`, `2 pairs of microbatches`."""
    if together > 1:
        return plural(runs, "pair of microbatches", "pairs of microbatches")
    return plural(runs, "microbatch", "microbatches")


def plural(count: int, one: str, many: str) -> str:
    """`1 rank`, `2 ranks`."""
    return f"{count} {one if count == 1 else many}"
