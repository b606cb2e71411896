r"""Prove model × mesh × schedule × microbatches in float64 by simulating all ranks; the matrix goes to
docs/coverage_pipelines.md.

    python -m benchmarks.pipeline_coverage [--models 'llama;gpt2'] [--meshes 'pp=2*'] [--schedules 'zb*'] [--jobs 2]

A cell is a whole step of the generated program under torch's schedule runtime: every action of every stage, for all
ranks in one process, beside the eager model: loss, outputs, every gradient, and their norm.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console

from autopar import interpret, pipeline, proof
from autopar.errors import AutoparError
from autopar.ir import Program
from autopar.mesh import Mesh
from autopar.models import catalogue
from autopar.passes.emit import emit
from autopar.pipelining.spec import AXIS, SCHEDULES, PipelineSpec
from autopar.promote import only
from autopar.strategies import resolve
from benchmarks.cells import DTYPE, Cell, _ignore_some_labels

DOCS = Path(__file__).parent.parent / "docs"
ROWS, TOKENS, LAYERS = 16, 16, 8
MODELS = {"llama": None, "gpt2": 0.0, "gpt2 with dropout": 0.1, "t5": 0.0, "gemma2": None}
"""Name -> dropout, None for the model's own."""
MESHES = {
    "pp=2": "ddp",
    "pp=4": "ddp",
    "pp=2,dp=2": "dp=zero2",
    "pp=2,dp=2 zero3": "dp=zero3",
    "pp=2,tp=2": "tp=tensor+sequence",
    "pp=2,dp=2,tp=2": "dp=zero2,tp=tensor+sequence",
}
"""A mesh (and a word, where it stands twice) -> what its other axes do."""
COUNTS = (4, 8)


@dataclass(frozen=True, slots=True)
class Made:
    """A model placed on a mesh for some microbatches, lowered, and what eager gives."""

    request: pipeline.Request
    program: Program
    state: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    wanted: proof.Expected | None
    model: torch.nn.Module
    batch: dict[str, object]


def run(model: str, mesh: str, schedule: str, count: int) -> Cell:
    """Prove one cell; every error is caught and told."""
    start = time.perf_counter()
    try:
        return replace(_proven(model, mesh, schedule, count), seconds=time.perf_counter() - start)
    except AutoparError as error:
        return Cell("refused", message=str(error), seconds=time.perf_counter() - start)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()}"
        return Cell("failed", message=text[:2000], seconds=time.perf_counter() - start)


def _proven(model: str, mesh: str, schedule: str, count: int) -> Cell:
    made = _made(model, mesh, count)
    request = replace(made.request, pipeline=PipelineSpec(schedule))
    with only(DTYPE):
        program, _ = pipeline.run(request, _steps("split_stages"), program=made.program)
    source = emit(program, strategies=request.strategies)
    wanted = made.wanted
    if wanted is None:
        wanted = proof.expected(program, made.model, made.batch, made.state, made.inputs, 0, DTYPE, source)
    try:
        found = proof.run_all_ranks(program, source, made.state, made.inputs, 0)
    except AutoparError as error:  # of ranks that disagree
        return Cell("failed", message=str(error))
    rows = proof.compare(program, wanted, found, *proof.TOLERANCES[DTYPE], proof.NOISE[DTYPE])
    worst = max(rows, key=lambda row: row.error if row.error == row.error else float("inf"))
    bad = [row.name for row in rows if not row.ok]
    message = f"{len(bad)} of {len(rows)} tensors differ: {', '.join(bad[:6])}" if bad else ""
    events = max(len(each) for each in found.events)
    return Cell("failed" if bad else "ok", worst.error, worst.name, message, events)


def _steps(first: str, before: str | None = None) -> tuple[pipeline.Pass, ...]:
    names = [step.name for step in pipeline.DEFAULT]
    return pipeline.DEFAULT[names.index(first) : None if before is None else names.index(before)]


