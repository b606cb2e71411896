"""What the machine is: versions, and its ceilings of copies and products."""

from __future__ import annotations

import importlib.metadata
import platform
import subprocess

import torch

from autopar.cost.calibration.timing import Timer
from benchmarks.first_light.section import Section

PACKAGES = (
    "torch", "triton", "transformers", "numpy", "ortools", "immutabledict", "protobuf", "graphviz", "numba", "rich",
    "typer", "pygments", "sympy", "safetensors", "matplotlib", "pytest", "hypothesis", "accelerate", "peft",
)  # fmt: skip


def run(section: Section) -> None:
    found = {}
    for name in PACKAGES:
        try:
            found[name] = importlib.metadata.version(name)
        except importlib.metadata.PackageNotFoundError:
            found[name] = "missing"
    section.row("packages", None, python=platform.python_version(), **found)
    if section.on_cuda:
        section.attempt("device", lambda: _device(section))
    section.attempt("import autopar", lambda: _imports(section))
    timer = Timer(section.device, 0.5)
    size, copied = (8192, 2**30) if section.on_cuda else (512, 2**24)
    dtype = torch.bfloat16 if section.on_cuda else torch.float32
    a, b = (torch.randn(size, size, device=section.device, dtype=dtype) for _ in range(2))
    seconds = timer.seconds(lambda: a @ b)
    section.row("product", None, size=size, dtype=dtype, tflops=2 * size**3 / seconds * 1e-12)
    source = torch.empty(copied, dtype=torch.uint8, device=section.device)
    target = torch.empty_like(source)
    seconds = timer.seconds(lambda: target.copy_(source))
    section.row("copy", None, bytes=copied, read_and_written_tb_per_s=2 * copied / seconds * 1e-12)
    section.row("launch", None, microseconds=1e6 * timer.launch_s())


def _device(section: Section) -> None:
    properties = torch.cuda.get_device_properties(section.device)
    query = ["nvidia-smi", "--query-gpu=driver_version,clocks.sm,clocks.max.sm,power.limit", "--format=csv,noheader"]
    try:
        driver = subprocess.run(query, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError) as error:
        driver = str(error)
    section.row(
        "device", None, name=properties.name, memory_gib=properties.total_memory / 2**30,
        multiprocessors=properties.multi_processor_count, capability=f"{properties.major}.{properties.minor}",
        cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), nccl=str(torch.cuda.nccl.version()),
        driver=driver,
    )  # fmt: skip


def _imports(section: Section) -> None:
    import autopar.cli.main
    import autopar.views.report
    from autopar.runtime import kernels

    section.row("import autopar", kernels.register() == section.on_cuda, where=str(autopar.__file__))
