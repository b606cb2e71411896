"""An exchange as two or three statements, with what runs beside it between them: a copy of a phase's graph."""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from torch import fx

from autopar.cost import exchanges
from autopar.ir.nodes import NAME
from autopar.ir.region import LoweredFunction, Region
from autopar.ir.rings import SEND, TAKE, num_results
from autopar.machine.mesh import Mesh

HOME = 2
"""Of a gradient, how many results come home, the first ones: those of tokens and of weights."""
BESIDE = "beside"
"""In a node's meta: it runs beside an exchange."""


@dataclass(frozen=True, slots=True)
class Beside:
    """What runs beside one exchange: first on the way there, then on the way home; in order. apart: it is three
    statements even so, which somebody puts elsewhere.
    """

    exchange: fx.Node
    there: Sequence[fx.Node]
    home: Sequence[fx.Node]
    apart: bool = False

    @property
    def sends(self) -> bool:
        """Whether tokens leave before the exchange."""
        return self.apart or bool(self.there)

    @property
    def takes(self) -> bool:
        """Whether what comes home is waited for behind it."""
        return self.apart or bool(self.home)


def taken_apart(lowered: LoweredFunction, plan: Beside, region: Region, mesh: Mesh) -> LoweredFunction:
    """A copy, with the same names, in which an exchange is two or three statements, with what runs beside it between
    them.
    """
    writer = _Writer(lowered, plan, region, mesh)
    for node in lowered.graph.nodes:
        if node is plan.exchange:
            writer.exchange()
        elif node.target is operator.getitem and node.args[0] is plan.exchange and plan.takes:
            writer.pick(node)
        elif node not in writer.moved:
            writer.copy(node)
    return replace(lowered, graph=writer.graph)


class _Writer:
    """Writes the copy. moved: what is not where it was."""

    def __init__(self, lowered: LoweredFunction, plan: Beside, region: Region, mesh: Mesh) -> None:
        self.plan, self.graph, self._mesh = plan, fx.Graph(), mesh
        self.moved = {*plan.there, *plan.home}
        self._taken = {node.name for node in lowered.graph.nodes}
        self._made: dict[fx.Node, fx.Node] = {}
        name = plan.exchange.meta["operator"]
        self._priced = (*region.ops[name], region.strategies[name])
        self._is_single = num_results(plan.exchange) == 1

    def copy(self, node: fx.Node) -> fx.Node:
        """The statement as it is."""
        made = self._made[node] = self.graph.node_copy(node, self._made.__getitem__)
        return made

    def exchange(self) -> None:
        """Its statements, and what is between them."""
        plan, exchange, sent = self.plan, self.plan.exchange, None
        comm = self._made[exchange.args[0]]  # type: ignore[index]
        if plan.sends:
            sent = self._send(comm)
            self._beside(plan.there)
        made = self.copy(exchange)
        if sent is not None:
            made.update_kwarg("sent", sent)
        if plan.takes:
            made.update_kwarg("later", True)
            self._beside(plan.home)
            self._take(comm, made)

    def pick(self, node: fx.Node) -> None:
        """A result of an exchange whose first two come home by themselves."""
        index: Any = node.args[1]
        source, place = self._made[self.plan.exchange], index - HOME + 1
        if index < HOME:
            source, place = self._home, index
        made = self.graph.create_node("call_function", operator.getitem, (source, place), name=node.name)
        made.meta = dict(node.meta)
        self._made[node] = made

    def _send(self, comm: fx.Node) -> fx.Node:
        exchange, (call, rule, strategy) = self.plan.exchange, self._priced
        _, axis, *operands = exchange.args
        tokens = [self._made[each] for each in operands[: 3 if self._is_single else 4]]  # type: ignore[index]
        assert rule.exchange is not None
        experts = rule.sizes[rule.exchange.key] // self._mesh.size(str(axis))
        made = self._create("call_method", SEND, (comm, axis, *tokens), {"experts": experts}, "sent")
        made.meta["origin"] = exchange.meta.get("origin", "")
        made.meta["holds"] = partial(exchanges.under_way_bytes, "there", call, rule, strategy)
        made.meta["buffers"] = partial(exchanges.sending_bytes, call, rule, strategy)
        return made

    def _take(self, comm: fx.Node, made: fx.Node) -> None:
        exchange, priced, coming = self.plan.exchange, self._priced, made
        if not self._is_single:
            coming = self._create("call_function", operator.getitem, (made, 0), {}, "coming")
        coming.meta["holds"] = partial(exchanges.under_way_bytes, "back", *priced)
        self._home = home = self._create("call_method", TAKE, (comm, coming), {}, f"{exchange.name}_home")
        home.meta["buffers"] = partial(exchanges.taking_bytes, *priced)
        if self._is_single:
            home.meta |= {key: value for key, value in exchange.meta.items() if key not in ("operator", "buffers")}
            home.meta["buffers"] = partial(exchanges.taking_bytes, *priced)
            home.meta[NAME] = exchange.meta.get(NAME) or exchange.name
            made.meta[NAME] = home.meta[NAME]
            self._made[exchange] = home
        else:
            home.meta["origin"] = exchange.meta.get("origin", "")
            home.meta["num_results"] = HOME

    def _beside(self, nodes: Iterable[fx.Node]) -> None:
        for node in nodes:
            self.copy(node).meta[BESIDE] = True

    def _create(self, op: str, target: Any, args: tuple[Any, ...], kwargs: dict[str, Any], name: str) -> fx.Node:
        """A new node, whose name no other has or will have."""
        number, free = 0, name
        while free in self._taken:
            number, free = number + 1, f"{name}_{number + 1}"
        self._taken.add(free)
        return self.graph.create_node(op, target, args, kwargs, name=free)
