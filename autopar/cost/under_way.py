"""A phase of a region in which exchanges run beside what does not depend on them (passes/interleave.py).

Statements come one after the other; what a `send_tokens` lets leave is on the link from there on, and the exchange
waits until it has come; so with what comes home, and its `take_tokens`. A link carries one thing after the other. How
many rows come is told by everyone before any leave, and nothing runs beside that.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping
from dataclasses import dataclass, replace

from torch import fx

from autopar.cost.collectives import Collective, phase_collectives
from autopar.cost.exchanges import Exchange, Ways, exchange_of
from autopar.cost.operator_time import region_seconds, ways_of
from autopar.ir.program import Program
from autopar.ir.region import Region
from autopar.ir.rings import NO_COLLECTIVES, SEND, TAKE, is_beside, is_exchange, sends_inside, taken_at


@dataclass(frozen=True, slots=True)
class Moving:
    """A collective, or one way of an exchange, of one call. Seconds from the phase's start."""

    row: Collective
    start_s: float
    end_s: float


def hidden_beside(program: Program, region: Region, phase: str, seconds: Mapping[str, float]) -> float:
    """Seconds of a phase's operators and collectives in which exchanges run beside something else. seconds: of the
    operators, by name.
    """
    if phase not in region.lowered or not is_beside(region.lowered[phase]):
        return 0.0
    walk = _Walk(program, region, phase, seconds)
    return walk.alone_s - walk.now


def exchanges_hidden(program: Program, region: Region, phase: str, seconds: Mapping[str, float]) -> dict[str, float]:
    """Of each exchange of a phase, by its operator, the seconds in which something else runs: those of its ways for
    which nothing waits.
    """
    if phase not in region.lowered or not is_beside(region.lowered[phase]):
        return {}
    walk = _Walk(program, region, phase, seconds)
    return {name: max(0.0, whole_s - walk.waited[name]) for name, whole_s in walk.sent.items()}


def step_hidden_s(program: Program) -> float:
    """Seconds of a step's calls, on all stages, in which exchanges run beside something else."""
    found = 0.0
    for region in program.regions:
        if not any(map(is_beside, region.lowered.values())):
            continue
        seconds = region_seconds(region, program.on_mesh)
        hidden_s = sum(hidden_beside(program, region, phase, seconds) for phase in region.phases)
        found += program.num_calls(region.name) * program.microbatches * hidden_s
    return found


def moving(program: Program, region: Region, phase: str, seconds: Mapping[str, float]) -> list[Moving]:
    """The collectives of such a phase, as its statements come."""
    return _Walk(program, region, phase, seconds).moving


class _Walk:
    """The phase, statement by statement. alone_s: with nothing beside anything; now: as it runs. sent, waited: seconds
    of each exchange, by its operator, and of those in which the others wait for it.
    """

    def __init__(self, program: Program, region: Region, phase: str, seconds: Mapping[str, float]) -> None:
        self.region, self.mesh, self.seconds = region, program.on_mesh, seconds
        self.alone_s = self.now = 0.0
        self.moving: list[Moving] = []
        self.sent: dict[str, float] = {}
        self.waited: dict[str, float] = {}
        self._free: dict[bool, float] = {}
        self._come: dict[fx.Node, float] = {}
        self._taken: dict[fx.Node, fx.Node] = {}
        self._rows = phase_collectives(program, region, phase, 1)
        self._row_of: dict[fx.Node, Collective] = {}
        nodes = list(region.lowered[phase].graph.nodes)
        for node in nodes:  # a row is an exchange's, which stands behind what it lets leave
            if sends_inside(node) or (node.op == "call_method" and node.target not in NO_COLLECTIVES):
                self._row_of[node] = next(self._rows)
        for node in nodes:
            self._step(node)

    def _step(self, node: fx.Node) -> None:
        if node.target == SEND and node.op == "call_method":
            self._send(node)
        elif node.target == TAKE and node.op == "call_method":
            self._wait(self._taken[node], self._come[node])
        elif is_exchange(node):
            self._exchange(node)
        elif node in self._row_of:
            if sends_inside(node):
                self._compute(node)
            row = self._row_of[node]
            self.now = self._on_link(row, row.seconds, row.bytes_sent)
        elif node.op == "call_function" and node.target is not operator.getitem:
            self._compute(node)

    def _send(self, node: fx.Node) -> None:
        exchange = next(iter(node.users))
        self._wait(exchange, self._tell(exchange))
        self._come[exchange] = self._go(exchange)

    def _exchange(self, node: fx.Node) -> None:
        if node not in self._come:
            self._wait(node, self._tell(node))
            self._come[node] = self._go(node)
        self._wait(node, self._come[node])
        self._compute(node)
        row, found, ways = self._row_of[node], self._way(node), self._ways(node)
        home = self._on_link(row, ways.back_s, found.away * sum(found.back))
        name = node.meta["operator"]
        self.sent[name] = self.sent.get(name, 0.0) + sum(ways)
        taken = taken_at(node)
        if taken is None:
            self._wait(node, home)
        else:
            self._come[taken], self._taken[taken] = home, node

    def _tell(self, exchange: fx.Node) -> float:
        """When all ranks know how many rows come."""
        return self._on_link(self._row_of[exchange], self._ways(exchange).counts_s, self._way(exchange).counts_bytes)

    def _go(self, exchange: fx.Node) -> float:
        """When tokens that leave now have come to their experts."""
        found = self._way(exchange)
        return self._on_link(self._row_of[exchange], self._ways(exchange).there_s, found.away * sum(found.there))

    def _wait(self, exchange: fx.Node, until: float) -> None:
        """For what an exchange sends."""
        name, waited = exchange.meta["operator"], max(0.0, until - self.now)
        self.waited[name] = self.waited.get(name, 0.0) + waited
        self.now += waited

    def _compute(self, node: fx.Node) -> None:
        taken = self.seconds.get(node.meta.get("operator", node.name), 0.0)
        beside = max([0.0, *(min(free, self.now + taken) - self.now for free in self._free.values())])
        self.alone_s += taken
        self.now += taken + self.mesh.hardware.overlap_slowdown * beside

    def _on_link(self, row: Collective, seconds: float, num_bytes: float) -> float:
        """When what is sent now has come."""
        lane = self.mesh.crosses_nodes(row.axis)
        start = max(self.now, self._free.get(lane, 0.0))
        self._free[lane] = start + seconds
        self.alone_s += seconds
        self.moving.append(Moving(replace(row, bytes_sent=num_bytes, seconds=seconds), start, start + seconds))
        return start + seconds

    def _way(self, exchange: fx.Node) -> Exchange:
        name = exchange.meta["operator"]
        found = exchange_of(*self.region.ops[name], self.region.strategies[name], self.mesh.sizes)
        assert found is not None
        return found

    def _ways(self, exchange: fx.Node) -> Ways:
        name = exchange.meta["operator"]
        return ways_of(*self.region.ops[name], self.region.strategies[name], self.mesh)
