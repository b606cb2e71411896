r"""Draw configurations of the ten families that are used most and prove each: plan and verify, in one process.

    python benchmarks/proofs/configurations.py [--draws 300] [--first 0] [--resume]

A draw is the configuration of a seed (`drawn_configurations.py`) under one cell, families and cells in turn. What came
of them is kept in benchmarks/results/configurations.json, and the page beside it is written from that.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import time
from collections import Counter
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

import torch
from rich.console import Console

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.base.errors import AutoparError
from benchmarks.proofs.drawn_configurations import Drawn, drawn, made
from benchmarks.proofs.drawn_modules import Made
from benchmarks.proofs.matrix import write_whole
from benchmarks.proofs.modules import RESULTS, STATES, run, state_of

CELLS = (
    ("auto", "dp=2,tp=2"), ("zero3", "dp=2,tp=2"), ("tensor", "dp=2,tp=2"), ("ddp", "dp=2"),
    ("tensor+sequence", "tp=2"), ("auto", "dp=4"), ("zero3", "dp=4"),
)  # fmt: skip
"""Seven, so that each of ten families meets each."""

Results = dict[str, dict[str, object]]
"""A seed -> family, fields, cell, outcome, seconds of CPU time."""


def outcome_of(drawing: Drawn, strategy: str, mesh: str) -> str:
    """What comes of a configuration in a cell, as `modules.run` says it."""
    try:
        model, batch = made(*drawing)
    except AutoparError as error:
        return f"no model: {str(error).splitlines()[0]}"
    return run(Made(model, batch), strategy, mesh)


def page(results: Results) -> str:
    """benchmarks/results/configurations.md."""
    families = sorted({str(row["family"]) for row in results.values()})
    cells = [" ".join(each) for each in CELLS]
    count = Counter(state_of(str(row["outcome"])) for row in results.values())
    seconds = sum(float(str(row["seconds"])) for row in results.values())
    lines = [
        "# Configurations that are drawn",
        "",
        f"{len(results)} configurations of {len(families)} families, {time.strftime('%Y-%m-%d')}: "
        + ", ".join(f"{count[state]} {state}" for state in STATES)
        + f". Python {sys.version.split()[0]}, torch {torch.__version__}, {seconds / 60:.0f} minutes of CPU time. Each "
        "is planned and proven: loss, outputs, gradients of all ranks against eager, in float64.",
        "",
        "Cells: ok of those that were run.",
        "",
        f"| family | {' | '.join(cells)} |",
        "|---" + "|--:" * len(cells) + "|",
    ]
    for family in families:
        shown = []
        for cell in cells:
            own = [str(r["outcome"]) for r in results.values() if r["family"] == family and r["cell"] == cell]
            shown.append(f"{sum(state_of(each) == 'ok' for each in own)} of {len(own)}")
        lines.append(f"| {family} | {' | '.join(shown)} |")
    bad = [
        f"- {seed}, {row['family']}, {row['cell']}: {row['outcome']} ({json.dumps(row['fields'])})"
        for seed, row in results.items() if state_of(str(row["outcome"])) != "ok"
    ]  # fmt: skip
    return "\n".join([*lines, "", "## Not ok", "", *(bad or ["None."]), "",
                      "Written by `benchmarks/proofs/configurations.py`.", ""])  # fmt: skip


def main() -> int:
    """The command. Exit status 1 where something is wrong, crashed, or makes no model."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--draws", type=int, default=300)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--json", type=Path, default=RESULTS / "configurations.json", help="where outcomes are kept")
    parser.add_argument("--output", type=Path, default=RESULTS / "configurations.md", help="the page")
    parser.add_argument("--resume", action="store_true", help="keep what is done and ok")
    options = parser.parse_args()
    torch.set_num_threads(1)
    console = Console(stderr=True)
    results: Results = json.loads(options.json.read_text()) if options.resume and options.json.exists() else {}
    for seed in range(options.first, options.first + options.draws):
        if state_of(str(results.get(str(seed), {}).get("outcome", ""))) == "ok":
            continue
        (family, fields), (strategy, mesh) = drawing, cell = drawn(seed), CELLS[seed % len(CELLS)]
        started = time.process_time()
        outcome = outcome_of(drawing, *cell)
        row = {"family": family, "cell": f"{strategy} {mesh}", "outcome": outcome, "fields": dict(fields)}
        results[str(seed)] = {**row, "seconds": round(time.process_time() - started, 1)}
        if state_of(outcome) != "ok":
            text = f"{seed}, {family}, {strategy} {mesh}: {outcome} {json.dumps(row['fields'])}"
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        if seed % 5 == 0:
            write_whole(options.json, text_of(results))
    write_whole(options.json, text_of(results))
    options.output.write_text(page(results))
    count = Counter(state_of(str(row["outcome"])) for row in results.values())
    console.print(
        f"{len(results)} draws: " + ", ".join(f"{count[each]} {each}" for each in sorted(count)), markup=False
    )
    return 1 if sum(count.values()) > count["ok"] + count["refused"] else 0


def text_of(results: Results) -> str:
    """JSON with a line for each draw."""
    rows = sorted(results.items(), key=lambda item: int(item[0]))
    return "{\n" + ",\n".join(f"{json.dumps(seed)}: {json.dumps(row)}" for seed, row in rows) + "\n}\n"


if __name__ == "__main__":
    sys.exit(main())
