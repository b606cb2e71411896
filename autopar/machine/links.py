"""Links between devices: what carries a collective, as data sheets state it, and by name from a catalogue.

Bandwidths are bytes a second, of one device or one network card, in one direction. The catalogue is
``autopar/machine/data/links.toml``; each of its tables names the ``source`` of its numbers.
"""

from __future__ import annotations

import functools
import re
import tomllib
from dataclasses import dataclass, replace
from importlib import resources
from typing import Any

from autopar.base.errors import AutoparError

LINK_KINDS = ("nvlink", "nvswitch", "infinity-fabric", "pcie", "infiniband", "ethernet", "loopback")
COLLECTIVE_KINDS = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "permute")


@dataclass(frozen=True, slots=True)
class Measured:
    """One kind of collective as it was measured: seconds = launch + steps · latency_s + bytes sent / bandwidth."""

    kind: str
    latency_s: float
    bandwidth_bytes_per_s: float


@dataclass(frozen=True, slots=True)
class Link:
    """What carries a collective.

    bandwidth_bytes_per_s: of one device, one direction, as a ring over the group gets it.
    latency_s: of one step of a ring.
    wire_bandwidth_bytes_per_s: what one device reaches alone, when each sends to many others at once (all-to-all) or to
    one: between nodes a ring shares the wires of all its members in a node, single messages do not. None: the same.
    kind: one of `LINK_KINDS`.
    direct_bandwidth_bytes_per_s: of the wire between two devices, where each pair has its own and no switch is between:
    a device of a group of n has n − 1 of them. None: a switch, every device reaches any other at full speed.
    nvls_bandwidth_bytes_per_s, nvls_latency_s: bytes a second of an all-reduce that the switch sums (NVLink SHARP), as
    tensor bytes over seconds, and its latency. None: there is none.
    members, inside_bandwidth_bytes_per_s: of a group that leaves its node, how many of it a device has in its own node,
    itself among them, and at what speed it reaches these; of any other, 1.
    peer_bandwidth_bytes_per_s, peer_latency_s, peer_rank_s: of all-reduces in one kernel whose ranks read each other's
    memory: bytes a second that it reads, and the seconds of meeting once and of each other rank; by_peers: whether
    programs have such kernels.
    measured: collectives that have numbers of their own; they replace all of the above for their kind.
    """

    bandwidth_bytes_per_s: float
    latency_s: float
    wire_bandwidth_bytes_per_s: float | None = None
    kind: str = ""
    direct_bandwidth_bytes_per_s: float | None = None
    nvls_bandwidth_bytes_per_s: float | None = None
    nvls_latency_s: float = 0.0
    members: int = 1
    inside_bandwidth_bytes_per_s: float | None = None
    measured: tuple[Measured, ...] = ()
    peer_bandwidth_bytes_per_s: float | None = None
    peer_latency_s: float = 0.0
    peer_rank_s: float = 0.0
    by_peers: bool = False

    def __post_init__(self) -> None:
        # A plan's file holds the link of its pipeline as JSON, which knows neither tuples nor dataclasses.
        own = tuple(each if isinstance(each, Measured) else Measured(**each) for each in self.measured)
        object.__setattr__(self, "measured", own)

    def without_latency(self) -> Link:
        """Only volumes over bandwidths: one ring for every collective, no latency, as the literature counts bytes."""
        return replace(self, latency_s=0.0, nvls_bandwidth_bytes_per_s=None, measured=(), by_peers=False)

    def of(self, kind: str) -> Measured | None:
        """The collective's own numbers, if it was measured."""
        return next((each for each in self.measured if each.kind == kind), None)


@dataclass(frozen=True, slots=True)
class NamedLink:
    """A link of the catalogue. bandwidth: the data sheet's; efficiency: the fraction of it that collectives reach.

    cards: network cards a node that are usual with it; None: as many as the profile says.
    """

    name: str
    kind: str
    bandwidth_bytes_per_s: float
    efficiency: float
    latency_s: float
    source: str
    cards: int | None = None

    def link(self) -> Link:
        """The link as collectives see it."""
        return Link(self.bandwidth_bytes_per_s * self.efficiency, self.latency_s, kind=self.kind)


@functools.cache
def catalogue() -> dict[str, NamedLink]:
    """All named links, by name."""
    text = resources.files("autopar.machine").joinpath("data", "links.toml").read_text(encoding="utf-8")
    return {name: NamedLink(name=name, **fields) for name, fields in tomllib.loads(text).items()}


def named(text: str) -> tuple[NamedLink, int | None]:
    """``infiniband-400`` or ``8xinfiniband-400`` (8 cards a node) to a link and its cards; None: as the profile has.

    Raises AutoparError for a name that is not in the catalogue.
    """
    match = re.fullmatch(r"(?:([1-9][0-9]{0,5})x)?(\S+)", text.strip())
    found = catalogue().get(match[2].lower()) if match else None
    if match is None or found is None:
        raise AutoparError(
            f"There is no link {text!r}",
            values=f"Known: {', '.join(catalogue())}",
            remedy="Name one of these, with the number of cards a node in front if you like, as in 8xinfiniband-400",
        )
    return found, int(match[1]) if match[1] else found.cards


def parse_link(number: Any, section: str, fields: dict[str, Any], where: str) -> Link:
    """A link from a section of a profile. number: reads a positive number by its keys, or complains."""
    efficiency = number(section, "efficiency")

    def optional(key: str, factor: float = 1.0) -> float | None:
        return number(section, key) * factor if key in fields else None

    direct = optional("direct_bandwidth_bytes_per_s", efficiency)
    kind = str(fields.get("kind", ""))
    if kind and kind not in LINK_KINDS:
        raise AutoparError(
            f"A hardware profile has a {section} of the kind {kind!r}",
            where=where,
            remedy=f"Use {', '.join(LINK_KINDS)}",
        )
    return Link(
        bandwidth_bytes_per_s=number(section, "bandwidth_bytes_per_s") * efficiency,
        latency_s=number(section, "latency_s"),
        wire_bandwidth_bytes_per_s=optional("wire_bandwidth_bytes_per_s") or direct,
        kind=kind,
        direct_bandwidth_bytes_per_s=direct,
        nvls_bandwidth_bytes_per_s=optional("nvls_bandwidth_bytes_per_s"),
        nvls_latency_s=optional("nvls_latency_s") or 0.0,
        peer_bandwidth_bytes_per_s=optional("peer_bandwidth_bytes_per_s"),
        peer_latency_s=optional("peer_latency_s") or 0.0,
        peer_rank_s=optional("peer_rank_s") or 0.0,
        measured=tuple(
            Measured(each, number(section, each, "latency_s"), number(section, each, "bandwidth_bytes_per_s"))
            for each in COLLECTIVE_KINDS
            if isinstance(fields.get(each), dict)
        ),
    )
