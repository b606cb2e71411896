"""What one phase of a lowered region holds while it computes, and what it leaves behind, in bytes on one rank.

Counted are storages: a view holds nothing of its own, and lets nothing go of what it is a view of. A storage lives from
the operator that makes it to its last reader, as in the generated text. Parameters count elsewhere.
"""

from __future__ import annotations

import operator
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from torch import fx

from autopar.ir.graphs import is_view
from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF
from autopar.ir.local_bytes import local_bytes
from autopar.ir.region import LoweredFunction, Region
from autopar.machine.mesh import Mesh

Source = Literal["input", "output", "gradient", "own"]


@dataclass(frozen=True, slots=True)
class Held:
    """A storage that a phase leaves to a later one.

    source: where it comes from: the region's input or output `index`, the gradient of output `index`, or the region
    itself, where `name` tells one from another.
    """

    source: Source
    index: int
    name: str
    num_bytes: float


class Storages:
    """The storages of a lowered graph. owner: value -> the node that stands for its storage; parameters have none."""

    def __init__(self, lowered: LoweredFunction, mesh: Mesh) -> None:
        self.lowered, self.mesh = lowered, mesh
        self.output = next(node for node in lowered.graph.nodes if node.op == "output")
        self.owner: dict[fx.Node, fx.Node] = {}
        for node in lowered.graph.nodes:
            source = self._viewed(node)
            self.owner[node] = node if source is None else self.owner[source]
        self.holders = {node.name: node for node in lowered.graph.nodes if node.op == "placeholder"}

    @property
    def results(self) -> Sequence[fx.Node]:
        """What the phase returns to its callers."""
        return self.output.args[0][: self.lowered.num_results]

    @property
    def kept(self) -> Sequence[fx.Node]:
        """What it leaves to a later phase."""
        return self.output.args[0][self.lowered.num_results :]

    def bytes_of(self, owner: fx.Node) -> int:
        """Bytes of a storage on one rank; none for a parameter, and for what is no tensor."""
        return 0 if _is_parameter(owner) else local_bytes(owner, tuple(self.mesh.sizes))

    def peak(self, freed: Collection[str] = ()) -> float:
        """The most that the phase holds of its own making, less what it has freed by then: `freed` names those of its
        arguments that nobody else holds.
        """
        order = {node: place for place, node in enumerate(self.lowered.graph.nodes)}
        last: dict[fx.Node, int] = {}
        for node, owner in self.owner.items():
            last[owner] = max([last.get(owner, order[owner]), *(order[user] for user in node.users)])
        changes = [0.0] * (len(order) + 2)
        for owner, end in last.items():
            if (holds := owner.meta.get("holds")) is not None:  # what is on its way, between two statements
                changes[order[_made_by(owner)] + 1] += holds(self.mesh.sizes)
                changes[end] -= holds(self.mesh.sizes)
                continue
            is_argument = owner.op == "placeholder"
            if is_argument and owner.name not in freed:
                continue
            if not is_argument:
                changes[order[_made_by(owner)]] += self.bytes_of(owner)
            if end < order[self.output]:
                changes[end + 1] -= self.bytes_of(owner)
        for node, place in order.items():
            if (buffers := node.meta.get("buffers")) is not None:  # of any sizes: a search puts in others
                changes[place] += buffers(self.mesh.sizes)
                changes[place + 1] -= buffers(self.mesh.sizes)
        most = now = 0.0
        for change in changes:
            now += change
            most = max(most, now)
        return most

    def _viewed(self, node: fx.Node) -> fx.Node | None:
        """What a node's result shares its memory with."""
        if node.op == "call_method":
            _, source, *rest = (*node.args, None)
            if not isinstance(source, fx.Node):
                return None
            alone = isinstance(rest[0], str) and self.mesh.size(rest[0]) == 1
            return source if alone or (node.target == "slice" and rest[1] == 0 and rest[2] is None) else None
        if node.op != "call_function" or _is_parameter(node):
            return None
        source = node.args[0] if node.args else None
        if not isinstance(source, fx.Node):
            return None
        if node.target is operator.getitem:
            return source if self.owner[source] is not source else None
        return source if is_view(node) else None


