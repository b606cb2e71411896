"""What the benchmarks' pages of results share: tables, the machine, dated files, rows that a later run goes on from."""

from __future__ import annotations

import argparse
import json
import os
import platform
from collections.abc import Iterable, Sequence
from dataclasses import asdict
from datetime import date
from importlib.metadata import version
from pathlib import Path
from typing import Any

RESULTS = Path(__file__).parent / "results"


def table(header: Sequence[str], rows: Iterable[Sequence[object]]) -> str:
    """A Markdown table."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in lines)


def machine() -> str:
    """Cores and versions, for the head of a page."""
    versions = f"Python {platform.python_version()}, torch {version('torch')}"
    return f"{os.cpu_count()} cores, {platform.machine()}, {versions}"


def below(notes: Iterable[str]) -> str:
    """What numbers in brackets stand for, beneath a table."""
    return "".join(f"\n[{number}] {note}\n" for number, note in enumerate(notes, 1))


def of_cells(description: str | None, strategies: Iterable[str]) -> argparse.ArgumentParser:
    """The options of a script that fills a table of models and strategies, cell by cell."""
    parser = argparse.ArgumentParser(description=description, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="names, split by commas; all by default")
    parser.add_argument("--strategies", default=",".join(strategies), help="split by commas")
    parser.add_argument("--json", type=Path, help="a file from which a later run goes on")
    parser.add_argument("--write", action="store_true", help="write the page")
    return parser


def write(name: str, text: str) -> Path:
    """A dated page under benchmarks/results."""
    path = RESULTS / f"{name}-{date.today()}.md"
    path.write_text(text, encoding="utf-8")
    return path


def kept(path: Path | None) -> list[dict[str, Any]]:
    """The rows that earlier runs left in a file, as data."""
    if path is None or not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def keep(path: Path | None, row: Any) -> None:
    """Add a row, a dataclass or data, to the file as one JSON line; without a file nothing is kept."""
    if path is not None:
        data = row if isinstance(row, dict) else asdict(row)
        with path.open("a", encoding="utf-8") as file:
            file.write(json.dumps(data, ensure_ascii=False) + "\n")
