"""Predicted beside measured on the machine at hand: seconds and peak bytes of steps that calibration never saw.

    python benchmarks/training/accuracy.py [--only llama,gpt2:tensor] [--device cuda] [--rounds 11] [--json FILE]
                                           [--write]
    python benchmarks/training/accuracy.py --kept FILE [--write]

Calibrates this machine as `autopar calibrate` does: single operators, AdamW and collectives, no model. Then plans small
HuggingFace models with that profile, on one process and on two, and trains them: forward, backward, AdamW, in
float32 on a CPU, in bfloat16 on a GPU (one process, larger models). Each number of processes is calibrated by itself,
in the processes that then train.

Steps take longer than their operators do by themselves: Python between them, ranks that wait for each other at every
collective, caches. One model, llama, says by how much: the median of measured / predicted over its rows is a factor for
each number of processes. All other models are unseen, and are given with the factor and without.

Time: the median step, by the wall clock, of the slowest rank; on a CPU also the processor time of the busiest rank, all
its threads, which other processes on the machine disturb less, and which does not count waiting. Memory: the most bytes
of tensor storages that live at one time in a step (a dispatch mode follows every storage that an operator makes or
reads); on CUDA the allocator's peak. The C library's allocator is told to keep what is freed (`ALLOCATOR`): with its
defaults large tensors are mapped anew, and a step has page faults, more or fewer by chance.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass
from datetime import date
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[2]))

from benchmarks import pages

ALLOCATOR = {"MALLOC_ARENA_MAX": "1", "MALLOC_MMAP_MAX_": "0", "MALLOC_TRIM_THRESHOLD_": str(1 << 40)}
"""What glibc reads when a process starts: no tensor is mapped by itself, nothing is given back, and the threads of the
backward and of gloo share the memory of the main one (theirs would be given back).
"""
WARM_UP = 2
CALIBRATES = "llama"
"""The model whose steps say how much longer steps take than their operators."""
TARGETS = {"cpu": (0.10, 0.05), "cuda": (0.05, 0.03)}
"""Of the median errors of time and of peak memory."""
LEAST_MEMORY = 0.98
"""A predicted peak must not be less than this part of the measured one."""


@dataclass(frozen=True, slots=True)
class Model:
    """spec: of the catalogue; batch: sequences (images), tokens; overrides: of its configuration."""

    spec: str
    batch: tuple[int, int]
    overrides: Mapping[str, object]


def _llama(hidden: int, layers: int, heads: int, kv_heads: int, vocabulary: int) -> dict[str, object]:
    return {
        "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": hidden * 11 // 4,
        "num_hidden_layers": layers, "num_attention_heads": heads, "num_key_value_heads": kv_heads,
        "head_dim": hidden // heads,
    }  # fmt: skip


def _bert(hidden: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads,
        "intermediate_size": 4 * hidden,
    }  # fmt: skip


def _t5(hidden: int, layers: int, heads: int) -> dict[str, object]:
    return {
        "vocab_size": 4096, "d_model": hidden, "d_kv": hidden // heads, "d_ff": 4 * hidden, "num_layers": layers,
        "num_decoder_layers": layers, "num_heads": heads,
    }  # fmt: skip


def _gpt2(hidden: int, layers: int, heads: int) -> dict[str, object]:
    return {"vocab_size": 4096, "n_embd": hidden, "n_layer": layers, "n_head": heads, "n_positions": 256}


MODELS = {
    "llama": Model("llama", (4, 256), _llama(256, 4, 8, 4, 4096)),
    "qwen3": Model("qwen3", (2, 256), _llama(384, 3, 6, 2, 8192)),
    "mistral": Model("mistral", (1, 512), _llama(512, 2, 8, 8, 2048)),
    "gemma2": Model("gemma2", (2, 256), _llama(256, 4, 4, 2, 8192)),
    "gpt2": Model("gpt2", (4, 128), _gpt2(384, 4, 6)),
    "bert": Model("bert", (8, 128), {"vocab_size": 4096} | _bert(256, 4, 4)),
    "t5": Model("t5", (4, 128), _t5(256, 3, 8)),
    "vit": Model("vit", (8, 1), _bert(256, 4, 4)),
}
MODELS_CUDA = {
    "llama": Model("llama", (4, 2048), _llama(2048, 8, 16, 4, 32768)),
    "qwen3": Model("qwen3", (4, 2048), _llama(1536, 10, 12, 4, 65536)),
    "gpt2": Model("gpt2", (8, 1024), {"n_embd": 1280, "n_layer": 12, "n_head": 20}),
    "bert": Model("bert", (32, 512), _bert(1024, 12, 16)),
    "t5": Model("t5", (16, 512), _t5(1024, 8, 16)),
    "vit": Model("vit", (64, 1), _bert(1024, 12, 16)),
}
ALONE = ("dp", "ddp")
TOGETHER = {
    "llama": ("ddp", "zero3", "tensor", "tensor+sequence", "pipeline"),
    "gpt2": ("ddp", "zero3", "tensor", "pipeline"),
    "bert": ("ddp", "zero3", "tensor"),
    "qwen3": ("ddp", "zero3"),
    "t5": ("zero3",),
    "vit": ("ddp",),
}
"""Strategies on two processes."""


@dataclass(frozen=True, slots=True)
class Case:
    """One row: a model on so many ranks."""

    model: str
    ranks: int
    strategy: str

    @property
    def axis(self) -> str:
        """Of the mesh."""
        return {"tensor": "tp", "tensor+sequence": "tp", "pipeline": "pp"}.get(self.strategy, "dp")


@dataclass(frozen=True, slots=True)
class Row:
    """A case as predicted and measured: seconds of a step, bytes of the rank that holds most.

    parts_s: of the prediction: compute, communication, hidden, waiting, optimizer. cpu_s: processor time, on a CPU.
    least_s, most_s: the quartiles of the measured steps.
    """

    model: str
    ranks: int
    strategy: str
    predicted_s: float
    measured_s: float
    cpu_s: float | None
    least_s: float
    most_s: float
    predicted_bytes: float
    measured_bytes: float
    parts_s: Mapping[str, float]

    @property
    def time_error(self) -> float:
        """predicted / measured − 1."""
        return self.predicted_s / self.measured_s - 1

    @property
    def cpu_error(self) -> float | None:
        """The same of CPU time."""
        return None if self.cpu_s is None else self.predicted_s / self.cpu_s - 1

    @property
    def memory_error(self) -> float:
        """The same of the peak."""
        return self.predicted_bytes / self.measured_bytes - 1


# -- in the ranks


def work(cases: list[dict[str, Any]], ranks: int, device: str, rounds: int) -> dict[str, Any]:
    """Calibrate in these processes, then run the cases one after the other. Called on every rank."""
    import torch.distributed as dist

    from autopar.cost.calibration import Options
    from autopar.cost.calibration.run import calibrate
    from autopar.runtime import kernels
    from benchmarks.training.ranks import progress

    kernels.register()  # what is measured is what trains
    os.environ |= {"WORLD_SIZE": str(ranks), "LOCAL_WORLD_SIZE": str(ranks)}
    with tempfile.TemporaryDirectory() as folder:
        shared = [f"{folder}/measured.toml"]
        dist.broadcast_object_list(shared)
        begun = time.monotonic()
        found = calibrate(Options(Path(shared[0])))
        residuals = [] if found is None else [str(each) for each in found.residuals]
        progress(f"{ranks} process{'es' * (ranks > 1)}: calibrated in {time.monotonic() - begun:.0f} s")
        for text in residuals:
            progress(f"  {text}")
        dist.barrier()
        rows = []
        for case in (Case(**each) for each in cases):
            row = asdict(measure(case, shared[0], device, rounds))
            rows.append(row)
            progress(f"  {summary(Row(**row))}")
        dist.barrier()
        return {"rows": rows, "residuals": residuals, "profile": found.text if found is not None else ""}


def measure(case: Case, profile: str, device: str, rounds: int) -> Row:
    """Plan one case with the profile, train it, and follow one more step for its memory."""
    import torch
    import torch.distributed as dist

    import autopar
    from autopar.cli.models import catalogue
    from benchmarks.training.ranks import peak_bytes, quartiles

    model = (MODELS_CUDA if device == "cuda" else MODELS)[case.model]
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    loaded = catalogue.load(
        model.spec, batch=model.batch, device="cpu", dropout=0.0, dtype=dtype, overrides=model.overrides
    )
    batch = {key: value.to(device) if hasattr(value, "to") else value for key, value in loaded.batch.items()}
    mesh = dist.init_device_mesh(device, (case.ranks,), mesh_dim_names=(case.axis,))
    options: dict[str, Any] = {"strategy": "auto"} if case.axis == "pp" else {"strategy": case.strategy}
    compiled: Any = autopar.compile(
        loaded.model.to(device), mesh, example_inputs=batch, hardware=profile, memory_limit=1e12, **options
    )
    optimizer = torch.optim.AdamW(compiled.parameters(), lr=1e-4)

    def step() -> None:
        if case.axis == "pp":
            compiled.train_step(**batch)
        else:
            output = compiled(**batch)  # a name, as in most training loops: the logits live to the end of the step
            output.loss.backward()
        optimizer.step()
        optimizer.zero_grad()

    wall, cpu = _times(step, case.ranks, device, rounds)
    states = [v for state in optimizer.state.values() for v in state.values() if isinstance(v, torch.Tensor)]
    held = [*compiled.parameters(), *compiled.buffers(), *states]
    held += [value for value in batch.values() if isinstance(value, torch.Tensor)]
    peak = _most([float(peak_bytes(step, held)[0])], case.ranks, device)[0]
    cost = compiled.plan.cost
    parts = {
        "compute": cost.compute_s, "communication": cost.communication_s, "hidden": cost.hidden_s,
        "waiting": cost.waiting_s, "optimizer": cost.optimizer_s,
    }  # fmt: skip
    low, middle, high = quartiles(wall)
    return Row(
        case.model, case.ranks, case.strategy, cost.step_time_s, middle,
        statistics.median(cpu) if device == "cpu" else None, low, high,
        float(cost.peak_memory_bytes), peak, parts,
    )  # fmt: skip


def _times(step: Callable[[], None], ranks: int, device: str, rounds: int) -> tuple[list[float], list[float]]:
    """Wall seconds of the slowest rank and CPU seconds of the busiest one, of every step after the warm-up."""
    import torch.distributed as dist

    from benchmarks.training.ranks import synchronize

    wall, cpu = [], []
    for number in range(WARM_UP + rounds):
        synchronize()
        if ranks > 1:
            dist.barrier()
        begun, cpu_begun = time.perf_counter(), time.process_time()
        step()
        synchronize()
        if number >= WARM_UP:
            wall.append(time.perf_counter() - begun)
            cpu.append(time.process_time() - cpu_begun)
    return _most(wall, ranks, device), _most(cpu, ranks, device)


def _most(values: list[float], ranks: int, device: str) -> list[float]:
    """The largest of all ranks, one by one."""
    import torch
    import torch.distributed as dist

    found = torch.tensor(values, dtype=torch.float64, device=device)
    if ranks > 1:
        dist.all_reduce(found, op=dist.ReduceOp.MAX)
    return [float(value) for value in found]


# -- outside


def cases_of(device: str, only: Sequence[str] = ()) -> list[Case]:
    """All rows, or those of `MODEL`, `MODEL:STRATEGY`, or a number of ranks."""
    alone = [Case(name, 1, ALONE[1]) for name in (MODELS_CUDA if device == "cuda" else MODELS)]
    together = [Case(name, 2, strategy) for name, several in TOGETHER.items() for strategy in several]
    found = alone if device == "cuda" else alone + together
    return [c for c in found if not only or {c.model, f"{c.model}:{c.strategy}", str(c.ranks)} & set(only)]


def summary(row: Row) -> str:
    """One line, for stderr."""
    parts = ", ".join(f"{key} {1e3 * value:.0f}" for key, value in row.parts_s.items() if value >= 5e-4)
    cpu = "" if row.cpu_error is None else f" (CPU time {row.cpu_error:+.1%})"
    return (
        f"{row.model} {row.strategy}: {1e3 * row.predicted_s:.0f} ms ({parts}), measured {1e3 * row.measured_s:.0f}, "
        f"{row.time_error:+.1%}{cpu}; peak {row.predicted_bytes / 2**20:.1f} MiB, measured "
        f"{row.measured_bytes / 2**20:.1f}, {row.memory_error:+.1%}"
    )


def step_factor(rows: Sequence[Row]) -> float:
    """Measured by predicted: the median over the rows of the model that calibrates; 1 where there is none."""
    return statistics.median([r.measured_s / r.predicted_s for r in rows if r.model == CALIBRATES] or [1.0])


def unseen(rows: Sequence[Row]) -> list[Row]:
    """The rows of models that calibrate nothing; all where only those were asked for."""
    return [row for row in rows if row.model != CALIBRATES] or list(rows)


def median_error(errors: Sequence[float]) -> float:
    """The median of absolute values."""
    return statistics.median(map(abs, errors))


HEADER = ["model", "processes", "strategy", "operators ms", "predicted ms", "measured ms (quartiles)", "error",
          "without factor", "of CPU time", "predicted peak MiB", "measured", "error"]  # fmt: skip


def cells(row: Row, factor: float) -> list[str]:
    """Of the table. factor: as of `step_factor`."""
    error = (1 + row.time_error) * factor - 1
    return [
        row.model, str(row.ranks), row.strategy,
        *(f"{1e3 * each * row.predicted_s:.0f}" for each in (1.0, factor)),
        f"{1e3 * row.measured_s:.0f} ({1e3 * row.least_s:.0f}–{1e3 * row.most_s:.0f})",
        "calibrates" if row.model == CALIBRATES else f"**{error:+.1%}**", f"{row.time_error:+.1%}",
        "" if row.cpu_error is None else f"{row.cpu_error:+.1%}", f"{row.predicted_bytes / 2**20:.1f}",
        f"{row.measured_bytes / 2**20:.1f}", f"**{row.memory_error:+.1%}**",
    ]  # fmt: skip


def verdict(rows: Sequence[Row], device: str) -> list[str]:
    """What the page says of the errors of one number of processes, beside the targets: times of unseen models."""
    time_target, memory_target = TARGETS[device]
    factor, others = step_factor(rows), unseen(rows)
    cpu = [row.cpu_error for row in others if row.cpu_error is not None]
    under = min(rows, key=lambda row: row.memory_error)
    errors = [(1 + row.time_error) * factor - 1 for row in others]
    lines = [
        f"time: median error {median_error(errors):.1%} (target {time_target:.0%}), {min(errors):+.1%} to "
        f"{max(errors):+.1%}, with a factor of {factor:.3f}; without it "
        f"{median_error([row.time_error for row in others]):.1%}"
        + (f", of CPU time {median_error(cpu):.1%}" if cpu else ""),
        f"memory: median error {median_error([row.memory_error for row in rows]):.1%} (target {memory_target:.0%}); "
        f"least: {under.memory_error:+.1%} ({under.model} {under.strategy}; target: not under "
        f"{LEAST_MEMORY - 1:.0%})",
    ]
    return lines


def page(rows: Sequence[Row], device: str, residuals: Mapping[int, Sequence[str]]) -> str:
    """The page of results."""
    from benchmarks.training.ranks import machine

    ranks = sorted({row.ranks for row in rows})
    parts = [f"# Predicted and measured steps, {date.today()}", f"{_processor(device)}. {machine('1 and 2')}."]
    sizes = "; ".join(
        f"{name}: {model.spec}, batch {'x'.join(map(str, model.batch))}, {dict(model.overrides)}"
        for name, model in (MODELS_CUDA if device == "cuda" else MODELS).items()
        if any(row.model == name for row in rows)
    )
    allocator = " ".join(f"{key}={value}" for key, value in ALLOCATOR.items())
    parts.append(
        f"`python benchmarks/training/accuracy.py{' --device cuda' if device == 'cuda' else ''}`"
        + (f", with {allocator}. " if device == "cpu" else ". ")
        + f"Calibrated on operators and collectives, and on the steps of {CALIBRATES} (a factor for each number of "
        f"processes); the other models are unseen. The step is forward, backward and AdamW. {sizes}."
    )
    for number in ranks:
        own = [row for row in rows if row.ranks == number]
        parts.append(f"## {number} process{'es' * (number > 1)}")
        parts.append("\n".join(f"- {line}" for line in verdict(own, device)))
        parts.append(pages.table(HEADER, [cells(row, step_factor(own)) for row in own]))
        parts.append("How well the profile gives the times that it was made from: " + "; ".join(residuals[number]))
    return "\n\n".join(parts) + "\n"


def _processor(device: str) -> str:
    if device == "cuda":
        import torch

        return torch.cuda.get_device_name()
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    return next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "CPU")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", help="rows: MODEL, MODEL:STRATEGY, or a number of processes; several with commas")
    parser.add_argument("--device", choices=("cpu", "cuda"), default="cpu")
    parser.add_argument("--rounds", type=int, default=11, help="steps that are timed")
    parser.add_argument("--json", metavar="FILE", help="rows, residuals and profiles as data")
    parser.add_argument("--write", action="store_true", help="a dated page under benchmarks/results/")
    parser.add_argument("--kept", metavar="FILE", help="a page of what --json kept; nothing is run")
    options = parser.parse_args()
    if options.kept:
        done: list[dict[str, Any]] = json.loads(Path(options.kept).read_text())
        _show(done, options)
        return
    wanted = cases_of(options.device, options.only.split(",") if options.only else ())
    if not wanted:
        parser.error(f"no row is called {options.only}")
    if options.device == "cpu":
        os.environ |= ALLOCATOR | {"CUDA_VISIBLE_DEVICES": ""}
    from benchmarks.training.ranks import launch

    data: list[dict[str, Any]] = []
    for ranks in sorted({case.ranks for case in wanted}):
        cases = [asdict(case) for case in wanted if case.ranks == ranks]
        found = launch(work, cases, ranks, options.device, options.rounds, ranks=ranks)[0]
        data.append({"processes": ranks, **found})
    if options.json:
        Path(options.json).write_text(json.dumps(data, indent=1))
    _show(data, options)


def _show(data: Sequence[Mapping[str, Any]], options: argparse.Namespace) -> None:
    rows = [Row(**row) for found in data for row in found["rows"]]
    text = page(rows, options.device, {found["processes"]: found["residuals"] for found in data})
    print(text)
    if options.write:
        suffix = "-cuda" if options.device == "cuda" else ""
        pages.write(f"accuracy{suffix}", text)


if __name__ == "__main__":
    main()
