"""How long planning takes: wall and CPU seconds, by pass, on meta, for models, meshes and clusters of real size.

    python benchmarks/plans/planning.py [--repeat 3] [--only 405b] [--write]

Prints tables: plans, their passes, searches, and what depth adds; --write adds a dated file under benchmarks/results/.
Every case runs in a process of its own. Proven gaps are those of `benchmarks/plans/gaps.py`.
"""

from __future__ import annotations

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING, Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pages

if TYPE_CHECKING:
    from autopar.pipeline import PassTime

Measured = dict[str, Any]


@dataclass(frozen=True)
class Case:
    """What is planned. where: a mesh, or the cluster of a search. batch: `rows x tokens`; "" for the model's default.
    layers: 0 for as many as the model has. strategy: `auto`, or `named`: zero3 over dp and tensor+sequence over tp.
    """

    group: str
    model: str
    where: str
    batch: str = ""
    layers: int = 0
    strategy: str = "auto"

    def __str__(self) -> str:
        layers = f" ({self.layers} layers)" if self.layers else ""
        return f"{self.model}{layers} {self.where}"


PLANS = [
    Case("plan", "llama-3.1-8b", "dp=32,tp=8", "64x8192"),
    Case("plan", "llama-3.1-70b", "dp=32,tp=8", "64x8192"),
    Case("plan", "llama-3.1-405b", "dp=32,tp=8", "64x8192"),
    Case("plan", "llama-3.1-405b", "dp=64,tp=8", "128x8192"),
    Case("plan", "llama-3.1-8b", "pp=4,dp=8,tp=8", "256x8192"),
    Case("plan", "llama-3.1-405b", "pp=16,dp=64,tp=8", "2048x8192"),
    Case("plan", "gpt2-xl", "dp=8,tp=4", "64x1024"),
    Case("plan", "bert-large", "dp=8", "256x512"),
]
SEARCHES = [
    Case("search", "llama-3.1-8b", "h100x64", "256x8192"),
    Case("search", "llama-3.1-405b", "h100x1024", "256x8192"),
    Case("search", "llama-3.1-405b", "h100x16384", "2048x8192"),
]
DEPTHS = [
    Case("depth", "llama-3.1-405b", "dp=32,tp=8", "64x8192", layers, strategy)
    for strategy in ("auto", "named") for layers in (32, 64, 126)
]  # fmt: skip
UNLIMITED = 1e14
"""Bytes: nothing takes as many."""


def measure(case: Case) -> Measured:
    """Plan or search once in this process."""
    import autopar
    from autopar.cli.models import catalogue

    options: Measured = {"overrides": {"num_hidden_layers": case.layers}} if case.layers else {}
    if case.batch:
        rows, tokens = map(int, case.batch.split("x"))
        options["batch"] = (rows, tokens)
    loaded = catalogue.load(case.model, device="meta", **options)
    wall, cpu = time.perf_counter(), time.process_time()
    if case.group == "search":
        found = autopar.search(loaded.model, case.where, example_inputs=loaded.batch)
        best, _ = found.planned[0]
        more = {
            "points": len(found.candidates),
            "best": f"{best.point} {' '.join(best.point.strategy.values())}",
            "step_s": found[0].cost.step_time_s,
            "off_by": found.off_by,
        }
    else:
        mesh = autopar.Mesh.parse(case.where, hardware="h100")
        strategy = {"dp": "zero3", "tp": "tensor+sequence"} if case.strategy == "named" else "auto"
        options = {"example_inputs": loaded.batch, "precision": "bf16", "strategy": strategy}
        if case.group == "depth":  # without a limit, so that depth is all that differs
            options |= {"memory_limit": UNLIMITED, "rematerialize": "full"}
        plan = autopar.plan(loaded.model, mesh, **options)
        more = {
            "passes": passes(plan.times),
            "nodes": plan.solved.nodes,
            "gap": plan.gap,
            "recompute": plan.rematerialize,
            "step_s": plan.cost.step_time_s,
        }
    used = time.perf_counter() - wall, time.process_time() - cpu
    return {"wall_s": used[0], "cpu_s": used[1], "rss_gib": _rss_gib(), **more}


def _rss_gib() -> float:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20


def passes(times: Sequence[PassTime]) -> dict[str, float]:
    """CPU seconds by pass."""
    found: dict[str, float] = {}
    for each in times:
        found[each.name] = found.get(each.name, 0.0) + each.cpu_s
    return found


