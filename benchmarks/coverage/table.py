"""docs/architectures.md from the results of the sweep."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Collection, Mapping

from benchmarks.coverage.cells import COLUMNS, STATES, Columns, Row
from benchmarks.pages import table

SLOWEST = 10
MIXTURES = re.compile(r"grouped_mm|experts")


def page(rows: Mapping[str, Row], versions: str) -> str:
    """The whole page. rows: by `task | kind of configuration | class`."""
    eager = {key: row for key, row in rows.items() if row.eager == "ok"}
    return "\n".join(
        [
            "# Architectures of transformers",
            "",
            f"{len(rows)} pairs of a task and an architecture were tried in tiny form, {len(eager)} run eagerly "
            f"({len({key.split(' | ')[1] for key in eager})} kinds of configurations, "
            f"{len({key.split(' | ')[0] for key in eager})} tasks).",
            f"{versions}",
            "",
            "Written by `python benchmarks/coverage/architectures.py --page` from",
            "`benchmarks/results/architectures.json`. Every cell is `autopar.plan` and `Plan.verify`: loss or",
            "outputs, every gradient and changed buffer of all ranks in one process beside eager, in float64 (float32",
            "where an operator of the model knows no other).",
            "A timeout says after how many CPU-seconds it was ended. An empty",
            "cell was not asked yet, or has nothing to ask: a pipeline needs blocks that repeat, a ring attention over",
            "one sequence. A number: the table below. `ok*`: the rows of the batch cannot be taken apart (contrastive",
            "losses, batch norm in training), so that the pipeline has one microbatch, as a note of the plan says.",
            "The last column: when a cell of the row was asked last; an empty one: before days were kept,",
            "on 2026-11-25 at the latest.",
            "",
            counts(eager.values(), COLUMNS),
            "",
            "## What is refused, and what fails",
            "",
            reasons(eager),
            "",
            "## The slowest",
            "",
            slowest(eager),
            "",
            "## All",
            "",
            every(eager, COLUMNS, ("task", "class")),
            "",
            "## Not eager",
            "",
            "No tiny configuration or batch was found that the model takes.",
            "",
            table(
                ["pair", "why"],
                [(_cell(key), _cell(row.eager)) for key, row in sorted(rows.items()) if row.eager != "ok"],
            ),
            "",
        ]
    )


def counts(rows: Collection[Row], columns: Columns) -> str:
    """How many cells of each column are in which state."""
    found = Counter((column, cell[0]) for row in rows for column, cell in row.cells.items())
    lines = []
    for column, (mesh, strategy) in columns.items():
        counts = [found[column, state] for state in STATES]
        alone = sum(1 for row in rows if row.cells.get(column, [""])[0] == "ok" and row.cells[column][2])
        told = strategy if isinstance(strategy, str) else ", ".join(f"{a}: {s}" for a, s in strategy.items())
        share = f"{100 * counts[0] / sum(counts):.0f}%" if sum(counts) else ""
        what = f"`{told}` on `{mesh}`" + f"; {alone} of the batch as one microbatch" * bool(alone)
        lines.append((column, what, sum(counts), *counts, share))
    return table(["column", "what", "cells", *STATES, "ok"], lines)


def reason(said: str) -> str:
    """What an error says, without the names and numbers of one model."""
    text = re.sub(r"\(.*$", "", said.split("\n")[0])
    text = re.sub(r"'[^']*'|\"[^\"]*\"|`[^`]*`", "…", text)
    text = re.sub(r"\b[A-Z]\w*(Model|For\w+|Encoder|Decoder|Backbone|Head)\w*\b", "The model", text)
    text = re.sub(r"\b[\w.*]+\.\d+[\w.*]*|\b\d[\d.e+-]*\b", "…", text)
    return text.strip()[:160]


def _numbered(rows: Mapping[str, Row]) -> dict[tuple[str, str], int]:
    found = Counter(
        (cell[0], reason(cell[2])) for row in rows.values() for cell in row.cells.values() if cell[0] != "ok"
    )
    return {key: number for number, (key, _) in enumerate(found.most_common(), 1)}


def reasons(rows: Mapping[str, Row]) -> str:
    """What is said of cells that are not ok, each reason once, numbered."""
    numbers = _numbered(rows)
    lines = []
    for (state, text), number in numbers.items():
        hits = [
            (key, column, cell[2])
            for key, row in sorted(rows.items())
            for column, cell in row.cells.items()
            if cell[0] == state and reason(cell[2]) == text
        ]
        columns = Counter(column for _, column, _ in hits)
        kinds = {key for key, _, _ in hits}
        where = ", ".join(f"{column} {count}" for column, count in columns.items())
        lines.append((number, state, len(kinds), where, _cell(hits[0][2][:240]), hits[0][0].split(" | ")[2]))
    return table(["", "", "pairs", "cells", "what is said to the first", "which is"], lines)


def slowest(rows: Mapping[str, Row]) -> str:
    """The cells that took the most CPU."""
    cells = [(cell[1], key, column, cell[0]) for key, row in rows.items() for column, cell in row.cells.items()]
    cells = sorted(cells, reverse=True)[:SLOWEST]
    return table(
        ["CPU-seconds", "pair", "column", ""], [(f"{s:.0f}", _cell(key), c, state) for s, key, c, state in cells]
    )


def every(rows: Mapping[str, Row], columns: Columns, heads: tuple[str, str]) -> str:
    """A row a model. heads: of what keys begin and end with."""
    numbers = _numbered(rows)
    lines = []
    for key, row in sorted(rows.items()):
        task, _, name = key.split(" | ")
        cells = [_shown(row.cells.get(column), numbers) for column in columns]
        lines.append((task, name + ", dropout" * row.dropout, f"{row.parameters / 1e3:.0f}", *cells, row.asked))
    return table([*heads, "thousand parameters", *columns, "asked"], lines)


def _shown(cell: list[object] | None, numbers: Mapping[tuple[str, str], int]) -> str:
    if cell is None:
        return ""
    if cell[0] == "ok":
        return "ok*" if cell[2] else "ok"
    number = numbers[str(cell[0]), reason(str(cell[2]))]
    return f"[{number}]" if cell[0] == "refused" else f"**{cell[0]}** [{number}]"


def _cell(text: str) -> str:
    return text.replace("|", "·").replace("\n", " ")
