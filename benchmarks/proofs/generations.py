"""Prove plans of `generate()`, prompt and tokens, of tiny models of many kinds; a dated page under benchmarks/results.

    python benchmarks/proofs/generations.py [--models llama,mamba] [--strategies tensor,auto] [--cache int8]
        [--json FILE] [--write]

A cell is what `GenerationPlan.verify` proves on two simulated ranks: transformers' loop over the generated programs,
its tokens given, beside the eager model on the whole sequence without a cache: logits of every step, in float64. With
`--cache` keys and values are stored as codes, and what that changes is beside the error.
"""

from __future__ import annotations

import os
import sys
import time
import tomllib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import autopar
from autopar.base.codes import STORAGES
from autopar.base.errors import AutoparError
from benchmarks import pages

STRATEGIES: Mapping[str, tuple[dict[str, int], Any]] = {
    **{name: ({"x": 2}, name) for name in ("tensor", "ddp", "zero3", "auto")},
    "pipeline": ({"pp": 2}, "pipeline"),
    "tensor×pipeline": ({"pp": 2, "tp": 2}, {"pp": "pipeline", "tp": "tensor"}),
    "split_kv": ({"cp": 2}, "split_kv"),
    "tensor×split_kv": ({"cp": 2, "tp": 2}, {"cp": "split_kv", "tp": "tensor"}),
}
"""Column -> mesh, and what is asked for."""
TABLE = Path(__file__).with_name("generations.toml")
WANTED = autopar.Generation(batch=2, prompt=5, new_tokens=3)


@dataclass(frozen=True, slots=True)
class Row:
    """What came of a model under a strategy. found: `ok`, `NOT EQUAL` or what was refused. error: the largest of the
    logits, relative to the largest logit. cpu_s: planning, both phases, and the proof.
    """

    model: str
    strategy: str
    found: str
    error: float
    cpu_s: float
    said: str = ""


def made(name: str, entry: dict[str, Any], common: dict[str, Any]) -> Any:
    """A model with random weights, in float64."""
    import transformers

    config = {**common[entry["sizes"]], **entry.get("config", {})}
    torch.manual_seed(0)
    return getattr(transformers, entry["model"])(getattr(transformers, entry["class"])(**config)).double().eval()


def cell(name: str, model: Any, strategy: str, cache: str | None) -> Row:
    """Plan and prove."""
    start = time.process_time()
    sizes, asked = STRATEGIES[strategy]
    try:
        plan = autopar.plan_generation(model, autopar.Mesh(sizes), replace(WANTED, cache=cache), strategy=asked)
        proof = plan.verify()
    except AutoparError as error:
        return Row(name, strategy, f"refused: {str(error).splitlines()[0][:160]}", 0.0, time.process_time() - start)
    worst = max(each.error for each in proof.comparisons)
    return Row(
        name, strategy, "ok" if proof.ok else "NOT EQUAL", worst, time.process_time() - start, "; ".join(proof.notes)
    )


def page(rows: Sequence[Row], cache: str | None) -> str:
    """The table of all cells. cache: how keys and values are stored."""
    columns = [name for name in STRATEGIES if any(row.strategy == name for row in rows)]
    by_cell = {(row.model, row.strategy): row for row in rows}
    notes: list[str] = []

    def text(row: Row | None) -> str:
        if row is None:
            return ""
        if row.said:
            notes.append(f"{row.model}, {row.strategy}: {row.said}")
            return f"{row.found} {row.error:.0e} [{len(notes)}]"
        if not row.found.startswith("refused"):
            return f"{row.found} {row.error:.0e}"
        notes.append(f"{row.model}, {row.strategy}: {row.found}")
        return f"[{len(notes)}]"

    names = list(dict.fromkeys(row.model for row in rows))
    body = pages.table(
        ("model", *columns), [(name, *[text(by_cell.get((name, column))) for column in columns]) for name in names]
    )
    right = sum(row.found == "ok" for row in rows)
    seconds = sorted(row.cpu_s for row in rows)
    wrong = sum(row.found == "NOT EQUAL" for row in rows)
    head = (
        f"# generate(): plans proven\n\n{pages.machine()}. {right} of {len(rows)} cells of {len(names)} models are "
        f"right to 1e-9, {wrong} are wrong. Batch {WANTED.batch}, prompt {WANTED.prompt}, {WANTED.new_tokens} new "
        f"tokens, {f'keys and values stored as {cache}, ' if cache else ''}two simulated ranks (products of two: "
        "four), float64; a cell's number is the largest relative error "
        f"of a logit. Plan and proof took {seconds[0]:.0f} to {seconds[-1]:.0f} CPU-s, median "
        f"{seconds[len(seconds) // 2]:.0f}.\n\n"
    )
    return head + body + "\n" + pages.below(notes)


def main() -> int:
    parser = pages.of_cells(__doc__, STRATEGIES)
    parser.add_argument("--cache", choices=list(STORAGES), help="how keys and values are stored")
    options = parser.parse_args()
    table = tomllib.loads(TABLE.read_text(encoding="utf-8"))
    entries, common = table["model"], table["sizes"]
    names = options.models.split(",") if options.models else list(entries)
    rows = [Row(**row) for row in pages.kept(options.json)]
    for name in names:
        model = None
        for strategy in options.strategies.split(","):
            if any(row.model == name and row.strategy == strategy for row in rows):
                continue
            model = made(name, entries[name], common) if model is None else model
            rows.append(cell(name, model, strategy, options.cache))
            print(rows[-1], flush=True)
            pages.keep(options.json, rows[-1])
    print(page(rows, options.cache))
    if options.write:
        name = f"generations-{options.cache}" if options.cache else "generations"
        print(pages.write(name, page(rows, options.cache)))
    return int(any(row.found == "NOT EQUAL" for row in rows))


if __name__ == "__main__":
    sys.exit(main())
