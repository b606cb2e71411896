r"""Prove model × mesh × context strategy in float64, simulating all ranks; the matrix goes to docs/coverage_context.md.

    python benchmarks/proofs/contexts.py [--models 'llama;gpt2'] [--columns 'cp=4*'] [--jobs 2]

A cell is what `Plan.verify` proves: a whole step of the generated program for all ranks in one process beside the eager
model: loss, outputs, every gradient, and their norm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch
from torch import nn

from autopar import pipeline
from autopar.api import proof
from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.passes.emit import emit
from autopar.strategies.names import parse, resolve
from autopar.strategies.request import Attempt
from benchmarks.proofs import matrix
from benchmarks.proofs.cells import DTYPE, Captured, Cell, caught, judged, steps

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
    return caught(lambda: _proven(model, mesh, strategy))


def lowered(model: str, mesh_text: str, strategy: str) -> tuple[Captured, Program, str]:
    """The generated program of a cell."""
    mesh = Mesh.parse(mesh_text.split(" ")[0], hardware="cpu")
    strategies = resolve(parse(strategy), mesh)
    made = _made(*_key(model, mesh_text))
    request = Attempt(made.model, made.batch, mesh, strategies)
    padded = pipeline.vocabulary_ranks(request)
    program = made.program
    with only(DTYPE):
        if padded > 1:
            program, _ = pipeline.run(request, steps("capture", "spread_heads"))
        program, _ = pipeline.run(request, steps("spread_heads"), program=program)
    return made, program, emit(program, strategies=strategies)


def _proven(model: str, mesh: str, strategy: str) -> Cell:
    made, program, source = lowered(model, mesh, strategy)
    drops = any(region.uses_dropout for region in made.program.regions)
    wanted = made.expected(program, source) if drops else _wanted(*_key(model, mesh))
    cell = judged(program, source, made, wanted)
    return replace(cell, message="zigzag") if cell.status == "ok" and "zigzag=True" in source else cell


def _key(model: str, mesh: str) -> tuple[str, int, int]:
    rows, tokens = LONG if mesh.endswith("long") else (ROWS, TOKENS)
    return model, rows, tokens


@lru_cache(maxsize=2)
def _made(name: str, rows: int, tokens: int) -> Captured:
    """The model in float64 and its differentiated program."""
    model, batch = small_model(*build(name, rows, tokens), DTYPE, 0)
    mesh = Mesh({"dp": 1}, hardware="cpu")
    with only(DTYPE):
        request = Attempt(model, batch, mesh, resolve("auto", mesh))
        program, _ = pipeline.run(request, steps("capture", "spread_heads"))
    return Captured.of(model, batch, program)


@lru_cache(maxsize=2)
def _wanted(name: str, rows: int, tokens: int) -> proof.Expected:
    return _made(name, rows, tokens).expected()


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, str]]:
    """Which cells are wanted: model, mesh, strategy."""
    for model in MODELS:
        for mesh, strategies in COLUMNS.items():
            for strategy in strategies:
                if matrix.matches(model, options.models) and matrix.matches(f"{mesh} {strategy}", options.columns):
                    yield model, mesh, strategy


def _run_one(model: str, mesh: str, strategy: str) -> dict[str, Cell]:
    return {f"{model} | {mesh} | {strategy}": run(model, mesh, strategy)}


def page(results: matrix.Results) -> str:
    """docs/coverage_context.md."""
    notes: dict[str, int] = {}
    lines = [
        *matrix.opening("Context parallelism that is proven equal to eager", results),
        "Written by `python benchmarks/proofs/contexts.py` from `coverage_context.json`. Tiny versions of models,",
        f"batches of {ROWS} rows of {TOKENS} tokens; windows of {WINDOW} tokens in mistral, and in every other layer",
        "of gemma2; bert and t5 with padding. A cell is the largest relative error over the loss, every output, every",
        f"gradient and the gradient norm. `long`: {LONG[0]} rows of {LONG[1]} tokens; `z`: the plan is zigzag.",
        "A number in brackets: not admitted, and the note is what the user is told.",
        "",
    ]
    for mesh, strategies in COLUMNS.items():
        rows = {
            model: [_text(results.get(f"{model} | {mesh} | {strategy}"), notes) for strategy in strategies]
            for model in MODELS
        }
        lines += matrix.table(mesh.replace(",", ", "), ["model", *strategies], rows)
    return "\n".join([*lines, *matrix.closing(notes)])


def _text(result: dict[str, Any] | None, notes: dict[str, int]) -> str:
    return matrix.shown(result, notes) + " z" * (result is not None and result["message"] == "zigzag")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="patterns, separated by ;")
    parser.add_argument("--columns", help="patterns of `MESH STRATEGY`, separated by ;")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    groups = [partial(_run_one, *cell) for cell in cells(options)]
    matrix.run("coverage_context", groups, options.jobs, page)


if __name__ == "__main__":
    main()
