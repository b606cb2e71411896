r"""Prove model × mesh × schedule × microbatches in float64 by simulating all ranks; the matrix goes to
docs/coverage_pipelines.md.

    python benchmarks/proofs/pipelines.py [--models 'llama;gpt2'] [--meshes 'pp=2*'] [--schedules 'zb*'] [--jobs 2]

A cell is a whole step of the generated program under torch's schedule runtime: every action of every stage, for all
ranks in one process, beside the eager model: loss, outputs, every gradient, and their norm.
"""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Iterator, Sequence
from dataclasses import replace
from functools import lru_cache, partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar import pipeline
from autopar.api import proof
from autopar.api.promote import only
from autopar.api.small_model import small_model
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from autopar.passes.emit import emit
from autopar.strategies.names import parse, resolve
from autopar.strategies.pipelining.spec import AXIS, SCHEDULES, PipelineSpec
from autopar.strategies.request import Attempt
from benchmarks.proofs import matrix
from benchmarks.proofs.cells import DTYPE, Captured, Cell, caught, ignore_some_labels, judged, steps

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


def run(model: str, mesh: str, schedule: str, count: int) -> Cell:
    """Prove one cell; every error is caught and told."""
    return caught(lambda: _proven(model, mesh, schedule, count))


def _proven(model: str, mesh: str, schedule: str, count: int) -> Cell:
    placed_for, placed = _placed(model, mesh, count)
    request = replace(placed_for, pipeline=PipelineSpec(schedule))
    with only(DTYPE):
        program, _ = pipeline.run(request, steps("split_stages"), program=placed.program)
    source = emit(program, strategies=request.strategies)
    wanted = placed.expected(program, source) if MODELS[model] else _wanted(model, mesh, count)
    return judged(program, source, placed, wanted)


@lru_cache(maxsize=2)
def _placed(model: str, mesh: str, count: int) -> tuple[Attempt, Captured]:
    """A model in float64, its program placed on a mesh for some microbatches, and the request."""
    whole = Mesh.parse(mesh.split(" ")[0], hardware="cpu")
    layers = LAYERS // 2 if model == "t5" else LAYERS  # its encoder and decoder have as many each
    overrides = {"num_hidden_layers": layers, **({"num_layers": layers} if model == "t5" else {})}
    loaded = catalogue.load(
        model.split(" ")[0], tiny=True, device="cpu", dropout=MODELS[model], batch=(ROWS, TOKENS), overrides=overrides
    )
    given = dict(loaded.batch)
    ignore_some_labels(given)
    own, batch = small_model(loaded.model, given, DTYPE, 0)
    request = Attempt(
        own, batch, whole.without(AXIS), resolve(parse(MESHES[mesh]), whole), microbatches=count,
        pipeline=PipelineSpec("gpipe"),
    )  # fmt: skip
    with only(DTYPE):
        program, _ = pipeline.run(request, steps("capture", "split_stages"))
    return request, Captured.of(own, batch, program)


@lru_cache(maxsize=2)
def _wanted(model: str, mesh: str, count: int) -> proof.Expected:
    return _placed(model, mesh, count)[1].expected()


def cells(options: argparse.Namespace) -> Iterator[tuple[str, str, int]]:
    """Which captures are wanted: model, mesh, number of microbatches."""
    for model in MODELS:
        for mesh in MESHES:
            if matrix.matches(model, options.models) and matrix.matches(mesh, options.meshes):
                yield from ((model, mesh, count) for count in COUNTS)


def _run_all(model: str, mesh: str, count: int, schedules: Sequence[str]) -> dict[str, Cell]:
    return {f"{model} | {mesh} | {schedule} | {count}": run(model, mesh, schedule, count) for schedule in schedules}


def page(results: matrix.Results) -> str:
    """docs/coverage_pipelines.md."""
    notes: dict[str, int] = {}
    lines = [
        *matrix.opening("Pipelines that are proven equal to eager", results),
        "Written by `python benchmarks/proofs/pipelines.py` from `coverage_pipelines.json`. Tiny versions of the",
        f"models with {LAYERS} blocks, a batch of {ROWS} rows with different numbers of ignored labels, in 4 and 8",
        "microbatches. A cell is the largest relative error over the loss, every output, every gradient and the",
        "gradient norm, for each schedule as torch's own schedule runtime runs it. A number in brackets: not admitted,",
        "and the note is what the user is told.",
        "",
    ]
    columns = [(mesh, count) for mesh in MESHES for count in COUNTS]
    head = ["schedule", *(f"{mesh.replace(',', ', ')}, {count} microbatches" for mesh, count in columns)]
    for model in MODELS:
        if not any(key.startswith(f"{model} | ") for key in results):
            continue
        rows = {
            schedule: [
                matrix.shown(results.get(f"{model} | {mesh} | {schedule} | {count}"), notes) for mesh, count in columns
            ]
            for schedule in SCHEDULES
        }
        lines += matrix.table(model, head, rows)
    lines += ["## What the other axes do", "", *(f"- {mesh}: {named}" for mesh, named in MESHES.items()), ""]
    return "\n".join([*lines, *matrix.closing(notes)])


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", help="patterns, separated by ;")
    parser.add_argument("--meshes", help="patterns, separated by ;")
    parser.add_argument("--schedules", help="patterns, separated by ;")
    parser.add_argument("--jobs", type=int, default=1, help="processes")
    options = parser.parse_args()
    schedules = [name for name in SCHEDULES if matrix.matches(name, options.schedules)]
    groups = [partial(_run_all, *each, schedules) for each in cells(options)]
    matrix.run("coverage_pipelines", groups, options.jobs, page)


if __name__ == "__main__":
    main()
