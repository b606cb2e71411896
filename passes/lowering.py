"""The graph of one phase of a region on local tensors, operator by operator; `insert_collectives` says of what."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping, Sequence
from functools import partial
from typing import Any

from torch import fx

from autopar.cost import exchanges, iterated, rings
from autopar.ir.choices import Offset, Starts, localize
from autopar.ir.classes import Key, placeholder_keys, value_name
from autopar.ir.graphs import operands_of, source_of
from autopar.ir.nodes import COPY_OF, FORM_OF, FORMS, NAME, drop_dead, map_nodes
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rings import EXCHANGES, NAMES
from autopar.ir.sharding import Shard, Sharding, Step, format_sharding, redistribution_steps
from autopar.ir.tensor_type import TensorType
from autopar.machine.mesh import Mesh
from autopar.passes.joint_sums import join_sums

Form = tuple[fx.Node, Sharding]
"""A value of the region's graph (`canonical`) in one sharding."""


class Layouts:
    """How the values of a region lie: where they are made, where the backward finds them, as their readers want them.

    ports: of placeholders and results. saved_as: of what the forward saves, known once it is lowered.
    """

    def __init__(self, region: Region, mesh: Mesh, ports: Mapping[Key, Sharding]) -> None:
        self.region, self.ports = region, ports
        self.axes, self.sizes, self.hardware = mesh.axis_names, tuple(mesh.sizes), mesh.hardware
        self.holders = [node for node in region.graph.nodes if node.op == "placeholder"]
        self.keys = dict(zip(self.holders, placeholder_keys(region), strict=True))
        self.saved_as: dict[fx.Node, Sharding] = {}

    def relay_of(self, node: fx.Node) -> Sharding | None:
        """The sharding in which all readers of a value take it from, where there are several."""
        return self.region.relays.get(value_name(node))

    def is_forward(self, node: fx.Node) -> bool:
        """A result picked from a forward operator belongs to the forward wherever it stands."""
        producer, _ = source_of(node)
        return producer.name in self.region.forward_nodes

    def sharding_of(self, node: fx.Node) -> Sharding:
        """The sharding in which a value is made or comes in."""
        producer, index = source_of(node)
        if producer.op == "placeholder":
            return self.ports[self.keys[producer]]
        sharding = self.region.strategies[producer.name].results[index]
        assert sharding is not None
        return sharding

    def wanted(self, key: Key) -> Sharding:
        """The sharding of a result: of a slot, its gradient's."""
        return self.ports[("grad", *key[1:]) if key[0] == "slot" else key]

    def way(self, node: fx.Node, wanted: Sharding, phase: str) -> tuple[list[Form], list[Step]]:
        """The forms of a value from the one at hand in this phase, by way of its relay, to the one wanted, and the
        steps between them.
        """
        key = canonical(node)
        saved = self.saved_as.get(key) if phase != "forward" else None
        current = saved or self.sharding_of(node)
        forms: list[Form] = [(key, current)]
        found: list[Step] = []
        for target in (self.relay_of(node) or current, wanted):
            steps = redistribution_steps(current, target, self.sizes)
            assert steps is not None, f"{node.name}: no way from {current} to {target}"
            for step in steps:
                current = (*current[: step.axis], step.placement, *current[step.axis + 1 :])
                forms.append((key, current))
            found += steps
            current = target
        return forms, found


