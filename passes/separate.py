"""separate: values that no parameter goes into become calls of their own, so that any pipeline stage can make them.

Requires: phase `outlined`.
Ensures: the same phase and numbers. What leaves a region between the blocks (or a block that occurs once), is read by
    other calls and is computed from the program's inputs and from buffers alone (rotary tables, masks, position ids) is
    the result of a call placed right before the one it came from (`is_repeatable`). Results that share work are made
    together; what is cheap, such as a range of positions, is made again by each call that needs it. States that nothing
    writes are given back by calls that read them (`handed_back.py`).

    prologue: embedding, mask, cos, sin  →  prologue_values_1: mask;  prologue_values_2: cos, sin;  prologue: embedding
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar import operators  # noqa: F401 (defines torch.ops.autopar)
from autopar.ir.graphs import ancestors
from autopar.ir.names import base_name
from autopar.ir.nodes import map_nodes, result_types
from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Port, ValueRef
from autopar.passes.handed_back import with_states_handed_back
from autopar.passes.mutation import writes
from autopar.passes.repeatable import _is_random, repeatable_calls


def separate(program: Program) -> Program:
    """Give every value that no parameter goes into, and that another call reads, a call of its own."""
    assert program.phase == "outlined", program.phase
    program = with_states_handed_back(program)
    split = _Splitter(program)
    for region in program.regions:
        split.add(region)
    return split.rebuilt()


@dataclass(frozen=True, slots=True)
class _Part:
    """A piece of a region. slots: their places in it. reads: its nodes that the piece gets as inputs, in order."""

    region: Region
    slots: tuple[int, ...]
    reads: tuple[fx.Node, ...]
    results: tuple[fx.Node, ...]


class _Splitter:
    """Splits one region after the other, in the order in which they are first called.

    parts: of each region that falls apart, first the values, in the end what is left. free: values that no parameter
    goes into, by where they are in the old program.
    """

    def __init__(self, program: Program) -> None:
        self.program = program
        self.read = {ref for call in program.calls for ref in call.arguments}
        self.repeatable = repeatable_calls(program)
        self.fixed = {v.name for v in program.variables if not v.is_parameter} - {name for name, _ in program.updates}
        self.cheap_elements = max((p.type.num_elements for p in program.inputs if not p.type.is_float), default=0)
        self.parts: dict[str, tuple[_Part, ...]] = {}
        self.free: set[ValueRef] = set()

    def add(self, region: Region) -> None:
        """Note which results of a region are free, and cut them off where that is worth it."""
        calls = [index for index, _ in self.program.calls_of(region.name)]
        if all(index in self.repeatable for index in calls):
            self.free.update(ValueRef(index, i) for index in calls for i in range(len(region.outputs)))
        if region.module and len(calls) > 1:
            return
        free = self._free_nodes(region)
        moved = {
            node: [ValueRef(call, i) for call in calls]
            for i, node in enumerate(_results(region))
            if node in free and node.op == "call_function" and any(ValueRef(call, i) in self.read for call in calls)
        }
        parts = tuple(self._split(region, free, list(moved))) if moved else ()
        if len(parts) > 1:
            self.parts[region.name] = parts
            self.free.update(ref for refs in moved.values() for ref in refs)

    def _free_nodes(self, region: Region) -> set[fx.Node]:
        """Nodes of a region, placeholders among them, that no parameter goes into in any of its calls."""
        holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        calls = [call for _, call in self.program.calls_of(region.name)]
        free: set[fx.Node] = set()
        for place, node in enumerate(holders):
            given = place - len(region.slots)
            if all(
                call.slots[place] in self.fixed if given < 0 else self._is_free(call.arguments[given]) for call in calls
            ):
                free.add(node)
        for node in region.graph.nodes:
            if node.op == "call_function" and not _is_random(node) and not writes(node):
                free.update([node] if free.issuperset(node.all_input_nodes) else ())
        return free

    def _is_free(self, ref: ValueRef) -> bool:
        return ref.call < 0 or ref in self.free

    def _split(self, region: Region, free: Collection[fx.Node], moved: Sequence[fx.Node]) -> Iterable[_Part]:
        groups = _groups(moved, free, self._is_cheap)
        inside = [ancestors(group) for group in groups]
        rest = [node for node in _results(region) if node not in moved]
        borders: dict[fx.Node, int] = {}

        def stops(node: fx.Node) -> bool:
            number = next((i for i, nodes in enumerate(inside) if node in nodes), None)
            if number is None or node.op != "call_function" or self._is_cheap(node) or _is_tuple(node):
                return False
            borders[node] = number
            return True

        needed = ancestors(rest, stops)
        for number, group in enumerate(groups):
            extra = [node for node, owner in borders.items() if owner == number and node not in group]
            results = [node for node in region.graph.nodes if node in group or node in extra]
            name = f"{region.name}_values" + (f"_{number + 1}" if len(groups) > 1 else "")
            yield _part(self.program, region, name, inside[number], frozenset(), results)
        if rest:
            yield _part(self.program, region, region.name, needed, borders, rest)

    def _is_cheap(self, node: fx.Node) -> bool:
        """Whether making a value twice is nothing: ids and ranges of them, no larger than the model's inputs."""
        types = [type_ for type_ in result_types(node) if type_ is not None]
        vectors = all(sum(size > 1 for size in type_.shape) <= 1 for type_ in types)
        return all(not t.is_float or t.num_elements == 1 for t in types) and (
            vectors or sum(type_.num_elements for type_ in types) <= self.cheap_elements
        )

    def rebuilt(self) -> Program:
        """The program with the parts in place of the regions."""
        made: dict[ValueRef, ValueRef] = {}
        calls: list[Call] = []
        for index, call in enumerate(self.program.calls):
            region = self.program.region(call.region)
            if call.region not in self.parts:
                made.update({ValueRef(index, i): ValueRef(len(calls), i) for i in range(len(region.outputs))})
                calls.append(replace(call, arguments=tuple(made.get(ref, ref) for ref in call.arguments)))
                continue
            holders = [node for node in region.graph.nodes if node.op == "placeholder"]
            values = {
                node: made.get(ref, ref) for node, ref in zip(holders[len(region.slots) :], call.arguments, strict=True)
            }
            for part in self.parts[call.region]:
                slots = tuple(call.slots[place] for place in part.slots)
                path = "" if part.region.name != region.name else call.path
                calls.append(Call(part.region.name, path, slots, tuple(values[node] for node in part.reads)))
                values.update({node: ValueRef(len(calls) - 1, i) for i, node in enumerate(part.results)})
            made.update({ValueRef(index, i): values[node] for i, node in enumerate(_results(region))})
        updates = tuple((name, made[ref]) for name, ref in self.program.updates)
        return replace(
            self.program,
            regions=tuple(self._regions()),
            calls=tuple(calls),
            outputs=tuple(made.get(ref, ref) for ref in self.program.outputs),
            roots=frozenset(made.get(ref, ref) for ref in self.program.roots),
            updates=tuple(sorted(updates, key=lambda update: (update[1].call, update[1].index))),
        )

    def _regions(self) -> Iterable[Region]:
        for region in self.program.regions:
            if region.name in self.parts:
                yield from (part.region for part in self.parts[region.name])
            else:
                yield region


