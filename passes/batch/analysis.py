"""The captured graph, walked once: of each node how it depends on the batch's rows (`states.py`)."""

from __future__ import annotations

import math
import operator
from collections.abc import Mapping, Sequence

import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.ir.graphs import op_call, operands_of
from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.told import BUFFER
from autopar.passes.batch.compare import power_of
from autopar.passes.batch.composites import CREATIONS, flatten, law_of
from autopar.passes.batch.of_batch import Edits
from autopar.passes.batch.site import Site, make_site
from autopar.passes.batch.states import Coupled, Rows, State, Whole, factor_of, place_of
from autopar.passes.batch.transfer import transfer
from autopar.passes.batch.values import Values, ancestors, is_zero

REMEDY = "microbatches=1"


class RowsTogether(AutoparError):
    """What the model computes of a batch does not follow from what it computes of parts of it."""


def plain_line(where: str | None) -> str | None:
    """`layers.0 (model.py:7)`; a line without a module has no parentheses of its own."""
    if where and where.startswith("("):
        return where.removeprefix("(").removesuffix(")")
    return where or None


class Analysis:
    """One capture, or two compared: everything is said of the one with more rows. edits: where what is not one mean is
    to be made one, what makes it one.
    """

    def __init__(self, program: Program, other: Program | None, *, edits: bool = False) -> None:
        self.graph, self.origins = _flat(program)
        self.own_nodes = list(self.graph.nodes)
        self.own = {node: node for node in self.own_nodes}
        larger, smaller = program, other
        self.pairs: dict[fx.Node, fx.Node] = {}
        if other is not None:
            graph, origins = _flat(other)
            if _num_elements(other) > _num_elements(program):
                larger, smaller, self.graph, self.origins, graph = other, program, graph, origins, self.graph
            self.pairs = _pairs(self.graph, graph, self.origins)
            self.own = self.pairs if smaller is program else self.own
        self.larger, self.smaller = larger, smaller
        self.batch_dims, self.rows, self.ratio = _batch_dims(larger, smaller)
        region = larger.regions[0]
        holders = [node for node in self.graph.nodes if node.op == "placeholder"]
        slots = dict(zip(holders, region.slots, strict=False))
        constants = {n: larger.constants[s.name] for n, s in slots.items() if s.name in larger.constants}
        constants = {n: value for n, value in constants.items() if slots[n].name != BUFFER}
        self.slots, self.holders = slots, dict(zip(holders[len(slots) :], region.inputs, strict=True))
        self.values = Values(frozenset(self.holders), constants, self.pairs)
        output = next(node for node in self.graph.nodes if node.op == "output")
        self.results: Sequence[fx.Node] = output.args[0]
        self.states: dict[fx.Node, list[State]] = {}
        buffers = frozenset(n for n, s in slots.items() if not s.is_parameter and s.name != BUFFER)
        self.edits = Edits(self.pairs, lambda node: self.values.is_known(node, buffers)) if edits else None

    def run(self) -> list[State]:
        """The states of the results, in order."""
        wanted = {node for result in self.results for node in ancestors(result)}
        for node in self.graph.nodes:
            if node in wanted or "count" in node.meta:
                states = self._states_of(node)
                is_read = node.op == "call_function" and self.edits is not None and self.edits.reads(node, states)
                self.states[node] = [Whole()] if is_read else states
        return [self.states[result][0] for result in self.results]

    def where(self, index: int) -> str:
        """Module and line of a result."""
        return self.origins.get(self.results[index].name, "")

    def _states_of(self, node: fx.Node) -> list[State]:
        if node.op == "placeholder":
            return [self._placeholder(node)]
        if node.target is operator.getitem:
            source, index = node.args
            return [self.states[source][index]]  # type: ignore[index]
        site = self._site(node)
        states = [self.states[source][0] for source in operands_of(node)]
        return transfer(*self.values.numbered(site, states))

    def _placeholder(self, node: fx.Node) -> State:
        if node in self.holders:
            dim = self.batch_dims[self.holders[node].name]
            return Whole() if dim is None else Rows(dim)
        name = self.slots[node].name
        if self.smaller is None or name not in self.larger.constants:
            return Whole()
        value, less = self.larger.constants[name], self.smaller.constants.get(name)
        if less is not None and torch.equal(value, less):
            return Whole()
        if less is not None and value.numel() == less.numel() == 1:
            power = power_of(value.item(), less.item(), self.ratio)
            if power is not None:
                return Whole(power)
        users = [self.origins.get(user.name, "") for user in node.users]
        return Coupled("a constant of the model changes with the number of rows", next(iter(users), ""))

    def _site(self, node: fx.Node) -> Site:
        nodes = tuple(operands_of(node))
        return make_site(
            node,
            op_call(node),
            self.rows,
            self.origins.get(node.name, ""),
            smaller=self._smaller_call(node),
            ratio=self.ratio,
            as_rows=lambda index, state: not self.pairs and self._has_rows(nodes[index], state),
            same_count=self.values.same,
            count_kind=self.values.count_kind,
            is_zero=lambda index: is_zero(nodes[index]),
            operand_nodes=nodes,
            edits=self.edits,
        )

    def _smaller_call(self, node: fx.Node) -> OpCall | None:
        """The same operator in the smaller capture; where that left an expansion out, one that changes nothing."""
        if not self.pairs:
            return None
        pair, sources = self.pairs[node], operands_of(node)
        if not sources or pair is not self.pairs[sources[0]]:
            return op_call(pair)
        spec = TensorSpec(tuple(pair.meta["val"].shape), pair.meta["val"].dtype)
        return OpCall(node.target, (spec, list(spec.shape)), {}, (spec,), (spec,))

    def _has_rows(self, node: fx.Node, state: Rows) -> bool:
        """Whether a whole value may be read as rows: a constant made as many times as there are rows, each alike."""
        if node.op != "call_function" or self.states[node][0] != Whole():
            return False
        source, index = node.args if node.target is operator.getitem else (node, 0)
        assert isinstance(source, fx.Node) and isinstance(index, int)
        call = op_call(source)
        rule = law_of(call).rule
        dims = rule.results[index]
        factor = None if dims is None else factor_of(rule, dims, state, self.rows)
        if factor is None or not rule.factor(factor[0]).split:
            return False
        if call.name in CREATIONS:
            return True
        places = [place_of(rule, own, *factor) for own in rule.operands]
        sources = operands_of(source)
        return all(place is None or self._has_rows(own, place) for own, place in zip(sources, places, strict=True))


