"""How near the best placement is what the pass `place` finds? The proven gap of every shipped model on meshes of one to
four axes, with memory to spare and with less than it then takes.

    python benchmarks/plans/gaps.py [--only "gpt2 dp=8"] [--rows FILE] [--write]

Placements of `auto` alone, on meta, at the price of gathers that `auto` begins with: no named strategy is compared.
Each model and mesh is placed in a process of its own. The limit is the hardware's memory, where the placement without
one takes more and something fits, or else the first part of what it takes that will do; a price of 0 then says that
fitting costs less than the gap. `--rows` keeps one JSON line per model and mesh, so that a later run goes on where an
earlier one stopped; --write adds a dated file under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

sys.path.insert(0, str(Path(__file__).parents[2]))

from autopar.strategies.request import Attempt
from benchmarks import pages

if TYPE_CHECKING:
    from autopar.ir.program import Mode, Program
    from autopar.planner.programs import Programs

HARDWARE = "h100"
MESHES = ("dp=8", "dp=4,tp=2", "dp=8,tp=4", "dp=4,cp=2,tp=4", "node=2,dp=4,cp=2,tp=4")
SHARES = (0.8, 0.9, 0.95)
"""Parts of the memory without a limit that a placement is tried within, until something fits."""
ASKED = (1e-3, 1e-2)
"""The gaps above which cases are named."""
SECONDS = 1800
"""Wall time that a model and mesh may take."""


@dataclass(frozen=True, slots=True)
class Case:
    """A model, its default batch, and a mesh."""

    model: str
    mesh: str

    def __str__(self) -> str:
        return f"{self.model} {self.mesh}"


@dataclass(frozen=True, slots=True)
class Placed:
    """One placement. memory: `free`, or what the limit is. price_ms_per_gib: in seconds of the objective. cpu_s: of
    `place`. error: why there is none.
    """

    model: str
    mesh: str
    memory: str
    recompute: str = ""
    nodes: int = 0
    choices: int = 0
    gap: float = 0.0
    price_ms_per_gib: float = 0.0
    cpu_s: float = 0.0
    error: str = ""

    def __str__(self) -> str:
        return f"{self.model} on {self.mesh}, memory {self.memory}"


def cases() -> Iterator[Case]:
    """Every shipped model on every mesh."""
    from autopar.cli.models import catalogue

    for name in catalogue.names():
        if name not in catalogue.ALIASES:
            yield from (Case(name, mesh) for mesh in MESHES)


def measure(case: Case) -> Iterator[Placed]:
    """Place in this process: with memory to spare, then with memory that binds."""
    from autopar.base.errors import AutoparError

    prepared = prepare(case)
    mesh = prepared.asked.mesh
    free, peak = placed(case, prepared, "none", "free", None)
    yield free
    limits: list[tuple[str, float, tuple[Mode, ...]]] = []
    if peak > mesh.hardware.memory_bytes:
        limits.append((HARDWARE, float(mesh.hardware.memory_bytes), ("none", "selective", "full")))
    limits.extend((f"{share:.0%}", share * peak, ("none",)) for share in SHARES)
    for memory, limit, modes in limits:
        for mode in modes:
            try:
                found, _ = placed(case, prepared, mode, memory, limit)
            except AutoparError:
                continue
            # What takes less for computing more may have memory to spare.
            if mode == "none" or found.price_ms_per_gib:
                yield found
                return
    yield Placed(case.model, case.mesh, "binding", error="nothing fits a limit that binds")


def prepare(case: Case) -> Programs:
    """The model traced and differentiated, to be placed by `auto`."""
    from autopar import pipeline
    from autopar.cli.models import catalogue
    from autopar.machine.mesh import Mesh
    from autopar.planner.inputs import bind_inputs, to_dtype
    from autopar.planner.programs import Programs
    from autopar.strategies.names import resolve

    loaded = catalogue.load(case.model, device="meta")
    mesh = Mesh.parse(case.mesh, hardware=HARDWARE)
    inputs = bind_inputs(loaded.model, (), loaded.batch)
    request = Attempt(loaded.model, inputs, mesh, resolve("auto", mesh), precision=to_dtype("bf16"))
    return Programs.of(request, pipeline.DEFAULT)


def placed(case: Case, prepared: Programs, mode: Mode, memory: str, limit: float | None) -> tuple[Placed, float]:
    """A placement, and the bytes it takes."""
    from autopar.passes.place import place
    from autopar.planner.attempts import OVERLAP_PRICE

    program: Program = prepared.annotated(mode)
    start = time.process_time()
    result = place(
        program, strategies=prepared.asked.strategies, memory_limit_bytes=limit, explain=False,
        overlap_price=OVERLAP_PRICE,
    ).result  # fmt: skip
    seconds = time.process_time() - start
    price = 1e3 * 2**30 * result.memory_price_s_per_byte
    row = Placed(
        case.model, case.mesh, memory, mode, result.num_nodes, result.num_choices, result.gap, price, seconds
    )  # fmt: skip
    return row, result.peak_bytes


def run_case(case: Case) -> list[Placed]:
    """In a process of its own; what fails is a row, too."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case))]
    try:
        out = subprocess.run(command, capture_output=True, text=True, timeout=SECONDS)
    except subprocess.TimeoutExpired:
        return [Placed(case.model, case.mesh, "free", error=f"not done within {SECONDS} s")]
    found = [Placed(**json.loads(line)) for line in out.stdout.splitlines() if line.startswith("{")]
    if out.returncode:
        why = (out.stderr.strip().splitlines() or [f"exit status {out.returncode}"])[-1][:200]
        found.append(Placed(case.model, case.mesh, "binding" if found else "free", error=why))
    return found


