"""The statements of two microbatches in one order, in which tokens of each travel while the other is computed.

Nothing of one reads anything of the other, so any order that keeps each statement behind what it reads will do. This
one is found as a device would run it, statement by statement against the clock of `cost/under_way.py`. Of what may come
next and need not wait, first what lets tokens leave, or waits for nothing any more; then what leads to that; then
experts whose tokens have come; then all else. Where everything has to wait, what waits least.

    sent = comm.send_tokens(x, …)                   # x leaves
    h_b = attention(…); x_b = …                     # the other one gets as far, meanwhile
    sent_b = comm.send_tokens(x_b, …)               # x_b leaves
    mixed = comm.exchange_experts(x, …)             # experts of x, while x_b travels
    mixed_b = comm.exchange_experts(x_b, …)         # experts of x_b, while what they made of x comes home
    y = shared(x) + comm.take_tokens(mixed)
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Mapping
from dataclasses import replace

from torch import fx

from autopar.cost.collectives import Collective, phase_collectives
from autopar.cost.operator_time import ways_of
from autopar.ir.program import Program
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rings import NO_COLLECTIVES, SEND, TAKE, is_exchange, is_under_way, sends_inside, taken_at
from autopar.passes.interleaving.apart import Beside, taken_apart


def woven(program: Program, region: Region, phase: str, seconds: Mapping[str, float]) -> LoweredFunction:
    """A phase whose exchanges are three statements each, in the order of a clock; names stay. seconds: of the
    operators, by name.
    """
    found, mesh = region.lowered[phase], program.on_mesh
    exchanges = [node for node in found.graph.nodes if is_exchange(node) and mesh.size(str(node.args[1])) > 1]
    for name in [node.name for node in exchanges if not is_under_way(node)]:
        exchange = next(node for node in found.graph.nodes if node.name == name)
        found = taken_apart(found, Beside(exchange, (), (), apart=True), region, mesh)
    apart = replace(region, lowered={**region.lowered, phase: found})
    return replace(found, graph=_copied(_Order(program, apart, phase, seconds).nodes))


def _copied(nodes: Iterable[fx.Node]) -> fx.Graph:
    graph, made = fx.Graph(), dict[fx.Node, fx.Node]()
    for node in nodes:
        made[node] = graph.node_copy(node, made.__getitem__)
    return graph


class _Order:
    """nodes: of the phase, in their new order."""

    def __init__(self, program: Program, region: Region, phase: str, seconds: Mapping[str, float]) -> None:
        self.region, self.mesh, self.seconds = region, program.on_mesh, seconds
        given = list(region.lowered[phase].graph.nodes)
        self.nodes = [node for node in given if node.op == "placeholder"]
        self._now, self._free, self._come = 0.0, dict[bool, float](), dict[fx.Node, float]()
        rows = phase_collectives(program, region, phase, 1)
        self._rows: dict[fx.Node, Collective] = {
            node: next(rows) for node in given
            if sends_inside(node) or (node.op == "call_method" and node.target not in NO_COLLECTIVES)
        }  # fmt: skip
        self._leads = _leading(given)
        self._run([node for node in given if node.op not in ("placeholder", "output")])
        self.nodes += [node for node in given if node.op == "output"]

    def _run(self, nodes: list[fx.Node]) -> None:
        place = {node: number for number, node in enumerate(nodes)}
        left = {node: len([each for each in node.all_input_nodes if each in place]) for node in nodes}
        ready = [node for node in nodes if not left[node]]
        while ready:
            node = min(ready, key=lambda each: (self._wait(each), self._rank(each), place[each]))
            ready.remove(node)
            self._step(node)
            self.nodes.append(node)
            for user in node.users:
                if user in left:
                    left[user] -= 1
                    if not left[user]:
                        ready.append(user)

    def _rank(self, node: fx.Node) -> int:
        """What comes first of all that need not wait."""
        if self._is(node, TAKE) or self._is(node, SEND) or not self._taken(node):
            return 0
        if is_exchange(node):
            return 2
        return 1 if node in self._leads else 3

    def _wait(self, node: fx.Node) -> float:
        """Seconds until a statement does anything."""
        if is_exchange(node) or self._is(node, TAKE):
            return max(0.0, self._come.get(node, 0.0) - self._now)
        if self._is(node, SEND):
            return max(0.0, self._free.get(self._lane(self._exchange_of(node)), 0.0) - self._now)
        if node in self._rows:
            return max(0.0, self._free.get(self._lane(node), 0.0) - self._now)
        return 0.0

    def _step(self, node: fx.Node) -> None:
        """The clock, as `cost/under_way.py` has it."""
        if self._is(node, SEND):
            exchange = self._exchange_of(node)
            counts_s, there_s, _ = self._ways(exchange)
            self._now = self._on_link(exchange, counts_s)
            self._come[exchange] = self._on_link(exchange, there_s)
        elif self._is(node, TAKE):
            self._now = max(self._now, self._come[node])
        elif is_exchange(node):
            self._now = max(self._now, self._come.get(node, 0.0)) + self._taken(node)
            if (taken := taken_at(node)) is not None:
                self._come[taken] = self._on_link(node, self._ways(node)[2])
        elif node in self._rows:
            self._now = self._on_link(node, self._rows[node].seconds) + self._taken(node) * sends_inside(node)
        else:
            self._now += self._taken(node)

    def _on_link(self, node: fx.Node, seconds: float) -> float:
        lane = self._lane(node)
        self._free[lane] = max(self._now, self._free.get(lane, 0.0)) + seconds
        return self._free[lane]

    def _lane(self, node: fx.Node) -> bool:
        return self.mesh.crosses_nodes(self._rows[node].axis)

    def _ways(self, exchange: fx.Node) -> tuple[float, float, float]:
        name = exchange.meta["operator"]
        return ways_of(*self.region.ops[name], self.region.strategies[name], self.mesh)

    def _taken(self, node: fx.Node) -> float:
        """Seconds that a statement computes."""
        if node.target is operator.getitem or (node.op != "call_function" and not sends_inside(node)):
            return 0.0
        return self.seconds.get(node.meta.get("operator", node.name), 0.0)

    def _is(self, node: fx.Node, method: str) -> bool:
        return node.op == "call_method" and node.target == method

    def _exchange_of(self, send: fx.Node) -> fx.Node:
        return next(iter(send.users))


def _leading(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    """What something that leaves is made of."""
    waiting = [node for node in nodes if node.op == "call_method" and node.target == SEND]
    found = set[fx.Node]()
    while waiting:
        node = waiting.pop()
        if node not in found:
            found.add(node)
            waiting += node.all_input_nodes
    return found