def _flat(program: Program) -> tuple[fx.Graph, dict[str, str]]:
    region: Region = program.regions[0]
    return flatten(region.graph, region.origins)


def _num_elements(program: Program) -> int:
    return sum(port.type.num_elements for port in program.inputs)


def _pairs(larger: fx.Graph, smaller: fx.Graph, origins: Mapping[str, str]) -> dict[fx.Node, fx.Node]:
    """The node of the smaller capture for each of the larger: the same operators in order, of the same operands.

    An expansion to as many rows as there are already, one, is not in the smaller graph: its pair is its operand's.
    """
    pairs: dict[fx.Node, fx.Node] = {}
    rest = list(smaller.nodes)
    for node in larger.nodes:
        reads = [pairs[source] for source in operands_of(node)]
        pair = rest[0] if rest else None
        alike = pair is not None and pair.op == node.op and (node.op != "call_function" or pair.target is node.target)
        if alike and pair is not None and operands_of(pair) == reads:
            pairs[node] = rest.pop(0)
        elif node.target is torch.ops.aten.expand.default:
            pairs[node] = reads[0]
        else:
            values = f"{node.target} in one, {pair.target if pair is not None else 'nothing'} in the other"
            raise _changed(values, origins.get(node.name))
    if rest:
        raise _changed(f"{rest[0].target} in one, nothing in the other", origins.get(rest[0].name))
    return pairs


def _changed(values: str, where: str | None) -> RowsTogether:
    return RowsTogether(
        "the model computes something else when the batch has another number of rows, so microbatches cannot be put "
        "together",
        where=plain_line(where),
        values=values,
        remedy=REMEDY,
    )


def _batch_dims(larger: Program, smaller: Program | None) -> tuple[dict[str, int | None], int, int]:
    """The dim of each input that has rows of the batch, how many there are, and how many times the smaller's."""
    if smaller is None:
        sizes = [port.type.shape[0] for port in larger.inputs if port.type.shape]
        rows = max(sizes, key=sizes.count, default=1)
        dims = {p.name: 0 if p.type.shape[:1] == (rows,) else None for p in larger.inputs}
        return dims, _at_least_two(rows), 1
    found: dict[str, int | None] = {}
    pairs: list[tuple[int, int]] = []
    for ours, theirs in zip(larger.inputs, smaller.inputs, strict=True):
        shapes = (ours.type.shape, theirs.type.shape)
        grown = [dim for dim, (a, b) in enumerate(zip(*shapes)) if a != b]
        if len(grown) > 1 or len(shapes[0]) != len(shapes[1]):
            raise _changed(f"input {ours.name}: {list(shapes[0])} in one capture, {list(shapes[1])} in the other", None)
        found[ours.name] = grown[0] if grown else None
        pairs += [(shapes[0][dim], shapes[1][dim]) for dim in grown]
    ratios = {a // b if b and a % b == 0 else 0 for a, b in pairs}
    if len(ratios) != 1 or 0 in ratios:
        raise _changed(f"rows of the inputs: {', '.join(f'{a} and {b}' for a, b in pairs) or 'alike'}", None)
    return found, _at_least_two(math.gcd(*(a for a, _ in pairs))), ratios.pop()


def _at_least_two(rows: int) -> int:
    if rows < 2:
        raise AutoparError("a batch of one row cannot be cut into microbatches", remedy=f"give more rows, or {REMEDY}")
    return rows
