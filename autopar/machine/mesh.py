"""The device mesh: named axes, from the slowest link to the fastest, ranks row-major, as in torch's `DeviceMesh`."""

from __future__ import annotations

import functools
import itertools
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, cast

from autopar.base.errors import AutoparError
from autopar.machine import profiles
from autopar.machine.hardware import Hardware, Link

if TYPE_CHECKING:
    from torch.distributed.device_mesh import DeviceMesh

_EXAMPLE = "Write name=size pairs, slowest link first, as in dp=4,tp=2"


@dataclass(frozen=True, slots=True, init=False)
class Mesh:
    """Axes with their sizes, over one kind of hardware. Needs no process group, no GPU and no torch.

    ``Mesh({"dp": 64, "tp": 8}, hardware="h100")``, or ``Mesh("dp=64,tp=8")``. The order of the axes is kept and counts:
    rank r sits at the coordinates that row-major order gives it, so the last axis joins neighbouring ranks.

    Raises AutoparError for a size below 1, a name that is no identifier, a repeated axis, or an unknown hardware
    profile.
    """

    axes: tuple[tuple[str, int], ...]
    hardware: Hardware
    whole: Mesh | None

    def __init__(
        self, axes: Mapping[str, int] | Iterable[tuple[str, int]] | str, hardware: str | Hardware = "h100"
    ) -> None:
        if isinstance(axes, str):
            axes = _parsed(axes)
        pairs = tuple(cast("Iterable[tuple[str, int]]", axes.items() if isinstance(axes, Mapping) else axes))
        _check_axes(pairs)
        object.__setattr__(self, "axes", tuple((name, int(size)) for name, size in pairs))
        object.__setattr__(self, "hardware", profiles.load(hardware))
        object.__setattr__(self, "whole", None)

    def without(self, axis: str) -> Mesh:
        """The mesh of the ranks that share a coordinate of `axis` (a pipeline stage's); its links are the whole mesh's.

        Where no other axis is left, it is dp=1. `whole` is the mesh that it was taken from.
        """
        self._index(axis)
        rest = [(name, size) for name, size in self.axes if name != axis]
        inner = Mesh(rest or [("dp", 1)], hardware=self.hardware)
        object.__setattr__(inner, "whole", self)
        return inner

    def with_experts(self, imbalance: float | None) -> Mesh:
        """The mesh with `Hardware.with_experts`."""
        return self if imbalance is None else Mesh(self.axes, hardware=self.hardware.with_experts(imbalance))

    def in_graphs(self) -> Mesh:
        """The same on hardware that runs programs as CUDA graphs (`Hardware.in_graphs`)."""
        hardware = self.hardware.in_graphs()
        return self if hardware is self.hardware else Mesh(self.axes, hardware=hardware)

    def in_chunks(self) -> Mesh:
        """The same where prompts are priced in pieces (`Hardware.in_chunks`)."""
        hardware = self.hardware.in_chunks()
        return self if hardware is self.hardware else Mesh(self.axes, hardware=hardware)

    @staticmethod
    def parse(text: str, hardware: str | Hardware = "h100") -> Mesh:
        """``dp=4,tp=2`` to a mesh. Raises AutoparError that shows the part it cannot read."""
        return Mesh(_parsed(text), hardware=hardware)

    @staticmethod
    def of(mesh: Mesh | DeviceMesh | str | Mapping[str, int], hardware: str | Hardware | None = None) -> Mesh:
        """The mesh that is meant: one of these, torch's, or its axes: ``"dp=4,tp=2"``, ``{"dp": 4, "tp": 2}``.

        hardware: of what says nothing of it; None: of axes an H100, of a `DeviceMesh` the device at hand.

        Raises:
            AutoparError: as `Mesh`, `parse` and `from_device_mesh`.
        """
        if isinstance(mesh, Mesh):
            return mesh
        if isinstance(mesh, str | Mapping):
            return Mesh(mesh, hardware="h100" if hardware is None else hardware)
        return Mesh.from_device_mesh(mesh, hardware)

    @staticmethod
    def from_device_mesh(device_mesh: DeviceMesh, hardware: str | Hardware | None = None) -> Mesh:
        """The mesh that a torch `DeviceMesh` describes; without `hardware`, the profile of the device at hand.

        Raises AutoparError when it is no such mesh, when it has no axis names, or holds other ranks than 0, 1, 2 … in
        row-major order.
        """
        mesh: Any = device_mesh
        if not hasattr(mesh, "mesh_dim_names"):
            raise AutoparError(
                f"A mesh was expected, {type(mesh).__name__} was given",
                values=f"Given: {str(mesh)[:80]!r}",
                remedy="Pass a torch DeviceMesh, 'dp=4,tp=2', or autopar.Mesh.parse('dp=4,tp=2', hardware='h100')",
            )
        names = mesh.mesh_dim_names
        if not names:
            raise AutoparError(
                "The DeviceMesh has no axis names",
                values=f"Its shape is {tuple(mesh.mesh.shape)}",
                remedy='Pass mesh_dim_names to init_device_mesh, as in mesh_dim_names=("dp", "tp")',
            )
        ranks = mesh.mesh.flatten().tolist()
        if ranks != list(range(len(ranks))):
            raise AutoparError(
                "The DeviceMesh must hold the ranks 0, 1, 2 ... in row-major order",
                values=f"It holds {_shortened(ranks)}",
                remedy="Build it with init_device_mesh over all ranks",
            )
        profile = profiles.load(hardware) if hardware is not None else profiles.guess(mesh.device_type)
        return Mesh(zip(names, mesh.mesh.shape, strict=True), hardware=profile)

    @property
    def axis_names(self) -> tuple[str, ...]:
        """Slowest link first."""
        return tuple(name for name, _ in self.axes)

    @property
    def sizes(self) -> tuple[int, ...]:
        """In the order of `axis_names`."""
        return tuple(size for _, size in self.axes)

    @property
    def num_devices(self) -> int:
        """The number of ranks."""
        return math.prod(self.sizes)

    def size(self, axis: str) -> int:
        """The number of ranks along an axis. Raises AutoparError for an axis that the mesh lacks."""
        return self.sizes[self._index(axis)]

    def stride(self, axis: str) -> int:
        """The distance in ranks between neighbours along an axis."""
        return math.prod(self.sizes[self._index(axis) + 1 :])

    def link(self, axis: str) -> Link:
        """What carries a collective over the axis: the node's link, or the network where the group leaves a node.

        A group of the axis spans stride·size consecutive ranks; it leaves a node when these are more than
        devices_per_node D. Then a ring with g members in each node enters and leaves it over several of the node's C
        network cards together (as NCCL's rings do), and only one of its g steps crosses nodes. All D/g groups of the
        axis that have members in a node move their data at once and share the cards, so that each gets g·C/D of them:
            bandwidth = min(node bandwidth, g · C/D · card),   latency = (network + (g − 1) · node) / g,
        and one device by itself, in all-to-alls and single messages, C/D of a card. Those of a group that are in one
        node (of the node with fewest, where they are not as many in each) reach each other over the node's link.
        """
        if self.whole is not None and axis in self.whole.axis_names:
            return self.whole.link(axis)
        stride, hardware = self.stride(axis), self.hardware
        node, network, devices = hardware.node, hardware.network, hardware.devices_per_node
        if stride * self.size(axis) <= devices:
            return node
        members = max(1, devices // stride)
        wire = network.bandwidth_bytes_per_s * (hardware.network_cards / devices)
        bandwidth = min(node.bandwidth_bytes_per_s, members * wire) if members > 1 else wire
        latency = (network.latency_s + (members - 1) * node.latency_s) / members
        fewest = max(1, math.gcd(stride * self.size(axis), devices) // stride)
        return replace(
            network,
            bandwidth_bytes_per_s=bandwidth,
            latency_s=latency,
            wire_bandwidth_bytes_per_s=wire,
            members=fewest,
            inside_bandwidth_bytes_per_s=_all_to_all_bandwidth(node, fewest),
        )

    def crosses_nodes(self, axis: str) -> bool:
        """Whether a group of the axis leaves a node."""
        if self.whole is not None and axis in self.whole.axis_names:
            return self.whole.crosses_nodes(axis)
        return self.stride(axis) * self.size(axis) > self.hardware.devices_per_node

    def coordinates(self, rank: int) -> dict[str, int]:
        """Where a rank sits, by axis. Raises AutoparError for a rank that the mesh lacks."""
        if not 0 <= rank < self.num_devices:
            raise AutoparError(f"Rank {rank} is not in the mesh {self}", values=f"It has {self.num_devices} ranks")
        return {axis: rank // self.stride(axis) % size for axis, size in self.axes}

    def groups(self, axis: str) -> list[list[int]]:
        """The ranks that talk to each other along an axis; each in the order of its coordinate."""
        return [list(group) for group in _groups(self.sizes, self._index(axis))]

    def _index(self, axis: str) -> int:
        if axis not in self.axis_names:
            raise AutoparError(
                f"The mesh has no axis {axis!r}", values=f"It is {self}", remedy=f"Use {' or '.join(self.axis_names)}"
            )
        return self.axis_names.index(axis)

    def __str__(self) -> str:
        return " × ".join(f"{name}={size}" for name, size in self.axes)


def _parsed(text: str) -> list[tuple[str, int]]:
    """The axes that ``dp=4,tp=2`` names."""
    pairs = []
    for part in text.split(","):
        match = re.fullmatch(r"\s*([^\s=]+)\s*=\s*([+-]?\d+)\s*", part)
        if match is None:
            raise AutoparError(
                f"The mesh has the part {part.strip()!r}, which is no name=size",
                values=f"Given: {text!r}",
                remedy=_EXAMPLE,
            )
        pairs.append((match[1], int(match[2])))
    return pairs


def _check_axes(pairs: tuple[tuple[str, int], ...]) -> None:
    if not all(isinstance(pair, tuple | list) and len(pair) == 2 for pair in pairs):
        raise AutoparError("A mesh is made of axes, a name and a size each", values=f"Given: {pairs}", remedy=_EXAMPLE)
    given = ",".join(f"{name}={size}" for name, size in pairs)
    if not pairs:
        raise AutoparError("A mesh needs at least one axis", remedy=_EXAMPLE)
    for index, (name, size) in enumerate(pairs):
        if not isinstance(name, str) or not name.isidentifier():
            raise AutoparError(f"{name!r} cannot name a mesh axis", values=f"Given: {given}", remedy=_EXAMPLE)
        if name in [other for other, _ in pairs[:index]]:
            raise AutoparError(
                f"The mesh names the axis {name} twice", values=f"Given: {given}", remedy="Give each axis one size"
            )
        if isinstance(size, bool) or int(size) != size or size < 1:
            raise AutoparError(
                f"The mesh axis {name} has the size {size}", values=f"Given: {given}", remedy="Sizes start at 1"
            )


def _all_to_all_bandwidth(node: Link, members: int) -> float:
    """Bytes a second that one device sends to others of its node, as many as there are members less itself."""
    if node.direct_bandwidth_bytes_per_s is not None:
        return min(node.bandwidth_bytes_per_s, node.direct_bandwidth_bytes_per_s * max(1, members - 1))
    own = node.of("all_to_all")
    return (
        own.bandwidth_bytes_per_s if own is not None else node.wire_bandwidth_bytes_per_s or node.bandwidth_bytes_per_s
    )


@functools.cache
def _groups(sizes: tuple[int, ...], index: int) -> tuple[tuple[int, ...], ...]:
    stride = math.prod(sizes[index + 1 :])
    block = stride * sizes[index]
    starts = itertools.product(range(0, math.prod(sizes), block), range(stride))
    return tuple(tuple(range(outer + inner, outer + inner + block, stride)) for outer, inner in starts)


def _shortened(ranks: list[int]) -> str:
    return f"[{', '.join(map(str, ranks[:8]))}{', ...' if len(ranks) > 8 else ''}]"
