"""Is `auto` predicted at least as fast as every named strategy that fits? And what did its plan choose?

    python benchmarks/plans/auto.py [--only CASE,CASE] [--rows FILE] [--write]

Plans on meta: bundled configurations, of two layers or whole, hardware profiles of real machines; whole ones within
several limits of memory, of which some let nothing fit. Every strategy is planned as its user would plan it, from the
capture on. `--rows` keeps one JSON line per case, so that a later run goes on where an earlier one stopped; `--write`
adds a dated table under benchmarks/results/.
"""

from __future__ import annotations

import argparse
import math
import os
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

import torch

import autopar
from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.program import Program
from autopar.machine.mesh import Mesh
from autopar.strategies.names import Strategy
from autopar.strategies.request import Request
from benchmarks import pages


@dataclass(frozen=True, slots=True)
class Case:
    """batch: sequences x tokens. limit_gb: bytes/1e9 that one rank may use; None: the device's. layers: None: all."""

    name: str
    model: str
    mesh: str
    hardware: str
    batch: tuple[int, int]
    limit_gb: float | None = None
    layers: int | None = 2


def _within(name: str, model: str, mesh: str, hardware: str, batch: tuple[int, int], *limits: float) -> list[Case]:
    """A whole model within limits, in bytes/1e9; 0: the device's."""
    return [
        Case(f"{name}-{limit or 'device'}", model, mesh, hardware, batch, limit or None, layers=None)
        for limit in limits
    ]


CASES = (
    Case("llama-dp8", "llama-3.1-8b", "dp=8", "h100", (64, 4096)),
    Case("llama-dp8-tight", "llama-3.1-8b", "dp=8", "h100", (16, 2048), 16.0),
    Case("llama-tp8-small", "llama-3.1-8b", "tp=8", "h100", (1, 2048)),
    Case("llama-dp4tp2", "llama-3.1-8b", "dp=4,tp=2", "h100", (16, 4096)),
    Case("llama-dp4tp2-tight", "llama-3.1-8b", "dp=4,tp=2", "a100", (8, 2048), 8.0),
    Case("llama-dp8tp8", "llama-3.1-8b", "dp=8,tp=8", "h100", (64, 4096)),
    Case("llama-node2dp8", "llama-3.1-8b", "node=2,dp=8", "a100", (32, 2048), 24.0),
    Case("llama-node2dp4", "llama-3.1-8b", "node=2,dp=4", "h100", (8, 4096), 20.0),
    Case("gpt2-dp8", "gpt2", "dp=8", "a100", (256, 1024)),
    Case("gpt2-dp4tp2", "gpt2", "dp=4,tp=2", "a100", (8, 512)),
    Case("bert-dp8-tight", "bert-large", "dp=8", "a100", (32, 512), 1.0),
    Case("bert-tp8", "bert-large", "tp=8", "h100", (64, 512)),
    Case("bert-dp8tp8", "bert-large", "dp=8,tp=8", "a100", (128, 512)),
    *_within("llama-dp64", "llama-3.1-8b", "dp=64", "a100:8xinfiniband-200", (128, 1024), 0, 24, 12, 6.3, 3),
    *_within("llama-node8dp8", "llama-3.1-8b", "node=8,dp=8", "a100:8xinfiniband-200", (128, 1024), 0, 24, 12, 6.3),
    *_within("llama-dp8tp8", "llama-3.1-8b", "dp=8,tp=8", "h100", (64, 4096), 0, 40, 15, 5),
    *_within("gpt2-xl-dp8", "gpt2-xl", "dp=8", "h100", (64, 1024), 0, 40, 20, 10, 3),
    *_within("gpt2-xl-dp4tp2", "gpt2-xl", "dp=4,tp=2", "h100", (16, 1024), 0, 20, 9),
    *_within("bert-large-dp8", "bert-large", "dp=8", "a100", (64, 512), 0, 4, 2, 0.5),
    *_within("bert-large-dp4tp2", "bert-large", "dp=4,tp=2", "a100", (32, 512), 0, 6, 3),
    *_within("phi-3-mini-dp8", "phi-3-mini", "dp=8", "h100", (32, 2048), 0, 40, 20, 11, 8),
    *_within("phi-3-mini-dp4tp2", "phi-3-mini", "dp=4,tp=2", "h100", (16, 2048), 0, 25, 12),
)