def run_case(case: Case) -> Measured:
    """In a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps(asdict(case))]
    out = subprocess.run(command, capture_output=True, text=True, timeout=900)
    if out.returncode:
        raise SystemExit(f"{case}: {out.stderr[-2000:]}")
    found: Measured = json.loads(out.stdout.splitlines()[-1])
    return found


Results = list[tuple[Case, list[Measured]]]


def report(results: Results) -> str:
    """The tables, as Markdown."""
    of = {group: [(case, runs) for case, runs in results if case.group == group] for group in GROUPS}
    parts = []
    if rows := of["plan"]:
        parts.append("## Plans (strategy auto)\n\n" + _plans(rows))
        parts.append("## CPU seconds by pass\n\nOf the kept plan, one run.\n\n" + _passes(rows))
    if rows := of["search"]:
        parts.append("## Searches\n\n" + _searches(rows))
    if rows := of["depth"]:
        parts.append(
            "## Depth\n\nBlocks recomputed, no memory limit; named: zero3 and tensor+sequence.\n\n" + _depths(rows)
        )
    return "\n\n".join(parts)


def _cpu(runs: Sequence[Measured]) -> str:
    cpu = sorted(run["cpu_s"] for run in runs)
    return f"{statistics.median(cpu):.1f}" + (f" ({cpu[0]:.1f}–{cpu[-1]:.1f})" if len(cpu) > 1 else "")


def _wall(runs: Sequence[Measured]) -> str:
    return f"{statistics.median(run['wall_s'] for run in runs):.1f}"


def _plans(rows: Results) -> str:
    header = ("model", "mesh", "batch", "wall s", "CPU s", "nodes", "gap", "recompute", "RSS GiB")
    lines = [
        (case.model, case.where, case.batch or "default", _wall(runs), _cpu(runs), str(runs[0]["nodes"]),
         f"{runs[0]['gap']:.2%}", runs[0]["recompute"], f"{runs[0]['rss_gib']:.2f}")
        for case, runs in rows
    ]  # fmt: skip
    return pages.table(header, lines)


def _passes(rows: Results) -> str:
    names = [name for name, seconds in rows[-1][1][0]["passes"].items()]
    names += [name for _, runs in rows for name in runs[0]["passes"] if name not in names]
    names = [name for name in dict.fromkeys(names) if any(r[0]["passes"].get(name, 0.0) >= 0.05 for _, r in rows)]
    lines = [(str(case), *(f"{runs[0]['passes'].get(name, 0.0):.1f}" for name in names)) for case, runs in rows]
    return pages.table(("model, mesh", *names), lines)


def _searches(rows: Results) -> str:
    header = ("model", "cluster", "batch", "points", "wall s", "CPU s", "RSS GiB", "found", "step", "estimates off by")
    lines = [
        (case.model, case.where, case.batch, str(one["points"]), _wall(runs), _cpu(runs), f"{one['rss_gib']:.2f}",
         one["best"], f"{one['step_s']:.3g} s", f"{one['off_by']:.1%}")
        for case, runs in rows for one in runs[:1]
    ]  # fmt: skip
    return pages.table(header, lines)


def _depths(rows: Results) -> str:
    names = ("capture", "outline", "place")
    header = ("model, mesh", "strategy", "wall s", "CPU s", *names, "CPU s beside capture", "RSS GiB")
    lines = []
    for case, runs in rows:
        own = runs[0]["passes"]
        rest = runs[0]["cpu_s"] - own["capture"]
        seconds = (f"{own[name]:.2f}" for name in names)
        lines.append(
            (str(case), case.strategy, _wall(runs), _cpu(runs), *seconds, f"{rest:.2f}", f"{runs[0]['rss_gib']:.2f}")
        )
    return pages.table(header, lines)


GROUPS = ("plan", "search", "depth")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3, help="runs of each case")
    parser.add_argument("--only", default="", help="cases that have this text in their group, model or mesh")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(Case(**json.loads(options.one)))))
        return
    results: Results = []
    for case in (*PLANS, *SEARCHES, *DEPTHS):
        if options.only not in f"{case.group} {case}":
            continue
        runs: list[Measured] = []
        for _ in range(options.repeat):
            runs.append(run_case(case))
            text = f"{runs[-1]['wall_s']:.1f} s wall, {runs[-1]['cpu_s']:.1f} s CPU"
            print(case.group, case, text, file=sys.stderr, flush=True)
        results.append((case, runs))
    text = report(results)
    print(text)
    if options.write:
        pages.write(
            "planning",
            f"# Planning time, {date.today()}\n\n{pages.machine()}; hardware profile h100, precision bf16, "
            f"{options.repeat} runs each, medians (range); each run in a process of its own, which imports and builds "
            f"the model before the clock starts.\n\n{text}\n",
        )


if __name__ == "__main__":
    main()
