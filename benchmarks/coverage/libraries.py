r"""Models of other libraries in small form, planned and proven: the table docs/libraries.md.

    nice python benchmarks/coverage/libraries.py [--only 'timm*;*whisper*'] [--cells ddp,tensor] [--resume] [--page]

What the libraries' constructors make, with random weights and a batch (`others/`), first runs eagerly; every cell is
`autopar.plan(…)` and `plan.verify()`. The results lie in benchmarks/results/libraries.json, one line a model, written
after each. None of the libraries is needed by autopar: a model whose library is not installed is left out.
Install them beside it, so that its own packages stay: `pip install --no-deps --target FOLDER timm …`, and FOLDER on
PYTHONPATH.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Mapping
from functools import partial
from importlib import import_module
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

from benchmarks.coverage import cells, eager, table
from benchmarks.coverage.cells import Columns, Row, run
from benchmarks.coverage.kept import load, save
from benchmarks.coverage.others import entries
from benchmarks.coverage.others.entry import Entry
from benchmarks.pages import RESULTS
from benchmarks.proofs.matrix import DOCS, matches

KEPT = RESULTS / "libraries.json"
COLUMNS: Columns = {
    "ddp": ("dp=2", "ddp"),
    "tensor": ("tp=2", "tensor"),
    "zero3": ("dp=2", "zero3"),
    "auto": ("dp=2,tp=2", "auto"),
}
MODULES = {"open_clip_torch": "open_clip", "openai-whisper": "whisper"}
"""Of a package, where it is not its name."""


def subject(entry: Entry) -> eager.Subject:
    """The model and its batch, which ran eagerly."""
    torch.manual_seed(0)
    model, batch = entry.make()
    dropout = any(isinstance(m, torch.nn.Dropout) and m.p > 0 for m in model.modules())
    loss = eager.run_any(model, batch)
    size = sum(p.numel() for p in model.parameters())
    return eager.Subject(model, batch, size, loss, False, False, "", dropout)


def _installed(library: str) -> str:
    """Its version, or nothing."""
    try:
        return version(library)
    except PackageNotFoundError:
        return ""


def _versions(rows: Mapping[str, Row]) -> str:
    import autopar

    names = sorted({key.split(" | ")[0] for key in rows})
    told = ", ".join(f"{name} {_installed(name)}" for name in ("torch", *names) if _installed(name))
    return f"{time.strftime('%Y-%m-%d')}, autopar {autopar.__version__}, {told}.".replace("+cpu", "")


def page(rows: Mapping[str, Row], versions: str) -> str:
    """docs/libraries.md."""
    ran = {key: row for key, row in rows.items() if row.eager == "ok"}
    libraries = {key.split(" | ")[0] for key in ran}
    return "\n".join(
        [
            "# Models of other libraries",
            "",
            f"{len(ran)} models of {len(libraries)} libraries and of scripts, as their constructors make them, small,",
            "with random weights. Every cell is `autopar.plan` and `Plan.verify`: loss or outputs, every gradient and",
            "changed buffer of all ranks in one process beside eager, in float64.",
            versions,
            "",
            "Written by `python benchmarks/coverage/libraries.py --page` from `benchmarks/results/libraries.json`.",
            "A number in brackets: the table below.",
            "",
            table.counts(ran.values(), COLUMNS),
            "",
            "## What is refused, and what fails",
            "",
            table.reasons(ran),
            "",
            "## The slowest",
            "",
            table.slowest(ran),
            "",
            "## All",
            "",
            table.every(ran, COLUMNS, ("library", "model")),
            "",
        ]
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="patterns of `library | family | name`, separated by semicolons")
    parser.add_argument("--cells", default=",".join(COLUMNS), help="columns, separated by commas")
    cells.add_options(parser, KEPT, "docs/libraries.md")
    options = parser.parse_args()
    rows = load(options.json)
    if options.page:
        (DOCS / "libraries.md").write_text(page(rows, _versions(rows)))
        return 0
    torch.set_num_threads(1)
    columns = [column for column in COLUMNS if column in options.cells.split(",")]
    wanted = options.states.split(",") if options.states else None
    chosen = [e for e in entries() if matches(e.key, options.only) and (not e.package or _installed(e.package))]
    for library in {entry.package for entry in chosen} - {""}:
        import_module(MODULES.get(library, library.replace("-", "_")))  # so that forks begin at once
    for number, entry in enumerate(chosen, 1):
        row = rows.get(entry.key, Row())
        todo = columns
        if wanted is not None:
            todo = [c for c in columns if row.cells.get(c, [""])[0] in wanted]
        elif options.resume:
            todo = [c for c in columns if c not in row.cells and row.eager in ("", "ok")]
        if not todo and row.eager:
            continue
        began = time.monotonic()
        row.eager = ""
        row = run(partial(subject, entry), todo, row, options.cpu, COLUMNS)
        row.asked = time.strftime("%Y-%m-%d")
        # What another run wrote meanwhile stays.
        rows = load(options.json) | {entry.key: row}
        save(rows, options.json)
        told = ", ".join(f"{c} {row.cells[c][0]} {row.cells[c][1]}s" for c in todo if c in row.cells) or row.eager
        print(f"{number}/{len(chosen)} {entry.key}: {told} ({time.monotonic() - began:.0f} s)", flush=True)
    return 0


if __name__ == "__main__":
    sys.exit(main())
