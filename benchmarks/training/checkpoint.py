"""What a checkpoint costs: seconds to save and load, how long training stands still, bytes read, memory; beside
torch.distributed.checkpoint and transformers' `from_pretrained` in the same run.

    torchrun --nproc-per-node 4 benchmarks/training/checkpoint.py [--mib 4096] [--rounds 3] [--cold] [--write]

A model of square layers, ZeRO-3 over all ranks. All take turns; medians of the slowest rank. Both write with fsync of
their files. Memory for the copies of saves beside training is got while the first save is written, as
`autopar.resume_or_start` gets it while the first steps run.
Loads are into a model on meta, whose weights get their memory there, as those of `from_pretrained` do, which one rank
calls alone, for the whole model, and then every rank, as scripts do that have each rank make the model. It maps files:
its weights get memory of their own when they are first written, which is in seconds of their own.
Bytes read are those of the process (/proc/self/io; what is mapped is not in it), memory is the growth of its peak
(VmHWM) since before the model was made, with planning, or before the save; both against the rank's part of the weights.
Files are in the page cache as far as it has room; with --cold they are not when a load begins. Needs as much disk as
four times the weights.
"""

from __future__ import annotations

import argparse
import ctypes
import gc
import os
import platform
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from dataclasses import dataclass, replace
from datetime import date
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from transformers import PretrainedConfig, PreTrainedModel

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar
from autopar.base.torch_compat.distributed import local_tensor
from autopar.runtime.checkpoint.convert import convert
from autopar.runtime.checkpoint.saving import prepare

ROOT = Path(__file__).parents[2]
WIDTH = 2048


class Config(PretrainedConfig):
    """Of `Layers`."""

    model_type = "layers"

    def __init__(self, num: int = 1, **others: Any) -> None:
        super().__init__(**others)
        self.num = num


class Layers(PreTrainedModel):
    """The model, as transformers has models."""

    config_class = Config

    def __init__(self, config: Config) -> None:
        super().__init__(config)
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(config.num))
        self.post_init()

    def _init_weights(self, module: nn.Module) -> None:
        """They are as they are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass(frozen=True)
class Took:
    """Of the slowest rank, or the one that read or held most."""

    seconds: float
    read: float
    peak: float
    written: float = 0.0


def status(name: str) -> int:
    """Bytes, of /proc/self/status."""
    rows = Path("/proc/self/status").read_text().splitlines()
    return next(int(row.split()[1]) * 1024 for row in rows if row.startswith(name))


def held() -> int:
    """Bytes that this process holds, after it has given back what it freed; its peak begins anew."""
    gc.collect()
    ctypes.CDLL(None).malloc_trim(0)
    Path("/proc/self/clear_refs").write_text("5")
    return status("VmRSS")


def timed(act: Callable[[], object], before: int | None = None) -> Took:
    """What an act costs, over all ranks. before: what was held before the model was made."""

    def read() -> int:
        return int(Path("/proc/self/io").read_text().splitlines()[0].split()[1])

    before = held() if before is None else before
    dist.barrier()
    begun, known = time.perf_counter(), read()
    act()
    found = torch.tensor([time.perf_counter() - begun, read() - known, status("VmHWM") - before], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return Took(*found.tolist())


def made(num: int, mesh: Any) -> Any:
    """A compiled model, on meta: no rank ever holds all of it."""
    with torch.device("meta"):
        model = Layers(Config(num))
    batch = {"x": torch.zeros(mesh.size(), WIDTH)}
    # No step is taken: gradients, which would not fit everywhere, are none.
    return autopar.compile(model, mesh, example_inputs=batch, strategy="zero3", memory_limit=1 << 40)


def filled(model: Any) -> Any:
    """With values of its own in each layer."""
    model.to_empty(device="cpu")
    for number, value in enumerate(model.parameters()):
        local_of(value).fill_(0.5 + number)
    return model


def local_of(value: Any) -> torch.Tensor:
    """This rank's part."""
    return local_tensor(value) if hasattr(value, "device_mesh") else value.detach()


def touched(model: Any) -> None:
    """Each page of the weights is in memory: files that are mapped are read when somebody looks."""
    for value in () if model is None else model.parameters():
        local_of(value).view(-1)[::1024].sum()


def written(model: Any) -> float:
    """Seconds until each page of the weights is written once, as a first step writes it: of the slowest rank."""
    dist.barrier()
    begun = time.perf_counter()
    for value in () if model is None else model.parameters():
        local_of(value).view(-1)[::1024].mul_(1)
    seconds = torch.tensor(time.perf_counter() - begun)
    dist.all_reduce(seconds, dist.ReduceOp.MAX)
    return float(seconds)


def checked(model: Any) -> None:
    """All values are those that were saved."""
    for number, layer in enumerate(model.layers):
        assert bool((local_of(layer.weight) == 0.5 + number).all()), number


