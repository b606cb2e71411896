"""What a checkpoint costs: seconds to save and load, how long training stands still, bytes read; beside
torch.distributed.checkpoint in the same run.

    torchrun --nproc-per-node 2 benchmarks/training/checkpoint.py [--mib 256] [--rounds 3]

A model of square layers, ZeRO-3 over all ranks. The two take turns; medians of the slowest rank. Both write onto the
same disk, ours with fsync of every file and folder. Bytes read are those of the process (/proc/self/io), against those
of its part of the weights; files are in the page cache then.
"""

from __future__ import annotations

import argparse
import shutil
import statistics
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

sys.path.insert(0, str(Path(__file__).parents[2]))

import autopar

WIDTH = 2048


class Layers(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.layers = nn.ModuleList(nn.Linear(WIDTH, WIDTH, bias=False) for _ in range(num))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def read_bytes() -> int:
    """All that this process has read so far."""
    rows = Path("/proc/self/io").read_text().splitlines()
    return int(rows[0].split()[1])


def timed(act: Callable[[], object]) -> tuple[float, int]:
    """Seconds of the slowest rank, and bytes read by the one that read most."""
    dist.barrier()
    begun, read = time.perf_counter(), read_bytes()
    act()
    found = torch.tensor([time.perf_counter() - begun, read_bytes() - read], dtype=torch.float64)
    dist.all_reduce(found, dist.ReduceOp.MAX)
    return float(found[0]), int(found[1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--mib", type=int, default=256, help="of weights")
    parser.add_argument("--rounds", type=int, default=3)
    options = parser.parse_args()
    dist.init_process_group("gloo")
    ranks = dist.get_world_size()
    mesh = init_device_mesh("cpu", (ranks,), mesh_dim_names=("dp",))
    torch.manual_seed(0)
    model: Any = Layers(max(1, options.mib * 2**20 // (4 * WIDTH * WIDTH)))
    batch = {"x": torch.zeros(ranks, WIDTH)}
    model = autopar.compile(model, mesh, example_inputs=batch, strategy="zero3")
    box = [tempfile.mkdtemp(prefix="checkpoint-")]
    dist.broadcast_object_list(box, src=0)
    folder = Path(box[0])
    found: dict[str, list[tuple[float, int]]] = {}
    pending: list[Any] = []
    for number in range(options.rounds):
        acts: dict[str, Callable[[], object]] = {
            "save, autopar": lambda number=number: model.save(folder / "own", step=number, keep=1),
            "stall, autopar": lambda number=number: pending.append(
                model.save(folder / "beside", step=number, keep=1, wait=False)
            ),
            "save, torch": lambda number=number: dcp.save(
                {"model": model.state_dict()}, checkpoint_id=folder / f"torch{number}"
            ),
            "load, autopar": lambda: model.load(folder / "own"),
            "load, torch": lambda number=number: dcp.load(
                {"model": model.state_dict()}, checkpoint_id=folder / f"torch{number}"
            ),
        }
        for name, act in acts.items():
            found.setdefault(name, []).append(timed(act))
            if pending:  # on the disk before the next one takes its turn
                pending.pop().wait()
    needed = sum(p.to_local().numel() * 4 for p in model.parameters())
    if dist.get_rank() == 0:
        print(f"{needed * ranks / 2**20:.0f} MiB of weights on {ranks} ranks, {options.rounds} rounds")
        by_torch = statistics.median(row[0] for row in found["save, torch"])
        stalls = [row[0] for row in found["stall, autopar"]]
        print(
            f"stall of wait=False: {statistics.median(stalls) / by_torch:.1%} of torch's save (the first one, which "
            f"gets its memory, {stalls[0] / by_torch:.1%})"
        )
        for name, rows in found.items():
            seconds = [row[0] for row in rows]
            ratio = f", read {max(row[1] for row in rows) / needed:.3f} of its part" if "load, a" in name else ""
            spread = f"{min(seconds):.3f} to {max(seconds):.3f}"
            print(f"{name:14} {statistics.median(seconds):.3f} s ({spread}){ratio}")
        shutil.rmtree(folder, ignore_errors=True)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
