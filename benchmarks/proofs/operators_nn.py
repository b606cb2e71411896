r"""Plan and prove every layer, function and loss of torch.nn, and write the table to docs/operators.md.

    python benchmarks/proofs/operators_nn.py [--only 'MSELoss*;CTC*'] [--strategies 'ddp;zero*'] [--meshes 'dp=2'] \
        [--resume] [--json FILE] [--output FILE]

The rows are those of `operators_nn_layers.py`, `…_losses.py` and `…_reductions.py`, one tiny unmodified model each.
Every cell is `autopar.plan(…)` and `plan.verify()`: loss, outputs, gradients and changed buffers of all ranks against
eager, in float64. What came of each is kept in docs/operators.json, and the page is written from it; `--resume` runs
only the cells that are not there, or not ok.
"""

from __future__ import annotations

import argparse
import itertools
import json
import os
import sys
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
from autopar import pipeline
from autopar.base.errors import AutoparError
from benchmarks.proofs import operators_nn_layers, operators_nn_losses, operators_nn_reductions
from benchmarks.proofs.matrix import DOCS, captured_once, matches, write_whole
from benchmarks.proofs.operators_nn_cases import Case

STRATEGIES = ("ddp", "zero3", "auto")
MESHES = ("dp=2", "dp=2,tp=2")
COLUMNS = tuple(f"{strategy} {mesh}" for mesh, strategy in itertools.product(MESHES, STRATEGIES))
STATES = ("ok", "refused", "wrong", "crash")
GATHERS = "gathers"
"""The state of a cell that is ok, where an operator is computed whole on every rank, which the user is told."""

Results = dict[str, dict[str, str]]
"""Of a row and a column: "ok", or the state and what was said: "refused: mse_loss …"."""


def cases() -> list[Case]:
    """All rows."""
    kinds = (*operators_nn_layers.KINDS, *operators_nn_losses.KINDS, *operators_nn_reductions.KINDS)
    return [case for kind in kinds for case in kind()]


