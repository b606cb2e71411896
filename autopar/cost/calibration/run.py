"""Measure this machine and make a profile of it: one process alone, or all processes of a `torchrun` at once."""

from __future__ import annotations

import datetime
import gc
import os
import platform
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from autopar.base import environment
from autopar.base.errors import AutoparError
from autopar.cost.calibration import attention_kernels, collectives, fit
from autopar.cost.calibration.cases import all_cases
from autopar.cost.calibration.fit import CollectiveSample, Residual, Sample
from autopar.cost.calibration.profile import Host, Machine, Measurements, build
from autopar.cost.calibration.timing import Timer
from autopar.cost.calibration.updates import NUM_SMALL, optimizer_step, process_group, small_step
from autopar.machine import profiles
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}


@dataclass(frozen=True, slots=True)
class Options:
    """What to measure. dtypes: keys of `DTYPES`, the first one for all but products and attention; empty: fp32 on a
    CPU, bf16 on a GPU. axes: of a mesh (`dp=2,tp=2`) over all processes, whose groups are timed instead of all ranks.
    """

    save: Path
    quick: bool = False
    dtypes: tuple[str, ...] = ()
    axes: str | None = None
    device: str | None = None


@dataclass(frozen=True, slots=True)
class Calibration:
    """What was found. notes: what was not measured, and why."""

    hardware: Hardware
    text: str
    path: Path
    residuals: tuple[Residual, ...]
    notes: tuple[str, ...] = ()

    def to_dict(self) -> dict[str, Any]:
        """For machines."""
        rows = [asdict(r) for r in self.residuals]
        return {"profile": str(self.path), "name": self.hardware.name, "residuals": rows, "notes": list(self.notes)}


def calibrate(
    options: Options,
    begin: Callable[[int], None] = lambda total: None,
    advance: Callable[[str], None] = lambda text: None,
) -> Calibration | None:
    """Measure, fit, write. None on all ranks but the first.

    begin: told how many steps there will be; advance: before each, what it is. Raises AutoparError where the file
    cannot be written, the options do not fit the machine, or ranks differ.
    """
    check_writable(options.save)
    device = _device(options.device)
    launched = environment.launched()
    num_ranks, per_node = launched.world_size, launched.local_world_size
    owned = num_ranks > 1 and not dist.is_initialized()
    if owned:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo")
    try:
        machine, found, residual_axes = _measure(options, device, num_ranks, per_node, begin, advance)
        if num_ranks > 1:
            found = _merge(found, num_ranks)
        if num_ranks > 1 and dist.get_rank() != 0:
            return None
        return _write(options, machine, found, residual_axes)
    finally:
        if owned:
            dist.destroy_process_group()


def check_writable(path: Path) -> None:
    """Raise AutoparError where a profile cannot be written, before minutes are spent on it."""
    if path.suffix != ".toml":
        raise AutoparError(
            f"A hardware profile is a TOML file, not {path.name!r}", remedy=f"Save it as {path.with_suffix('.toml')}"
        )
    folder = path.parent
    if not folder.is_dir() or not os.access(path if path.exists() else folder, os.W_OK) or path.is_dir():
        raise AutoparError(f"cannot write {path}", remedy="name a file in a folder that exists and can be written")


def _device(name: str | None) -> torch.device:
    if name not in (None, "cpu", "cuda"):
        raise AutoparError(f"unknown device {name!r}", remedy="use cpu or cuda")
    if name == "cuda" and not torch.cuda.is_available():
        raise AutoparError("torch sees no CUDA device here", remedy="leave --device out, or use --device cpu")
    if name == "cpu" or not torch.cuda.is_available():
        return torch.device("cpu")
    device = torch.device("cuda", environment.launched().local_rank)
    torch.cuda.set_device(device)
    return device


def _dtypes(options: Options, device: torch.device) -> list[torch.dtype]:
    wanted = options.dtypes or (("bf16",) if device.type == "cuda" else ("fp32",))
    for name in wanted:
        if name not in DTYPES:
            raise AutoparError(f"unknown dtype {name!r}", remedy=f"use {', '.join(DTYPES)}")
    return [DTYPES[name] for name in dict.fromkeys(wanted)]


def _measure(
    options: Options, device: torch.device, num_ranks: int, per_node: int,
    begin: Callable[[int], None], advance: Callable[[str], None],
) -> tuple[Machine, Measurements, tuple[str, ...]]:  # fmt: skip
    dtypes = _dtypes(options, device)
    axes, notes = _axes(options, num_ranks, per_node)
    machine = _describe(device, num_ranks, per_node, dtypes)
    _check_alike(machine, options)
    cases = [(dtype, case) for dtype in dtypes for case in all_cases(dtype, device.type, options.quick)]
    main = dtypes[0]
    cases = [(dtype, case) for dtype, case in cases if dtype == main or case.kind in ("matmul", "attention")]
    begin(len(cases) + 3 + collectives.num_steps(axes, options.quick, device.type))
    crowded = device.type == "cpu" and per_node * torch.get_num_threads() > _num_cores()
    timer = Timer(device, 0.05 if options.quick else 0.2, crowded)
    advance("launches")
    launch, among, view = timer.launch_s(), *timer.launches_among_others_s()
    advance("kernels of plain attention")
    kernels = attention_kernels.measured(main, device, timer.seconds)
    samples = []
    with attention_kernels.first(kernels):  # as programs run it there
        for dtype, case in cases:
            label = f"{case.label} in {str(dtype).removeprefix('torch.')}"
            advance(label)
            function, work = case.build(device)
            _together(num_ranks)
            samples.append(Sample(case.kind, label, work, timer.seconds(function)))
            del function
            gc.collect(0)
    advance("AdamW")
    step, num_bytes = optimizer_step(main, device)
    _together(num_ranks)
    optimizer, per_tensor = timer.seconds(step) / num_bytes, 0.0
    if device.type == "cpu":
        with process_group():
            per_tensor = timer.seconds(small_step(main)) / NUM_SMALL
    messages, collective_launch = _collectives(axes, options, device, advance)
    host = Host(among, view, per_tensor, _busy(axes, device, per_node))
    found = Measurements(launch, samples, optimizer, messages, collective_launch, host, kernels)
    return machine, found, notes


