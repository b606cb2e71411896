"""pair: two microbatches go through the program together, so that tokens of one travel while the other is computed.

Requires: phase `placed`, trained, of an even number of microbatches.
Ensures: the same phase. Every region takes the values of two microbatches, and computes each as it did; gradients of
    parameters are added. Ports, operators and outputs of the second have the names of the first with a suffix.
    `Program.together` is 2, `Program.microbatches` how often a step runs the program, `Program.single` what it was.

    layer(x) -> y           layer(x, x_b) -> (y, y_b)
    h = linear(x, w)        h = linear(x, w)
    y = experts(h, …)   →   y = experts(h, …)
                            h_b = linear(x_b, w)
                            y_b = experts(h_b, …)

Rows are cut by the microbatches, so what sums over a batch is put together as theirs are. Where statements come is for
`interleave` to say. What one draws at random follows from its own seed, as in turn. A program that changes buffers or
returns states is left as it is, and so is one without an exchange: nothing would be hidden.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import fx
from torch.fx.node import map_arg

from autopar.base.text import plural
from autopar.cost.exchanges import exchange_axis
from autopar.cost.operator_time import operator_seconds
from autopar.ir.batching import Batching
from autopar.ir.choices import axis_choices, shardings
from autopar.ir.graphs import op_call, source_of
from autopar.ir.nodes import COPY_OF, NAME, TERM
from autopar.ir.op_call import OpCall
from autopar.ir.placement import Placement
from autopar.ir.program import Program
from autopar.ir.region import Annotated, NodeStrategy, Options, Placed, Region
from autopar.ir.rule import Rule
from autopar.ir.sharding import Shard, Sharding
from autopar.ir.values import Port, ValueRef
from autopar.machine.mesh import Mesh
from autopar.operators.rules.lookup import rules_for

TOGETHER = 2


def pair(program: Program) -> Program:
    """The program for two microbatches at a time; itself where that cannot be, or is done."""
    if program.together > 1 or why_not(program):
        return program
    suffix = _suffix(program)
    regions = [_Pair(program, region, suffix).region() for region in program.regions]
    if any(region is None for region in regions):
        return program
    outs = {region.name: len(region.outputs) for region in program.regions}

    def second(ref: ValueRef) -> ValueRef:
        if ref.call < 0:
            return replace(ref, name=ref.name + suffix)
        return replace(ref, index=ref.index + outs[program.calls[ref.call].region])

    def both(refs: Iterable[ValueRef]) -> tuple[ValueRef, ...]:
        refs = tuple(refs)
        return (*refs, *map(second, refs))

    return replace(
        program,
        regions=tuple(region for region in regions if region is not None),
        calls=tuple(replace(call, arguments=both(call.arguments)) for call in program.calls),
        inputs=_ports(program.inputs, suffix),
        outputs=both(program.outputs),
        output_names=(*program.output_names, *(name + suffix for name in program.output_names)),
        roots=frozenset(both(program.roots)),
        placement=_placement(program, outs, suffix),
        batching=_batching(program.batching, suffix),
        microbatches=program.microbatches // TOGETHER,
        together=TOGETHER,
        single=replace(program, pipeline=None),  # which is of both, where it was decided before
    )


def why_not(program: Program) -> str:
    """Why a placed program is not computed for two microbatches at a time; "" where it may be."""
    if not program.training:
        return "it is planned for inference"
    if program.microbatches % TOGETHER:
        return f"a step has {plural(program.microbatches, 'microbatch', 'microbatches')}"
    if program.updates:
        return "it changes buffers"
    if program.by_value:
        return "it is for inputs of these values"
    moves = (
        axis
        for region in program.regions for each in region.strategies.values()
        if (axis := exchange_axis(each.choices)) is not None
    )  # fmt: skip
    if all(program.on_mesh.sizes[axis] == 1 for axis in moves):
        return "no tokens travel to experts"
    return ""


def _suffix(program: Program) -> str:
    """What no name ends with."""
    names = {node.name for region in program.regions for node in region.graph.nodes}
    names |= {port.name for region in program.regions for port in (*region.inputs, *region.outputs)}
    names |= {port.name for port in program.inputs} | set(program.output_names)
    suffixes = ("_" + "b" * number for number in itertools.count(1))
    return next(each for each in suffixes if not any(name.endswith(each) for name in names))


def _ports(ports: Sequence[Port], suffix: str) -> tuple[Port, ...]:
    return (*ports, *(replace(port, name=port.name + suffix) for port in ports))


def _placement(program: Program, outs: Mapping[str, int], suffix: str) -> Placement:
    placed = program.placed

    def both(values: Mapping[tuple[int, int], Sharding]) -> dict[tuple[int, int], Sharding]:
        moved = {(call, index + outs[program.calls[call].region]): each for (call, index), each in values.items()}
        return {**values, **moved}

    inputs = {**placed.inputs, **{name + suffix: each for name, each in placed.inputs.items()}}
    return Placement(placed.parameters, inputs, both(placed.values), both(placed.gradients))


def _batching(batching: Batching | None, suffix: str) -> Batching | None:
    if batching is None:
        return None
    inputs = {**batching.inputs, **{name + suffix: dim for name, dim in batching.inputs.items()}}
    return replace(batching, inputs=inputs, outputs=(*batching.outputs, *batching.outputs))


@dataclass
class _Pair:
    """One region, twice. first, second: the nodes of the copy, by those of the region. sums: operators that add the
    gradients of parameters.
    """

    program: Program
    own: Region
    suffix: str
    graph: fx.Graph = field(default_factory=fx.Graph)
    first: dict[fx.Node, fx.Node] = field(default_factory=dict)
    second: dict[fx.Node, fx.Node] = field(default_factory=dict)
    sums: dict[str, tuple[tuple[OpCall, Rule], NodeStrategy]] = field(default_factory=dict)

    def region(self) -> Region | None:
        """None where no strategy adds gradients as they lie."""
        own, nodes = self.own, list(self.own.graph.nodes)
        holders = [node for node in nodes if node.op == "placeholder"]
        fixed, given = len(own.slots), len(own.slots) + len(own.inputs)
        seeded = given + own.seeds
        for node in holders[:fixed]:
            self.first[node] = self.second[node] = self._copy(node, self.first, "")
        for group in (holders[fixed:given], holders[given:seeded], holders[seeded:]):
            self._twice(group)
        self._twice([node for node in nodes if node.op not in ("placeholder", "output")])
        (output,) = (node for node in nodes if node.op == "output")
        results = self._results(list(output.args[0]))
        if results is None:
            return None
        self.graph.output(tuple(results))
        count = len(own.outputs)
        return replace(
            own,
            graph=self.graph,
            seeds=TOGETHER * own.seeds,
            inputs=_ports(own.inputs, self.suffix),
            outputs=_ports(own.outputs, self.suffix),
            tangents=(*own.tangents, *(index + count for index in own.tangents)),
            forward_nodes=frozenset(self._of_both(dict.fromkeys(own.forward_nodes))),
            origins=self._of_both(own.origins),
            annotated=self._annotated(),
            placed=self._placed(),
        )

    def _twice(self, nodes: Iterable[fx.Node]) -> None:
        nodes = list(nodes)
        for made, suffix in ((self.first, ""), (self.second, self.suffix)):
            for node in nodes:
                made[node] = self._copy(node, made, suffix)

    def _copy(self, node: fx.Node, made: Mapping[fx.Node, fx.Node], suffix: str) -> fx.Node:
        name = node.name + suffix
        target = name if node.op == "placeholder" else node.target
        args: Any = map_arg(node.args, made.__getitem__)
        kwargs: Any = map_arg(node.kwargs, made.__getitem__)
        copy = self.graph.create_node(node.op, target, args, kwargs, name=name)
        assert copy.name == name, f"{name} is taken by another node"
        copy.meta = dict(node.meta)
        copy.meta |= {key: copy.meta[key] + suffix for key in (NAME, TERM, COPY_OF) if key in copy.meta}
        return copy

    def _results(self, results: Sequence[fx.Node]) -> list[fx.Node] | None:
        """Outputs of both, gradients of slots added, gradients of inputs of both."""
        own = self.own
        num_outputs, num_slots = len(own.outputs), len(own.trainable_slots)
        outputs, rest = results[:num_outputs], results[num_outputs:]
        of_slots = []
        for value in rest[:num_slots]:
            added = self._added(value)
            if added is None:
                return None
            of_slots.append(added)
        of_inputs = rest[num_slots:]
        found = [[made[node] for made in (self.first, self.second) for node in group] for group in (outputs, of_inputs)]
        return [*found[0], *of_slots, *found[1]]

    def _added(self, gradient: fx.Node) -> fx.Node | None:
        """The sum of both gradients of a parameter, which lies as these are made."""
        producer, index = source_of(gradient)
        if producer.op == "placeholder":
            return None
        lies = self.own.strategies[producer.name].results[index]
        made = self.graph.call_function(
            torch.ops.aten.add.Tensor, (self.first[gradient], self.second[gradient])
        )  # named by fx, as no other is
        made.meta = {key: each for key, each in gradient.meta.items() if key in ("val", NAME)}
        call = op_call(made)
        (rule,) = rules_for([call])
        strategy = None if lies is None else _strategy(rule, lies, self.program.on_mesh)
        if strategy is None:
            return None
        self.sums[made.name] = (call, rule), strategy
        return made

    def _named(self) -> dict[str, tuple[str, str]]:
        """By name: the names of both copies."""
        return {node.name: (self.first[node].name, self.second[node].name) for node in self.first}

    def _of_both(self, known: Mapping[str, Any]) -> dict[str, Any]:
        """What is known of nodes, by the names of both copies; a name may end with the number of a result."""
        named, found = self._named(), dict[str, Any]()
        for place in (0, 1):
            for name, each in known.items():
                head, dot, number = name.partition(".")
                found[named[head][place] + dot + number if head in named else name] = each
        return found

    def _annotated(self) -> Annotated:
        own, mesh = self.own, self.program.on_mesh
        sums = {name: op for name, (op, _) in self.sums.items()}
        alone = {
            name: Options((strategy,), (operator_seconds(*op, strategy, mesh),))
            for name, (op, strategy) in self.sums.items()
        }
        return Annotated(
            {**self._of_both(own.ops), **sums},
            self._of_both(own.hints),
            self._of_both(own.zigzags),
            {**self._of_both(own.options), **alone},
        )

    def _placed(self) -> Placed:
        own = self.own
        sums = {name: strategy for name, (_, strategy) in self.sums.items()}
        return Placed({**self._of_both(own.strategies), **sums}, self._of_both(own.relays))


def _strategy(rule: Rule, lies: Sharding, mesh: Mesh) -> NodeStrategy | None:
    """What adds two values that lie so, and gives one that does."""
    outers = {
        name: {each.outer for each in lies if isinstance(each, Shard)} - {1} for name in (f.name for f in rule.factors)
    }
    offered = [axis_choices(rule, size, outers) for size in mesh.sizes]
    for choices in itertools.product(*offered):
        placed = shardings(rule, choices, mesh.sizes)
        if placed is not None and all(each == lies for each in (*placed[0], *placed[1])):
            return NodeStrategy(tuple(choices), *placed)
    return None
