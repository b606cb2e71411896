"""States that a call gives back as it got them come from a call that reads them, so that one stage has both.

    block: reads keys;  epilogue: returns keys, logits   →   block: reads and returns keys;  epilogue: returns logits

What an encoder gave is kept by its decoder's blocks from the first token on, and nothing writes it again: a trace then
returns it where it ends, on whatever stage that is.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator, Mapping
from dataclasses import replace

import torch
from torch import fx

from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.tensor_type import TensorType
from autopar.ir.values import Port, ValueRef
from autopar.passes.repeatable import kept_states

COPY = torch.ops.aten.clone.default


def with_states_handed_back(program: Program) -> Program:
    """The program in which each state that nothing writes is an output of the last call that reads it; of regions that
    are called once, as what lies around the blocks is.

    Requires: phase `outlined`.
    """
    moved = dict(_moved(program))
    if not moved:
        return program
    added: dict[str, dict[int, int]] = {}
    for call, position in moved.values():
        region = program.region(program.calls[call].region)
        places = added.setdefault(region.name, {})
        places.setdefault(position, len(region.outputs) + len(places))
    dropped: dict[str, set[int]] = {}
    for place in moved:
        ref = program.outputs[place]
        dropped.setdefault(program.calls[ref.call].region, set()).add(ref.index)
    regions = {name: _returning(program.region(name), places) for name, places in added.items()}
    kept: dict[str, tuple[int, ...]] = {}
    for name, results in dropped.items():
        regions[name], kept[name] = _without(program.region(name), results)
    numbers = {
        name: {old: new for new, old in enumerate(i for i in range(len(program.region(name).outputs)) if i not in gone)}
        for name, gone in dropped.items()
    }

    def renamed(ref: ValueRef) -> ValueRef:
        places = numbers.get(program.calls[ref.call].region) if ref.call >= 0 else None
        return ref if places is None else replace(ref, index=places[ref.index])

    def output(place: int, ref: ValueRef) -> ValueRef:
        if place not in moved:
            return renamed(ref)
        call, position = moved[place]
        return ValueRef(call, added[program.calls[call].region][position])

    return program.with_regions(
        regions,
        calls=tuple(_rewired(call, kept.get(call.region), renamed) for call in program.calls),
        outputs=tuple(output(place, ref) for place, ref in enumerate(program.outputs)),
        roots=frozenset(map(renamed, program.roots)),
        updates=tuple((name, renamed(ref)) for name, ref in program.updates),
    )


def _moved(program: Program) -> Iterator[tuple[int, tuple[int, int]]]:
    """Of each output that moves its place, and where to: a call, and which of its arguments it returns."""
    kept = kept_states(program)
    for place, (name, ref) in enumerate(zip(program.output_names, program.outputs, strict=True)):
        if name not in kept or ref.call < 0 or program.num_calls(program.calls[ref.call].region) > 1:
            continue
        own = program.calls[ref.call]
        region = program.region(own.region)
        holders = _holders(region)
        result = _copied_from(_results(region)[ref.index])
        if result not in holders or own.arguments[holders.index(result)].name != name:
            continue
        readers = [
            (number, position)
            for number, call in enumerate(program.calls)
            for position, argument in enumerate(call.arguments)
            if number != ref.call and argument.call < 0 and argument.name == name
        ]
        if readers:
            yield place, readers[-1]


def _returning(region: Region, places: Mapping[int, int]) -> Region:
    """The region with some of its inputs as further results. places: of an input, of the result."""
    graph, copies = _copied(region)
    given: list[fx.Node] = []
    for position in sorted(places, key=places.__getitem__):
        holder = copies[_holders(region)[position]]
        given.append(graph.call_function(COPY, (holder,)))  # as a trace returns what it was given
        given[-1].meta = {"val": holder.meta["val"]}
    graph.output((*(copies[node] for node in _results(region)), *given))
    ports = tuple(Port(node.name, TensorType.of(node.meta["val"])) for node in given)
    return replace(region, graph=graph, outputs=(*region.outputs, *ports))


def _without(region: Region, gone: Collection[int]) -> tuple[Region, tuple[int, ...]]:
    """The region without some of its results and what is read for these alone; the inputs that are left."""
    graph, copies = _copied(region)
    pairs = enumerate(zip(region.outputs, _results(region), strict=True))
    results = [pair for i, pair in pairs if i not in gone]
    graph.output(tuple(copies[node] for _, node in results))
    for node in reversed(list(graph.nodes)):
        if node.target is COPY and not node.users:
            graph.erase_node(node)
    holders = _holders(region)
    kept = tuple(i for i, node in enumerate(holders) if copies[node].users)
    for node in holders:
        if not copies[node].users:
            graph.erase_node(copies[node])
    inputs = tuple(region.inputs[i] for i in kept)
    return replace(region, graph=graph, inputs=inputs, outputs=tuple(port for port, _ in results)), kept


def _rewired(call: Call, kept: tuple[int, ...] | None, renamed: Callable[[ValueRef], ValueRef]) -> Call:
    arguments = call.arguments if kept is None else tuple(call.arguments[i] for i in kept)
    return replace(call, arguments=tuple(map(renamed, arguments)))


def _copied_from(node: fx.Node) -> fx.Node:
    while node.target is COPY:
        (node,) = node.all_input_nodes
    return node


def _copied(region: Region) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy of the graph that returns nothing yet, and its nodes by those of the region's."""
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()
    graph.graph_copy(region.graph, copies)
    return graph, copies


def _holders(region: Region) -> list[fx.Node]:
    """The placeholders of a region's inputs."""
    return [node for node in region.graph.nodes if node.op == "placeholder"][len(region.slots) :]


def _results(region: Region) -> list[fx.Node]:
    output = next(node for node in region.graph.nodes if node.op == "output")
    return list(output.args[0])
