"""Build the assignment problem of a program on a mesh.

Minimise  Σ_operators calls·compute(s)  +  Σ_edges calls·redistribution(s, s')  +  Σ_parameters (gathers + gradient
reduction)
subject to memory at every time of the folded timeline. The variables, one choice each:

- an *operator* of a region: what each mesh axis does with its loop nest (`_add_operator`);
- a *class* of values between calls, or of their gradients: its sharding, no partial sums (`_add_classes`);
- a *parameter*: its stored, held and compute shardings (`_add_parameters`), with the gathers of forward and backward as
  its cost, and, where it is trained, the layout of its gradient before the reduction, which is paid once a step;
- a *relay*, where several read one value: the sharding to which it is moved once, for all of them (`_relay`).

Edges carry the redistribution between what one makes and the other reads, inside regions times the number of calls and
of microbatches.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
from torch import fx

from autopar.blocks import may_split_padded
from autopar.classes import Classes, Key, value_classes
from autopar.errors import AutoparError
from autopar.estimate import OPTIMIZER_STATES, reads_in_backward
from autopar.ir import NodeStrategy, Program, Region, TensorType, Variable
from autopar.mesh import Mesh
from autopar.passes.annotate import operands_of, source_of
from autopar.passes.heads import may_stay_whole
from autopar.passes.placement.layouts import ParameterChoice, Redistribution, layouts_of, parameter_choices
from autopar.passes.placement.timeline import Lifetime, Timeline
from autopar.sharding import PARTIAL, REPLICATE, Replicate, Shard, Sharding, num_pieces, replicated
from autopar.solver.problem import AssignmentProblem, Edge, Node, Usage
from autopar.strategies import AxisStrategy, Pin


@dataclass(slots=True)
class Slot:
    """A parameter's or buffer's variable in the problem."""

    choices: list[ParameterChoice]
    node: int
    gradient: int = -1
    gradient_layouts: list[Sharding] = field(default_factory=list)


@dataclass(slots=True)
class PlacementProblem:
    """The assignment problem and what its indices mean.

    operators: (region, node) -> (problem node, its strategies); classes: class key -> (problem node, its layouts);
    slots: class key -> Slot; relays: (region, value) -> (problem node, its layouts). `describe` names a problem node for
    people.
    """

    problem: AssignmentProblem
    operators: dict[tuple[str, str], tuple[int, Sequence[NodeStrategy]]]
    classes: dict[Key, tuple[int, list[Sharding]]]
    slots: dict[Key, Slot]
    relays: dict[tuple[str, str], tuple[int, tuple[Sharding, ...]]]
    value_classes: Classes
    timeline: Timeline
    descriptions: list[str]


def build_problem(
    program: Program, strategies: Sequence[AxisStrategy], pins: Sequence[Pin], memory_limit_bytes: float | None
) -> PlacementProblem:
    """The assignment problem of an annotated program.

    Raises:
        AutoparError: an input that a strategy must split and cannot, a pin that no layout satisfies.
    """
    assert program.mesh is not None
    return _Builder(program, program.mesh, strategies, pins).build(memory_limit_bytes)


class _Builder:
    def __init__(self, program: Program, mesh: Mesh, strategies: Sequence[AxisStrategy], pins: Sequence[Pin]) -> None:
        self.program, self.mesh, self.strategies, self.pins = program, mesh, strategies, pins
        self.sizes = tuple(mesh.sizes)
        self.costs, self.block_costs, self.slot_costs = _redistributions(mesh, strategies)
        self.known = value_classes(program)
        self.timeline = Timeline.of(program)
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.descriptions: list[str] = []
        self.operators: dict[tuple[str, str], tuple[int, Sequence[NodeStrategy]]] = {}
        self.classes: dict[Key, tuple[int, list[Sharding]]] = {}
        self.slots: dict[Key, Slot] = {}
        self.relays: dict[tuple[str, str], tuple[int, tuple[Sharding, ...]]] = {}
        self.wanted: dict[tuple[str, str], list[tuple[Sharding, ...]]] = {}

    def build(self, memory_limit_bytes: float | None) -> PlacementProblem:
        self._add_classes()
        self._add_parameters()
        for region in self.program.regions:
            self._note_readers(region)
            for node in region.graph.nodes:
                if node.name in region.ops:
                    self._add_operator(region, node)
            self._add_results(region)
        limit = memory_limit_bytes
        problem = AssignmentProblem(tuple(self.nodes), tuple(self.edges), limit)
        return PlacementProblem(
            problem,
            self.operators,
            self.classes,
            self.slots,
            self.relays,
            self.known,
            self.timeline,
            self.descriptions,
        )

    def _node(self, name: str, costs: Sequence[float], usages: Sequence[Usage], description: str) -> int:
        self.nodes.append(Node(name, np.array(costs, dtype=float), tuple(usages)))
        self.descriptions.append(description)
        return len(self.nodes) - 1

    # -- values between calls ------------------------------------------------------------------------------------------

    def _add_classes(self) -> None:
        for root, members in sorted(self.known.members.items()):
            ports = [key for key in members if key[0] in ("in", "out", "gin", "gout")]
            if not ports:
                continue
            type_ = self._port_type(ports[0])[1]
            layouts = layouts_of(type_, self.sizes, self._stripes(ports))
            layouts = self._allowed_layouts(members, type_, layouts)
            usages = self._class_usages(ports, type_, layouts)
            name = f"value:{':'.join(map(str, root))}"
            index = self._node(name, [0.0] * len(layouts), usages, self._describe_class(members, type_))
            self.classes[root] = (index, layouts)

    def _port_type(self, key: Key) -> tuple[Region, TensorType]:
        region = self.program.region(key[1])
        ports = region.inputs if key[0] in ("in", "gin") else region.outputs
        return region, ports[key[2]].type

    def _stripes(self, keys: Sequence[Key]) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for kind, name, index in keys:
            region = self.program.region(name)
            holders = [node for node in region.graph.nodes if node.op == "placeholder"]
            label = f"{kind}{index}"
            if kind == "in":
                label = holders[len(region.slots) + index].name
            elif kind == "slot":
                label = holders[index].name
            for dim, outers in region.hints.get(label, {}).items():
                found.setdefault(dim, set()).update(outers)
        return {dim: tuple(sorted(outers)) for dim, outers in found.items()}

    def _describe_class(self, members: Sequence[Key], type_: TensorType) -> str:
        inputs = [name for kind, name, _ in members if kind == "program"]
        if inputs:
            return f"input {inputs[0]} {type_}"
        kind, name, index = members[0]
        prefix = "gradient of " if kind in ("gin", "gout") else ""
        port = self._port_type(members[0])[0]
        ports = port.inputs if kind in ("in", "gin") else port.outputs
        return f"{prefix}{ports[index].name} {type_} ({name})"

    def _allowed_layouts(self, members: Sequence[Key], type_: TensorType, layouts: list[Sharding]) -> list[Sharding]:
        inputs = [name for kind, name, _ in members if kind == "program"]
        names = inputs + self._output_names(members)
        for axis, strategy in enumerate(self.strategies):
            if strategy.hidden == "split" and self.sizes[axis] > 1 and self._is_hidden(members, type_):
                layouts = self._along_the_sequence(members, type_, layouts, axis)
            if inputs and strategy.inputs == "replicate":
                layouts = [layout for layout in layouts if isinstance(layout[axis], Replicate)]
            if inputs and strategy.inputs == "batch" and self.sizes[axis] > 1:
                batched = [layout for layout in layouts if layout[axis] == Shard(0)]
                if not batched and type_.shape:
                    raise self._batch_error(inputs[0], type_, axis)
                layouts = batched or layouts
        layouts = self._as_users_see(members, layouts)
        for name in names:
            for pinned in self.pins:
                if pinned.matches(name):
                    layouts = self._apply_pin(pinned, name, type_, layouts, lambda layout: layout)
        return layouts

    def _as_users_see(self, members: Sequence[Key], layouts: list[Sharding]) -> list[Sharding]:
        """Layouts in which a result may leave the program: a dim with padding in pieces that DTensor knows, a buffer's
        new value whole.
        """
        for ref in self.program.outputs:
            port = self.program.port(ref)
            if ref.call >= 0 and port.logical and ("out", self.program.calls[ref.call].region, ref.index) in members:
                shape = port.type.shape
                layouts = [each for each in layouts if may_split_padded(port.logical, shape, each, self.sizes)]
        if any(("out", self.program.calls[ref.call].region, ref.index) in members for _, ref in self.program.updates):
            return [replicated(len(self.sizes))]
        return layouts

    def _is_hidden(self, members: Sequence[Key], type_: TensorType) -> bool:
        """Whether a class, or the gradient of one, flows between repeated blocks."""
        repeated = any(kind in ("out", "gout") and self.program.region(name).module for kind, name, _ in members)
        return repeated and type_.is_float and len(type_.shape) > 2

    def _along_the_sequence(
        self, members: Sequence[Key], type_: TensorType, layouts: list[Sharding], axis: int
    ) -> list[Sharding]:
        """Layouts that split a dim which is neither the batch nor the last."""
        inner = range(1, len(type_.shape) - 1)
        kept = [each for each in layouts if isinstance(p := each[axis], Shard) and p.dim in inner and p.outer == 1]
        if kept:
            return kept
        name, size = self.mesh.axis_names[axis], self.sizes[axis]
        raise AutoparError(
            f"the sequence cannot split over {name}={size}",
            where=self._describe_class(members, type_),
            values=f"no dim between the batch and the last of {type_} is a multiple of {size}",
            remedy=f"use a sequence length that is a multiple of {size}, or strategy tensor, which keeps it whole",
        )

    def _output_names(self, members: Sequence[Key]) -> list[str]:
        found = []
        for name, ref in zip(self.program.output_names, self.program.outputs, strict=True):
            if ref.call >= 0 and ("out", self.program.calls[ref.call].region, ref.index) in members:
                found.append(name)
        return found

    def _batch_error(self, name: str, type_: TensorType, axis: int) -> AutoparError:
        axes = [a for a, s in enumerate(self.strategies) if s.inputs == "batch" and self.sizes[a] > 1]
        ways = int(np.prod([self.sizes[a] for a in axes]))
        label = " × ".join(f"{self.mesh.axis_names[a]}={self.sizes[a]}" for a in axes)
        return AutoparError(
            f"{name}: a batch of {type_.shape[0]} cannot split over {label}",
            where=f"input {name} {type_}, strategy {self.strategies[axis].name}",
            values=f"{type_.shape[0]} is not a multiple of {ways}",
            remedy=f"use a global batch that is a multiple of {ways}, or smaller axes",
        )

    def _apply_pin(
        self, pinned: Pin, name: str, type_: TensorType, options: list, layout_of: Callable[..., Sharding]
    ) -> list:
        for axis_name, placement in pinned.placements:
            axis = self.mesh.axis_names.index(axis_name)
            if self.sizes[axis] == 1:
                continue
            kept = [option for option in options if layout_of(option)[axis] == placement]
            if not kept:
                raise AutoparError(
                    f"{name} cannot be {placement} on {axis_name}",
                    where=f'pin("{pinned.pattern}", {axis_name}={placement})',
                    values=f"{name} is {type_}, {axis_name}={self.sizes[axis]}, strategy {self.strategies[axis].name}",
                    remedy="pin a dim that the axis divides and the strategy allows, or drop the other pin",
                )
            options = kept
        return options

    def _class_usages(self, ports: Sequence[Key], type_: TensorType, layouts: Sequence[Sharding]) -> list[Usage]:
        """Inputs that the backward reads stay alive once per distinct value; results belong to the operators that make
        them.
        """
        size = np.array([type_.num_bytes / num_pieces(layout, self.sizes) for layout in layouts])
        usages = []
        for kind, name, index in ports:
            region = self.program.region(name)
            if kind != "in":
                continue
            holders = [node for node in region.graph.nodes if node.op == "placeholder"]
            users = self._users_through_views(holders[len(region.slots) + index])
            saved = any(u.op == "call_function" and u.name not in region.forward_nodes for u in users)
            if saved and name in self.timeline.backward:
                values = {call.arguments[index] for _, call in self.program.calls_of(name)}
                usages.append(
                    Usage(self.timeline.forward[name][0], self.timeline.backward[name][1], size * len(values))
                )
        return usages

    def _users_through_views(self, node: fx.Node) -> list[fx.Node]:
        found: list[fx.Node] = []
        for user in node.users:
            is_alias = user.target is operator.getitem or self._is_alias(user)
            found += [user, *(self._users_through_views(user) if is_alias else ())]
        return found

    def _is_alias(self, node: fx.Node) -> bool:
        return any(region.ops[node.name][1].alias for region in self.program.regions if _owns(region, node))

    # -- parameters ----------------------------------------------------------------------------------------------------

    def _add_parameters(self) -> None:
        for root, members in sorted(self.known.members.items()):
            names = [key[1] for key in members if key[0] == "var"]
            if names:
                self._add_parameter(root, members, names)

    def _add_parameter(self, root: Key, members: Sequence[Key], names: list[str]) -> None:
        variables = [self.program.variable(name) for name in names]
        first = variables[0]
        uses = [key for key in members if key[0] == "slot"]
        choices = self._parameter_choices(first, uses, names)
        costs = [self._gather_seconds(first, choice, len(names), uses) for choice in choices]
        usages = self._parameter_usages(first, choices, len(names), uses)
        description = f"{first.name}" + (f" (and {len(names) - 1} more)" if len(names) > 1 else "") + f" {first.type}"
        index = self._node(f"parameter:{first.name}", costs, usages, description)
        slot = Slot(choices, index)
        self.slots[root] = slot
        if first.trainable and self.program.training:
            layouts = layouts_of(first.seen, self.sizes, self._stripes(uses), partial=True)
            slot.gradient_layouts = [
                each for each in layouts if may_split_padded(first.type.shape, first.seen.shape, each, self.sizes)
            ]
            extra = [len(names) * self._early_reduction_price(first, layout) for layout in slot.gradient_layouts]
            kept = self._gradient_usages(first, slot.gradient_layouts, len(names))
            slot.gradient = self._node(f"gradient:{first.name}", extra, kept, f"gradient of {description}")
            stored = tuple(choice.stored for choice in choices)
            self._edge(slot.gradient, slot.gradient_layouts, index, stored, first.seen, len(names))

    def _parameter_choices(self, variable: Variable, uses: Sequence[Key], names: list[str]) -> list[ParameterChoice]:
        if not variable.is_parameter:
            whole = replicated(len(self.sizes))
            return [ParameterChoice(whole, whole, whole, ("replicate",) * len(self.sizes))]
        allowed = [strategy.parameters for strategy in self.strategies]
        choices = parameter_choices(variable, self.sizes, self._stripes(uses), allowed)
        pinned_axes = set()
        for name in names:
            for pinned in self.pins:
                if any(pinned.matches(each) for each in (name, *self.program.variable(name).aliases)):
                    choices = self._apply_pin(pinned, name, variable.type, choices, lambda choice: choice.stored)
                    pinned_axes |= {self.mesh.axis_names.index(axis) for axis, _ in pinned.placements}
        for axis, strategy in enumerate(self.strategies):
            if axis not in pinned_axes:
                choices = self._required(choices, axis, strategy, variable, uses)
        return self._on_a_grid(choices)

    def _on_a_grid(self, choices: list[ParameterChoice]) -> list[ParameterChoice]:
        """Where two axes form a grid, those choices in which they split different dims."""
        axes = [axis for axis, strategy in enumerate(self.strategies) if strategy.grid]
        kept = [c for c in choices if len({p.dim for a in axes if isinstance(p := c.stored[a], Shard)}) == len(axes)]
        return kept or choices

    def _required(
        self, choices: list[ParameterChoice], axis: int, strategy: AxisStrategy, variable: Variable, uses: Sequence[Key]
    ) -> list[ParameterChoice]:
        if strategy.required in ("gather", "keep"):
            mode = strategy.required
            gathered = {_elsewhere(choice.stored, axis) for choice in choices if choice.modes[axis] == mode}
            # A bias that another axis splits has no dim left for this one: it stays whole here.
            kept = [c for c in choices if c.modes[axis] == mode or _elsewhere(c.stored, axis) not in gathered]
            return kept or choices
        if strategy.required == "shard_matrices" and len(variable.type.shape) == 2:
            kept = [choice for choice in choices if choice.modes[axis] == "shard"]
            if any(self.program.region(name).module for _, name, _ in uses):
                if any(may_stay_whole(self.program, key, self._tensor_ranks()) for key in uses):
                    return choices
                return kept or choices
            if any(is_vocabulary(self.program, key) for key in uses):
                # Outside the repeated blocks the vocabulary is split; a table that the axis does not divide stays
                # whole.
                kept = [choice for choice in kept if choice.stored[axis] == Shard(0)]
                return kept or [choice for choice in choices if choice.modes[axis] == "replicate"]
        return choices

    def _tensor_ranks(self) -> int:
        """How many ranks share each weight matrix."""
        named = zip(self.strategies, self.sizes, strict=True)
        return math.prod(size for strategy, size in named if strategy.required == "shard_matrices")

    def _early_reduction_price(self, variable: Variable, layout: Sharding) -> float:
        """What keeps a strategy that reduces whole gradients from summing earlier: more than any reduction costs."""
        price = 0.0
        whole = replicated(len(self.sizes))
        for axis, strategy in enumerate(self.strategies):
            if strategy.reduces_whole and self.sizes[axis] > 1 and layout[axis] != PARTIAL:
                term = tuple(PARTIAL if a == axis else REPLICATE for a in range(len(self.sizes)))
                piece = tuple(Shard(0) if a == axis else REPLICATE for a in range(len(self.sizes)))
                ways = [whole, piece] if variable.type.shape else [whole]
                price += 4 * sum(self.costs.seconds(variable.type, term, way, free=True) for way in ways)
        return price

    def _gather_seconds(self, variable: Variable, choice: ParameterChoice, count: int, uses: Sequence[Key]) -> float:
        if choice.is_whole_in_place:
            return 0.0
        again = self.program.training and self._gathers_again(uses, choice)
        once = self.costs.seconds(variable.type, choice.stored, choice.held, free=True)
        each = self.costs.seconds(variable.type, choice.held, choice.compute, free=True)
        return count * (once + each * (1 + again) * self.program.microbatches)

    def _gathers_again(self, uses: Sequence[Key], choice: ParameterChoice) -> bool:
        """Whether the backward needs the parameter, or the strategy gathers it as the literature does."""
        axes = [axis for axis, mode in enumerate(choice.modes) if mode == "gather"]
        if any(self.strategies[axis].regather == "all" for axis in axes):
            return True
        return any(reads_in_backward(self.program.region(name), index) for _, name, index in uses)

    def _parameter_usages(
        self, variable: Variable, choices: Sequence[ParameterChoice], count: int, uses: Sequence[Key]
    ) -> list[Usage]:
        elements = variable.type.num_elements
        per_element = variable.stored_dtype.itemsize
        if variable.trainable and self.program.training:
            per_element *= 2 + OPTIMIZER_STATES
        stored = np.array([count * per_element * elements / num_pieces(c.stored, self.sizes) for c in choices])
        usages = [Usage(0, self.timeline.length, stored)]
        casts = variable.stored_dtype != variable.type.dtype
        copies = [variable.type.num_bytes / num_pieces(c.compute, self.sizes) for c in choices]
        held = [variable.type.num_bytes / num_pieces(c.held, self.sizes) if "keep" in c.modes else 0.0 for c in choices]
        whole = np.array(
            [b if c.held != c.compute or (casts and c.stored == c.compute) else 0.0 for b, c in zip(copies, choices)]
        )
        trained = variable.trainable and self.program.training
        regions = sorted({name for _, name, _ in uses})
        first = 0 if self.program.microbatches > 1 else min(self.timeline.forward[name][0] for name in regions)
        usages.append(Usage(first, self.timeline.length, np.array(held) * count))
        for name in regions:
            usages.append(Usage(*self.timeline.forward[name], whole))
            if trained and name in self.timeline.backward:
                usages.append(Usage(*self.timeline.backward[name], whole + np.array(copies)))
        return [usage for usage in usages if usage.bytes.any()]

    def _gradient_usages(self, variable: Variable, layouts: Sequence[Sharding], count: int) -> list[Usage]:
        """Gradients that wait unreduced: over microbatches, or for the end of the backward."""
        waits = self.program.microbatches > 1 or any(strategy.reduces == "at_end" for strategy in self.strategies)
        if not waits:
            return []
        itemsize = (variable.stored_dtype if self.program.microbatches > 1 else variable.type.dtype).itemsize
        size = [variable.type.num_elements * itemsize * count / num_pieces(layout, self.sizes) for layout in layouts]
        start = 0 if self.program.microbatches > 1 else max(end for _, end in self.timeline.forward.values())
        return [Usage(start, self.timeline.length, np.array(size))]

    # -- operators -----------------------------------------------------------------------------------------------------

    def _add_operator(self, region: Region, node: fx.Node) -> None:
        options = region.options[node.name]
        strategies = options.strategies
        num_calls = self.program.num_calls(region.name)
        times = num_calls * self.program.microbatches
        costs = [times * seconds for seconds in options.seconds]
        usages = self._operator_usages(region, node, strategies, num_calls)
        label = f"{region.name}.{node.name}"
        index = self._node(label, costs, usages, f"{label} = {node.target} ({region.origins.get(node.name, '')})")
        self.operators[(region.name, node.name)] = (index, strategies)
        for position, source in enumerate(operands_of(node)):
            wanted = tuple(strategy.operands[position] for strategy in strategies)
            self._connect(region, source, index, wanted, times)

    def _operator_usages(
        self, region: Region, node: fx.Node, strategies: Sequence[NodeStrategy], num_calls: int
    ) -> list[Usage]:
        call, rule = region.ops[node.name]
        if rule.alias:
            return []
        life = self.timeline.lifetime(region, node, self._users_through_views(node), num_calls)
        end_of_forward = self.timeline.forward[region.name][1]
        if node.name in region.forward_nodes and life.end > end_of_forward and self._has_relay(region, node):
            life = Lifetime(life.start, end_of_forward, 1)  # from there on the relay counts it
        size = np.zeros(len(strategies))
        for number, strategy in enumerate(strategies):
            for spec, layout in zip(call.results, strategy.results, strict=True):
                if spec is not None and layout is not None:
                    size[number] += TensorType(spec.shape, spec.dtype).num_bytes / num_pieces(layout, self.sizes)
        return [Usage(life.start, life.end, size * life.copies)]

    def _add_results(self, region: Region) -> None:
        """Tie what a region returns to the layout of its class, or of its parameter's gradient."""
        output = next(node for node in region.graph.nodes if node.op == "output")
        num_calls = self.program.num_calls(region.name) * self.program.microbatches
        for value, key in zip(output.args[0], result_keys(region), strict=False):
            root = self.known.of[key]
            if key[0] == "slot":
                slot = self.slots[root]
                # A hair dearer here than after the backward, so that reductions stand in the region's reduce function.
                self._connect(region, value, slot.gradient, tuple(slot.gradient_layouts), num_calls * 1.01)
            else:
                index, layouts = self.classes[root]
                self._connect(region, value, index, tuple(layouts), num_calls)

    def _note_readers(self, region: Region) -> None:
        """Which shardings every reader of a value may want it in."""
        for node in region.graph.nodes:
            if node.name in region.ops:
                strategies = region.options[node.name].strategies
                for position, source in enumerate(operands_of(node)):
                    wanted = tuple(strategy.operands[position] for strategy in strategies)
                    self.wanted.setdefault((region.name, value_name(source)), []).append(wanted)
        output = next(node for node in region.graph.nodes if node.op == "output")
        for value, key in zip(output.args[0], result_keys(region), strict=False):
            layouts = self.slots[self.known.of[key]].gradient_layouts if key[0] == "slot" else self.classes[self.known.of[key]][1]
            self.wanted.setdefault((region.name, value_name(value)), []).append(tuple(layouts))

    def _connect(
        self, region: Region, source: fx.Node, index: int, wanted: tuple[Sharding, ...], times: float
    ) -> None:
        """The edge from whatever makes `source`, or its relay, to the problem node that reads it as `wanted`."""
        type_ = TensorType.of(source.meta["val"])
        producer, _ = source_of(source)
        if producer.op == "placeholder" and self._key_of(region, producer)[0] == "seed":
            costs = self._costs_of(region, source).matrix(type_, (replicated(len(self.sizes)),), wanted)[0] * times
            node = self.nodes[index]
            self.nodes[index] = replace(node, costs=node.costs + costs)
            return
        maker, layouts = self._relay(region, source, times) or self._maker(region, source)
        self._edge(maker, layouts, index, wanted, type_, times, self._costs_of(region, source))

    def _costs_of(self, region: Region, source: fx.Node) -> Redistribution:
        """What it costs to move a value that a region reads."""
        if source.op == "placeholder" and self._key_of(region, source)[0] == "slot":
            return self.slot_costs
        return self.block_costs if region.module else self.costs

    def _maker(self, region: Region, source: fx.Node) -> tuple[int, tuple[Sharding, ...]]:
        producer, result = source_of(source)
        if producer.op == "placeholder":
            return self._placeholder(region, producer)
        maker, strategies = self.operators[(region.name, producer.name)]
        return maker, tuple(strategy.results[result] or replicated(len(self.sizes)) for strategy in strategies)

    def _relay(self, region: Region, source: fx.Node, times: float) -> tuple[int, tuple[Sharding, ...]] | None:
        """The node through which all readers of a value read it, where there are several and they may differ."""
        key = (region.name, value_name(source))
        if key in self.relays:
            return self.relays[key]
        if not self._has_relay(region, source):
            return None
        layouts = tuple(dict.fromkeys(layout for each in self.wanted[key] for layout in each))
        type_ = TensorType.of(source.meta["val"])
        # A hair dearer where it is larger: of equal plans the one that keeps less.
        costs = [1e-18 * type_.num_bytes / num_pieces(layout, self.sizes) for layout in layouts]
        usages = self._relay_usages(region, source, layouts)
        index = self._node(f"relay:{region.name}.{key[1]}", costs, usages, f"{region.name}.{key[1]} as its readers want it")
        self.relays[key] = (index, layouts)
        maker, made = self._maker(region, source)
        self._edge(maker, made, index, layouts, type_, times, self._costs_of(region, source))
        return self.relays[key]

    def _has_relay(self, region: Region, source: fx.Node) -> bool:
        """Whether several read a value. A parameter's choice says what its readers see; it needs no relay."""
        producer, _ = source_of(source)
        if producer.op == "placeholder" and self._key_of(region, producer)[0] == "slot":
            return False
        return len(self.wanted.get((region.name, value_name(source)), [])) > 1

    def _relay_usages(self, region: Region, source: fx.Node, layouts: Sequence[Sharding]) -> list[Usage]:
        """A value that the backward reads is kept as the relay has it, from the end of its forward on."""
        producer, _ = source_of(source)
        if producer.op == "placeholder" or region.ops[producer.name][1].alias:
            return []
        num_calls = self.program.num_calls(region.name)
        life = self.timeline.lifetime(region, producer, self._users_through_views(source), num_calls)
        end_of_forward = self.timeline.forward[region.name][1]
        if producer.name not in region.forward_nodes or life.end <= end_of_forward:
            return []
        size = np.array([TensorType.of(source.meta["val"]).num_bytes / num_pieces(each, self.sizes) for each in layouts])
        return [Usage(end_of_forward, life.end, size * life.copies)]

    def _key_of(self, region: Region, node: fx.Node) -> Key:
        holders = [n for n in region.graph.nodes if n.op == "placeholder"]
        return placeholder_keys(region)[holders.index(node)]

    def _placeholder(self, region: Region, node: fx.Node) -> tuple[int, tuple[Sharding, ...]]:
        """Problem node and layouts behind a placeholder, but the dropout seed's."""
        key = self._key_of(region, node)
        root = self.known.of[key]
        if key[0] == "slot":
            slot = self.slots[root]
            return slot.node, tuple(choice.compute for choice in slot.choices)
        index, layouts = self.classes[root]
        return index, tuple(layouts)

    def _edge(
        self,
        u: int,
        u_layouts: Sequence[Sharding],
        v: int,
        v_layouts: Sequence[Sharding],
        type_: TensorType,
        times: float,
        costs: Redistribution | None = None,
    ) -> None:
        """costs: what the moves between the two may be; None: anything."""
        sources, targets = tuple(dict.fromkeys(u_layouts)), tuple(dict.fromkeys(v_layouts))
        matrix = (costs or self.costs).matrix(type_, sources, targets, free=costs is None)
        if not matrix.any():
            return
        source_class = {layout: i for i, layout in enumerate(sources)}
        target_class = {layout: i for i, layout in enumerate(targets)}
        u_class = np.array([source_class[layout] for layout in u_layouts])
        v_class = np.array([target_class[layout] for layout in v_layouts])
        self.edges.append(Edge(u, v, u_class, v_class, matrix * times))


