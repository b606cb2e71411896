"""A hardware profile as plain data, and back: for plans, which say on what they were made where a name does not."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from autopar.base.errors import AutoparError
from autopar.machine import profiles
from autopar.machine.curves import AttentionCurve, MatmulCurve, Points
from autopar.machine.hardware import FUSED_KERNELS, Hardware, Link


def to_data(hardware: Hardware) -> str | dict[str, Any]:
    """The name alone where that is enough to find it again; else every number."""
    try:
        if profiles.load(hardware.name) == hardware and _same(profiles.load(hardware.name), hardware):
            return hardware.name
    except AutoparError:
        pass
    return asdict(hardware)


def from_data(data: str | Mapping[str, Any]) -> Hardware:
    """The inverse of `to_data`.

    Raises:
        AutoparError: a name that is not known.
        KeyError, TypeError, ValueError: damaged data.

    Opens no file: a name is one of those that come with autopar.
    """
    if isinstance(data, str):
        return profiles.load_shipped(data)
    fields = dict(data)
    fields["node"], fields["network"] = Link(**fields["node"]), Link(**fields["network"])
    fields["matmul"] = {name: MatmulCurve(**curve) for name, curve in fields["matmul"].items()}
    fields["attention"] = {
        name: AttentionCurve(_by_size(curve["causal"]), _by_size(curve["full"]), curve["half_rows"])
        for name, curve in fields["attention"].items()
    }
    fields["memory_points"] = _points(fields["memory_points"])
    fields["plain_attention_s"] = {str(k): float(x) for k, x in dict(fields.get("plain_attention_s", {})).items()}
    fields["fused_kernels"] = tuple(fields.get("fused_kernels", FUSED_KERNELS))
    found = Hardware(**fields)
    least = {
        "node.bandwidth_bytes_per_s": found.node.bandwidth_bytes_per_s,
        "network.bandwidth_bytes_per_s": found.network.bandwidth_bytes_per_s,
        "memory_bandwidth_bytes_per_s": found.memory_bandwidth_bytes_per_s,
        "memory_bytes": found.memory_bytes,
        "devices_per_node": found.devices_per_node,
        "network_cards": found.network_cards,
        **{f"peak_flops.{name}": value for name, value in found.peak_flops.items()},
        **{f"efficiency.{name}": value for name, value in found.efficiency.items()},
    }
    if wrong := [name for name, value in least.items() if not value > 0]:
        raise ValueError(f"hardware.{wrong[0]} is not positive")
    return found


def _same(one: Hardware, other: Hardware) -> bool:
    """Mappings take no part in a hash, but in this."""
    return asdict(one) == asdict(other)


def _by_size(rows: Any) -> tuple[tuple[int, Points], ...]:
    return tuple((int(size), _points(points)) for size, points in rows)


def _points(rows: Any) -> Points:
    return tuple((float(at), float(value)) for at, value in rows)
