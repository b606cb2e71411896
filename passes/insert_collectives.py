"""insert_collectives: from global tensors with shardings to local tensors with collectives.

Requires: phase `placed`.
Ensures: phase `lowered`; `Region.lowered` holds a forward and a backward on local shapes; where a consumer wants
    another sharding than the producer made, the moves between them are calls on `comm`; nothing is moved twice in one
    phase.

    linear: +tp  →  add wants R      h = linear(x, w)        # f32[8, 64] +tp
                                     h_1 = comm.all_reduce(h, "tp")   # f32[8, 64]
"""

from __future__ import annotations

import operator
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import fx

from autopar.ir import LoweredFunction, Program, Region, TensorType, map_nodes
from autopar.passes.annotate import operands_of, source_of
from autopar.passes.placement.parts import placeholder_keys, result_keys, value_name
from autopar.rules.strategies import Offset, localize
from autopar.sharding import (
    REPLICATE,
    Shard,
    Sharding,
    Step,
    format_sharding,
    redistribution_steps,
    replicated,
)

Key = tuple[str, str, int]

_SUFFIX = {
    "slice": "part", "all_gather": "whole", "all_reduce": "sum", "reduce_scatter": "sum_part", "all_to_all": "turned"
}  # fmt: skip
"""How a moved value's name ends."""


def insert_collectives(program: Program) -> Program:
    """Lower every region's forward and backward to local shapes."""
    regions = {}
    for region in program.regions:
        lowering = _Lowering(program, region)
        regions[region.name] = replace(region, lowered=lowering.run())
    return program.with_regions(regions, phase="lowered")


class _Lowering:
    """Both phases of one region. `shardings` says how each value lies where it is made."""

    def __init__(self, program: Program, region: Region) -> None:
        assert program.mesh is not None and program.placement is not None
        self.program, self.region, self.mesh = program, region, program.mesh
        self.holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        self.keys = dict(zip(self.holders, placeholder_keys(region), strict=True))
        self.output = next(node for node in region.graph.nodes if node.op == "output")
        self.ports = port_shardings(program, region)
        self.saved_as: dict[fx.Node, Sharding] = {}

    def run(self) -> dict[str, LoweredFunction]:
        results = list(zip(self.output.args[0], result_keys(self.region), strict=False))
        cut = len(self.region.outputs)
        saved = self._saved()
        inputs = [node for node in self.holders if self.keys[node][0] in ("in", "seed")]
        lowered = {"forward": _Phase(self, "forward", inputs).run(results[:cut], saved)}
        if self.program.training and len(results) > cut:
            tangents = [node for node in self.holders if self.keys[node][0] == "gout"]
            lowered["backward"] = _Phase(self, "backward", [*saved, *tangents]).run(results[cut:], [])
        return lowered

    def _saved(self) -> list[fx.Node]:
        """What the backward reads and the forward made or was given, slots apart, in graph order."""
        read: set[fx.Node] = set()
        for node in self.region.graph.nodes:
            if node.op == "call_function" and not self._is_forward(node):
                read.update(node.all_input_nodes)
        if self.program.training:
            read.update(value for value in list(self.output.args[0])[len(self.region.outputs) :])
        made = {canonical(node) for node in read if self._crosses(node)}
        return [node for node in self.region.graph.nodes if node in made]

    def relay_of(self, node: fx.Node) -> Sharding | None:
        """The sharding in which all readers of a value take it from, where there are several."""
        return self.region.relays.get(value_name(node))

    def _crosses(self, node: fx.Node) -> bool:
        return self.keys[node][0] in ("in", "seed") if node.op == "placeholder" else self._is_forward(node)

    def _is_forward(self, node: fx.Node) -> bool:
        """A result picked from a forward operator belongs to the forward wherever it stands."""
        producer, _ = source_of(node)
        return producer.name in self.region.forward_nodes

    def sharding_of(self, node: fx.Node) -> Sharding:
        producer, index = source_of(node)
        if producer.op == "placeholder":
            return self.ports[self.keys[producer]]
        sharding = self.region.strategies[producer.name].results[index]
        assert sharding is not None
        return sharding