def _redistributions(
    mesh: Mesh, strategies: Sequence[AxisStrategy]
) -> tuple[Redistribution, Redistribution, Redistribution]:
    """Costs of moves outside of repeated blocks, inside, and of parameters from what is gathered to what is read."""
    everywhere = [strategy.collectives for strategy in strategies]
    inside = [s.collectives if s.inside_blocks is None else s.inside_blocks for s in strategies]
    # Where a strategy says what is gathered, its parameters are not gathered by other means.
    slots = [s.collectives if s.required == "none" or s.grid else frozenset({"slice"}) for s in strategies]
    latency = any(strategy.required == "none" and "shard" in strategy.parameters for strategy in strategies)
    return tuple(Redistribution(mesh, kinds, latency) for kinds in (everywhere, inside, slots))  # type: ignore[return-value]


def _elsewhere(sharding: Sharding, axis: int) -> Sharding:
    """What the other axes do."""
    return (*sharding[:axis], *sharding[axis + 1 :])


def _owns(region: Region, node: fx.Node) -> bool:
    return region.graph is node.graph and node.name in region.ops


def value_name(node: fx.Node) -> str:
    """One name for all picks of the same result: the operator's, with the number of the result beyond the first."""
    producer, index = source_of(node)
    return f"{producer.name}.{index}" if index else producer.name


