r"""Draw plain modules and prove each: plan and verify under several strategies, in one process.

    python benchmarks/proofs/modules.py [--draws 1000] [--first 0] [--resume] [--shrink]

Each is the module of a seed (`drawn_modules.py`); seeds that give none are passed over. Every cell is `autopar.plan(…)`
and `plan.verify()`: loss, outputs, gradients and changed buffers of all ranks against eager, in float64. What came of
them is kept in benchmarks/results/modules.json, and the page beside it is written from that. `--shrink` looks for the
smallest part of a module that still fails in the same way, and prints it.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar import pipeline
from autopar.base.errors import AutoparError
from benchmarks.proofs.drawn_modules import Drawing, Made, drawn, made
from benchmarks.proofs.matrix import captured_once, matches, write_whole

CELLS = (("ddp", "dp=2"), ("zero3", "dp=2,tp=2"), ("auto", "dp=2,tp=2"), ("tensor", "tp=2"))
OTHERS = (("zero3", "dp=2"), ("ddp", "dp=2,tp=2"), ("auto", "dp=2,tp=2"), ("tensor", "tp=2"))
"""Of even and odd seeds."""
STATES = ("ok", "refused", "wrong", "crash")
WHOLE = "computed whole on every rank"
RESULTS = Path(__file__).parents[1] / "results"

Results = dict[str, dict[str, str]]
"""Of a seed and a cell: "ok", "ok: " and what the user is told, or the state and what was said."""


def cells_of(seed: int) -> Sequence[tuple[str, str]]:
    return OTHERS if seed % 2 else CELLS


def run(subject: Made, strategy: str, mesh: str, passes: Sequence[pipeline.Pass] = pipeline.DEFAULT) -> str:
    """What comes of one cell."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            devices = autopar.Mesh.parse(mesh, hardware="cpu")
            batch = dict(subject.batch)
            plan = autopar.plan(subject.model, devices, example_inputs=batch, strategy=strategy, passes=passes)
        except AutoparError as error:
            return f"refused: {_short(error)}"
        except Exception as error:  # a bug of ours
            return f"crash: plan: {type(error).__name__}: {_short(error)}"
        try:
            proof = plan.verify()
        except Exception as error:
            return f"crash: verify: {type(error).__name__}: {_short(error)}"
    if not proof.ok:
        return f"wrong: {proof.worst.name} differs by {proof.worst.error:.1e}"
    said = [str(each.message).splitlines()[0] for each in told if WHOLE in str(each.message)]
    return f"ok: {said[0]}" if said else "ok"


def _short(error: Exception) -> str:
    return " ".join(str(error).split())[:400]


def state_of(outcome: str) -> str:
    return outcome.partition(":")[0]


def shrunk(drawing: Drawing, strategy: str, mesh: str, outcome: str) -> Drawing:
    """The smallest part of a drawing that fails in the same way."""
    kind = ": ".join(outcome.split(": ")[: 3 if outcome.startswith("crash") else 1])
    again = True
    while again:
        again = False
        for smaller in drawing.smaller():
            subject = made(smaller)
            if subject is not None and run(subject, strategy, mesh).startswith(kind):
                drawing, again = smaller, True
                break
    return drawing


