"""A cluster: nodes of devices of one kind."""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

from autopar.base.errors import AutoparError
from autopar.machine import profiles
from autopar.machine.hardware import Hardware
from autopar.machine.mesh import Mesh

_EXAMPLE = "Write hardware x devices, as in h100x64, or hardware x nodes x devices of a node, as in h100x8x8"


@dataclass(frozen=True, slots=True, init=False)
class Cluster:
    """``Cluster("h100", nodes=8, gpus_per_node=8)``. Needs no process group, no GPU and no torch.

    gpus_per_node: None takes the profile's. Raises AutoparError for an unknown profile and for sizes below 1.
    """

    hardware: Hardware
    nodes: int

    def __init__(self, hardware: str | Hardware, nodes: int, gpus_per_node: int | None = None) -> None:
        profile = profiles.load(hardware)
        if nodes < 1 or (gpus_per_node is not None and gpus_per_node < 1):
            raise AutoparError(
                "A cluster has at least one node of one device",
                values=f"nodes={nodes}, gpus_per_node={gpus_per_node}",
                remedy=_EXAMPLE,
            )
        if gpus_per_node is not None and gpus_per_node != profile.devices_per_node:
            profile = replace(profile, devices_per_node=gpus_per_node)
        object.__setattr__(self, "hardware", profile)
        object.__setattr__(self, "nodes", nodes)

    @staticmethod
    def parse(text: str) -> Cluster:
        """``h100x64``: 64 devices in nodes of as many as the profile says (fewer where there are fewer); ``h100x8x8``:
        8 nodes of 8. The hardware may name its links: ``h100:ethernet-100x64``.

        Raises:
            AutoparError: text that is neither, devices that fill no whole number of nodes.
        """
        match = re.fullmatch(r"(.+?)x(\d+)(?:x(\d+))?", text.strip())
        if match is None:
            raise AutoparError(f"{text!r} names no cluster", remedy=_EXAMPLE)
        name, first, second = match[1], int(match[2]), match[3]
        if second is not None:
            return Cluster(name, first, int(second))
        per_node = min(profiles.load(name).devices_per_node, max(1, first))
        if first % per_node:
            raise AutoparError(
                f"{first} devices do not fill nodes of {per_node}", where=text, remedy=f"Use a multiple of {per_node}"
            )
        return Cluster(name, first // per_node, per_node)

    @property
    def num_devices(self) -> int:
        return self.nodes * self.hardware.devices_per_node

    def mesh(self, axes: dict[str, int]) -> Mesh:
        """A mesh of all its devices."""
        return Mesh(axes, hardware=self.hardware)

    def __str__(self) -> str:
        return f"{self.nodes} × {self.hardware.devices_per_node} {self.hardware.name}"