def _is_parameter(node: fx.Node) -> bool:
    return node.target is operator.getitem and isinstance(node.args[1], str)


def _made_by(owner: fx.Node) -> fx.Node:
    """The operator that makes a storage: what is picked of several results is there with all of them."""
    return owner.args[0] if owner.target is operator.getitem and not _is_parameter(owner) else owner  # type: ignore[return-value]


@dataclass(frozen=True, slots=True)
class RegionMemory:
    """What one call of a region holds, in bytes on one rank, for one microbatch.

    saved: by the forward for the backward; kept: by the input half for the weight half. peaks: phase -> the most that
    it holds of its own making beyond what it is given, less what it has freed by then of what only it had. passes: an
    output -> the input whose storage it is.
    """

    saved: tuple[Held, ...]
    kept: tuple[Held, ...]
    peaks: Mapping[str, float]
    passes: Mapping[int, int]


def region_memory(region: Region, mesh: Mesh) -> RegionMemory:
    """Walk over the lowered phases of a region."""
    forward = Storages(region.lowered["forward"], mesh)
    names = region.lowered["forward"].inputs
    known = {
        forward.holders[name]: Held("input", i, name, forward.bytes_of(forward.holders[name]))
        for i, name in enumerate(names[: len(region.inputs)])
    }
    passes = {}
    for i, result in enumerate(forward.results):
        owner = forward.owner[result]
        if owner in known and known[owner].source == "input":
            passes[i] = known[owner].index
        elif owner not in known:
            known[owner] = Held("output", i, owner.name, forward.bytes_of(owner))
    saved = dict(zip(region.lowered["forward"].saved, _held(forward, known, "forward"), strict=True))
    peaks = {"forward": forward.peak()}
    kept: dict[str, Held] = {}
    if "backward" in region.lowered:
        backward = Storages(region.lowered["backward"], mesh)
        peaks["backward"] = backward.peak(_own(saved))
    if INPUT_HALF in region.lowered:
        first, last = Storages(region.lowered[INPUT_HALF], mesh), Storages(region.lowered[WEIGHT_HALF], mesh)
        given = _given(region, first, saved)
        kept = dict(zip(region.lowered[INPUT_HALF].saved, _held(first, given, INPUT_HALF), strict=True))
        remain = set(kept.values())
        peaks[INPUT_HALF] = first.peak({name for name in _own(saved) if saved[name] not in remain})
        peaks[WEIGHT_HALF] = last.peak(_own(kept))
    return RegionMemory(_distinct(saved), _distinct(kept), peaks, passes)


def _given(region: Region, half: Storages, saved: Mapping[str, Held]) -> dict[fx.Node, Held]:
    """The storages that the input half is given."""
    found = {half.holders[name]: held for name, held in saved.items() if name in half.holders}
    tangents = [name for name in half.lowered.inputs if name not in saved]
    for index, name in zip(region.tangents, tangents, strict=True):
        node = half.holders[name]
        found[node] = Held("gradient", index, name, half.bytes_of(node))
    return found


def _held(storages: Storages, known: Mapping[fx.Node, Held], phase: str) -> Iterator[Held]:
    """The storages of what a phase keeps, in order."""
    for node in storages.kept:
        owner = storages.owner[node]
        yield known.get(owner) or Held("own", 0, f"{phase} {owner.name}", storages.bytes_of(owner))


def _own(held: Mapping[str, Held]) -> set[str]:
    """Arguments that the call alone has, under their names: those whose storage is held under one name."""
    counts: dict[Held, int] = {}
    for each in held.values():
        counts[each] = counts.get(each, 0) + 1
    return {name for name, each in held.items() if each.source == "own" and counts[each] == 1}


def _distinct(held: Mapping[str, Held]) -> tuple[Held, ...]:
    return tuple(dict.fromkeys(each for each in held.values() if each.num_bytes))