@lru_cache(maxsize=2)
def _made(model: str, mesh: str, count: int) -> Made:
    from autopar.strategies import parse

    whole = Mesh.parse(mesh.split(" ")[0], hardware="cpu")
    dropout = MODELS[model]
    layers = LAYERS // 2 if model == "t5" else LAYERS  # its encoder and decoder have as many each
    overrides = {"num_hidden_layers": layers, **({"num_layers": layers} if model == "t5" else {})}
    loaded = catalogue.load(
        model.split(" ")[0], tiny=True, device="cpu", dropout=dropout, batch=(ROWS, TOKENS), overrides=overrides
    )
    given = dict(loaded.batch)
    _ignore_some_labels(given)
    own, batch = proof.small_model(loaded.model, given, DTYPE, 0)
    request = pipeline.Request(
        own, batch, whole.without(AXIS), resolve(parse(MESHES[mesh]), whole), microbatches=count,
        pipeline=PipelineSpec("gpipe"),
    )  # fmt: skip
    with only(DTYPE):
        program, _ = pipeline.run(request, _steps("capture", "split_stages"))
    state, inputs = interpret.state_of(own, program), interpret.input_tensors(program, batch)
    wanted = None if dropout else proof.expected(program, own, batch, state, inputs, 0, DTYPE)
    return Made(request, program, state, inputs, wanted, own, batch)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Which captures are wanted: model, mesh, number of microbatches."""
    for model in MODELS:
        for mesh in MESHES:
            if _wanted(model, options.models) and _wanted(mesh, options.meshes):
                yield from ((model, mesh, count) for count in COUNTS)


def _wanted(text: str, patterns: str | None) -> bool:
    return patterns is None or any(fnmatch.fnmatch(text, each.strip()) for each in patterns.split(";"))


def _run_all(model: str, mesh: str, count: int, schedules: Sequence[str]) -> dict[str, Cell]:
    torch.set_num_threads(1)
    return {f"{model} | {mesh} | {schedule} | {count}": run(model, mesh, schedule, count) for schedule in schedules}


def page(results: dict[str, dict[str, object]]) -> str:
    """docs/coverage_pipelines.md."""
    ok, refused, failed = (sum(r["status"] == s for r in results.values()) for s in ("ok", "refused", "failed"))
    worst = max((float(r["error"]) for r in results.values() if r["status"] == "ok"), default=0.0)  # type: ignore[arg-type]
    notes: dict[str, int] = {}
    lines = [
        "# Pipelines that are proven equal to eager",
        "",
        f"{ok} cells are equal to eager, {refused} are not admitted, {failed} failed. The largest error of a cell that",
        f"is equal is {worst:.1e}; 1e-9 is allowed. torch {torch.__version__}, float64, all ranks in one process.",
        "",
        "Written by `python -m benchmarks.pipeline_coverage` from `coverage_pipelines.json`. Tiny versions of the",
        f"models with {LAYERS} blocks, a batch of {ROWS} rows with different numbers of ignored labels, in 4 and 8",
        "microbatches. A cell is the largest relative error over the loss, every output, every gradient and the",
        "gradient norm, for each schedule as torch's own schedule runtime runs it. A number in brackets: not admitted,",
        "and the note is what the user is told.",
        "",
    ]
    for model in MODELS:
        if not any(key.startswith(f"{model} | ") for key in results):
            continue
        columns = [(mesh, count) for mesh in MESHES for count in COUNTS]
        head = " | ".join(f"{mesh.replace(',', ', ')}, {count} microbatches" for mesh, count in columns)
        lines += [f"## {model}", "", f"| schedule | {head} |", "|---" * (len(columns) + 1) + "|"]
        for schedule in SCHEDULES:
            texts = [_text(results.get(f"{model} | {mesh} | {schedule} | {count}"), notes) for mesh, count in columns]
            lines.append(f"| {schedule} | {' | '.join(texts)} |")
        lines.append("")
    lines += ["## What the other axes do", "", *(f"- {mesh}: {named}" for mesh, named in MESHES.items()), ""]
    lines += ["## Notes", "", *(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


def _text(result: dict[str, object] | None, notes: dict[str, int]) -> str:
    if result is None:
        return ""
    if result["status"] == "ok":
        return f"{float(result['error']):.1e}"  # type: ignore[arg-type]
    number = notes.setdefault(str(result["message"]).replace("\n", " "), len(notes) + 1)
    return f"no [{number}](#notes)" if result["status"] == "refused" else f"**failed** [{number}](#notes)"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="patterns, separated by ;")
    parser.add_argument("--meshes", help="patterns, separated by ;")
    parser.add_argument("--schedules", help="patterns, separated by ;")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    console, path = Console(), DOCS / "coverage_pipelines.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    schedules = [name for name in SCHEDULES if _wanted(name, options.schedules)]
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(_run_all, *each, schedules) for each in cells(options)]
        for future in as_completed(futures):
            for key, cell in future.result().items():
                results[key] = asdict(cell)
                style = {"ok": "green", "refused": "yellow", "failed": "bold red"}[cell.status]
                told = f"{cell.error:.1e}" if cell.status == "ok" else cell.message[:200]
                console.print(f"{key}: {cell.status} {told} ({cell.seconds:.1f} s)", style=style, highlight=False)
            path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    (DOCS / "coverage_pipelines.md").write_text(page(results))
    counts = {status: sum(r["status"] == status for r in results.values()) for status in ("ok", "refused", "failed")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))


if __name__ == "__main__":
    main()