def _part(
    program: Program,
    region: Region,
    name: str,
    inside: Collection[fx.Node],
    borders: Collection[fx.Node],
    results: Sequence[fx.Node],
) -> _Part:
    """The nodes `inside` of a region as one that gets `borders` as inputs. Values of a block get whole slot names."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    _, call = next(program.calls_of(region.name))
    keeps = name == region.name
    places = tuple(i for i, node in enumerate(holders[: len(region.slots)]) if node in inside)
    slots = tuple(region.slots[i] if keeps else replace(region.slots[i], name=call.slots[i]) for i in places)
    given = dict(zip(holders[len(region.slots) :], region.inputs, strict=True))
    reads = tuple(node for node in given if node in inside) + tuple(n for n in region.graph.nodes if n in borders)
    graph = fx.Graph()
    env: dict[fx.Node, fx.Node] = {}
    for node in (*(holders[i] for i in places), *reads):
        env[node] = graph.placeholder(node.name)
        env[node].target = env[node].name
        env[node].meta = {"val": node.meta["val"]}
    inputs = tuple(replace(given[n], name=env[n].name) if n in given else _port(env[n], n.meta["val"]) for n in reads)
    origins: dict[str, str] = {}
    for node in region.graph.nodes:
        if node in inside and node not in env:
            args, kwargs = map_nodes((node.args, node.kwargs), lambda n: env[n])
            env[node] = graph.create_node(node.op, node.target, args, kwargs, name=base_name(node))
            env[node].meta = dict(node.meta)
            origins[env[node].name] = region.origins.get(node.name, "")
    graph.output(tuple(env[node] for node in results))
    outputs = tuple(_port(env[node], node.meta["val"]) for node in results)
    module = region.module if keeps else ""
    made = Region(name, module, graph, slots, inputs, outputs, origins=origins, leaves=region.leaves)
    return _Part(made, places, reads, tuple(results))


def _port(node: fx.Node, value: torch.Tensor) -> Port:
    return Port(node.name, TensorType.of(value))


def _results(region: Region) -> list[fx.Node]:
    output = next(node for node in region.graph.nodes if node.op == "output")
    return list(output.args[0])


def _groups(
    moved: Sequence[fx.Node], free: Collection[fx.Node], is_cheap: Callable[[fx.Node], bool]
) -> list[list[fx.Node]]:
    """Values to move, those that share work together, in the order of their first ones."""
    work = {
        node: {n for n in ancestors([node]) if n.op == "call_function" and n in free and not is_cheap(n)}
        for node in moved
    }
    groups: list[tuple[list[fx.Node], set[fx.Node]]] = []
    for node in moved:
        sharing = [group for group in groups if group[1] & work[node]]
        members = [n for group in sharing for n in group[0]] + [node]
        joined = (members, set().union(work[node], *(group[1] for group in sharing)))
        where = next((i for i, group in enumerate(groups) if group in sharing), len(groups))
        groups = [group for group in groups if group not in sharing]
        groups.insert(where, joined)
    return [members for members, _ in groups]


def _is_tuple(node: fx.Node) -> bool:
    return isinstance(node.meta.get("val"), (list, tuple))
