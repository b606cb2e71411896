r"""Prove model × strategy × mesh in float64 by simulating all ranks, and write the matrix to docs/coverage.md.

    python benchmarks/proofs/models.py [--models 'llama;gpt2'] [--strategies 'zero*;auto'] [--meshes 'dp=2'] \
        [--jobs 2] [--resume]

Every cell's result and times are kept in docs/coverage.json, and the page is written from it; `--resume` runs only the
cells that are not there, or failed. A cell is what `benchmarks/proofs/cells.py` says.
"""

from __future__ import annotations

import argparse
import json
import os
import queue
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from concurrent.futures import Future, ProcessPoolExecutor
from dataclasses import asdict
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.strategies.names import parse
from benchmarks.proofs import matrix
from benchmarks.proofs.cells import Cell, Column, Subject, run
from benchmarks.proofs.matrix import DOCS, Results, matches

SUBJECTS = (
    Subject("llama", "llama"),
    Subject("gpt2, no dropout", "gpt2", 0.0),
    Subject("gpt2, dropout 0.1", "gpt2", 0.1),
    Subject("bert, no dropout", "bert", 0.0),
    Subject("bert, dropout 0.1", "bert", 0.1),
    Subject("qwen3", "qwen3-0.6b"),
    Subject("gemma2", "gemma2"),
    Subject("phi3", "phi3"),
    Subject("phi3, grouped heads", "phi-3-medium"),
    Subject("t5, no dropout", "t5", 0.0),
    Subject("t5, dropout 0.1", "t5", 0.1),
    Subject("t5-3b, heads wider than the hidden state", "t5-3b", 0.0),
    Subject("whisper", "whisper"),
    Subject("vit", "vit"),
    Subject("clip", "clip"),
    Subject("mlp", "mlp"),
    Subject("cnn", "cnn"),
    Subject("resnet", "resnet"),
)
_DATA = ("ddp", "zero1", "zero2", "zero3", "zero3+keep")
_TENSOR = ("tensor", "tensor+sequence")
_PRODUCTS = ("dp=zero1,tp=tensor", "dp=zero2,tp=tensor+sequence", "dp=zero3,tp=tensor", "dp=zero3,tp=tensor+sequence")
CASES: Mapping[Column, Sequence[str]] = {
    Column("dp=2"): (*_DATA, "hsdp", "tensor2d", "auto"),
    Column("tp=2"): _TENSOR,
    Column("tp=4"): (*_TENSOR, "auto"),
    Column("dp=2,tp=2"): (*_DATA, "hsdp", *_TENSOR, *_PRODUCTS, "auto"),
    Column("dp=2,cp=2"): ("hsdp", "tensor2d", "dp=zero2,cp=auto", "dp=zero3,cp=tensor+sequence"),
    Column("tp0=2,tp1=2"): (*_TENSOR, "tensor2d"),
    Column("dp=2,cp=2,tp=2"): ("zero3", "hsdp", *_PRODUCTS[1:3], "dp=zero2,cp=ddp,tp=tensor+sequence"),
    Column("dp=3", rows=9): ("ddp", "zero1", "zero3", "auto"),
    Column("dp=2", microbatches=4): ("ddp", "zero1", "zero3", "zero3+keep"),
    Column("dp=2,tp=2", microbatches=4): ("dp=zero2,tp=tensor+sequence", "dp=zero3,tp=tensor", "auto"),
}
"""Which strategies are proven where: what differs from another column by an axis's name alone is left out."""

WORDS = (
    ("batch", "a batch of "),
    ("two axes", "takes two axes"),
    ("sequence", "the sequence cannot split"),
    ("coupled", "does not follow from those of its microbatches"),
    ("heads", "heads cannot split"),
    ("no split", "cannot split over"),
    ("excluded", "cannot be carried out"),
)
"""A word for the cell, by what the error says."""


def key_of(subject: Subject, strategy: str, column: Column) -> str:
    return f"{subject.label} | {strategy} | {column.label}"


# --------------------------------------------------------------------------------------------------------- running


_channel: Any = None


def _begin(channel: Any) -> None:
    """In a worker: where its results go."""
    global _channel
    _channel = channel
    matrix.one_thread()


def _run_all(subject: Subject, todo: Sequence[tuple[str, Column]]) -> None:
    """All cells of one model, in a worker: they share its captures."""
    for strategy, column in todo:
        cell = run(subject, parse(strategy), column)
        _channel.put((key_of(subject, strategy, column), cell))


def _cells(todo: Mapping[Subject, Sequence[tuple[str, Column]]], jobs: int) -> Iterator[tuple[str, Cell]]:
    """Results as they come. A worker that dies ends the run with its error."""
    context = get_context("spawn")
    with context.Manager() as manager:
        channel = manager.Queue()
        with ProcessPoolExecutor(jobs, context, _begin, (channel,)) as pool:
            futures: list[Future[None]] = [pool.submit(_run_all, subject, cells) for subject, cells in todo.items()]
            while True:
                done = all(future.done() for future in futures)
                try:
                    yield channel.get(timeout=0.5)
                except queue.Empty:
                    if done:
                        break
            for future in futures:
                future.result()


