"""Hardware profiles: what one device computes, moves and holds, and how fast its links are.

A profile is a TOML file (``autopar/data/hardware/*.toml``, or one of the user's own, as `autopar calibrate` writes).
Each of its tables names the ``source`` of its numbers. Links are given per direction and per device.
"""

from __future__ import annotations

import functools
import logging
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import resources
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError

# What an operator is, as far as its speed goes. A "view" moves nothing and costs nothing.
OP_CLASSES = ("matmul", "convolution", "attention", "elementwise", "reduction", "view")

# Peak FLOP/s are kept by hardware format; integer and boolean operators run on the fp32 units.
_FORMATS = {
    "float64": "fp64",
    "float32": "fp32",
    "bfloat16": "bf16",
    "float16": "fp16",
    "float8_e4m3fn": "fp8",
    "float8_e5m2": "fp8",
    "complex64": "fp32",
    "complex128": "fp64",
    "int64": "fp32",
    "int32": "fp32",
    "int16": "fp32",
    "int8": "fp32",
    "uint8": "fp32",
    "bool": "fp32",
}


@dataclass(frozen=True, slots=True)
class Link:
    """What carries a collective.

    bandwidth_bytes_per_s: of one device, one direction, as a ring over the group gets it.
    latency_s: of one step of a ring.
    wire_bandwidth_bytes_per_s: what one device reaches alone, when each sends to many others at once (all-to-all) or to
    one: between nodes a ring shares the wires of all its members in a node, single messages do not. None: the same.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    wire_bandwidth_bytes_per_s: float | None = None


@dataclass(frozen=True, slots=True)
class Hardware:
    """One device and its links.

    peak_flops: FLOP/s by format (fp64, fp32, tf32, bf16, fp16, fp8), dense. efficiency: the fraction of the peak that
    each class of operators (`OP_CLASSES`) reaches; "memory" is the fraction of the memory bandwidth. launch_overhead_s:
    a kernel's floor.
    node, network: the links between devices of one node, and between nodes. collective_launch_s: a collective's floor.
    device: torch's type of it, `cuda` or `cpu`: on `cuda` autopar has Triton kernels.
    """

    name: str
    description: str
    peak_flops: Mapping[str, float] = field(hash=False)
    efficiency: Mapping[str, float] = field(hash=False)
    memory_bandwidth_bytes_per_s: float
    memory_bytes: int
    launch_overhead_s: float
    collective_launch_s: float
    devices_per_node: int
    node: Link
    network: Link
    sources: Mapping[str, str] = field(hash=False, compare=False)
    device: str = "cpu"

    def flops_per_s(self, dtype: object, op_class: str) -> float:
        """FLOP/s that an operator of this class and dtype (a torch dtype, or its name) reaches.

        Raises AutoparError where the device has no such format, and ValueError for an unknown class.
        """
        if op_class not in OP_CLASSES:
            raise ValueError(f"op_class {op_class!r} is none of {', '.join(OP_CLASSES)}")
        name = str(dtype).removeprefix("torch.")
        peak = self.peak_flops.get(_FORMATS.get(name, name))
        if peak is None:
            raise AutoparError(
                f"{name} has no peak FLOP/s in the hardware profile {self.name}",
                values=f"The profile has {', '.join(self.peak_flops)}",
                remedy="Use one of these, or add the number to a profile of your own and pass its path",
            )
        return peak * self.efficiency[op_class]


def names() -> tuple[str, ...]:
    """The profiles shipped with autopar, sorted."""
    files = resources.files("autopar").joinpath("data", "hardware").iterdir()
    return tuple(sorted(file.name.removesuffix(".toml") for file in files if file.name.endswith(".toml")))


def load(name_or_path: str | Path | Hardware) -> Hardware:
    """A shipped profile by name (any case), or one from a TOML file.

    Raises AutoparError for an unknown name, and for a file that is damaged or lacks a number.
    """
    if isinstance(name_or_path, Hardware):
        return name_or_path
    text = str(name_or_path)
    if text.lower() in names():
        return _load_shipped(text.lower())
    path = Path(text).expanduser()
    if path.suffix == ".toml" and path.is_file():
        return parse(path.read_text(encoding="utf-8"), name=path.stem, where=text)
    raise AutoparError(
        f"There is no hardware profile {text!r}",
        values=f"Shipped with autopar: {', '.join(names())}",
        remedy="Name one of these, or give the path of a profile (.toml)",
    )


def guess(device_type: str) -> Hardware:
    """The profile for this machine's devices: `cpu` for CPU processes, by the GPU's name for CUDA ones."""
    if device_type != "cuda":
        return load("cpu")
    import torch

    device_name = torch.cuda.get_device_name()
    for name in ("h200", "h100", "a100"):
        if name in device_name.lower():
            return load(name)
    # Plans stay right on an unknown device, only their predicted times do not.
    logging.getLogger("autopar.hardware").warning(
        "no hardware profile for %s: costs are those of an A100; pass hardware= to choose another", device_name
    )
    return load("a100")


@functools.cache
def _load_shipped(name: str) -> Hardware:
    text = resources.files("autopar").joinpath("data", "hardware", f"{name}.toml").read_text(encoding="utf-8")
    return parse(text, name=name, where=f"{name}.toml")


def parse(text: str, *, name: str, where: str) -> Hardware:
    """A profile from its TOML text. Raises AutoparError naming what is missing or is not a positive number."""
    try:
        data = tomllib.loads(text)
    except tomllib.TOMLDecodeError as error:
        raise AutoparError("A hardware profile is not TOML", where=where, values=str(error)) from error

    def number(*keys: str) -> float:
        value: Any = data
        for key in keys:
            value = value.get(key) if isinstance(value, dict) else None
        if isinstance(value, bool) or not isinstance(value, int | float) or value <= 0:
            raise AutoparError(
                f"A hardware profile needs a positive number for {'.'.join(keys)}",
                where=where,
                values=f"It has {value!r}",
                remedy="See the shipped profiles for an example",
            )
        return float(value)

    peak = data.get("peak_flops", {})
    formats = [key for key in peak if key != "source"] or ["fp32"]
    classes = [op_class for op_class in OP_CLASSES if op_class != "view"] + ["memory"]
    sections = {key: value for key, value in data.items() if isinstance(value, dict)}
    return Hardware(
        name=str(data.get("name", name)),
        description=str(data.get("description", "")),
        peak_flops={key: number("peak_flops", key) for key in formats},
        efficiency={key: number("efficiency", key) for key in classes} | {"view": 1.0},
        memory_bandwidth_bytes_per_s=number("memory", "bandwidth_bytes_per_s"),
        memory_bytes=int(number("memory", "bytes")),
        launch_overhead_s=number("launch", "kernel_s"),
        collective_launch_s=number("launch", "collective_s"),
        devices_per_node=int(number("node", "devices")),
        node=_link(number, "node"),
        network=_link(number, "network"),
        sources={key: str(value.get("source", "")) for key, value in sections.items()},
        device=str(data.get("device", "cpu")),
    )


def _link(number: Any, section: str) -> Link:
    """A link as collectives see it: the data sheet's bandwidth times the fraction of it that they reach."""
    bandwidth = number(section, "bandwidth_bytes_per_s") * number(section, "efficiency")
    return Link(bandwidth_bytes_per_s=bandwidth, latency_s=number(section, "latency_s"))
