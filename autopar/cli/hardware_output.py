"""What `autopar hardware` and `autopar calibrate` print."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.machine import profiles
from autopar.machine.hardware import Hardware
from autopar.machine.links import Link

if TYPE_CHECKING:
    from autopar.cost.calibration import Calibration

COLUMNS = ("name", "also", "peak TFLOP/s", "memory", "node links reached", "network reached")


def row(profile: Hardware) -> tuple[str, ...]:
    """One profile in the table of all."""
    also = [alias for alias, name in profiles.ALIASES.items() if name == profile.name]
    cards = f"{profile.network_cards} x {_gigabytes(profile.network)}"
    node = f"{profile.devices_per_node} a node, {profile.node.kind}, {_gigabytes(profile.node)}"
    return profile.name, ", ".join(also), _peaks(profile), _memory(profile), node, f"{cards} {profile.network.kind}"


def _peaks(profile: Hardware) -> str:
    return ", ".join(f"{key} {value / 1e12:.4g}" for key, value in profile.peak_flops.items())


def _memory(profile: Hardware) -> str:
    size = f"{profile.memory_bytes / 2**30:.3g} GiB"
    cache = profile.cache_bandwidth_bytes_per_s
    shared = f", the shared cache {cache / 1e9:.4g}" if cache else ""
    return f"{size} at {profile.memory_bandwidth_bytes_per_s / 1e9:.4g} GB/s{shared}"


def _gigabytes(link: Link) -> str:
    return f"{link.bandwidth_bytes_per_s / 1e9:.3g} GB/s"


def _microseconds(seconds: float) -> str:
    return f"{seconds * 1e6:.3g} us"


def details(profile: Hardware) -> list[tuple[str, ...]]:
    """One profile, a row for each of its tables: what, value, source."""
    values = {
        "peak_flops": f"TFLOP/s: {_peaks(profile)}",
        "efficiency": ", ".join(f"{key} {value:.3g}" for key, value in profile.efficiency.items() if key != "view"),
        "matmul": "\n".join(_curves(profile)),
        "attention": "\n".join(_attention(profile)),
        "memory": _memory(profile) + (f", {len(profile.memory_points)} sizes" if profile.memory_points else ""),
        "memory_share": ", ".join(f"{key} {value:.3g}" for key, value in profile.memory_share.items()),
        "rates": "GFLOP/s: " + ", ".join(f"{key} {value / 1e9:.3g}" for key, value in profile.rates.items()),
        "launch": f"kernel {_microseconds(profile.launch_overhead_s)}, "
        f"collective {_microseconds(profile.collective_launch_s)}"
        + (f", queued in {_microseconds(profile.host_kernel_s)} by the host" if profile.host_kernel_s else "")
        + (f", view {_microseconds(profile.view_s)}" if profile.view_s else "")
        + (f"; collectives take {profile.collective_busy:.0%} of a core" if profile.collective_busy else ""),
        "optimizer": _optimizer(profile),
        "node": f"{profile.devices_per_node} devices, {_link(profile.node)}",
        "network": f"{profile.network_cards} cards a node, {_link(profile.network)} each",
    }
    rows: list[tuple[str, ...]] = [("name", f"{profile.name}: {profile.description}", "")]
    return rows + [(key, value, profile.sources[key]) for key, value in values.items() if key in profile.sources]


def _curves(profile: Hardware) -> Iterator[str]:
    for name, curve in profile.matmul.items():
        halves = f"m {curve.half_m:.3g}, n {curve.half_n:.3g}, k {curve.half_k:.3g}, area {curve.half_area:.3g}"
        waves = f"waves of {curve.multiprocessors:.0f} tiles, " if curve.multiprocessors else ""
        yield f"{name}: {curve.efficiency:.0%} of the peak, {waves}half at {halves}"


def _attention(profile: Hardware) -> Iterator[str]:
    for phase, curve in profile.attention.items():
        sizes = ", ".join(f"{size}: {points[-1][1]:.0%}" for size, points in curve.causal)
        yield f"{phase}, longest causal, by head size: {sizes} of the peak"


def _optimizer(profile: Hardware) -> str:
    each = profile.optimizer_s_per_tensor
    host = f", {_microseconds(each)} for each parameter" if each else ""
    if profile.optimizer_s_per_byte is not None:
        return f"{profile.optimizer_s_per_byte * 1e12:.3g} ps for a byte of parameters{host}"
    return f"{profile.optimizer_passes:g} passes over the parameters{host}"


def _link(link: Link) -> str:
    text = f"{link.kind}, {_gigabytes(link)}, {link.latency_s * 1e6:.3g} us a step"
    if link.direct_bandwidth_bytes_per_s is not None:
        text += f", {link.direct_bandwidth_bytes_per_s / 1e9:.3g} GB/s between two"
    if link.nvls_bandwidth_bytes_per_s is not None:
        text += f", all-reduce in the switch {link.nvls_bandwidth_bytes_per_s / 1e9:.3g} GB/s of tensor"
    for each in link.measured:
        text += f"\n{each.kind}: {each.bandwidth_bytes_per_s / 1e9:.3g} GB/s, {each.latency_s * 1e6:.3g} us a step"
    return text


def calibration_text(found: Calibration) -> str:
    """What was measured, and how well the profile says it."""
    lines = [f"{found.path}: {found.hardware.description}", *map(str, found.residuals)]
    lines += [f"not measured: {note}" for note in found.notes]
    return "\n".join([*lines, f"use it: autopar plan MODEL --mesh ... --hardware {found.path}"]) + "\n"
