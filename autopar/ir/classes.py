"""Which ports and slots of the regions must agree, because the calls connect them.

A *class* is a set of ports that one layout serves: the hidden state that every layer reads and writes is one class, its
gradient another; the parameters that fill one slot of a repeated region are one class, and a tied parameter joins the
slots it fills. `place` decides one sharding per class.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass

from torch import fx

from autopar.ir.graphs import source_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.values import ValueRef

Key = tuple[str, str, int]
"""("in", region, i): input i of a region; ("out", region, i): its output i; ("gin" | "gout", region, i): their
gradients; ("slot", region, i): slot i; ("program", input name, 0): an input of the program; ("var", name, 0): a
parameter or buffer."""


class _UnionFind:
    def __init__(self) -> None:
        self._parent: dict[Hashable, Hashable] = {}

    def find(self, key: Hashable) -> Hashable:
        self._parent.setdefault(key, key)
        root = key
        while self._parent[root] != root:
            root = self._parent[root]
        while self._parent[key] != root:
            self._parent[key], key = root, self._parent[key]
        return root

    def union(self, first: Hashable, second: Hashable) -> None:
        a, b = self.find(first), self.find(second)
        if a != b:
            keep, drop = sorted((a, b), key=repr)
            self._parent[drop] = keep


@dataclass(frozen=True, slots=True)
class Classes:
    """`of[key]` is the class of a port or slot; `members` lists each class's keys, sorted."""

    of: dict[Key, Key]
    members: dict[Key, tuple[Key, ...]]


def value_classes(program: Program) -> Classes:
    """The classes of an outlined (or later) program."""
    sets = _UnionFind()
    keys: set[Key] = set()

    def join(first: Key, second: Key) -> None:
        keys.update((first, second))
        sets.union(first, second)

    for region in program.regions:
        keys.update(("in", region.name, i) for i in range(len(region.inputs)))
        keys.update(("out", region.name, i) for i in range(len(region.outputs)))
        keys.update(("gout", region.name, i) for i in region.tangents)
        keys.update(("gin", region.name, i) for i, port in enumerate(region.inputs) if port.differentiable)
    for call in program.calls:
        region = program.region(call.region)
        for i, name in enumerate(call.slots):
            join(("slot", call.region, i), ("var", name, 0))
        for i, ref in enumerate(call.arguments):
            join(("in", call.region, i), _source(program, ref))
            if region.inputs[i].differentiable and program.has_gradient(ref):
                # The gradient of an input goes back to the user as the input came.
                made = ("gout", program.calls[ref.call].region, ref.index)
                join(("gin", call.region, i), ("program", ref.name, 0) if ref.call < 0 else made)
    states = program.states
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        if name in states:
            join(("program", name, 0), ("out", program.calls[ref.call].region, ref.index))
    for ref in program.roots:
        # The user's gradient of an output comes in the layout in which the output went out.
        region = program.region(program.calls[ref.call].region)
        if ref.index in region.tangents:
            join(("out", region.name, ref.index), ("gout", region.name, ref.index))
    of = {key: sets.find(key) for key in keys}
    members: dict[Key, list[Key]] = {}
    for key, root in of.items():
        members.setdefault(root, []).append(key)  # type: ignore[arg-type]
    return Classes(of, {root: tuple(sorted(found)) for root, found in members.items()})  # type: ignore[arg-type]


def _source(program: Program, ref: ValueRef) -> Key:
    return ("program", ref.name, 0) if ref.call < 0 else ("out", program.calls[ref.call].region, ref.index)


def port_shardings(program: Program, region: Region) -> dict[Key, Sharding]:
    """The sharding of every port and slot of a region: `slot` as operators see it, `grad` its gradient before the
    reduction.
    """
    placement = program.placed
    whole = replicated(len(program.on_mesh.axis_names))
    index, call = next(program.calls_of(region.name))
    found: dict[Key, Sharding] = {("seed", region.name, i): whole for i in range(region.seeds)}
    for i, ref in enumerate(call.arguments):
        found[("in", region.name, i)] = (
            placement.inputs[ref.name] if ref.call < 0 else placement.values[(ref.call, ref.index)]
        )
        if region.inputs[i].differentiable:
            # The first call may read an input of the program, whose gradient nobody wants; the others read values.
            sources = [each.arguments[i] for _, each in program.calls_of(region.name)]
            flowing = (_gradient_sharding(program, source) for source in sources)
            found[("gin", region.name, i)] = next(sharding for sharding in flowing if sharding is not None)
    for i in range(len(region.outputs)):
        found[("out", region.name, i)] = placement.values[(index, i)]
        if i in region.tangents:
            found[("gout", region.name, i)] = placement.gradients[(index, i)]
    for i, name in enumerate(call.slots):
        found[("slot", region.name, i)] = placement.parameters[name].compute
        found[("grad", region.name, i)] = placement.parameters[name].gradient
    return found


def _gradient_sharding(program: Program, ref: ValueRef) -> Sharding | None:
    """How the gradient of what a call reads lies; None where it has none."""
    if ref.call < 0:
        return program.placed.inputs[ref.name] if ref.name in program.wanted else None
    return program.placed.gradients.get((ref.call, ref.index))


def value_name(node: fx.Node) -> str:
    """One name for all picks of the same result: the operator's, with the number of the result beyond the first."""
    producer, index = source_of(node)
    return f"{producer.name}.{index}" if index else producer.name


def placeholder_keys(region: Region) -> list[Key]:
    """The class key of every placeholder of a differentiated graph, in order (`seed` for those of dropout)."""
    keys: list[Key] = [("slot", region.name, i) for i in range(len(region.slots))]
    keys += [("in", region.name, i) for i in range(len(region.inputs))]
    keys += [("seed", region.name, i) for i in range(region.seeds)]
    return keys + [("gout", region.name, i) for i in region.tangents]


def result_keys(region: Region) -> list[Key]:
    """The class key of every result of a differentiated graph, in order (`slot` for a parameter's gradient)."""
    keys: list[Key] = [("out", region.name, i) for i in range(len(region.outputs))]
    keys += [("slot", region.name, i) for i, slot in enumerate(region.slots) if slot.trainable]
    return keys + [("gin", region.name, i) for i, port in enumerate(region.inputs) if port.differentiable]
