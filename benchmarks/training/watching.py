"""What watching costs: seconds of a step with `autopar.watch`, and with its metrics, against those without.

    torchrun --nproc-per-node 2 benchmarks/training/watching.py [--steps 20] [--rounds 20] [--write]

Feed-forward blocks under ZeRO-2, one model. Steps without, with all that is watched by default, and with metrics too,
take turns, so that what else a machine does meets all alike. Ratios are of medians on rank 0. The step in which
replicas and waits are compared, one in 100, is told by itself.
"""

from __future__ import annotations

import argparse
import os
import platform
import statistics
import sys
import tempfile
import time
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar

ROOT = Path(__file__).parents[2]
KINDS = ("without", "watched", "with metrics")


class Blocks(nn.Module):
    """A stack of feed-forward blocks with norms: enough parameters for states and replicas to count."""

    def __init__(self, width: int, depth: int) -> None:
        super().__init__()
        self.blocks = nn.ModuleList(
            nn.Sequential(nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width))
            for _ in range(depth)
        )

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = x + block(x)
        return x.square().mean()


class Timed:
    """A watch, and the seconds spent in it since somebody asked, and those of the processor: without the waits for the
    other ranks, which would have come at the next collective where a rank is late.
    """

    def __init__(self, watch: Any) -> None:
        self.watch, self.number = watch, watch.number
        self.spent = [0.0, 0.0]

    def __getattr__(self, name: str) -> Any:
        found = getattr(self.watch, name)
        if name not in ("forward_ended", "clipped", "before_step"):
            return found

        def timed(*args: Any) -> Any:
            begun = time.perf_counter(), time.thread_time()
            try:
                return found(*args)
            finally:
                self.spent[0] += time.perf_counter() - begun[0]
                self.spent[1] += time.thread_time() - begun[1]

        return timed


def one(model: Any, optimizer: torch.optim.Optimizer, batch: torch.Tensor) -> tuple[float, float]:
    """Seconds of a step, and of this process' processors."""
    begun, used = time.perf_counter(), time.process_time()
    model(x=batch).backward()
    model.clip_grad_norm_(1.0)
    optimizer.step()
    optimizer.zero_grad()
    return time.perf_counter() - begun, time.process_time() - used


def of_rounds(rows: list[float], size: int) -> list[float]:
    """The median of each round."""
    return [statistics.median(rows[first : first + size]) for first in range(0, len(rows), size)]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=20, help="of each kind in a round")
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--width", type=int, default=512)
    parser.add_argument("--depth", type=int, default=3)
    parser.add_argument("--rows", type=int, default=128)
    parser.add_argument("--write", action="store_true", help="benchmarks/results/watching-DATE.md")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    torch.manual_seed(0)
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    batch = torch.randn(options.rows, options.width)
    plain = Blocks(options.width, options.depth)
    model: Any = autopar.compile(plain, mesh, example_inputs={"x": batch}, strategy="zero2")
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-6)
    for _ in range(5):
        one(model, optimizer, batch)
    usual: dict[str, list[tuple[float, float]]] = {kind: [] for kind in KINDS}
    compared: dict[str, list[float]] = {kind: [] for kind in KINDS[1:]}
    inside: dict[str, list[tuple[float, ...]]] = {kind: [] for kind in KINDS[1:]}
    with tempfile.TemporaryDirectory() as folder:
        watches: dict[str, Any] = {"without": None}
        for kind in KINDS[1:]:
            watches[kind] = Timed(autopar.watch(model, metrics=Path(folder) if kind == "with metrics" else None))
            model.autopar.watch = None
        for number in range(options.rounds * options.steps):
            for kind in KINDS[number % 3 :] + KINDS[: number % 3]:
                watch = model.autopar.watch = watches[kind]
                took = one(model, optimizer, batch)
                if watch is not None and watch.step % watch.every == 0:
                    compared[kind].append(took[0])
                else:
                    usual[kind].append(took)
                    if watch is not None:
                        inside[kind].append(tuple(watch.spent))
                if watch is not None:
                    watch.spent = [0.0, 0.0]
        for watch in filter(None, watches.values()):
            watch.close()
    if dist.get_rank() == 0:
        text = [
            f"# What watching costs, {date.today()}",
            "",
            f"`torchrun --nproc-per-node {ranks} benchmarks/training/watching.py --steps {options.steps} --rounds "
            f"{options.rounds} --width {options.width} --depth {options.depth} --rows {options.rows}`: ZeRO-2 on "
            f"{ranks} ranks, {os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; torch {torch.__version__}, Python "
            f"{platform.python_version()}, gloo. The three kinds of steps take turns, step by step.",
            "",
            "| | a step | more than without | processor time, more than without | in the watch's calls | of it the "
            "processor |",
            "| --- | --: | --: | --: | --: | --: |",
        ]
        median = {kind: statistics.median(wall for wall, _ in usual[kind]) for kind in KINDS}
        for kind in KINDS:
            row = f"| {kind} | {1e3 * median[kind]:.2f} ms |"
            for which in (0, 1) if kind != "without" else ():
                mine, base = (of_rounds([each[which] for each in usual[k]], options.steps) for k in (kind, "without"))
                ratios = [a / b - 1 for a, b in zip(mine, base, strict=False)]
                low, middle, high = statistics.quantiles(ratios, n=4)
                row += f" {middle:+.2%} ({low:+.2%} to {high:+.2%}) |"
            if kind != "without":
                for which in (0, 1):
                    share = statistics.median(each[which] for each in inside[kind])
                    row += f" {1e3 * share:.2f} ms, {share / median['without']:.2%} |"
            text.append(row if kind != "without" else f"{row} | | | |")
        text += ["", "Medians over rounds of medians over steps, quarters behind."]
        for kind, rows in compared.items():
            more = statistics.median(rows) - median[kind]
            text.append(
                f"{kind}: the step in which replicas and waits are compared takes {1e3 * more:.2f} ms more, once in "
                f"100 steps: {more / 100 / median['without']:+.2%}."
            )
        print("\n".join(text))
        if options.write:
            path = ROOT / "benchmarks" / "results" / f"watching-{date.today()}.md"
            path.write_text("\n".join(text) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
