r"""Prove model × mesh × context strategy in float64, simulating all ranks; the matrix goes to docs/coverage_context.md.

    python -m benchmarks.context_coverage [--models 'llama;gpt2'] [--columns 'cp=4*'] [--jobs 2]

A cell is what `Plan.verify` proves: a whole step of the generated program for all ranks in one process beside the eager
model: loss, outputs, every gradient, and their norm.
"""

from __future__ import annotations

import argparse
import fnmatch
import json
import os
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import asdict, dataclass, replace
from functools import lru_cache
from multiprocessing import get_context
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console
from torch import nn

from autopar import interpret, pipeline, proof
from autopar.errors import AutoparError
from autopar.ir import Program
from autopar.mesh import Mesh
from autopar.models import catalogue
from autopar.passes.emit import emit
from autopar.promote import only
from autopar.strategies import parse, resolve
from benchmarks.cells import DTYPE, Cell

DOCS = Path(__file__).parent.parent / "docs"
ROWS, TOKENS, WINDOW = 4, 16, 6
LONG = (2, 256)
"""Rows and tokens where attention is most of the work, so that zigzag pays."""
MODELS = ("llama", "qwen3", "mistral", "gemma2", "gpt2", "gpt2 with dropout", "bert", "t5")
COLUMNS = {
    "cp=2": ("ulysses", "allgather_kv", "ring"),
    "cp=4": ("ulysses", "allgather_kv", "ring"),
    "dp=2,cp=2": (
        "ulysses", "allgather_kv", "ring", "dp=zero3,cp=ulysses", "dp=zero3,cp=allgather_kv", "dp=zero3,cp=ring"
    ),
    "cp=2,tp=2": (
        "tp=tensor,cp=ulysses", "tp=tensor,cp=allgather_kv", "tp=tensor,cp=ring",
        "tp=tensor+sequence,cp=ulysses", "tp=tensor+sequence,cp=allgather_kv", "tp=tensor+sequence,cp=ring",
    ),
    "tp=2,cp=2": ("tp=tensor,cp=ulysses",),
    "cp0=2,cp1=2,tp=2": ("tp=tensor,cp0=ring,cp1=ulysses",),
    "cp0=2,cp1=2": ("cp0=ring,cp1=ulysses", "cp0=allgather_kv,cp1=ulysses"),
    "cp=4 long": ("ulysses", "allgather_kv", "ring"),
    "dp=2,cp=2 long": ("allgather_kv", "ring"),
    "cp0=2,cp1=2 long": ("cp0=ring,cp1=ulysses",),
}  # fmt: skip
"""A mesh (and `long`) -> what is proven on it."""


@dataclass(frozen=True, slots=True)
class Made:
    """A model in float64 with a batch, its differentiated program, and what eager gives; None with dropout."""

    model: nn.Module
    batch: dict[str, Any]
    program: Program
    state: dict[str, torch.Tensor]
    inputs: dict[str, torch.Tensor]
    wanted: proof.Expected | None


def build(name: str, rows: int = ROWS, tokens: int = TOKENS) -> tuple[nn.Module, dict[str, Any]]:
    """A tiny model and its batch; windows are shorter than the batch's sequences."""
    if name != "mistral":
        dropout = 0.1 if name.endswith("dropout") else 0.0
        loaded = catalogue.load(name.split(" ")[0], tiny=True, device="cpu", dropout=dropout, batch=(rows, tokens))
        return loaded.model, dict(loaded.batch)
    from transformers import MistralConfig, MistralForCausalLM

    config = MistralConfig(
        vocab_size=128, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=4, max_position_embeddings=tokens, sliding_window=WINDOW,
    )  # fmt: skip
    ids = torch.randint(128, (rows, tokens), generator=torch.Generator().manual_seed(0))
    return MistralForCausalLM(config).train(), {"input_ids": ids, "labels": ids.clone()}


def run(model: str, mesh: str, strategy: str) -> Cell:
    """Prove one cell; every error is caught and told."""
    start = time.perf_counter()
    try:
        return replace(_proven(model, mesh, strategy), seconds=time.perf_counter() - start)
    except AutoparError as error:
        return Cell("refused", message=str(error), seconds=time.perf_counter() - start)
    except Exception as error:
        text = f"{type(error).__name__}: {str(error).strip()}"
        return Cell("failed", message=text[:2000], seconds=time.perf_counter() - start)


def lowered(model: str, mesh_text: str, strategy: str) -> tuple[Made, Program, str]:
    """The generated program of a cell."""
    mesh = Mesh.parse(mesh_text.split(" ")[0], hardware="cpu")
    strategies = resolve(parse(strategy), mesh)
    made = _made(model, *(LONG if mesh_text.endswith("long") else (ROWS, TOKENS)))
    request = pipeline.Request(made.model, made.batch, mesh, strategies)
    padded = pipeline.vocabulary_ranks(request)
    program = made.program
    with only(DTYPE):
        if padded > 1:
            program, _ = pipeline.run(request, _steps("capture", "spread_heads"))
        program, _ = pipeline.run(request, _steps("spread_heads"), program=program)
    return made, program, emit(program, strategies=strategies)


def _proven(model: str, mesh: str, strategy: str) -> Cell:
    made, program, source = lowered(model, mesh, strategy)
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
    message = (
        f"{len(bad)} of {len(rows)} tensors differ: {', '.join(bad[:6])}"
        if bad
        else "zigzag" * ("zigzag=True" in source)
    )
    events = max(len(each) for each in found.events)
    return Cell("failed" if bad else "ok", worst.error, worst.name, message, events)


