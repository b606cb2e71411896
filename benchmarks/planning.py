"""How long planning takes: wall and CPU seconds per pass, on meta, for models and meshes of real size.

    python benchmarks/planning.py [--repeat 3] [--write] [--plot times.svg]

Prints a table; --write adds a dated file under benchmarks/results/, --plot draws the passes. Every case runs in a
process of its own.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Sequence
from datetime import date
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from autopar.pipeline import PassTime

CASES = [
    ("llama-3.1-8b", "dp=32,tp=8", "64x8192"),
    ("llama-3.1-70b", "dp=32,tp=8", "64x8192"),
    ("llama-3.1-405b", "dp=32,tp=8", "64x8192"),
    ("llama-3.1-405b", "dp=64,tp=8", "128x8192"),
    ("llama-3.1-8b", "pp=4,dp=8,tp=8", "256x8192"),
    ("llama-3.1-405b", "pp=16,dp=64,tp=8", "2048x8192"),
    ("gpt2-xl", "dp=8,tp=4", "64x1024"),
    ("bert-large", "dp=8", "256x512"),
]


def measure(model: str, mesh: str, batch: str) -> dict[str, object]:
    """Plan once in this process."""
    import autopar
    from autopar.models import catalogue

    rows, tokens = map(int, batch.split("x"))
    loaded = catalogue.load(model, device="meta", batch=(rows, tokens))
    wall, cpu = time.perf_counter(), time.process_time()
    plan = autopar.plan(
        loaded.model, autopar.Mesh.parse(mesh, hardware="h100"), example_inputs=loaded.batch, precision="bf16"
    )
    return {
        "wall_s": time.perf_counter() - wall,
        "cpu_s": time.process_time() - cpu,
        "passes": passes(plan.times),
        "nodes": plan.solved.nodes,
        "choices": plan.solved.choices,
        "gap": plan.gap,
        "rematerialize": plan.rematerialize,
        "step_s": plan.cost.step_time_s,
        "peak_gib": plan.cost.peak_memory_bytes / 2**30,
        "rss_gib": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 2**20,
    }


def passes(times: Sequence[PassTime]) -> dict[str, float]:
    """CPU seconds by pass."""
    found: dict[str, float] = {}
    for each in times:
        found[each.name] = found.get(each.name, 0.0) + each.cpu_s
    return found


def run_case(case: tuple[str, str, str]) -> dict[str, object]:
    out = subprocess.run([sys.executable, __file__, "--one", *case], capture_output=True, text=True, timeout=900)
    if out.returncode:
        raise SystemExit(out.stderr[-2000:])
    found: dict[str, object] = json.loads(out.stdout.splitlines()[-1])
    return found


def table(results: list[tuple[tuple[str, str, str], list[dict[str, object]]]]) -> str:
    lines = [
        "| model | mesh | batch | wall s | CPU s (min–max) | capture | differentiate | place | nodes | gap | recompute "
        "| RSS GiB |",
        "|---|---|---|---|---|---|---|---|---|---|---|---|",
    ]
    for (model, mesh, batch), runs in results:
        cpu = sorted(float(str(run["cpu_s"])) for run in runs)
        wall = statistics.median(float(str(run["wall_s"])) for run in runs)
        one = runs[0]
        passes: dict[str, float] = one["passes"]  # type: ignore[assignment]
        lines.append(
            f"| {model} | {mesh} | {batch} | {wall:.1f} | {statistics.median(cpu):.1f} ({cpu[0]:.1f}–{cpu[-1]:.1f}) | "
            f"{passes['capture']:.1f} | {passes['differentiate']:.1f} | {passes['place']:.1f} | {one['nodes']} | "
            f"{float(str(one['gap'])):.2%} | {one['rematerialize']} | {float(str(one['rss_gib'])):.2f} |"
        )
    return "\n".join(lines)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeat", type=int, default=3)
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--plot", type=Path)
    parser.add_argument("--one", nargs=3, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.one:
        print(json.dumps(measure(*options.one)))
        return
    results = []
    for case in CASES:
        runs = []
        for _ in range(options.repeat):
            runs.append(run_case(case))
            print(*case, f"{runs[-1]['wall_s']:.1f} s wall, {runs[-1]['cpu_s']:.1f} s CPU", file=sys.stderr, flush=True)
        results.append((case, runs))
    text = table(results)
    print(text)
    if options.plot:
        from autopar.plots import draw_times

        draw_times([(f"{model} {mesh}", runs[0]["passes"]) for (model, mesh, _), runs in results], options.plot)  # type: ignore[misc]
    if options.write:
        import torch

        path = Path(__file__).parent / "results" / f"planning-{date.today()}.md"
        versions = f"Python {platform.python_version()}, torch {torch.__version__}"
        machine = f"{os.cpu_count()} cores, {platform.machine()}, {versions}"
        path.write_text(
            f"# Planning time, {date.today()}\n\n{machine}; hardware profile h100, precision bf16, strategy auto, "
            f"{options.repeat} runs each, medians (range). Pass columns: CPU seconds of one run; `place` is the last "
            f"mode of rematerialization tried, the CPU column has all.\n\n{text}\n"
        )


if __name__ == "__main__":
    main()
