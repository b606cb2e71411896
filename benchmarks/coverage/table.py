"""docs/architectures.md from the results of the sweep."""

from __future__ import annotations

from benchmarks.coverage.cells import Row


def page(rows: dict[str, Row]) -> str:
    return ""
