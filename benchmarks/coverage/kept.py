"""Where the results of the sweep lie, and the slice of them that tests ask for again."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict
from hashlib import sha256
from pathlib import Path

from benchmarks.coverage.cells import Row
from benchmarks.coverage.discovery import Pair, pairs
from benchmarks.pages import RESULTS
from benchmarks.proofs.matrix import in_lines, write_whole

KEPT = RESULTS / "architectures.json"
SLICE = 40
"""Models of it, a cell each."""
SLICE_CELL_S = 6.0
"""CPU that a cell of it may have taken: all together stay under three minutes or so."""


def load(path: Path = KEPT) -> dict[str, Row]:
    """Results by the pairs' keys."""
    return {key: Row(**value) for key, value in json.loads(path.read_text()).items()} if path.exists() else {}


def save(rows: Mapping[str, Row], path: Path) -> None:
    write_whole(path, in_lines({key: asdict(row) for key, row in rows.items()}) + "\n")


def chosen(rows: Mapping[str, Row], version: str) -> list[tuple[Pair, str, str]]:
    """A pair, a column and what came of it, `SLICE` times: others with each version of autopar, of the classes that
    this version of transformers has.
    """
    found, there = [], {pair.key for pair in pairs()}
    for key, row in rows.items():
        if row.eager != "ok" or key not in there:
            continue
        quick = [
            c for c, (state, seconds, _) in row.cells.items() if state in ("ok", "refused") and seconds < SLICE_CELL_S
        ]
        if quick:
            column = min(quick, key=lambda column: sha256(f"{version}{key}{column}".encode()).digest())
            found.append((Pair.of(key), column, row.cells[column][0]))
    return sorted(found, key=lambda each: each[0].rank(version))[:SLICE]
