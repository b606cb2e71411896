"""From measurements to the text of a hardware profile, and how well it predicts them. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, fields, replace
from typing import Any

import torch

from autopar.cost.calibration import fit
from autopar.cost.calibration.fit import CollectiveSample, Residual, Sample
from autopar.cost.calibration.profile_text import to_toml
from autopar.cost.roofline import COLLECTIVE_KINDS, Link, collective_time_s
from autopar.machine import profiles
from autopar.machine.curves import MatmulCurve, Points
from autopar.machine.hardware import Hardware


@dataclass(frozen=True, slots=True)
class Machine:
    """What was measured on. base: the shipped profile for it, whose numbers stay where nothing is measured.

    is_known: base's peaks are the device's own, so that efficiencies are fractions of a data sheet.
    """

    base: Hardware
    device: str
    name: str
    memory_bytes: int
    devices_per_node: int
    source: str
    dtypes: tuple[torch.dtype, ...]
    is_known: bool


@dataclass(frozen=True, slots=True)
class Host:
    """What is waited for beside the device's work; 0 where nothing is. launch_s, view_s: of an operator among others.
    parameter_s: of each parameter, a step. collective_busy: as in `Hardware`.
    """

    launch_s: float
    view_s: float
    parameter_s: float
    collective_busy: float


@dataclass(frozen=True, slots=True)
class Measurements:
    """All times of one rank, or their medians over ranks. launch_s: of an operator that repeats, as those that are
    timed do. optimizer_s_per_byte: of the parameters. plain_attention: by kernel
    (`attention_kernels`), where there are several.
    """

    launch_s: float
    samples: list[Sample]
    optimizer_s_per_byte: float
    collectives: list[CollectiveSample]
    collective_launch_s: float | None
    host: Host
    plain_attention: Mapping[str, float] = field(default_factory=dict)

    def times(self) -> dict[str, float]:
        """The times alone, by what they are of; the same keys on all ranks."""
        found = {"launch": self.launch_s, "optimizer": self.optimizer_s_per_byte}
        if self.collective_launch_s is not None:
            found["collective launch"] = self.collective_launch_s
        found |= {f"host {key}": value for key, value in asdict(self.host).items()}
        found |= {f"plain attention by {kernel}": value for kernel, value in self.plain_attention.items()}
        found |= {f"{i} {s.label}": s.seconds for i, s in enumerate(self.samples)}
        return found | {f"collective {i}": s.seconds for i, s in enumerate(self.collectives)}

    def with_times(self, times: Mapping[str, float]) -> Measurements:
        """The same with other times, as `times` names them."""
        return Measurements(
            times["launch"],
            [replace(s, seconds=times[f"{i} {s.label}"]) for i, s in enumerate(self.samples)],
            times["optimizer"],
            [replace(s, seconds=times[f"collective {i}"]) for i, s in enumerate(self.collectives)],
            times.get("collective launch"),
            Host(**{each.name: times[f"host {each.name}"] for each in fields(Host)}),
            {kernel: times[f"plain attention by {kernel}"] for kernel in self.plain_attention},
        )


def build(machine: Machine, found: Measurements, name: str) -> tuple[str, list[Residual]]:
    """The TOML of the profile, and its residuals."""
    text = to_toml(_tables(machine, found, name))
    hardware = profiles.parse(text, name=name, where=f"{name}.toml")
    # Operators were timed by themselves, over and over.
    repeated = replace(hardware, launch_overhead_s=found.launch_s)
    return text, [*fit.residuals(found.samples, repeated), *_collective_residuals(found, hardware)]


def _tables(machine: Machine, found: Measurements, name: str) -> dict[str, Any]:
    base, launch, source = machine.base, found.launch_s, machine.source
    points = fit.fit_memory(_of(found, "memory"), launch)
    peaks, curves = _products(machine, found, points)
    attention = {
        base.format_of(dtype): fit.fit_attention(
            (s for s in _of(found, "attention") if s.work.dtype == dtype), launch, peaks[base.format_of(dtype)]
        )
        for dtype in machine.dtypes
    }
    rates, shares = fit.fit_operators(_of(found, "operator"), launch, points)
    kept = f"not measured, from the shipped profile {base.name}"
    tables: dict[str, Any] = {
        "name": name,
        "description": f"{machine.name}, as measured",
        "device": machine.device,
        "peak_flops": {"source": _peak_source(machine, kept), **peaks},
        "efficiency": {"source": f"{source}. Convolution: {kept}", **_efficiency(machine, found, peaks, curves)},
        "matmul": {"source": source, **{key: _curve(curve) for key, curve in curves.items()}},
        "attention": {"source": source, **{key: _attention_tables(each) for key, each in attention.items()}},
        "memory": {
            "source": source,
            "bytes": machine.memory_bytes,
            "bandwidth_bytes_per_s": points[-1][1],
            "points": [[int(x), y] for x, y in points],
        },
        "memory_share": {"source": source, **shares},
        "rates": {"source": source, **rates},
        "optimizer": {"source": f"{source}, torch.optim.AdamW", "seconds_per_byte": found.optimizer_s_per_byte},
    }
    if found.plain_attention:
        what = "forward and backward of one plain call, causal; the faster comes first in programs"
        tables["plain_attention"] = {
            "source": f"{source}: {what}", **{f"{kernel}_s": each for kernel, each in found.plain_attention.items()}
        }  # fmt: skip
    host = {
        "optimizer": {"seconds_per_tensor": found.host.parameter_s},
        "launch": {"view_s": found.host.view_s, "collective_busy": found.host.collective_busy},
    }
    collective = found.collective_launch_s or base.collective_launch_s
    tables["launch"] = {"source": source, "kernel_s": found.host.launch_s, "collective_s": collective}
    for section, fields_ in host.items():
        tables[section] |= {key: value for key, value in fields_.items() if value > 0}
    tables["node"] = _link(machine, found, "node", base.node, collective) | {"devices": machine.devices_per_node}
    tables["network"] = _link(machine, found, "network", base.network, collective)
    measured_network = any(s.section == "network" for s in found.collectives)
    cards = machine.devices_per_node if measured_network else min(base.network_cards, machine.devices_per_node)
    tables["network"]["cards"] = cards
    return tables


def _of(found: Measurements, kind: str) -> list[Sample]:
    return [sample for sample in found.samples if sample.kind == kind]


def _products(machine: Machine, found: Measurements, points: Points) -> tuple[dict[str, float], dict[str, MatmulCurve]]:
    """Peaks by format, and curves. Of a known device the peaks are the data sheet's; else the first dtype's is what
    its products come near to, and the formats that were not measured keep their ratios to it.
    """
    base = machine.base
    tops, curves = {}, {}
    for dtype in machine.dtypes:
        samples = [s for s in _of(found, "matmul") if s.work.dtype == dtype]
        top, curve = fit.fit_matmul(samples, found.launch_s, points)
        tops[base.format_of(dtype)], curves[base.format_of(dtype)] = top, curve
    first = next(iter(tops))
    ratio = 1.0 if machine.is_known else tops[first] / base.peak_flops[first]
    peaks = {key: value * ratio for key, value in base.peak_flops.items()}
    for key, top in tops.items():
        peaks[key] = max(peaks.get(key, top), top) if machine.is_known else top
    return peaks, {key: replace(curve, efficiency=tops[key] / peaks[key]) for key, curve in curves.items()}


def _peak_source(machine: Machine, kept: str) -> str:
    formats = ", ".join(machine.base.format_of(dtype) for dtype in machine.dtypes)
    if machine.is_known:
        return f"{machine.base.sources['peak_flops']}; raised where {machine.source} says more"
    return f"{machine.source}: what large products in {formats} come near to; ratios to others: {kept}"


def _efficiency(
    machine: Machine, found: Measurements, peaks: Mapping[str, float], curves: Mapping[str, MatmulCurve]
) -> dict[str, float]:
    """Fractions where no curve and no rate says better: of elementwise operators and reductions the best.

    A GPU's are bound by its memory, and the FLOPs that they count for the bytes say nothing of those that count more:
    there not less than the shipped profile's.
    """
    main = machine.base.format_of(machine.dtypes[0])

    def best(samples: Iterable[Sample]) -> float:
        speeds = [s.work.flops / fit.working_s(s.seconds, found.launch_s) for s in samples]
        return min(1.0, max(speeds) / peaks[main])

    attention = [
        s for s in _of(found, "attention") if s.work.op_class == "attention" and s.work.dtype == machine.dtypes[0]
    ]
    reductions = [s for s in _of(found, "operator") if s.work.op_class == "reduction"]
    least = machine.base.efficiency if machine.device == "cuda" else {"elementwise": 0.0, "reduction": 0.0}
    return {
        "matmul": curves[main].efficiency,
        "convolution": machine.base.efficiency["convolution"],
        "attention": best(attention),
        "elementwise": max(least["elementwise"], best(_of(found, "memory"))),
        "reduction": max(least["reduction"], best(reductions)),
        "memory": 1.0,
    }


def _curve(curve: MatmulCurve) -> dict[str, float]:
    halves = {"half_m": curve.half_m, "half_n": curve.half_n, "half_k": curve.half_k, "half_area": curve.half_area}
    halves["launch_s"] = curve.launch_s
    return {"efficiency": curve.efficiency} | {key: value for key, value in halves.items() if value > 0}


def _attention_tables(attention: fit.Attention) -> dict[str, Any]:
    return {
        phase: {
            seen: {str(size): [[float(x), y] for x, y in rows] for size, rows in sorted(sizes.items())}
            for seen, sizes in tables.items()
        }
        for phase, tables in attention.items()
    }


def _link(machine: Machine, found: Measurements, section: str, base: Link, launch_s: float) -> dict[str, Any]:
    """A section of links: measured collectives, or the shipped profile's numbers."""
    samples = [s for s in found.collectives if s.section == section]
    if not samples:
        fields = {
            "source": f"not measured, from the shipped profile {machine.base.name}: {machine.base.sources[section]}",
            "kind": base.kind,
            "bandwidth_bytes_per_s": base.bandwidth_bytes_per_s,
            "efficiency": 1.0,
            "latency_s": base.latency_s,
            "wire_bandwidth_bytes_per_s": base.wire_bandwidth_bytes_per_s,
            "direct_bandwidth_bytes_per_s": base.direct_bandwidth_bytes_per_s,  # efficiency is in it
            "nvls_bandwidth_bytes_per_s": base.nvls_bandwidth_bytes_per_s,
            "nvls_latency_s": base.nvls_latency_s or None,
            "peer_bandwidth_bytes_per_s": base.peer_bandwidth_bytes_per_s,
            "peer_latency_s": base.peer_latency_s or None,
            "peer_rank_s": base.peer_rank_s or None,
        }
        return {key: value for key, value in fields.items() if value is not None and value != ""}
    by_kind = {
        kind: fit.fit_collective([s for s in samples if s.kind == kind], launch_s)
        for kind in COLLECTIVE_KINDS
        if any(s.kind == kind for s in samples)
    }
    latency, bandwidth = by_kind["all_gather"]
    return {
        "source": f"{machine.source}, groups of {', '.join(map(str, sorted({s.n for s in samples})))}; "
        "bandwidth and latency: all-gather's, wire: permute's",
        "kind": base.kind or "loopback",
        "bandwidth_bytes_per_s": bandwidth,
        "efficiency": 1.0,
        "latency_s": latency,
        "wire_bandwidth_bytes_per_s": by_kind["permute"][1],
        **{kind: {"latency_s": each[0], "bandwidth_bytes_per_s": each[1]} for kind, each in by_kind.items()},
    }


def _collective_residuals(found: Measurements, hardware: Hardware) -> list[Residual]:
    errors: dict[str, dict[str, float]] = {}
    for i, sample in enumerate(found.collectives):
        if not sample.section:
            continue
        link = hardware.node if sample.section == "node" else hardware.network
        kind: Any = sample.kind
        predicted = collective_time_s(kind, sample.num_bytes, sample.n, link, hardware.collective_launch_s)
        by_size = errors.setdefault(f"{sample.section} {sample.kind}", {})
        label = f"{sample.num_bytes:.0f} bytes over {sample.n}"
        by_size[label if label not in by_size else f"{label}, {i}"] = abs(predicted / sample.seconds - 1.0)
    return [fit.summary(name, each) for name, each in errors.items()]
