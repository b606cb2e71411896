"""What a rank says of itself: versions, devices, limits, room. Nothing here waits for another rank."""

from __future__ import annotations

import os
import platform
import resource
import shutil
import socket
from dataclasses import dataclass, field
from importlib import metadata
from pathlib import Path

import torch
from torch.cuda import nccl

from autopar.base.environment import Launched

PACKAGES = ("torch", "numpy", "safetensors", "xxhash", "ortools", "numba", "triton", "transformers")
UNLIMITED = -1
SHM, MEMORY, INFINIBAND = Path("/dev/shm"), Path("/proc/meminfo"), Path("/sys/class/infiniband")


@dataclass(frozen=True, slots=True)
class Device:
    """A GPU. free_bytes: of its memory, before this process took any."""

    name: str
    free_bytes: int
    total_bytes: int


@dataclass(frozen=True, slots=True)
class Facts:
    """Of one rank. packages: version by name, of those that are there. cuda, nccl: versions, "" without. devices: how
    many GPUs torch sees; device: that of this rank. computes: whether a product has the bits that it should have.
    threads: of torch in this process; cores: that it may use. open_files, locked_bytes: limits, -1 for none.
    shm_bytes: free in /dev/shm, None where there is none. is_infiniband: whether the machine has such cards.
    """

    rank: int
    host: str
    local_ranks: int
    python: str
    autopar: str
    packages: dict[str, str] = field(default_factory=dict)
    cuda: str = ""
    nccl: str = ""
    devices: int = 0
    device: Device | None = None
    computes: bool = True
    threads: int = 1
    cores: int = 1
    open_files: int = UNLIMITED
    locked_bytes: int = UNLIMITED
    shm_bytes: int | None = None
    memory_bytes: int | None = None
    is_infiniband: bool = False


def collect(launched: Launched, device: torch.device) -> Facts:
    """This rank's. device: `cpu`, or its GPU."""
    from autopar import __version__

    gpu = None
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        gpu = Device(torch.cuda.get_device_name(device), free, total)
    return Facts(
        rank=launched.rank,
        host=socket.gethostname(),
        local_ranks=launched.local_world_size,
        python=platform.python_version(),
        autopar=__version__,
        packages={name: version for name in PACKAGES if (version := _version(name))},
        cuda=str(torch.version.cuda or ""),
        nccl=".".join(map(str, nccl.version())) if device.type == "cuda" else "",
        devices=torch.cuda.device_count() if torch.cuda.is_available() else 0,
        device=gpu,
        computes=computes(device),
        threads=torch.get_num_threads(),
        cores=len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1,
        open_files=_limit(resource.RLIMIT_NOFILE),
        locked_bytes=_limit(resource.RLIMIT_MEMLOCK),
        shm_bytes=shutil.disk_usage(SHM).free if SHM.is_dir() else None,
        memory_bytes=_memory(),
        is_infiniband=INFINIBAND.is_dir() and any(INFINIBAND.iterdir()),
    )


def computes(device: torch.device) -> bool:
    """Whether a product of small whole numbers is right to the bit, as it is in any format and order of sums."""
    a = (torch.arange(256 * 256) % 11 - 5).view(256, 256)
    right = a @ a
    found = a.to(device, torch.float32) @ a.to(device, torch.float32)
    return bool((found.to("cpu", torch.int64) == right).all())


def _version(name: str) -> str:
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return ""


def _limit(which: int) -> int:
    soft = resource.getrlimit(which)[0]
    return UNLIMITED if soft == resource.RLIM_INFINITY else soft


def _memory() -> int | None:
    """Main memory that programs may still get."""
    try:
        rows = MEMORY.read_text().splitlines()
    except OSError:
        return None
    return next((int(row.split()[1]) * 1024 for row in rows if row.startswith("MemAvailable:")), None)