def _steps(first: str, before: str | None = None) -> tuple[pipeline.Pass, ...]:
    names = [step.name for step in pipeline.DEFAULT]
    return pipeline.DEFAULT[names.index(first) : None if before is None else names.index(before)]


@lru_cache(maxsize=2)
def _made(name: str, rows: int, tokens: int) -> Made:
    given, batch = build(name, rows, tokens)
    model, batch = proof.small_model(given, batch, DTYPE, 0)
    mesh = Mesh({"dp": 1}, hardware="cpu")
    with only(DTYPE):
        request = pipeline.Request(model, batch, mesh, resolve("auto", mesh))
        program, _ = pipeline.run(request, _steps("capture", "spread_heads"))
    state, inputs = interpret.state_of(model, program), interpret.input_tensors(program, batch)
    drops = any(region.uses_dropout for region in program.regions)
    wanted = None if drops else proof.expected(program, model, batch, state, inputs, 0, DTYPE)
    return Made(model, batch, program, dict(state), dict(inputs), wanted)


def cells(options: argparse.Namespace) -> Iterator[tuple[str, list[tuple[str, str]]]]:
    """Which cells are wanted: of each model, meshes with strategies."""
    columns = [(mesh, strategy) for mesh, strategies in COLUMNS.items() for strategy in strategies]
    wanted = [each for each in columns if _wanted(f"{each[0]} {each[1]}", options.columns)]
    for model in MODELS:
        if _wanted(model, options.models):
            yield model, wanted


def _wanted(text: str, patterns: str | None) -> bool:
    return patterns is None or any(fnmatch.fnmatch(text, each.strip()) for each in patterns.split(";"))


def _run_all(model: str, columns: list[tuple[str, str]]) -> dict[str, Cell]:
    torch.set_num_threads(1)
    return {f"{model} | {mesh} | {strategy}": run(model, mesh, strategy) for mesh, strategy in columns}


def page(results: dict[str, dict[str, object]]) -> str:
    """docs/coverage_context.md."""
    ok, refused, failed = (sum(r["status"] == s for r in results.values()) for s in ("ok", "refused", "failed"))
    worst = max((float(r["error"]) for r in results.values() if r["status"] == "ok"), default=0.0)  # type: ignore[arg-type]
    notes: dict[str, int] = {}
    lines = [
        "# Context parallelism that is proven equal to eager",
        "",
        f"{ok} cells are equal to eager, {refused} are not admitted, {failed} failed. The largest error of a cell that",
        f"is equal is {worst:.1e}; 1e-9 is allowed. torch {torch.__version__}, float64, all ranks in one process.",
        "",
        "Written by `python -m benchmarks.context_coverage` from `coverage_context.json`. Tiny versions of models,",
        f"batches of {ROWS} rows of {TOKENS} tokens; windows of {WINDOW} tokens in mistral, and in every other layer",
        "of gemma2; bert and t5 with padding. A cell is the largest relative error over the loss, every output, every",
        f"gradient and the gradient norm. `long`: {LONG[0]} rows of {LONG[1]} tokens; `z`: the plan is zigzag.",
        "A number in brackets: not admitted, and the note is what the user is told.",
        "",
    ]
    for mesh, strategies in COLUMNS.items():
        lines += [f"## {mesh.replace(',', ', ')}", "", f"| model | {' | '.join(strategies)} |"]
        lines.append("|---" * (len(strategies) + 1) + "|")
        for model in MODELS:
            texts = [_text(results.get(f"{model} | {mesh} | {strategy}"), notes) for strategy in strategies]
            lines.append(f"| {model} | {' | '.join(texts)} |")
        lines.append("")
    lines += ["## Notes", "", *(f"{number}. {text}" for text, number in notes.items()), ""]
    return "\n".join(lines)


def _text(result: dict[str, object] | None, notes: dict[str, int]) -> str:
    if result is None:
        return ""
    if result["status"] == "ok":
        return f"{float(result['error']):.1e}{' z' * (result['message'] == 'zigzag')}"  # type: ignore[arg-type]
    number = notes.setdefault(str(result["message"]).replace("\n", " "), len(notes) + 1)
    return f"no [{number}](#notes)" if result["status"] == "refused" else f"**failed** [{number}](#notes)"


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="patterns, separated by ;")
    parser.add_argument("--columns", help="patterns of `MESH STRATEGY`, separated by ;")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    console, path = Console(), DOCS / "coverage_context.json"
    results = json.loads(path.read_text()) if path.exists() else {}
    with ProcessPoolExecutor(options.jobs, get_context("spawn")) as pool:
        futures = [pool.submit(_run_all, model, [column]) for model, columns in cells(options) for column in columns]
        for future in as_completed(futures):
            for key, cell in future.result().items():
                results[key] = asdict(cell)
                style = {"ok": "green", "refused": "yellow", "failed": "bold red"}[cell.status]
                told = f"{cell.error:.1e} {cell.message}" if cell.status == "ok" else cell.message[:200]
                console.print(f"{key}: {cell.status} {told} ({cell.seconds:.1f} s)", style=style, highlight=False)
            path.write_text(json.dumps(dict(sorted(results.items())), indent=1) + "\n")
    (DOCS / "coverage_context.md").write_text(page(results))
    counts = {status: sum(r["status"] == status for r in results.values()) for status in ("ok", "refused", "failed")}
    console.print(", ".join(f"{count} {status}" for status, count in counts.items()))


if __name__ == "__main__":
    main()
