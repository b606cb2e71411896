"""What the matrices of proven cells share: which cells are wanted, how they are run, kept in docs/, and shown."""

from __future__ import annotations

import fnmatch
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any

import torch
from rich.console import Console

from autopar import pipeline
from autopar.ir.program import Program
from autopar.strategies.request import Attempt
from benchmarks.proofs.cells import Cell

DOCS = Path(__file__).parents[2] / "docs"

Results = dict[str, dict[str, Any]]
"""A cell's key -> the fields of `Cell`."""


def matches(text: str, patterns: str | None) -> bool:
    """Whether one of the patterns, which semicolons separate, matches; None: all do."""
    return patterns is None or any(fnmatch.fnmatch(text, each.strip()) for each in patterns.split(";"))


# --------------------------------------------------------------------------------------------------------- running


def run(name: str, groups: Iterable[Callable[[], dict[str, Cell]]], jobs: int, page: Callable[[Results], str]) -> None:
    """Run groups of cells in `jobs` processes; docs/`name`.json grows with each group, docs/`name`.md follows."""
    console, path = Console(), DOCS / f"{name}.json"
    results: Results = json.loads(path.read_text()) if path.exists() else {}
    with ProcessPoolExecutor(jobs, get_context("spawn"), one_thread) as pool:
        for future in as_completed([pool.submit(group) for group in groups]):
            for key, cell in future.result().items():
                results[key] = asdict(cell)
                style = {"ok": "green", "refused": "yellow", "failed": "bold red"}[cell.status]
                told = f"{cell.error:.1e} {cell.message}".strip() if cell.status == "ok" else cell.message[:200]
                console.print(f"{key}: {cell.status} {told} ({cell.seconds:.1f} s)", style=style, highlight=False)
            write_whole(path, f"{in_lines(results)}\n")
    (DOCS / f"{name}.md").write_text(page(results))
    ok, refused, failed, _ = tally(results)
    console.print(f"{ok} ok, {refused} refused, {failed} failed")


def one_thread() -> None:
    """In a worker, before its first cell."""
    torch.set_num_threads(1)


def in_lines(results: Results) -> str:
    """JSON with a line for each cell."""
    lines = ",\n".join(f"{json.dumps(key)}: {json.dumps(results[key])}" for key in sorted(results))
    return f"{{\n{lines}\n}}"


def write_whole(path: Path, text: str) -> None:
    """All at once, so that an interrupted run leaves a whole file."""
    temporary = path.with_suffix(".part")
    temporary.write_text(text)
    temporary.replace(path)


# -------------------------------------------------------------------------------------------------------- the page


def tally(results: Results) -> tuple[int, int, int, float]:
    """How many cells are ok, refused and failed, and the largest error of one that is ok."""
    ok, refused, failed = (sum(r["status"] == s for r in results.values()) for s in ("ok", "refused", "failed"))
    return ok, refused, failed, max((r["error"] for r in results.values() if r["status"] == "ok"), default=0.0)


def opening(title: str, results: Results) -> list[str]:
    """The title, and the numbers of cells."""
    ok, refused, failed, worst = tally(results)
    return [
        f"# {title}",
        "",
        f"{ok} cells are equal to eager, {refused} are not admitted, {failed} failed. The largest error of a cell that",
        f"is equal is {worst:.1e}; 1e-9 is allowed. torch {torch.__version__}, float64, all ranks in one process.",
        "",
    ]


def table(title: str, columns: Sequence[str], rows: Mapping[str, Sequence[str]]) -> list[str]:
    """A section with a table; the first of `columns` is that of the rows' names."""
    head = [f"## {title}", "", f"| {' | '.join(columns)} |", "|---" * len(columns) + "|"]
    return [*head, *(f"| {name} | {' | '.join(cells)} |" for name, cells in rows.items()), ""]


def shown(result: Mapping[str, Any] | None, notes: dict[str, int], word: Callable[[str], str] | str = "no") -> str:
    """A cell's text: its error, or the number of a note, which is added. word: of a refusal, or by its message."""
    if result is None:
        return ""
    if result["status"] == "ok":
        return f"{result['error']:.1e}"
    message = result["message"]
    number = notes.setdefault(message.replace("\n", " "), len(notes) + 1)
    refusal = word if isinstance(word, str) else word(message)
    return f"{refusal if result['status'] == 'refused' else '**failed**'} [{number}](#notes)"


def closing(notes: Mapping[str, int]) -> list[str]:
    """The notes."""
    return ["## Notes", "", *(f"{number}. {text}" for text, number in notes.items()), ""]


def captured_once() -> tuple[pipeline.Pass, ...]:
    """autopar's passes, for many plans and proofs of one model and batch: each is captured once, which is most of their
    time.
    """
    capture, kept = pipeline.DEFAULT[0], dict[torch.dtype, Program]()

    def once(program: None, request: Attempt) -> Program:
        dtype = next(request.model.parameters()).dtype
        if dtype not in kept:
            kept[dtype] = capture.apply(program, request)
        return replace(kept[dtype], share=None)

    return (pipeline.Pass("capture", once), *pipeline.DEFAULT[1:])