def placeholder_keys(region: Region) -> list[Key]:
    """The class key of every placeholder of a differentiated graph, in order (`seed` for the dropout seed)."""
    keys: list[Key] = [("slot", region.name, i) for i in range(len(region.slots))]
    keys += [("in", region.name, i) for i in range(len(region.inputs))]
    keys += [("seed", region.name, 0)] * region.uses_dropout
    return keys + [("gout", region.name, i) for i in region.tangents]


def result_keys(region: Region) -> list[Key]:
    """The class key of every result of a differentiated graph, in order (`slot` for a parameter's gradient)."""
    keys: list[Key] = [("out", region.name, i) for i in range(len(region.outputs))]
    keys += [("slot", region.name, i) for i, slot in enumerate(region.slots) if slot.trainable]
    return keys + [("gin", region.name, i) for i, port in enumerate(region.inputs) if port.differentiable]


def is_vocabulary(program: Program, key: Key) -> bool:
    """Whether a slot is an embedding table, or the head whose product is an output of the model."""
    region = program.region(key[1])
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    outputs = {ref.index for ref in program.outputs if ref.call >= 0 and program.calls[ref.call].region == region.name}
    results = next(node for node in region.graph.nodes if node.op == "output").args[0]
    returned = {results[i] for i in outputs}
    for user in holders[key[2]].users:
        name = str(user.target)
        if name.startswith("autopar.embedding"):
            return True
        after = [user, *user.users, *(n for follower in user.users for n in follower.users)]  # a bias, a cast
        if name.startswith("autopar.linear.") and any(n in returned for n in after):
            return True
    return False