def _busy(axes: Sequence[collectives.Axis], device: torch.device, per_node: int) -> float:
    """The part of a collective's time in which it takes a core that computing needs: none where some are left."""
    inside = [axis for axis in axes if axis.section == "node"]
    if device.type != "cpu" or not inside or per_node * torch.get_num_threads() < _num_cores():
        return 0.0
    return collectives.busy_share(inside[0], device)


def _collectives(
    axes: Sequence[collectives.Axis], options: Options, device: torch.device, advance: Callable[[str], None]
) -> tuple[list[CollectiveSample], float | None]:
    if not axes:
        return [], None
    budget_s = 0.05 if options.quick else 0.2
    sizes = collectives.sizes_for(device.type, options.quick)
    launch = collectives.launch_s(device, budget_s)
    found = []
    for axis in axes:
        found += collectives.measure_axis(axis, collectives.COLLECTIVE_KINDS, sizes, device, budget_s, advance)
    return found, launch


def _axes(options: Options, num_ranks: int, per_node: int) -> tuple[list[collectives.Axis], tuple[str, ...]]:
    """The axes to time, and what will be missing."""
    if num_ranks == 1:
        if options.axes is not None:
            raise AutoparError(
                f"the mesh {options.axes} has axes to time, and this is one process",
                remedy="start one for each rank: torchrun --nproc-per-node N --no-python autopar calibrate --mesh MESH",
            )
        return [], ("collectives: one process has none; the links are those of the shipped profile",)
    named: list[tuple[str, list[list[int]]]] = []
    if options.axes is not None:
        mesh = Mesh.parse(options.axes, hardware="cpu")
        if mesh.num_devices != num_ranks:
            raise AutoparError(
                f"the mesh {options.axes} has {mesh.num_devices} ranks, and torchrun started {num_ranks}",
                remedy="write a mesh of all processes",
            )
        named = [(axis, mesh.groups(axis)) for axis in mesh.axis_names]
    found = collectives.axes_of(num_ranks, per_node, named)
    notes = [f"{axis.name}: its groups use both links, so it is not fitted" for axis in found if axis.section is None]
    notes += [
        f"{section}: no group uses only it; it is that of the shipped profile"
        for section in ("node", "network")
        if all(axis.section != section for axis in found)
    ]
    return found, tuple(notes)


def _describe(device: torch.device, num_ranks: int, per_node: int, dtypes: Sequence[torch.dtype]) -> Machine:
    base = profiles.guess(device.type)
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        name, memory = properties.name, properties.total_memory
        devices = per_node if num_ranks > 1 else base.devices_per_node
    else:
        name = f"{_cpu_name()}, {_threads(torch.get_num_threads())} a process"
        whole = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") if hasattr(os, "sysconf") else 0
        memory, devices = (whole or base.memory_bytes) // per_node, max(base.devices_per_node, per_node)
    at = f"{datetime.date.today().isoformat()}, torch {torch.__version__}, {num_ranks} process"
    source = f"measured by autopar calibrate, {at}{'es' if num_ranks > 1 else ''}, {name}"
    known = device.type == "cuda" and (base.name != "a100" or "a100" in name.lower())
    return Machine(base, device.type, name, int(memory), devices, source, tuple(dtypes), known)


def _num_cores() -> int:
    """Cores that this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


def _threads(count: int) -> str:
    return f"{count} thread{'s' if count > 1 else ''}"


def _cpu_name() -> str:
    try:
        lines = Path("/proc/cpuinfo").read_text(encoding="utf-8").splitlines()
    except OSError:
        lines = []
    found = next((line.split(":", 1)[1].strip() for line in lines if line.startswith("model name")), "")
    return found or platform.processor() or platform.machine()


def _check_alike(machine: Machine, options: Options) -> None:
    """All ranks must be alike: they are one profile."""
    if not dist.is_initialized():
        return
    own = (machine.name, machine.device, str(machine.dtypes), str(torch.__version__), options.quick, options.axes)
    every: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(every, own)
    other = next((rank for rank, each in enumerate(every) if each != every[0]), None)
    if other is not None:
        differs = [(a, b) for a, b in zip(every[0], every[other], strict=True) if a != b]
        raise AutoparError(
            f"rank {other} is not like rank 0, so one profile cannot describe both",
            values="; ".join(f"{b!r} instead of {a!r}" for a, b in differs),
            remedy="start all processes with the same options, threads (OMP_NUM_THREADS), torch and devices",
        )


def _together(num_ranks: int) -> None:
    """All ranks begin at once, so that they share what they share."""
    if num_ranks > 1:
        dist.barrier()


def _merge(found: Measurements, num_ranks: int) -> Measurements:
    """The medians over ranks."""
    every: list[Any] = [None] * num_ranks
    dist.all_gather_object(every, found.times())
    return found.with_times(fit.merge_ranks(every))


def _write(options: Options, machine: Machine, found: Measurements, notes: tuple[str, ...]) -> Calibration:
    text, residuals = build(machine, found, options.save.stem)
    try:
        options.save.write_text(text, encoding="utf-8")
    except OSError as error:
        raise AutoparError(f"cannot write {options.save}: {error}", remedy="name another file") from error
    return Calibration(profiles.load(options.save), text, options.save, tuple(residuals), notes)
