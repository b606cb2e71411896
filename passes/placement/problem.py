"""Build the assignment problem of a program on a mesh.

Minimise  Σ_operators calls·compute(s)  +  Σ_edges calls·redistribution(s, s')
          +  overlap price · Σ_parameters (gathers + gradient reduction)
subject to memory at every time of the folded timeline. The variables, one choice each:

- an *operator* of a region: what each mesh axis does with its loop nest (`_add_operator`);
- a *class* of values between calls, or of their gradients: its sharding, no partial sums (values.py);
- a *parameter*: its stored, held and compute shardings (parameters.py), with the gathers of forward and backward as
  its cost, and, where it is trained, the layout of its gradient before the reduction, which is paid once a step;
- a *relay*, where several read one value: the sharding to which it is moved once, for all of them (`_relay`).

Edges carry the redistribution between what one makes and the other reads, inside regions times the number of calls and
of microbatches.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from torch import fx

from autopar.base.spoken import operator_word
from autopar.cost import exchanges, rings
from autopar.ir.classes import Classes, Key, placeholder_keys, result_keys, value_name
from autopar.ir.graphs import operands_of, source_of
from autopar.ir.op_call import name_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Options, Region
from autopar.ir.sharding import Sharding, replicated
from autopar.ir.tensor_type import TensorType
from autopar.passes.placement import columns, mixtures
from autopar.passes.placement.columns import Column
from autopar.passes.placement.context import allowed, require_attention, values_of_attention
from autopar.passes.placement.moves import Redistribution
from autopar.passes.placement.parameters import Parameters
from autopar.passes.placement.parts import Link, Slot, values_beside
from autopar.passes.placement.timeline import Lifetime, Timeline
from autopar.passes.placement.values import ValueClasses
from autopar.solver.problem import AssignmentProblem, Usage
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import Pin


@dataclass(slots=True)
class PlacementProblem:
    """The assignment problem and what its indices mean.

    operators: (region, node) -> (problem node, its strategies); classes: class key -> (problem node, its layouts);
    slots: class key -> Slot; relays: (region, value) -> (problem node, its layouts). descriptions: of the problem's
    nodes, for people. links: what lies between nodes, whether or not it costs anything.
    """

    problem: AssignmentProblem
    operators: dict[tuple[str, str], tuple[int, Sequence[NodeStrategy]]]
    classes: dict[Key, tuple[int, list[Sharding]]]
    slots: dict[Key, Slot]
    relays: dict[tuple[str, str], tuple[int, tuple[Sharding, ...]]]
    value_classes: Classes
    timeline: Timeline
    descriptions: list[str]
    links: Sequence[Link]


def build_problem(
    program: Program,
    strategies: Sequence[AxisStrategy],
    pins: Sequence[Pin],
    memory_limit_bytes: float | None,
    overlap_price: float = 1.0,
    gathered: Collection[tuple[str, str]] = (),
    excused: Collection[tuple[str, int]] | None = (),
    facts: dict[tuple[str, ...], Any] | None = None,
) -> PlacementProblem:
    """The assignment problem of an annotated program.

    overlap_price: what a second of gathering parameters, or of reducing gradients, counts: 1 where it is waited for,
    less where it runs beside the compute. gathered: operators, by region and node, whose operands may be gathered
    whatever the strategies say. excused: weight matrices, by name and axis, that may stay whole on an axis whose
    strategy splits such; None: all of them. facts: what problems of this program have alike; gets what is found out.

    Raises:
        AutoparError: an input or attention that a strategy must split and cannot, a pin that no layout
            satisfies.
    """
    require_attention(program, strategies, program.on_mesh)
    builder = _Builder(
        program, program.on_mesh, strategies, pins, overlap_price, frozenset(gathered),
        None if excused is None else frozenset(excused), facts,
    )  # fmt: skip
    return builder.build(memory_limit_bytes)


def at_price(
    built: PlacementProblem,
    program: Program,
    strategies: Sequence[AxisStrategy],
    memory_limit_bytes: float | None,
    overlap_price: float,
    facts: dict[tuple[str, ...], Any] | None = None,
) -> PlacementProblem:
    """What `build_problem` builds without pins, from what it has built of the same program at another price: only what
    gathers of parameters and reductions of gradients cost is another.
    """
    builder = _Builder(program, program.on_mesh, strategies, (), overlap_price, facts=facts)
    builder.at_this_price(built.slots, built.problem, built.links)
    problem = AssignmentProblem(tuple(builder.nodes), tuple(builder.edges), memory_limit_bytes)
    return replace(built, problem=problem)


def priced_seconds(
    built: PlacementProblem,
    program: Program,
    strategies: Sequence[AxisStrategy],
    choice: Sequence[int],
    facts: dict[tuple[str, ...], Any] | None = None,
) -> float:
    """What the objective of a choice grows by, where a second of gathers and reductions beside the compute counts one
    more. Where that is nothing, the choice is as good at any higher price: there no other costs less than it did.
    """
    free, whole = (
        _Builder(program, program.on_mesh, strategies, (), price, facts=facts).transfers_s(
            built.slots, built.links, choice
        )
        for price in (0.0, 1.0)
    )
    return whole - free


def choices_within(
    built: PlacementProblem,
    program: Program,
    strategies: Sequence[AxisStrategy],
    facts: dict[tuple[str, ...], Any],
    excused: Collection[tuple[str, int]] | None = None,
) -> list[np.ndarray]:
    """For each node of a program's problem in which all is left to the solver, which of its choices may be had under
    other strategies: of values between calls and of parameters; of all else all. excused: as of `build_problem`.

    Raises:
        AutoparError: as `build_problem`.
    """
    given = None if excused is None else frozenset(excused)
    builder = _Builder(program, program.on_mesh, strategies, (), excused=given, facts=facts)
    found = _of_classes(built, builder)
    for root, slot in built.slots.items():
        ways = frozenset(builder.ways_to_keep(root)[0])
        found[slot.node] = np.array([choice in ways for choice in slot.choices])
    return found


def classes_within(
    built: PlacementProblem, program: Program, strategies: Sequence[AxisStrategy], facts: dict[tuple[str, ...], Any]
) -> list[np.ndarray]:
    """As `choices_within`, of values between calls alone."""
    return _of_classes(built, _Builder(program, program.on_mesh, strategies, (), facts=facts))


def _of_classes(built: PlacementProblem, builder: _Builder) -> list[np.ndarray]:
    found = [np.ones(len(node.costs), dtype=bool) for node in built.problem.nodes]
    for root, (index, layouts) in built.classes.items():
        kept = frozenset(builder.layouts_within(root, layouts))
        found[index] = np.array([layout in kept for layout in layouts])
    return found


class _Builder(ValueClasses, Parameters):
    def build(self, memory_limit_bytes: float | None) -> PlacementProblem:
        self._add_classes()
        self._add_parameters()
        for region in self.program.regions:
            self._note_readers(region)
            times = self.program.num_calls(region.name) * self.program.microbatches
            copies = self.program.saved_copies(region.name)
            for node in region.graph.nodes:
                if node.name in region.ops:
                    self._add_operator(region, node, times, copies)
            self._add_results(region)
        self._join_rounds()
        limit = memory_limit_bytes
        problem = AssignmentProblem(tuple(self.nodes), tuple(self.edges), limit)
        return PlacementProblem(
            problem, self.operators, self.classes, self.slots, self.relays, self.known, self.timeline,
            self.descriptions, self.links,
        )  # fmt: skip

    def _add_operator(self, region: Region, node: fx.Node, times: int, copies: float) -> None:
        """times: how often a step runs it; copies: how many of a value that its backward reads are held at once."""
        options = self.options[region.name, node.name]
        strategies = options.strategies
        costs = [times * seconds for seconds in options.seconds]
        usages = self._operator_usages(region, node, options, copies)
        first = self.firsts.get((region.name, node.name))
        if first is not None:
            index = self.operators[region.name, first][0]
            self._add_round(index, costs, usages)
        else:
            index = self._node(f"{region.name}.{node.name}", costs, usages, _said(region, node))
            if (region.name, node.name) in self.repeated:
                self.looped.add(index)
        self.operators[(region.name, node.name)] = (index, strategies)
        moves = self.gathering if (region.name, node.name) in self.gathered else None
        specs = region.ops[node.name][0].operands
        for position, (source, spec) in enumerate(zip(operands_of(node), specs, strict=True)):
            wanted = columns.operand(options, position)
            self._connect(region, source, TensorType(spec.shape, spec.dtype), index, wanted, times, moves)

    def _options(self, region: Region, node: fx.Node) -> Options:
        """What the axes may do to an operator, as far as their strategies let them."""
        options = region.options[node.name]
        if not name_of(node.target).startswith("autopar."):
            return options  # strategies say nothing of torch's own
        given = (region, node, self.strategies, self.mesh)
        attends = region.name in self.attending
        kept = mixtures.allowed(*given) if mixtures.is_experts(node) else allowed(*given, attends)
        if kept is None:
            return options
        return Options(tuple(options.strategies[i] for i in kept), tuple(options.seconds[i] for i in kept))

    def _operator_usages(self, region: Region, node: fx.Node, options: Options, copies: float) -> list[Usage]:
        call, rule = region.ops[node.name]
        if rule.alias:
            return []
        held = self._fact(("held", region.name, node.name), lambda: self._held(region, node, copies))
        sizes: dict[tuple[int, int], np.ndarray] = {}
        for index, key, num_bytes in held:
            size = num_bytes / columns.result(options, index).pieces(self.sizes)
            sizes[key] = sizes.get(key, 0.0) + size
        if rule.pair is not None:
            now = self.timeline.position[(region.name, node.name)]
            holds = exchanges.grouped_holds(call, self.mesh.hardware)
            bytes_of = partial(exchanges.buffer_bytes, holds=holds) if rule.ring is None else rings.buffer_bytes
            buffers = np.array([float(bytes_of(call, rule, each, self.sizes)) for each in options.strategies])
            sizes[now, now + 1] = sizes.get((now, now + 1), 0.0) + buffers
        return [Usage(start, end, size) for (start, end), size in sizes.items()]

    def _held(self, region: Region, node: fx.Node, copies: float) -> list[tuple[int, tuple[int, int], float]]:
        """For each result of an operator that is a tensor: its number, from when to when it is held, and its bytes."""
        end_of_forward = self.timeline.forward[region.name][1]
        found = []
        for index, spec in enumerate(region.ops[node.name][0].results):
            if spec is None:
                continue
            life = self.timeline.lifetime(region, node, self._uses_of_result(node, index), copies)
            crosses = node.name in region.forward_nodes and life.end > end_of_forward
            if crosses and self._has_relay(region, node, index):
                life = Lifetime(life.start, end_of_forward, 1)  # from there on the relay counts it
            num_bytes = TensorType(spec.shape, spec.dtype).num_bytes * life.copies
            found.append((index, (life.start, life.end), num_bytes))
        return found

    def _add_results(self, region: Region) -> None:
        """Tie what a region returns to the layout of its class, or of its parameter's gradient."""
        output = next(node for node in region.graph.nodes if node.op == "output")
        num_calls = self.program.num_calls(region.name) * self.program.microbatches
        for value, key in zip(output.args[0], result_keys(region), strict=False):
            root, type_ = self.known.of[key], TensorType.of(value.meta["val"])
            if key[0] == "slot":
                slot = self.slots[root]
                # A hair dearer here than after the backward, so that reductions stand in the region's reduce function.
                self._connect(region, value, type_, slot.gradient, self._column_of(key), num_calls * 1.01)
            else:
                self._connect(region, value, type_, self.classes[root][0], self._column_of(key), num_calls)

    def _note_readers(self, region: Region) -> None:
        """Which shardings every reader of a value may want it in."""
        for node in region.graph.nodes:
            if node.name in region.ops:
                options = self._options_in_rounds(region, node)
                for position, source in enumerate(operands_of(node)):
                    wanted = columns.operand(options, position)
                    self.wanted.setdefault((region.name, value_name(source)), []).append(wanted)
                    if (region.name, node.name) in self.gathered:
                        self.gathered_values.add((region.name, value_name(source)))
        output = next(node for node in region.graph.nodes if node.op == "output")
        for value, key in zip(output.args[0], result_keys(region), strict=False):
            self.wanted.setdefault((region.name, value_name(value)), []).append(self._column_of(key))

    def _options_in_rounds(self, region: Region, node: fx.Node) -> Options:
        """As `_options`; of a later round of a loop the first one's own, where it may do the same."""
        name, options = (region.name, node.name), self._options(region, node)
        first = region.rounds.get(node.name)
        if first is not None and self.options[region.name, first] == options:
            self.firsts[name] = first
            self.repeated.add((region.name, first))
            options = self.options[region.name, first]
        self.options[name] = options
        return options

    def _column_of(self, key: Key) -> Column:
        """How what a region returns may leave it: a value, or a parameter's gradient."""
        root = self.known.of[key]
        if key[0] == "slot":
            return self.columns["gradient", root]
        if ("value", root) not in self.columns:
            self.columns["value", root] = Column(self.classes[root][1])
        return self.columns["value", root]

    def _connect(
        self,
        region: Region,
        source: fx.Node,
        type_: TensorType,
        index: int,
        wanted: Column,
        times: float,
        moves: Redistribution | None = None,
    ) -> None:
        """The edge from whatever makes `source`, of this type, or from its relay, to the problem node that reads it as
        `wanted`. moves: what may be moved for it, where that is not what its region may.
        """
        producer, _ = source_of(source)
        if producer.op == "placeholder" and self._key_of(region, producer)[0] == "seed":
            costs = self._costs_of(region, source).matrix(type_, (replicated(len(self.sizes)),), wanted.each)[0] * times
            node = self.nodes[index]
            self.nodes[index] = replace(node, costs=node.costs + costs)
            return
        maker, layouts = self._relay(region, source, type_, times) or self._maker(region, source)
        self._edge(
            maker, layouts, index, wanted, type_, times, moves or self._costs_of(region, source), region=region.name
        )

    def _costs_of(self, region: Region, source: fx.Node) -> Redistribution:
        """What it costs to move a value that a region reads."""
        if source.op == "placeholder" and (key := self._key_of(region, source))[0] == "slot":
            readers = [each for each in self.known.members[self.known.of[key]] if each[0] == "slot"]
            # One layout for a parameter that several regions read may suit only one of them.
            return self.slot_costs if len(readers) == 1 else self.costs
        if self.laying is not None and self.of_experts.are_moved(region, value_name(source)):
            return self.laying
        if not region.module:
            if region.name not in self.beside:
                self.beside[region.name] = values_beside(region)
            return self.slicing if source.name in self.beside[region.name] else self.costs
        if region.name not in self.near_attention:
            self.near_attention[region.name] = values_of_attention(region)
        return self.attention_costs if source.name in self.near_attention[region.name] else self.block_costs

    def _maker(self, region: Region, source: fx.Node) -> tuple[int, Column]:
        producer, result = source_of(source)
        if producer.op == "placeholder":
            return self._placeholder(region, producer)
        maker, _ = self.operators[(region.name, producer.name)]
        return maker, columns.result(self.options[region.name, producer.name], result)

    def _relay(self, region: Region, source: fx.Node, type_: TensorType, times: float) -> tuple[int, Column] | None:
        """The node through which all readers of a value read it, where there are several and they may differ."""
        key = (region.name, value_name(source))
        if key in self.relays:
            return self.relays[key][0], self.columns["relay", key]
        if not self._has_relay(region, *source_of(source)):
            return None
        layouts = tuple(dict.fromkeys(layout for each in self.wanted[key] for layout in each.distinct))
        column = self.columns["relay", key] = Column(layouts)
        # A hair dearer where it is larger: of equal plans the one that keeps less.
        costs = 1e-18 * type_.num_bytes / column.pieces(self.sizes)
        usages = self._relay_usages(region, source, type_, column)
        maker, made = self._maker(region, source)
        alike = (maker, id(made), layouts)
        if alike in self.relayed:
            index = self.relayed[alike]
            self._add_round(index, costs, usages)
            column = self.columns["relay", key] = self.columns["relay", index]
        else:
            label = f"{region.name}.{key[1]}"
            index = self._node(f"relay:{label}", costs, usages, f"what {_said(region, source)} gives, as it is read")
        if maker in self.looped:
            self.relayed[alike] = index
            self.columns["relay", index] = column
            self.looped.add(index)
        self.relays[key] = (index, layouts)
        moves = self.gathering if key in self.gathered_values else self._costs_of(region, source)
        self._edge(maker, made, index, column, type_, times, moves, region=region.name)
        return index, column

    def _has_relay(self, region: Region, producer: fx.Node, index: int) -> bool:
        """Whether several read a result. A parameter's choice says what its readers see; it needs no relay."""
        if producer.op == "placeholder" and self._key_of(region, producer)[0] == "slot":
            return False
        name = f"{producer.name}.{index}" if index else producer.name
        return len(self.wanted.get((region.name, name), [])) > 1

    def _relay_usages(self, region: Region, source: fx.Node, type_: TensorType, layouts: Column) -> list[Usage]:
        """A value that the backward reads is kept as the relay has it, from the end of its forward on."""
        producer, index = source_of(source)
        if producer.op == "placeholder":
            return []
        if region.ops[producer.name][1].alias and producer not in self.kept_views:
            return []
        copies = self.program.saved_copies(region.name)
        life = self.timeline.lifetime(region, producer, self._uses_of_result(producer, index), copies)
        end_of_forward = self.timeline.forward[region.name][1]
        if producer.name not in region.forward_nodes or life.end <= end_of_forward:
            return []
        size = type_.num_bytes / layouts.pieces(self.sizes)
        return [Usage(end_of_forward, life.end, size * life.copies)]

    def _key_of(self, region: Region, node: fx.Node) -> Key:
        if region.name not in self.keys:
            holders = [n for n in region.graph.nodes if n.op == "placeholder"]
            self.keys[region.name] = dict(zip(holders, placeholder_keys(region), strict=False))
        return self.keys[region.name][node]

    def _placeholder(self, region: Region, node: fx.Node) -> tuple[int, Column]:
        """Problem node and layouts behind a placeholder, but the dropout seed's."""
        key = self._key_of(region, node)
        root = self.known.of[key]
        if key[0] == "slot":
            slot = self.slots[root]
            if ("compute", root) not in self.columns:
                self.columns["compute", root] = Column([choice.compute for choice in slot.choices])
            return slot.node, self.columns["compute", root]
        return self.classes[root][0], self._column_of(key)


def _said(region: Region, value: fx.Node) -> str:
    """What makes a value of a region, in a model's words: `linear in mlp.down_proj (model.py:12)`."""
    node, _ = source_of(value)
    origin = region.origins.get(node.name, "") or region.module or region.name
    return f"{node.name if node.op == 'placeholder' else operator_word(name_of(node.target).split('.')[1])} in {origin}"