def report(rows: Sequence[Placed]) -> str:
    """What is above which gap, by mesh, and every row, as Markdown."""
    ok = [row for row in rows if not row.error]
    lines = [f"{len(ok)} placements of {len({row.model for row in ok})} models."]
    for asked in sorted(ASKED, reverse=True):
        above = sorted((row for row in ok if row.gap > asked), key=lambda row: -row.gap)
        names = "; ".join(f"{row}: {row.gap:.2%}" for row in above)
        lines.append(f"Above {asked:.1%}: {len(above)}" + (f" ({names})" if names else "") + ".")
    if wrong := [f"{row}: {row.error}" for row in rows if row.error]:
        lines.append(f"Without a placement: {'; '.join(wrong)}.")
    header = ("mesh", "memory", "placements", "median gap", "largest gap", "longest CPU s")
    by_mesh = [
        (mesh, "binds" if binds else "free", *_spread([row for row in ok if _is(row, mesh, binds)]))
        for mesh in dict.fromkeys(row.mesh for row in ok) for binds in (False, True)
        if any(_is(row, mesh, binds) for row in ok)
    ]  # fmt: skip
    columns = ("model", "mesh", "memory", "recompute", "nodes", "choices", "gap", "ms per GiB", "CPU s")
    each = [
        (row.model, row.mesh, row.memory, row.recompute, str(row.nodes), str(row.choices), f"{row.gap:.3%}",
         f"{row.price_ms_per_gib:.3g}" if row.price_ms_per_gib else "–", f"{row.cpu_s:.1f}")
        for row in ok
    ]  # fmt: skip
    parts = ["\n\n".join(lines)]
    parts += [f"## By mesh\n\n{pages.table(header, by_mesh)}", f"## Every placement\n\n{pages.table(columns, each)}"]
    return "\n\n".join(parts)


def _is(row: Placed, mesh: str, binds: bool) -> bool:
    return row.mesh == mesh and (row.memory != "free") == binds


def _spread(rows: Sequence[Placed]) -> tuple[str, ...]:
    gaps = [row.gap for row in rows]
    return str(len(rows)), f"{statistics.median(gaps):.3%}", f"{max(gaps):.3%}", f"{max(r.cpu_s for r in rows):.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="", help="models and meshes that have one of these texts, split by ;")
    parser.add_argument("--rows", type=Path, help="a file of rows that are done, and are added to")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        for row in measure(Case(**json.loads(options.one))):
            print(json.dumps(asdict(row)), flush=True)
        return
    kept = {Case(**each["case"]): [Placed(**row) for row in each["rows"]] for each in pages.kept(options.rows)}
    rows: list[Placed] = []
    wanted = options.only.split(";")
    todo = [case for case in cases() if any(each.strip() in str(case) for each in wanted)]
    for number, case in enumerate(todo, 1):
        start = time.perf_counter()
        found = kept.get(case) or run_case(case)
        rows += found
        text = "; ".join(row.error or f"{row.memory} {row.gap:.3%} in {row.cpu_s:.1f} s" for row in found)
        again = ", done before" if case in kept else f", {time.perf_counter() - start:.0f} s"
        print(f"{number}/{len(todo)} {case}: {text}{again}", file=sys.stderr, flush=True)
        if case not in kept:
            pages.keep(options.rows, {"case": asdict(case), "rows": [asdict(row) for row in found]})
    text = report(rows)
    print(text)
    if options.write:
        pages.write(
            "gaps",
            f"# Proven gaps of placements, {date.today()}\n\n{pages.machine()}; hardware profile "
            f"{HARDWARE}, precision bf16, the models' default batches. Memory: free, or the limit: the device's, or "
            "that part of what the placement without a limit takes. ms per GiB: what another GiB would save, in ms of "
            f"the objective. CPU s: of `place`.\n\n{text}\n",
        )


if __name__ == "__main__":
    main()