def page(results: Results, seconds: float) -> str:
    """benchmarks/results/modules.md."""
    columns = sorted({cell for row in results.values() for cell in row})
    told = {cell: sum(row.get(cell, "").startswith("ok:") for row in results.values()) for cell in columns}
    lines = [
        "# Plain modules that are drawn",
        "",
        f"{len(results)} modules, {time.strftime('%Y-%m-%d')}; {os.cpu_count()} cores, x86_64, Python "
        f"{sys.version.split()[0]}, torch {torch.__version__}, {seconds / 60:.0f} minutes of CPU time. Each is planned "
        "and proven: loss, outputs, gradients of all ranks against eager, in float64, for a batch of 8 rows.",
        "",
        "Told: ok, and the user is warned that an operator, or a weight, is computed whole on every rank.",
        "",
        f"| cell | run | {' | '.join(STATES)} | told |",
        "|---|--:" + "|--:" * (len(STATES) + 1) + "|",
    ]
    for cell in columns:
        count = Counter(state_of(row[cell]) for row in results.values() if cell in row)
        lines.append(f"| {cell} | {count.total()} | {' | '.join(str(count[s]) for s in STATES)} | {told[cell]} |")
    bad = [f"- {seed}, {cell}: {said}" for seed, row in results.items() for cell, said in row.items()
           if state_of(said) != "ok"]  # fmt: skip
    note = "Written by `benchmarks/proofs/modules.py`; a number is a seed of `drawn_modules.drawn`."
    return "\n".join([*lines, "", "## Not ok", "", *(bad or ["None."]), "", note, ""])


def text_of(results: Results, seconds: float) -> str:
    """JSON with a line for each module: one whose cells are alike has one for all."""
    lines = [f'"seconds": {seconds:.0f}']
    for seed, row in results.items():
        outcomes = set(row.values()) if set(row) == {" ".join(each) for each in cells_of(int(seed))} else set()
        lines.append(f"{json.dumps(seed)}: {json.dumps(outcomes.pop() if len(outcomes) == 1 else row)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> tuple[Results, float]:
    """What is kept, and how many seconds it took."""
    kept = json.loads(path.read_text()) if path.exists() else {}
    seconds = kept.pop("seconds", 0.0)
    cells = {seed: [" ".join(each) for each in cells_of(int(seed))] for seed in kept}
    return {
        seed: dict.fromkeys(cells[seed], row) if isinstance(row, str) else row for seed, row in kept.items()
    }, seconds


def main() -> int:
    """The command. Exit status 1 where something is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000, help="how many modules")
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--strategies", help="these alone, separated by semicolons")
    parser.add_argument("--json", type=Path, default=RESULTS / "modules.json", help="where outcomes are kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "modules.md", help="the page")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are done and ok")
    parser.add_argument("--shrink", action="store_true", help="show the smallest part of what fails")
    options = parser.parse_args()
    torch.set_num_threads(1)
    results, seconds = read(options.json) if options.resume else ({}, 0.0)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    subjects = itertools.islice(_subjects(options.first), options.draws)
    started = time.process_time() - seconds
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for seed, drawing, subject in progress.track(subjects, total=options.draws, description="modules"):
            row, passes = results.setdefault(str(seed), {}), captured_once()
            for strategy, mesh in cells_of(seed):
                kept = state_of(row.get(f"{strategy} {mesh}", "")) == "ok"
                if kept or not matches(strategy, options.strategies):
                    continue
                outcome = row[f"{strategy} {mesh}"] = run(subject, strategy, mesh, passes)
                if state_of(outcome) != "ok":
                    text = f"{seed}, {strategy} {mesh}: {outcome}"
                    if options.shrink:
                        text += f"\n    {shrunk(drawing, strategy, mesh, outcome)}"
                    console.print(text, markup=False, highlight=False, soft_wrap=True)
            if seed % 10 == 0:
                write_whole(options.json, text_of(results, time.process_time() - started))
    write_whole(options.json, text_of(results, time.process_time() - started))
    options.output.write_text(page(results, time.process_time() - started))
    count = Counter(state_of(outcome) for row in results.values() for outcome in row.values())
    console.print(f"{len(results)} modules: " + ", ".join(f"{count[state]} {state}" for state in STATES), markup=False)
    return 1 if count["wrong"] + count["crash"] else 0


def _subjects(first: int) -> Iterator[tuple[int, Drawing, Made]]:
    """Seeds that give a module, and what they give."""
    for seed in itertools.count(first):
        drawing = drawn(seed)
        subject = made(drawing)
        if subject is not None:
            yield seed, drawing, subject


if __name__ == "__main__":
    sys.exit(main())