@dataclass(frozen=True, slots=True)
class Row:
    """One case. auto_s: infinite where nothing fits. named: predicted seconds by strategy, of those that fit. modes:
    how many parameters auto treats how.
    """

    case: str
    auto_s: float
    gap: float
    rematerialize: str
    peak_gb: float
    cpu_s: float
    named: dict[str, float]
    modes: dict[str, int]

    @property
    def best(self) -> tuple[str, float]:
        return min(self.named.items(), key=lambda item: item[1], default=("none fits", float("inf")))

    @property
    def holds(self) -> bool:
        """Whether `auto` fits where a named strategy does, and is as fast."""
        return self.auto_s <= self.best[1] * (1 + 1e-9)


def named(mesh: Mesh) -> Iterator[tuple[str, Strategy]]:
    """Every strategy by name that the mesh has the axes for, and products of one for data and one for tensors."""
    axes = mesh.axis_names
    yield from ((name, name) for name in ("ddp", "zero2", "zero3", "tensor", "tensor+sequence"))
    if len(axes) == 1:
        yield from ((name, name) for name in ("zero1", "zero3+keep"))
        return
    yield "hsdp", "hsdp"
    if "node" in axes:
        yield "hpZ", {"node": "zero2", "dp": "zero3"}
    if "tp" in axes:
        for data in ("zero2", "zero3"):
            for tensors in ("tensor", "tensor+sequence"):
                yield f"{data} x {tensors}", {axis: tensors if axis == "tp" else data for axis in axes}


def measure(case: Case) -> Row:
    """Plan `auto` and the named strategies, each by itself; the captured program is shared."""
    mesh = Mesh.parse(case.mesh, hardware=case.hardware)
    overrides = {"num_hidden_layers": case.layers} if case.layers else {}
    loaded = catalogue.load(case.model, batch=case.batch, dropout=0.0, overrides=overrides)
    limit = case.limit_gb and case.limit_gb * 1e9
    captured: list[Program] = []

    def capture(program: Any, request: Request) -> Program:
        if not captured:
            captured.append(pipeline.DEFAULT[0].apply(program, request))
        return captured[0]

    def plan(strategy: Strategy) -> autopar.Plan | None:
        try:
            return autopar.plan(
                loaded.model, mesh, example_inputs=loaded.batch, strategy=strategy, precision="bf16",
                memory_limit=limit, passes=(pipeline.Pass("capture", capture), *pipeline.DEFAULT[1:]),
            )  # fmt: skip
        except AutoparError as error:
            print(f"    {case.name} {strategy}: {str(error)[:160]}", file=sys.stderr, flush=True)
            return None

    start = time.process_time()
    auto = plan("auto")
    seconds = time.process_time() - start
    plans = {name: plan(strategy) for name, strategy in named(mesh)}
    found = {name: each.cost.step_time_s for name, each in plans.items() if each is not None}
    if auto is None:
        return Row(case.name, math.inf, 0.0, "", 0.0, seconds, found, {})
    return Row(
        case.name, auto.cost.step_time_s, auto.gap, auto.rematerialize, auto.cost.peak_memory_bytes / 1e9, seconds,
        found, modes(auto),
    )  # fmt: skip