class _Phase:
    """Builds the graph of one phase."""

    def __init__(self, lowering: _Lowering, name: str, inputs: Sequence[fx.Node]) -> None:
        self.low, self.name, self.region = lowering, name, lowering.region
        self.axes, self.sizes = lowering.mesh.axis_names, tuple(lowering.mesh.sizes)
        self.graph = fx.Graph()
        self.comm = self.graph.placeholder("comm")
        self.parameters = self.graph.placeholder("p")
        self.inputs = list(inputs)
        self.made: dict[tuple[fx.Node, Sharding], fx.Node] = {}
        self.operators: dict[fx.Node, fx.Node] = {}
        for node in self.inputs:
            self._note(node, self._sharding_at_hand(node), self.graph.placeholder(node.name))

    def run(self, results: Sequence[tuple[fx.Node, Key]], saved: Sequence[fx.Node]) -> LoweredFunction:
        is_forward = self.name == "forward"
        for node in self.region.graph.nodes:
            belongs = node.name in self.region.forward_nodes
            if node.op == "call_function" and node.target is not operator.getitem and belongs == is_forward:
                self._lower(node)
        wanted = [("grad", *key[1:]) if key[0] == "slot" else key for _, key in results]
        returned = [self.value(node, self.low.ports[key]) for (node, _), key in zip(results, wanted, strict=True)]
        for node in saved:
            self.low.saved_as[node] = self.low.relay_of(node) or self.low.sharding_of(node)
        kept = [self.value(node, self.low.saved_as[node]) for node in saved]
        self.graph.output((*returned, *kept))
        self.graph.eliminate_dead_code()
        names = tuple(node.name for node in self.inputs)
        return LoweredFunction(self.graph, names, len(returned), tuple(node.name for node in saved))

    def value(self, node: fx.Node, wanted: Sharding) -> fx.Node:
        """The lowered value of `node` in the sharding `wanted`, moving it there, by way of its relay, if need be."""
        have = self._sharding_at_hand(node)
        result = self._base(node, have)
        for target in (self.low.relay_of(node) or have, wanted):
            result = self._moved(node, result, have, target)
            have = target
        return result

    def _moved(self, node: fx.Node, result: fx.Node, have: Sharding, wanted: Sharding) -> fx.Node:
        steps = redistribution_steps(have, wanted)
        assert steps is not None, f"{node.name}: no way from {have} to {wanted}"
        current = list(have)
        for step in steps:
            current[step.axis] = REPLICATE if step.kind in ("all_gather", "all_reduce") else Shard(step.dim, step.outer)
            key = (canonical(node), tuple(current))
            if key not in self.made:
                self._note(node, tuple(current), self._move(result, step))
            result = self.made[key]
        return result

    def _sharding_at_hand(self, node: fx.Node) -> Sharding:
        saved = self.low.saved_as.get(canonical(node)) if self.name == "backward" else None
        return saved or self.low.sharding_of(node)

    def _base(self, node: fx.Node, have: Sharding) -> fx.Node:
        key = (canonical(node), have)
        if key in self.made:
            return self.made[key]
        producer, index = source_of(node)
        if producer.op == "placeholder":
            assert self.low.keys[producer][0] == "slot", f"{producer.name} does not reach the {self.name}"
            name = self.region.slots[self.low.keys[producer][2]].name
            made = self._create("call_function", operator.getitem, (self.parameters, name), name=producer.name)
        else:
            made = self._create("call_function", operator.getitem, (self.operators[producer], index), name=node.name)
        return self._note(node, have, made)

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any = None, name: str | None = None
    ) -> fx.Node:
        return self.graph.create_node(op, target, args, kwargs or {}, name=name)

    def _move(self, source: fx.Node, step: Step) -> fx.Node:
        axis = self.axes[step.axis]
        args: tuple[Any, ...] = (self.comm, source, axis)
        if step.kind != "all_reduce":
            args += (step.dim, step.outer) if step.outer != 1 else (step.dim,)
        kwargs: dict[str, Any] = {} if step.op == "sum" else {"op": step.op}
        if step.kind == "all_to_all":
            kwargs = {"from_dim": step.from_dim} | ({"from_outer": step.from_outer} if step.from_outer != 1 else {})
        return self._create("call_method", step.kind, args, kwargs, name=f"{source.name}_{_SUFFIX[step.kind]}")

    def _note(self, node: fx.Node, sharding: Sharding, made: fx.Node) -> fx.Node:
        made.meta["type"] = TensorType.of(node.meta["val"])
        made.meta["sharding"] = sharding
        made.meta["origin"] = self.region.origins.get(node.name, "")
        self.made[(canonical(node), sharding)] = made
        return made

    def _lower(self, node: fx.Node) -> None:
        strategy = self.region.strategies[node.name]
        _, rule = self.region.ops[node.name]
        operands = iter([self.value(s, wanted) for s, wanted in zip(operands_of(node), strategy.operands, strict=True)])
        args, kwargs = map_nodes((node.args, node.kwargs), lambda _: next(operands))
        args, kwargs = localize(rule, tuple(args), dict(kwargs), strategy.choices, self.sizes)
        for path, index in rule.position_args:
            args = self._with_positions(args, path, rule.shape_of(rule.operands[index]), strategy.operands[index])
        args = tuple(self._offset(arg) if isinstance(arg, Offset) else arg for arg in args)
        kwargs = {key: self._offset(arg) if isinstance(arg, Offset) else arg for key, arg in kwargs.items()}
        made = self._create("call_function", node.target, args, kwargs, name=node.name)
        made.meta["origin"] = self.region.origins.get(node.name, "")
        self.operators[node] = made
        if len(strategy.results) == 1 and not isinstance(node.meta["val"], (list, tuple)):
            self._note(node, self.low.sharding_of(node), made)

    def _with_positions(
        self, args: tuple[Any, ...], path: Any, shape: Sequence[int], sharding: Sharding
    ) -> tuple[Any, ...]:
        """Where elements lie in the whole tensor, for operators that draw numbers by position."""
        if not any(isinstance(placement, Shard) for placement in sharding):
            return args
        text = format_sharding(sharding, self.axes)
        positions = self.graph.call_method("positions", (self.comm, tuple(shape), text))
        return (*args[: path[0]], positions, *args[path[0] + 1 :])

    def _offset(self, offset: Offset) -> fx.Node:
        """base + index·local_size, with the index row-major over the axes that split the factor."""
        index: Any = self.graph.call_method("index", (self.comm, self.axes[offset.axes[0]]))
        for axis, size in zip(offset.axes[1:], offset.axis_sizes[1:], strict=True):
            scaled = self.graph.call_function(operator.mul, (index, size))
            own = self.graph.call_method("index", (self.comm, self.axes[axis]))
            index = self.graph.call_function(operator.add, (scaled, own))
        start = self.graph.call_function(operator.mul, (index, offset.local_size))
        return self.graph.call_function(operator.add, (start, offset.base)) if offset.base else start