def saves(folder: Path, num: int, mesh: Any, rounds: int, found: dict[str, list[Took]]) -> None:
    """All three kinds, in turns."""
    model = filled(made(num, mesh))
    prepare(model, model.autopar, ())  # as `resume_or_start` does after the first step
    for step in range(rounds):
        shutil.rmtree(folder / "torch", ignore_errors=True)
        acts: dict[str, Callable[[], Any]] = {
            "save": lambda step=step: model.save(folder / "own", step=step, keep=1),  # type: ignore[misc]
            "stall": lambda step=step: model.save(folder / "beside", step=step, keep=1, wait=False),  # type: ignore[misc]
            "torch's save": lambda: dcp.save({"model": model.state_dict()}, checkpoint_id=folder / "torch"),
        }
        for name, act in acts.items():
            pending: list[Any] = []
            found.setdefault(name, []).append(timed(lambda act=act, pending=pending: pending.append(act())))  # type: ignore[misc]
            if name == "stall":
                pending.pop().wait()
    model.autopar.background.finish()
    dist.barrier()
    if dist.get_rank() == 0:
        shutil.rmtree(folder / "beside")


def evicted(folder: Path) -> None:
    """The files are on the disk alone, not in the page cache."""
    if dist.get_rank() == 0:
        for path in folder.rglob("*"):
            if path.is_file():
                descriptor = os.open(path, os.O_RDONLY)
                os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
                os.close(descriptor)
    dist.barrier()


def loads(folder: Path, num: int, mesh: Any, rounds: int, is_cold: bool, found: dict[str, list[Took]]) -> None:
    """Onto models on meta, in turns."""
    for _ in range(rounds):
        for name in ("load", "load_pretrained", "torch's load", "from_pretrained", "from_pretrained on each rank"):
            if is_cold:
                evicted(folder)
            before = held()
            model = None if name.startswith("from_pretrained") else made(num, mesh)

            def act(name: str = name, model: Any = model) -> Any:
                if name == "load":
                    model.load(folder / "own")
                elif name == "load_pretrained":
                    model.load_pretrained(folder / "whole")
                elif name == "torch's load":
                    model.to_empty(device="cpu")
                    dcp.load({"model": model.state_dict()}, checkpoint_id=folder / "torch")
                elif "each" in name or dist.get_rank() == 0:
                    model = Layers.from_pretrained(folder / "whole", dtype=torch.float32)
                touched(model)
                return model

            kept: list[Any] = []
            found.setdefault(name, []).append(timed(lambda act=act, kept=kept: kept.append(act()), before))  # type: ignore[misc]
            found[name][-1] = replace(found[name][-1], written=written(kept[0]))
            if kept[0] is not None:
                checked(kept[0])
            del kept, model, act


def row(name: str, took: list[Took], part: float) -> str:
    """Of the table."""
    seconds = [each.seconds for each in took]
    read, peak = (max(getattr(each, what) for each in took) / part for what in ("read", "peak"))
    spread = f"{min(seconds):.2f} to {max(seconds):.2f}"
    first = statistics.median(each.written for each in took)
    written_in = f"{first:.2f} s" if first else ""
    return f"| {name} | {statistics.median(seconds):.2f} s ({spread}) | {written_in} | {read:.3f} | {peak:.3f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=4096, help="of weights")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--cold", action="store_true", help="files are not in the page cache when they are loaded")
    parser.add_argument("--write", action="store_true", help="benchmarks/results/checkpoint-of-MIB-DATE.md")
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks, num = dist.get_world_size(), max(1, options.mib * 2**20 // (4 * WIDTH * WIDTH))
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    box = [tempfile.mkdtemp(prefix="checkpoint-")]
    dist.broadcast_object_list(box, src=0)
    folder, found = Path(box[0]), dict[str, list[Took]]()
    try:
        saves(folder, num, mesh, options.rounds, found)
        gc.collect()
        if dist.get_rank() == 0:
            convert(folder / "own", folder / "whole")
            Config(num).save_pretrained(folder / "whole")
        dist.barrier()
        loads(folder, num, mesh, options.rounds, options.cold, found)
    finally:
        dist.barrier()
        if dist.get_rank() == 0:
            shutil.rmtree(folder, ignore_errors=True)
    if dist.get_rank() == 0:
        part = num * 4 * WIDTH * WIDTH / ranks
        stalls = [ours.seconds / other.seconds for ours, other in zip(found["stall"], found["torch's save"])]
        text = [
            f"# Checkpoints of {options.mib} MiB{', files not in the page cache' * options.cold}, {date.today()}",
            "",
            f"`torchrun --nproc-per-node {ranks} benchmarks/training/checkpoint.py --mib {options.mib} --rounds "
            f"{options.rounds}{' --cold' * options.cold}`: ZeRO-3 on {ranks} ranks of one machine with "
            f"{os.cpu_count()} cores, load {os.getloadavg()[0]:.1f}; "
            f"torch {torch.__version__}, Python {platform.python_version()}, local disk.",
            "",
            "| | seconds (of the rounds) | first write | read, of a rank's part "
            "| most memory beyond what was held before, of it |",
            "| --- | --: | --: | --: | --: |",
            *(row(name, took, part) for name, took in found.items()),
            "",
            f"Training stands still for {statistics.median(stalls):.1%} of torch's save of the same round ("
            f"{min(stalls):.1%} to {max(stalls):.1%}). "
            "`from_pretrained` is of the whole model, by one rank or by each.",
        ]
        print("\n".join(text))
        if options.write:
            path = (
                ROOT
                / "benchmarks"
                / "results"
                / f"checkpoint-of-{options.mib}{'-cold' * options.cold}-{date.today()}.md"
            )
            path.write_text("\n".join(text) + "\n")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