def modes(plan: autopar.Plan) -> dict[str, int]:
    """How many parameters the plan treats in which way, axis by axis."""
    counts: dict[str, int] = {}
    for layout in plan.decisions.placement.parameters.values():
        words = []
        for axis, *placements in zip(
            plan.mesh.axis_names, layout.stored, layout.held, layout.compute, layout.gradient, strict=True
        ):
            stored, held, compute, _ = map(str, placements)
            word = (
                "replicate"
                if stored == "R"
                else "shard"
                if stored == compute
                else "keep"
                if held == compute
                else "gather"
            )
            words.append(f"{axis}:{word}")
        key = " ".join(words)
        counts[key] = counts.get(key, 0) + 1
    return dict(sorted(counts.items(), key=lambda item: -item[1]))


def text_of(row: Row) -> str:
    name, seconds = row.best
    if math.isinf(row.auto_s):
        return f"{row.case:20} nothing fits; of the named ones {name}; {row.cpu_s:.1f} s CPU"
    verdict = "ok" if row.holds else "WORSE"
    ratio = f"{row.auto_s / seconds:.4f} of" if row.named else ""
    return (
        f"{row.case:20} auto {1e3 * row.auto_s:.3f} ms {ratio} {name} {verdict}; gap {row.gap:.2%}, "
        f"{row.rematerialize}, {row.peak_gb:.1f} GB, {row.cpu_s:.1f} s CPU; {row.modes}"
    )


def table(rows: list[Row]) -> str:
    cases = {case.name: case for case in CASES}
    header = (
        "model", "layers", "mesh", "hardware", "batch", "limit GB", "auto ms", "best named", "its ms", "ratio", "gap",
        "recompute", "peak GB", "CPU s", "what auto does to parameters",
    )  # fmt: skip
    lines = []
    for row in rows:
        case, (name, seconds) = cases[row.case], row.best
        did = "; ".join(f"{count} × {key}" for key, count in row.modes.items())
        lines.append((
            case.model, case.layers or "all", case.mesh, case.hardware, "x".join(map(str, case.batch)),
            case.limit_gb or "–", _ms(row.auto_s), name, _ms(seconds), _ratio(row.auto_s, seconds), f"{row.gap:.2%}",
            row.rematerialize, f"{row.peak_gb:.1f}", f"{row.cpu_s:.1f}", did,
        ))  # fmt: skip
    return pages.table(header, lines)


def _ms(seconds: float) -> str:
    return "–" if math.isinf(seconds) else f"{1e3 * seconds:.3f}"


def _ratio(auto_s: float, named_s: float) -> str:
    return "–" if math.isinf(named_s) else f"{auto_s / named_s:.4f}"


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="names of cases, separated by commas")
    parser.add_argument("--rows", type=Path, help="file that keeps what was found, one JSON line per case")
    parser.add_argument("--write", action="store_true", help="write a dated table under benchmarks/results/")
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = {row["case"]: Row(**row) for row in pages.kept(options.rows)}
    wanted = options.only.split(",") if options.only else [case.name for case in CASES]
    for case in (case for case in CASES if case.name in wanted):
        if case.name not in rows or options.only:
            rows[case.name] = measure(case)
            pages.keep(options.rows, rows[case.name])
        print(text_of(rows[case.name]), flush=True)
    done = [rows[name] for name in wanted if name in rows]
    worse = [row.case for row in done if not row.holds]
    said = f"auto is worse in {len(worse)} of {len(done)} cases {' '.join(worse)}".rstrip()
    if options.write:
        pages.write(
            "auto",
            f"# auto against the named strategies, {date.today()}\n\nPredicted step times, bf16, "
            f"torch {torch.__version__.split('+')[0]}. Best named: of those that fit the limit. CPU s: planning "
            f"`auto` and tracing, {os.cpu_count()} cores, load average {os.getloadavg()[0]:.1f}. Where nothing fits, "
            f"no named strategy does.\n\n{said}.\n\n{table(done)}\n",
        )
    print(said)
    return 1 if worse else 0


if __name__ == "__main__":
    sys.exit(main())