def run(case: Case, strategy: str, mesh: str, passes: Sequence[pipeline.Pass] = pipeline.DEFAULT) -> str:
    """What comes of one cell."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        try:
            torch.manual_seed(0)
            hardware = autopar.Mesh.parse(mesh, hardware="cpu")
            batch = case.batch()
            plan = autopar.plan(case.model(), hardware, example_inputs=batch, strategy=strategy, passes=passes)
        except AutoparError as error:
            return f"refused: {_first_line(error)}"
        except Exception as error:  # a bug of ours
            return f"crash: plan: {type(error).__name__}: {_first_line(error)}"
        try:
            proof = plan.verify()
        except Exception as error:
            return f"crash: verify: {type(error).__name__}: {_first_line(error)}"
    if not proof.ok:
        return f"wrong: {proof.worst.name} differs by {proof.worst.error:.1e}"
    gathered = [str(each.message) for each in told if "computed whole on every rank" in str(each.message)]
    return f"{GATHERS}: {gathered[0].splitlines()[0]}" if gathered else "ok"


def _first_line(error: Exception) -> str:
    lines = str(error).splitlines()
    return lines[0][:300] if lines else ""


def state_of(outcome: str) -> str:
    """One of STATES; a cell that gathers is ok."""
    state = outcome.partition(":")[0]
    return "ok" if state == GATHERS else state


# -------------------------------------------------------------------------------------------------------- the page


def page(results: Results, rows: Sequence[Case]) -> str:
    """docs/operators.md."""
    known = {case.name: results[case.name] for case in rows if case.name in results}
    outcomes = [outcome for row in known.values() for outcome in row.values()]
    count = Counter(map(state_of, outcomes))
    gathering = sum(any(each.startswith(GATHERS) for each in row.values()) for row in known.values())
    whole = sum(all(state_of(each) == "ok" for each in row.values()) for row in known.values())
    notes: dict[str, int] = {}
    table = [_row(name, row, notes) for name, row in sorted(known.items(), key=lambda item: item[0].lower())]
    return "\n".join(
        [
            "# Layers, functions and losses of torch.nn",
            "",
            f"{len(known)} settings of {len({case.of for case in rows if case.name in known})} layers, functions and "
            f"losses: {whole} work in every column that was run, {gathering} of them with an operator that is "
            f"computed whole on every rank. Of {len(outcomes)} cells "
            + ", ".join(f"{count[state]} {state}" for state in STATES)
            + ".",
            "",
            f"Written by `python benchmarks/proofs/operators_nn.py`; torch {torch.__version__.split('+')[0]}. A row is",
            "a tiny unmodified `nn.Module`: a linear layer, and what the row names. A cell is `autopar.plan` and",
            "`plan.verify`: the loss, the outputs, every gradient and changed buffer of all ranks against eager, in",
            "float64, for a batch of 8 rows.",
            "",
            "- **ok**: equal to eager. **gathers**: equal, and the user is warned that an operator needs all rows, so",
            "  that its operands are gathered and every rank computes it whole.",
            "- **refused**: an error that names what stands in the way. **wrong**, **crash**: a bug. Empty: not run.",
            "",
            f"| layer, function or loss | {' | '.join(COLUMNS)} |",
            "|---" * (len(COLUMNS) + 1) + "|",
            *table,
            "",
            "## Notes",
            "",
            *(f"{number}. {text}" for text, number in notes.items()),
            "",
        ]
    )


def _row(name: str, outcomes: Mapping[str, str], notes: dict[str, int]) -> str:
    cells = []
    for column in COLUMNS:
        state, _, said = outcomes.get(column, "").partition(": ")
        if said:
            number = notes.setdefault(said.replace("|", "\\|"), len(notes) + 1)
            state = f"{state} [{number}](#notes)"
        cells.append(state)
    return f"| {name} | {' | '.join(cells)} |"


def text_of(results: Results) -> str:
    """JSON with a line for each row: a row whose cells are alike has one for all."""
    lines = []
    for name in sorted(results):
        row = results[name]
        alike = set(row) == set(COLUMNS) and len(set(row.values())) == 1
        lines.append(f"{json.dumps(name)}: {json.dumps(next(iter(row.values())) if alike else row)}")
    return "{\n" + ",\n".join(lines) + "\n}\n"


def read(path: Path) -> Results:
    """What is kept."""
    if not path.exists():
        return {}
    kept = json.loads(path.read_text())
    return {name: dict.fromkeys(COLUMNS, row) if isinstance(row, str) else row for name, row in kept.items()}


# ------------------------------------------------------------------------------------------------------- the script


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of rows, with wildcards, separated by semicolons")
    parser.add_argument("--strategies", help="the same of strategies")
    parser.add_argument("--meshes", help="the same of meshes")
    parser.add_argument("--resume", action="store_true", help="keep the cells that are done and ok")
    parser.add_argument("--json", type=Path, default=DOCS / "operators.json", help="where outcomes are kept")
    parser.add_argument("--output", type=Path, default=DOCS / "operators.md", help="the page")
    options = parser.parse_args()
    rows, results = cases(), read(options.json)
    results = {case.name: results[case.name] for case in rows if case.name in results}
    todo = [
        (case, strategy, mesh)
        for case in rows
        for mesh, strategy in itertools.product(MESHES, STRATEGIES)
        if matches(case.name, options.only) and matches(strategy, options.strategies) and matches(mesh, options.meshes)
        if not (options.resume and state_of(results.get(case.name, {}).get(f"{strategy} {mesh}", "")) == "ok")
    ]
    torch.set_num_threads(1)
    console = Console(stderr=True)
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeElapsedColumn())
    with Progress(*columns, console=console, disable=not console.is_terminal) as progress:
        passes, last = pipeline.DEFAULT, None
        task = progress.add_task("cells", total=len(todo))
        for number, (case, strategy, mesh) in enumerate(todo, 1):
            if case is not last:
                passes, last = captured_once(), case
            outcome = run(case, strategy, mesh, passes)
            results.setdefault(case.name, {})[f"{strategy} {mesh}"] = outcome
            if outcome != "ok":
                line = f"{number}/{len(todo)} {case.name}, {strategy} {mesh}: {outcome}"
                console.print(line, markup=False, highlight=False, soft_wrap=True)
            if number % 50 == 0 or number == len(todo):
                write_whole(options.json, text_of(results))
            progress.advance(task)
    options.output.write_text(page(results, rows))
    count = Counter(state_of(outcome) for row in results.values() for outcome in row.values())
    console.print(f"{len(results)} rows: " + ", ".join(f"{count[state]} {state}" for state in STATES), markup=False)
    return 1 if count["wrong"] + count["crash"] else 0


if __name__ == "__main__":
    sys.exit(main())
