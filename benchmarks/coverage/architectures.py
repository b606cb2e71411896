r"""Every architecture of transformers in tiny form, planned and proven: the table docs/architectures.md.

    nice python benchmarks/coverage/architectures.py [--only 'causal | *;*bert*'] [--task causal] [--cells ddp,auto] \
        [--sample 100] [--resume] [--first]

A pair is a task and a class that serves it (`discovery.py`); its tiny configuration comes from `shrinking.py`, its
batch from `inputs.py`, and it first runs eagerly. Every cell is `autopar.plan(…)` and `plan.verify()`. The results lie
in benchmarks/results/architectures.json, one line a pair, written after each; `--resume` runs what is not there.
`--sample N` takes the N pairs that come first by digest, `--first` each kind of configuration once.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from functools import partial
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks.coverage import cells, discovery, eager, sources, table
from benchmarks.coverage.cells import COLUMNS, Row, run
from benchmarks.coverage.discovery import Pair
from benchmarks.coverage.kept import KEPT, load, save
from benchmarks.proofs.matrix import DOCS, matches


def _chosen(options: argparse.Namespace) -> list[Pair]:
    every = tuple(p for p in discovery.pairs() if matches(p.key, options.only) and matches(p.task, options.task))
    if options.sample:
        every = tuple(sorted(every, key=Pair.rank)[: options.sample])
    ordered = discovery.in_order(every)
    if options.first:
        kinds: dict[str, Pair] = {}
        for pair in ordered:
            kinds.setdefault(pair.model_type, pair)
        return list(kinds.values())
    return list(ordered)


def _prepare() -> None:
    """Load all that a cell needs, so that forks begin at once."""
    import torch
    import transformers

    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()


def _versions() -> str:
    import torch
    import transformers

    import autopar

    versions = f"torch {torch.__version__.split('+')[0]}, transformers {transformers.__version__}"
    return f"{time.strftime('%Y-%m-%d')}, autopar {autopar.__version__}, {versions}."


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="patterns of `task | model type | class`, separated by semicolons")
    parser.add_argument("--task", help="patterns of tasks")
    parser.add_argument("--cells", default=",".join(COLUMNS), help="columns, separated by commas; none: eager alone")
    parser.add_argument("--sample", type=int, help="how many pairs")
    parser.add_argument("--first", action="store_true", help="one pair of each kind of configuration")
    cells.add_options(parser, KEPT, "docs/architectures.md")
    options = parser.parse_args()
    rows = load(options.json)
    if options.page:
        (DOCS / "architectures.md").write_text(table.page(rows, _versions()))
        sources.write()
        return 0
    columns = [column for column in COLUMNS if column in options.cells.split(",")]
    wanted = options.states.split(",") if options.states else None
    _prepare()
    chosen = _chosen(options)
    for number, pair in enumerate(chosen, 1):
        row = rows.get(pair.key, Row())
        if wanted is not None:
            todo = [c for c in columns if row.cells.get(c, [""])[0] in wanted]
        elif options.resume:
            todo = [
                c
                for c in columns
                if c not in row.cells and row.eager in ("", "ok") and (not row.eager or row.admits(c))
            ]
        else:
            todo = columns
        if not todo and row.eager:
            continue
        began = time.monotonic()
        # What another run wrote meanwhile stays.
        row = run(partial(eager.subject, pair), todo, row, options.cpu)
        row.asked = time.strftime("%Y-%m-%d")
        rows = load(options.json) | {pair.key: row}
        save(rows, options.json)
        told = ", ".join(f"{c} {row.cells[c][0]} {row.cells[c][1]}s" for c in todo if c in row.cells)
        said = told or row.eager
        print(
            f"{number}/{len(chosen)} {pair.key}: {said} ({time.monotonic() - began:.0f} s)", file=sys.stderr, flush=True
        )
    return 0


if __name__ == "__main__":
    sys.exit(main())