def _selected(options: argparse.Namespace, known: Results) -> dict[Subject, list[tuple[str, Column]]]:
    chosen: dict[Subject, list[tuple[str, Column]]] = {}
    for subject in SUBJECTS:
        if not (matches(subject.name, options.models) or matches(subject.label, options.models)):
            continue
        for column, names in CASES.items():
            for name in names:
                before = known.get(key_of(subject, name, column), {}).get("status")
                done = options.resume and before in ("ok", "refused")
                if not done and matches(name, options.strategies) and matches(column.label, options.meshes):
                    chosen.setdefault(subject, []).append((name, column))
    return chosen


# -------------------------------------------------------------------------------------------------------- the page


def page(results: Results, versions: str) -> str:
    """docs/coverage.md."""
    ok, refused, failed, worst = matrix.tally(results)
    notes: dict[str, int] = {}
    tables = [line for subject in SUBJECTS for line in _table(subject, results, notes)]
    return "\n".join(
        [
            "# What is proven equal to eager",
            "",
            f"{ok} cells are equal to eager, {refused} are not admitted, {failed} failed.",
            f"The largest error of a cell that is equal is {worst:.1e}. {versions}",
            "",
            "Written by `python benchmarks/proofs/models.py` from `coverage.json`, which also has all times. Tiny",
            "versions of the models (`--tiny`), unmodified classes, all ranks simulated in one process in float64. A",
            "cell holds the largest relative error over the loss, every output, every gradient, the gradient norm and",
            "the buffers that forward changes; 1e-9 is allowed. Batches have 8 rows where nothing else is said. Parts",
            "are microbatches, of rows with different numbers of labels. Empty: another cell is the same but for an",
            "axis's name. A word with a number: the strategy does not admit it, and the note is what the user is told.",
            "",
            *tables,
            *matrix.closing(notes),
        ]
    )


def _table(subject: Subject, results: Results, notes: dict[str, int]) -> list[str]:
    names = list(dict.fromkeys(name for column in CASES.values() for name in column))
    if not any(key.startswith(f"{subject.label} | ") for key in results):
        return []
    columns = [column.label.replace(",", ", ").replace(",  ", ", ") for column in CASES]
    rows = {
        name.replace(",", ", "): [
            matrix.shown(results.get(key_of(subject, name, column)), notes, _word) for column in CASES
        ]
        for name in names
    }
    return matrix.table(subject.label, ["strategy", *columns], rows)


def _word(message: str) -> str:
    return next((word for word, mark in WORDS if mark in message), "no")


# --------------------------------------------------------------------------------------------------------- the script


def _versions() -> str:
    import torch
    import transformers

    import autopar

    python = ".".join(map(str, sys.version_info[:3]))
    torch_version = torch.__version__.split("+")[0]
    return (
        f"{time.strftime('%Y-%m-%d')}, autopar {autopar.__version__}, torch {torch_version}, "
        f"transformers {transformers.__version__}, Python {python}."
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="names or labels, with wildcards, separated by semicolons")
    parser.add_argument("--strategies", help="the same of strategies")
    parser.add_argument("--meshes", help="the same of columns")
    parser.add_argument("--jobs", type=int, default=1, help="processes; each takes whole models")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are done and did not fail")
    parser.add_argument("--output", type=Path, default=DOCS / "coverage.md", help="the page; the JSON lies beside it")
    options = parser.parse_args()
    kept = options.output.with_suffix(".json")
    results: Results = json.loads(kept.read_text())["cells"] if kept.exists() else {}
    todo = _selected(options, results)
    valid = {key_of(s, name, column) for s in SUBJECTS for column, names in CASES.items() for name in names}
    results = {key: value for key, value in results.items() if key in valid}
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    total = sum(len(cells) for cells in todo.values())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        task = progress.add_task("cells", total=total)
        for number, (key, cell) in enumerate(_cells(todo, options.jobs), 1):
            results[key] = asdict(cell)
            whole = f'{{"versions": {json.dumps(_versions())}, "cells": {matrix.in_lines(results)}}}\n'
            matrix.write_whole(kept, whole)
            line = f"{number}/{total} {key}: {cell.status} {cell.error:.1e} ({cell.seconds:.1f} s) {cell.message[:300]}"
            console.print(line, markup=False, highlight=False, soft_wrap=True)
            progress.advance(task)
    options.output.write_text(page(results, _versions()))
    failed = [key for key, result in results.items() if result["status"] == "failed"]
    console.print(f"{len(results)} cells, {len(failed)} failed", *failed, sep="\n", markup=False)
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
