r"""Draw plain modules and prove each: plan and verify under several strategies, in one process.

    python benchmarks/proofs/modules.py [--draws 1000] [--first 0] [--json FILE] [--resume] [--shrink] [--page]

Draw number n is the module of seed n (`drawn_modules.py`); seeds that give none are counted and left out. Every cell is
`autopar.plan(…)` and `plan.verify()`: loss, outputs, gradients and changed buffers of all ranks against eager, in
float64. `--shrink` looks for the smallest part of a module that still fails in the same way, and prints it.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.base.errors import AutoparError
from benchmarks.proofs.drawn_modules import Drawing, Made, drawn, made
from benchmarks.proofs.matrix import write_whole

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


def run(subject: Made, strategy: str, mesh: str) -> str:
    """What comes of one cell."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            hardware = autopar.Mesh.parse(mesh, hardware="cpu")
            plan = autopar.plan(subject.model, hardware, example_inputs=dict(subject.batch), strategy=strategy)
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


def page(results: Results, draws: int, seconds: float) -> str:
    """benchmarks/results/modules-DATE.md."""
    columns = sorted({cell for row in results.values() for cell in row})
    counts = {cell: Counter(state_of(row[cell]) for row in results.values() if cell in row) for cell in columns}
    told = {cell: sum(row.get(cell, "").startswith("ok:") for row in results.values()) for cell in columns}
    lines = [
        f"# Plain modules that were drawn, {time.strftime('%Y-%m-%d')}",
        "",
        f"{len(results)} modules of {draws} seeds, the others give none; {os.cpu_count()} cores, x86_64, Python "
        f"{sys.version.split()[0]}, torch {torch.__version__}, {seconds / 60:.0f} minutes of CPU time. Each is planned "
        "and proven: loss, outputs, gradients of all ranks against eager, in float64, for a batch of 8 rows.",
        "",
        "Told: ok, and the user is warned that an operator, or a weight, is computed whole on every rank.",
        "",
        f"| cell | run | {' | '.join(STATES)} | told |",
        "|---|--:" + "|--:" * (len(STATES) + 1) + "|",
    ]
    for cell in columns:
        row = counts[cell]
        lines.append(f"| {cell} | {row.total()} | {' | '.join(str(row[s]) for s in STATES)} | {told[cell]} |")
    lines += ["", "## Not ok", ""]
    bad = [f"- {seed}, {cell}: {said}" for seed, row in results.items() for cell, said in row.items()
           if state_of(said) != "ok"]  # fmt: skip
    return "\n".join([*lines, *(bad or ["None."]), "", "Written by `benchmarks/proofs/modules.py`.", ""])


def main() -> int:
    """The command. Exit status 1 where something is wrong or crashed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=1000)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seeds", help="these alone, separated by commas")
    parser.add_argument("--strategies", help="these alone, separated by commas")
    parser.add_argument("--rotate", action="store_true", help="one cell for each seed, in turn, instead of four")
    parser.add_argument("--json", type=Path, help="where outcomes are kept")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are done and ok")
    parser.add_argument("--shrink", action="store_true", help="show the smallest part of what fails")
    parser.add_argument("--page", action="store_true", help=f"write the page of today in {RESULTS.name}/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    kept: Mapping = json.loads(options.json.read_text()) if options.json and options.json.exists() else {}
    results: Results = dict(kept.get("results", {})) if options.resume else {}
    before = (kept.get("seconds", 0.0) if options.resume else 0.0) - time.process_time()
    seeds = range(options.first, options.first + options.draws)
    if options.seeds:
        seeds = [int(each) for each in options.seeds.split(",")]
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        for number, seed in enumerate(progress.track(seeds, description="modules"), 1):
            todo = [
                each for each in (cells_of(seed) if not options.rotate else cells_of(seed)[seed // 2 % 4 :][:1])
                if state_of(results.get(str(seed), {}).get(" ".join(each), "")) != "ok"
                and (not options.strategies or each[0] in options.strategies.split(","))
            ]  # fmt: skip
            drawing = drawn(seed)
            subject = made(drawing) if todo else None
            for strategy, mesh in todo if subject is not None else ():
                assert subject is not None
                outcome = run(subject, strategy, mesh)
                results.setdefault(str(seed), {})[f"{strategy} {mesh}"] = outcome
                if state_of(outcome) != "ok":
                    console.print(
                        f"{seed}, {strategy} {mesh}: {outcome}", markup=False, highlight=False, soft_wrap=True
                    )
                    if options.shrink:
                        smallest = shrunk(drawing, strategy, mesh, outcome)
                        console.print(f"    {smallest}", markup=False, highlight=False, soft_wrap=True)
            if options.json and (number % 10 == 0 or number == len(seeds)):
                text = json.dumps({"seconds": before + time.process_time(), "results": results}, indent=0)
                write_whole(options.json, text)
    count = Counter(state_of(outcome) for row in results.values() for outcome in row.values())
    console.print(f"{len(results)} modules: " + ", ".join(f"{count[state]} {state}" for state in STATES), markup=False)
    if options.page:
        path = RESULTS / f"modules-{time.strftime('%Y-%m-%d')}.md"
        path.write_text(page(results, len(seeds), before + time.process_time()))
    return 1 if count["wrong"] + count["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