def canonical(node: fx.Node) -> fx.Node:
    """One node for all picks of the same result: the first in the graph."""
    producer, index = source_of(node)
    if producer is node:
        return node
    return next(user for user in producer.users if user.target is operator.getitem and user.args[1] == index)


def port_shardings(program: Program, region: Region) -> dict[Key, Sharding]:
    """The sharding of every port and slot of a region: `slot` as operators see it, `grad` its gradient before the
    reduction.
    """
    assert program.placement is not None and program.mesh is not None
    placement = program.placement
    whole = replicated(len(program.mesh.axis_names))
    index, call = next(program.calls_of(region.name))
    found: dict[Key, Sharding] = {("seed", region.name, 0): whole}
    for i, ref in enumerate(call.arguments):
        found[("in", region.name, i)] = (
            placement.inputs[ref.name] if ref.call < 0 else placement.values[(ref.call, ref.index)]
        )
        if region.inputs[i].differentiable:
            # The first call may read an input of the program, whose gradient nobody wants; the others read values.
            sources = [each.arguments[i] for _, each in program.calls_of(region.name)]
            flowing = (placement.gradients.get((source.call, source.index)) for source in sources)
            found[("gin", region.name, i)] = next(sharding for sharding in flowing if sharding is not None)
    for i in range(len(region.outputs)):
        found[("out", region.name, i)] = placement.values[(index, i)]
        if i in region.tangents:
            found[("gout", region.name, i)] = placement.gradients[(index, i)]
    for i, name in enumerate(call.slots):
        found[("slot", region.name, i)] = placement.parameters[name].compute
        found[("grad", region.name, i)] = placement.parameters[name].gradient
    return found