class PhaseBuilder:
    """Builds the graph of one phase. given: what it gets as arguments, with their names."""

    def __init__(self, layouts: Layouts, name: str, given: Iterable[tuple[Form, str]]) -> None:
        self.layouts, self.name, self.region = layouts, name, layouts.region
        self.graph = fx.Graph()
        self.comm = self.graph.placeholder("comm")
        self.parameters = self.graph.placeholder("p")
        self.made: dict[Form, fx.Node] = {}
        self.operators: dict[fx.Node, fx.Node] = {}
        self.starts: dict[tuple[int, str], fx.Node] = {}
        self.inputs: list[str] = []
        for (node, sharding), name_ in given:
            self.inputs.append(name_)
            self._note(node, sharding, self.graph.placeholder(name_))

    def lower(self, operators: Iterable[fx.Node]) -> None:
        """Compute these, in this order."""
        for node in operators:
            self._lower(node)

    def results(self, results: Iterable[tuple[fx.Node, Key]]) -> list[fx.Node]:
        """Results of the region as its callers want them."""
        return [self.value(node, self.layouts.wanted(key)) for node, key in results]

    def finish(
        self, returned: Sequence[fx.Node], kept: Sequence[fx.Node] = (), names: Sequence[str] = ()
    ) -> LoweredFunction:
        """The function that gives `returned`, then what it keeps for later, under these names."""
        self.graph.output((*returned, *kept))
        drop_dead(self.graph)
        join_sums(self.graph, self.layouts.sizes)
        return LoweredFunction(self.graph, tuple(self.inputs), len(returned), tuple(names))

    def value(self, node: fx.Node, wanted: Sharding) -> fx.Node:
        """The lowered value of `node` in the sharding `wanted`, moved there, by way of its relay, from the last form
        on that way that there is.
        """
        forms, steps = self.layouts.way(node, wanted, self.name)
        there = max((i for i, form in enumerate(forms) if form in self.made), default=0)
        result = self.base(node, forms[there][1])
        for form, step in zip(forms[there + 1 :], steps[there:], strict=True):
            result = self._note(node, form[1], self._move(result, step, f"{node.name}_{FORMS[step.kind]}"))
        return result

    def base(self, node: fx.Node, have: Sharding) -> fx.Node:
        """The lowered value of `node` in a sharding in which this phase has it without a move."""
        key = (canonical(node), have)
        if key in self.made:
            return self.made[key]
        producer, index = source_of(node)
        if producer.op == "placeholder":
            place = self.layouts.keys[producer]
            assert place[0] == "slot", f"{producer.name} does not reach the {self.name}"
            name = self.region.slots[place[2]].name
            made = self._create("call_function", operator.getitem, (self.parameters, name), name=producer.name)
        else:
            made = self._create("call_function", operator.getitem, (self.operators[producer], index), name=node.name)
        return self._note(node, have, made)

    def _create(
        self, op: str, target: Any, args: tuple[Any, ...], kwargs: Any = None, name: str | None = None
    ) -> fx.Node:
        return self.graph.create_node(op, target, args, kwargs or {}, name=name)

    def _move(self, source: fx.Node, step: Step, name: str) -> fx.Node:
        axis = self.layouts.axes[step.axis]
        args: tuple[Any, ...] = (self.comm, source, axis)
        if step.kind != "all_reduce":
            args += (step.dim, step.outer) if step.outer != 1 else (step.dim,)
        kwargs: dict[str, Any] = {} if step.op == "sum" else {"op": step.op}
        if step.kind == "all_to_all":
            kwargs = {"from_dim": step.from_dim} | ({"from_outer": step.from_outer} if step.from_outer != 1 else {})
        kwargs |= {name: True for name in ("zigzag", "from_zigzag") if getattr(step, name)}
        return self._create("call_method", step.kind, args, kwargs, name=name)

    def _note(self, node: fx.Node, sharding: Sharding, made: fx.Node) -> fx.Node:
        made.meta["type"] = TensorType.of(node.meta["val"])
        made.meta["sharding"] = sharding
        made.meta["origin"] = self.region.origins.get(node.name, "")
        made.meta[NAME] = node.meta.get(NAME, "")
        made.meta[COPY_OF] = node.meta.get(COPY_OF, "")
        made.meta[FORM_OF] = canonical(node).name
        self.made[(canonical(node), sharding)] = made
        return made

    def _lower(self, node: fx.Node) -> None:
        strategy = self.region.strategies[node.name]
        _, rule = self.region.ops[node.name]
        operands = iter([self.value(s, wanted) for s, wanted in zip(operands_of(node), strategy.operands, strict=True)])
        args, kwargs = map_nodes((node.args, node.kwargs), lambda _: next(operands))
        args, kwargs = localize(rule, tuple(args), dict(kwargs), strategy.choices, self.layouts.sizes)
        for path, index in rule.position_args:
            if positions := self._positions(rule.shape_of(rule.operands[index]), strategy.operands[index]):
                args, kwargs = _with_argument(args, kwargs, path[0], positions)
        args = tuple(self._where(arg) for arg in args)
        kwargs = {key: self._where(arg) for key, arg in kwargs.items()}
        ring, exchange = rings.ring_axis(strategy.choices), exchanges.exchange_axis(strategy.choices)
        if ring is not None:
            made = self._ring(node, ring, args, kwargs)
        elif exchange is not None:
            made = self._exchange(node, exchange, args, kwargs)
        else:
            made = self._create("call_function", node.target, args, kwargs, name=node.name)
            self._note_buffers(node, made)
        made.meta["origin"] = self.region.origins.get(node.name, "")
        made.meta["operator"] = node.name
        made.meta["num_results"] = len(strategy.results)
        self.operators[node] = made
        if len(strategy.results) == 1 and not isinstance(node.meta["val"], (list, tuple)):
            self._note(node, self.layouts.sharding_of(node), made)

    def _ring(self, node: fx.Node, axis: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The operator over an axis around which its travelling operands go."""
        call, rule = self.region.ops[node.name]
        strategy, sizes = self.region.strategies[node.name], self.layouts.sizes
        choice, way = strategy.choices[axis], rings.ring_of(call, rule, strategy, sizes)
        assert way is not None
        said = {"outer": choice.outer, "zigzag": choice.zigzag, "visits": list(way.visits)}
        plain = {"outer": 1, "zigzag": False, "visits": list(range(sizes[axis]))}
        kwargs = kwargs | {name: value for name, value in said.items() if value != plain[name]}
        target = NAMES[str(node.target)]
        args = (self.comm, self.layouts.axes[axis], *args)
        made = self._create("call_method", target, args, kwargs, name=node.name)
        made.meta["buffers"] = partial(rings.buffer_bytes, call, rule, strategy)
        return made

    def _exchange(self, node: fx.Node, axis: int, args: tuple[Any, ...], kwargs: dict[str, Any]) -> fx.Node:
        """The operator over an axis to whose ranks its rows go."""
        target, args = EXCHANGES[str(node.target)], (self.comm, self.layouts.axes[axis], *args)
        made = self._create("call_method", target, args, kwargs, name=node.name)
        self._note_buffers(node, made)
        return made

    def _note_buffers(self, node: fx.Node, made: fx.Node) -> None:
        """What a layer of experts, or a loop, holds while it runs, where that is known."""
        call, rule = self.region.ops[node.name]
        strategy, holds = self.region.strategies[node.name], exchanges.grouped_holds(call, self.layouts.hardware)
        if iterated.is_loop(call):
            made.meta["buffers"] = partial(iterated.held_bytes, call, strategy)
        if holds is not None or exchanges.exchange_axis(strategy.choices) is not None:
            made.meta["buffers"] = partial(exchanges.buffer_bytes, call, rule, strategy, holds=holds)

    def _positions(self, shape: Sequence[int], sharding: Sharding) -> fx.Node | None:
        """Where elements lie in the whole tensor, for operators that draw numbers by position; None: all are here."""
        if not any(isinstance(placement, Shard) for placement in sharding):
            return None
        return self.graph.call_method(
            "positions", (self.comm, tuple(shape), format_sharding(sharding, self.layouts.axes))
        )

    def _where(self, arg: Any) -> Any:
        """An argument that says where a rank's elements lie as what computes it; any other as it is."""
        if isinstance(arg, Starts):
            splits = zip(self.layouts.axes, arg.sharding(len(self.layouts.axes)), strict=True)
            text = ", ".join(f"{axis}={placement}" for axis, placement in splits if isinstance(placement, Shard))
            if (arg.size, text) not in self.starts:
                self.starts[arg.size, text] = self.graph.call_method("starts", (self.comm, arg.size, text))
            return self.starts[arg.size, text]
        return self._offset(arg) if isinstance(arg, Offset) else arg

    def _offset(self, offset: Offset) -> fx.Node:
        """base + index·local_size, with the index row-major over the axes that split the factor."""
        index: Any = self.graph.call_method("index", (self.comm, self.layouts.axes[offset.axes[0]]))
        for axis, size in zip(offset.axes[1:], offset.axis_sizes[1:], strict=True):
            scaled = self.graph.call_function(operator.mul, (index, size))
            own = self.graph.call_method("index", (self.comm, self.layouts.axes[axis]))
            index = self.graph.call_function(operator.add, (scaled, own))
        one = offset.local_size == 1
        start = index if one else self.graph.call_function(operator.mul, (index, offset.local_size))
        return self.graph.call_function(operator.add, (start, offset.base)) if offset.base else start


def _with_argument(
    args: tuple[Any, ...], kwargs: dict[str, Any], path: int | str, value: Any
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments with one replaced, by position or by name."""
    if isinstance(path, str):
        return args, {**kwargs, path: value}
    return (*args[:path], value, *args[path + 1 :]), kwargs


def canonical(node: fx.Node) -> fx.Node:
    """One node for all picks of the same result: the first in the graph."""
    producer, index = source_of(node)
    if producer is node:
        return node
    return next(user for user in producer.users if user.target is operator.getitem and user.args[1] == index)
