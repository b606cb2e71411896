"""Are plans what they were? Predicted seconds, peak bytes and bytes sent of known cases, beside those of another time.

    python benchmarks/plans/digests.py --rows FILE [--only CASE,CASE] [--before FILE [--write]]

Plans the bundled models on dp=4,tp=2, and a few large cases, on meta. `--rows` keeps one JSON line per case, so that a
later run goes on where an earlier one stopped, and is what a later version's `--before` reads. Exits with 1 where a
case is predicted slower than before, needs more memory or sends more, by more than a thousandth; `--write` adds a
dated table under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.cli.models import catalogue
from autopar.machine.mesh import Mesh
from benchmarks import pages

UNLIMITED = 1e15
"""Bytes of memory that hold any model."""
TOLERANCE = 1e-3
"""What a number may be worse by: proven gaps of plans are about as large."""


@dataclass(frozen=True, slots=True)
class Case:
    """memory_limit: bytes; None: what the device has."""

    name: str
    model: str
    mesh: str
    strategy: Any = "auto"
    memory_limit: float | None = UNLIMITED


CASES = (
    *(Case(name, name, "dp=4,tp=2") for name in catalogue.names() if name not in catalogue.ALIASES),
    Case("8b-dp32tp8", "llama-3.1-8b", "dp=32,tp=8", memory_limit=None),
    Case(
        "405b-pp16dp64tp8", "llama-3.1-405b", "pp=16,dp=64,tp=8", {"pp": "pipeline", "dp": "auto", "tp": "auto"}, None
    ),
    Case("8b-tight", "llama-3.1-8b", "dp=2,tp=4", memory_limit=24e9),
    Case("8b-named", "llama-3.1-8b", "dp=4,tp=2", {"dp": "zero3", "tp": "tensor"}),
)


@dataclass(frozen=True, slots=True)
class Row:
    """What was planned. sent: bytes by one rank in a step. messages: collectives of a step. mode: what is computed
    again.
    """

    case: str
    step_s: float
    peak: float
    sent: float
    messages: int
    mode: str
    cpu_s: float


def measured(case: Case) -> Row:
    """Plan one case as a user would."""
    loaded = catalogue.load(case.model, device="meta")
    mesh = Mesh.parse(case.mesh, hardware="h100")
    begun = time.process_time()
    plan = autopar.plan(
        loaded.model,
        mesh,
        example_inputs=loaded.batch,
        strategy=case.strategy,
        memory_limit=case.memory_limit,
        precision="bf16",
    )
    sent, messages = sum(row.bytes_sent for row in plan.collectives), sum(row.times for row in plan.collectives)
    cost = plan.cost
    cpu_s = time.process_time() - begun
    return Row(case.name, cost.step_time_s, cost.memory.peak, sent, messages, plan.rematerialize, round(cpu_s, 1))


def worse(now: Row, before: Row) -> list[str]:
    """The numbers that are larger than they were, by name."""
    pairs = {"step": (now.step_s, before.step_s), "peak": (now.peak, before.peak), "sent": (now.sent, before.sent)}
    return [name for name, (new, old) in pairs.items() if new > old * (1 + TOLERANCE)]


def report(rows: Sequence[Row], before: dict[str, Row]) -> str:
    """The page: numbers now, and by how much they are others than they were."""
    header = ("case", "step", "", "peak GiB", "", "sent GiB", "", "messages", "before", "recomputes", "CPU s", "before")
    lines = [
        (
            row.case,
            f"{1e3 * row.step_s:.4g} ms",
            _change(row.step_s, old.step_s),
            f"{row.peak / 2**30:.4g}",
            _change(row.peak, old.peak),
            f"{row.sent / 2**30:.4g}",
            _change(row.sent, old.sent),
            row.messages,
            old.messages,
            row.mode if row.mode == old.mode else f"{row.mode} (before: {old.mode})",
            row.cpu_s,
            old.cpu_s,
        )
        for row in rows
        if (old := before.get(row.case)) is not None
    ]
    return pages.table(header, lines)


def _change(new: float, old: float) -> str:
    change = new / old - 1 if old else float(new != old)
    return "=" if abs(change) < 5e-7 else f"{change:+.3%}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, required=True, help="a JSON line per case, kept")
    parser.add_argument("--only", default="", help="names of cases, by commas")
    parser.add_argument("--before", type=Path, help="rows of another version")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results")
    options = parser.parse_args()
    only = [name for name in options.only.split(",") if name]
    done = {row["case"] for row in pages.kept(options.rows)}
    for case in CASES:
        if case.name not in done and (not only or case.name in only):
            row = measured(case)
            pages.keep(options.rows, row)
            print(f"{row.case}: {1e3 * row.step_s:.4g} ms, {row.peak / 2**30:.4g} GiB, {row.cpu_s} CPU s", flush=True)
    if options.before is None:
        return 0
    rows, before = (
        [Row(**row) for row in pages.kept(options.rows)],
        {r["case"]: Row(**r) for r in pages.kept(options.before)},
    )
    text = report(rows, before)
    print(text)
    if options.write:
        head = f"# Plans beside those of another version\n\n{pages.machine()}; hardware profile h100, precision bf16."
        print(pages.write("digests", f"{head}\n\n{text}\n"))
    found = {row.case: worse(row, before[row.case]) for row in rows if row.case in before}
    print(*(f"{case}: more {', '.join(names)}" for case, names in found.items() if names), sep="\n")
    return any(found.values())


if __name__ == "__main__":
    sys.exit(main())
