"""interleave: while tokens are on their way to experts, and home, what does not depend on them is computed.

Requires: phase `lowered`.
Ensures: the same phase and numbers; an exchange beside which something can run is three statements, between which that
    stands, where the step is predicted shorter by it. Nothing is sent more or less, and every rank issues the same in
    the same order. `send_tokens` tells how many rows come, and lets the first round leave; `later` has the last one
    come home by itself.

    shared = ops.linear(x, …)                       sent = comm.send_tokens("ep", x, indices, weights, experts=4)
    mixed = comm.exchange_experts("ep", x, …)   →   shared = ops.linear(x, …)
    y = mixed + shared                              mixed = comm.exchange_experts("ep", x, …, sent=sent, later=True)
                                                    shared = ops.linear(shared, …)
                                                    mixed = comm.take_tokens(mixed)
                                                    y = mixed + shared

What is independent is taken from right before the exchange, then from behind it; no more than takes as long as the
exchange. What is beside another exchange, or sends tokens, or keys, by itself, stays where it is. Of two
microbatches that go through the program together (pair.py) statements are woven (interleaving/weave.py), where that
hides more.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace

from torch import fx

from autopar.cost.exchanges import Ways
from autopar.cost.operator_time import region_seconds, ways_of
from autopar.cost.under_way import hidden_beside
from autopar.ir.graphs import ancestors, reached, users_of
from autopar.ir.program import Program
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rings import SEND, TAKE, is_exchange, is_under_way, sends_inside
from autopar.passes.interleaving.apart import BESIDE, Beside, taken_apart
from autopar.passes.interleaving.weave import woven

WORTH = 0.02
"""An exchange is taken apart where so much of its seconds is hidden: three statements are more to read than one."""
LEAST = 0.01
"""So much of an exchange's seconds a statement takes for whose sake it, and what it needs, is moved."""
_Following = Callable[[fx.Node], Iterable[fx.Node]]


def interleave(program: Program) -> Program:
    """Let exchanges run beside what does not depend on them."""
    regions = {}
    for region in program.regions:
        lowered = {phase: _Phase(program, region, phase).ordered() for phase in region.lowered}
        if any(lowered[phase] is not region.lowered[phase] for phase in lowered):
            regions[region.name] = replace(region, lowered=lowered)
    return program.with_regions(regions) if regions else program


class _Phase:
    """One phase of a region."""

    def __init__(self, program: Program, region: Region, phase: str) -> None:
        self.program, self.region, self.phase = program, region, phase
        self.lowered = region.lowered[phase]

    def ordered(self) -> LoweredFunction:
        """As it is predicted fastest; of two microbatches, which may run beside each other, perhaps woven."""
        found = self.interleaved()
        if self.program.together == 1 or not any(map(self._moves, self.lowered.graph.nodes)):
            return found
        tried = woven(self.program, self.region, self.phase, self.seconds)
        return tried if self._hidden(tried) > self._hidden(found) else found

    def interleaved(self) -> LoweredFunction:
        """With what is independent next to exchanges beside them."""
        exchanges_ = [node for node in self.lowered.graph.nodes if self._moves(node) and not is_under_way(node)]
        if not exchanges_:
            return self.lowered
        self.seconds = region_seconds(self.region, self.program.on_mesh)
        found = self.lowered
        for name in [node.name for node in exchanges_]:
            # A graph whose exchange is taken apart is another one, in which names stay.
            exchange = next(node for node in found.graph.nodes if node.name == name)
            plan = self._plan(found.graph, exchange)
            if not plan.there and not plan.home:
                continue
            tried = taken_apart(found, plan, self.region, self.program.on_mesh)
            saved = self._hidden(tried) - self._hidden(found)
            if saved > WORTH * sum(self._ways(exchange)):
                found = tried
        return found

    def _moves(self, node: fx.Node) -> bool:
        return is_exchange(node) and self.program.on_mesh.size(str(node.args[1])) > 1

    def _hidden(self, lowered: LoweredFunction) -> float:
        region = replace(self.region, lowered={**self.region.lowered, self.phase: lowered})
        return hidden_beside(self.program, region, self.phase, self.seconds)

    def _ways(self, exchange: fx.Node) -> Ways:
        name = exchange.meta["operator"]
        return ways_of(*self.region.ops[name], self.region.strategies[name], self.program.on_mesh)

    def _plan(self, graph: fx.Graph, exchange: fx.Node) -> Beside:
        """The independent statements next to the exchange that take as long as it is on the link, in two parts of which
        as much as can be is hidden.
        """
        ways = self._ways(exchange)
        need, chosen = ways.there_s + ways.back_s, list[fx.Node]()
        before, behind = _independent(graph, exchange)
        before = self._worth_moving(before, need, lambda node: node.users)
        behind = self._worth_moving(behind, need, lambda node: node.all_input_nodes)
        while before and self._taken(chosen) < need:
            chosen.insert(0, before.pop())
        while behind and self._taken(chosen) < need:
            chosen.append(behind.pop(0))
        if not self._taken(chosen):
            return Beside(exchange, [], [])

        def hidden(cut: int) -> float:
            return min(self._taken(chosen[:cut]), ways.there_s) + min(self._taken(chosen[cut:]), ways.back_s)

        cut = max(range(len(chosen) + 1), key=hidden)
        there, home = (part if self._taken(part) else [] for part in (chosen[:cut], chosen[cut:]))
        return Beside(exchange, there, home)

    def _worth_moving(self, nodes: Sequence[fx.Node], need: float, following: _Following) -> list[fx.Node]:
        """Those that take a part of the exchange's time, and what has to move with them."""
        moved = reached([node for node in nodes if self._taken([node]) > LEAST * need], following)
        return [node for node in nodes if node in moved]

    def _taken(self, nodes: Iterable[fx.Node]) -> float:
        return sum(self.seconds.get(node.meta.get("operator", node.name), 0.0) for node in nodes)


def _independent(graph: fx.Graph, exchange: fx.Node) -> tuple[list[fx.Node], list[fx.Node]]:
    """What may run beside an exchange: of what stands before it, and of what stands behind it; in order.

    Each may be taken from the end that is next to the exchange: whatever reads something of the first is in it too, or
    behind the exchange; whatever something of the second reads is in it too, or before.
    """
    nodes = [node for node in graph.nodes if node.op in ("call_function", "call_method")]
    at = nodes.index(exchange)
    no_later = ancestors([exchange, *filter(_stays, nodes[:at])])
    no_sooner = users_of(filter(_stays, nodes[at:]))  # the exchange is one of these
    return [node for node in nodes[:at] if node not in no_later], [node for node in nodes[at:] if node not in no_sooner]


def _stays(node: fx.Node) -> bool:
    """Whether a statement is not to be moved: it sends by itself, or something runs beside it already."""
    return sends_inside(node) or node.target in (SEND, TAKE) or BESIDE in node.meta
