"""What the variables of a placement problem are made of: nodes, edges, and the names of values."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import fx

from autopar.base.errors import AutoparError
from autopar.cost.context import attending_regions
from autopar.ir.classes import Classes, Key, value_classes
from autopar.ir.graphs import is_view, placeholders
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Options, Region
from autopar.ir.sharding import Sharding
from autopar.ir.tensor_type import TensorType
from autopar.machine.mesh import Mesh
from autopar.passes.placement.columns import Column
from autopar.passes.placement.layouts import ParameterChoice
from autopar.passes.placement.mixtures import OfExperts
from autopar.passes.placement.moves import Redistribution
from autopar.passes.placement.timeline import Timeline
from autopar.solver.problem import Edge, Node, Usage
from autopar.strategies.axis import ANY_COLLECTIVE, AxisStrategy
from autopar.strategies.names import Pin, Pins


@dataclass(slots=True)
class Slot:
    """A parameter's or buffer's variable in the problem. unmet: for each choice, the axes whose strategy asks for more
    than it gives, where that may be. edge, link: the numbers of what reduces its gradient (-1: nothing does).
    """

    choices: list[ParameterChoice]
    node: int
    gradient: int = -1
    gradient_layouts: list[Sharding] = field(default_factory=list)
    unmet: list[frozenset[int]] = field(default_factory=list)
    edge: int = -1
    link: int = -1


class Link(NamedTuple):
    """What lies between two nodes of a problem, also where nothing that may be moved there takes time: the layouts at
    its ends, what is moved, how often, and by whose leave (`kinds_of`; empty: anyone's). region: where operators read.
    """

    u: int
    sources: Column
    v: int
    targets: Column
    type_: TensorType
    times: float
    leave: str
    region: str


@dataclass(slots=True)
class Joined:
    """What several rounds of a loop have alike: the numbers of its link and of its edge (-1: it costs nothing), how
    often the first of them moves it, and how often all.
    """

    link: int
    edge: int
    first: float
    times: float


class Parts:
    """A problem in the making. operators, classes, slots, relays: as in `PlacementProblem`; overlap_price,
    gathered, excused, facts: of `build_problem`. looped: nodes that stand for all rounds of a loop; joined: what lies
    between them and others.
    """

    def __init__(
        self,
        program: Program,
        mesh: Mesh,
        strategies: Sequence[AxisStrategy],
        pins: Sequence[Pin],
        overlap_price: float = 1.0,
        gathered: frozenset[tuple[str, str]] = frozenset(),
        excused: frozenset[tuple[str, int]] | None = frozenset(),
        facts: dict[tuple[str, ...], Any] | None = None,
    ) -> None:
        self.program, self.mesh, self.strategies, self.pins = program, mesh, strategies, Pins(pins)
        # In a pipeline what is moved once a step is waited for.
        self.each_price, self.once_price = overlap_price, overlap_price if program.share is None else 1.0
        # So is what the first call gathers: nothing computes before it, nor after its backward has made its gradients.
        self.first_parameters = frozenset(program.calls[0].slots) if program.calls else frozenset[str]()
        self.sizes = tuple(mesh.sizes)
        kinds = kinds_of(strategies)
        # Of one token the bytes are nothing beside it: one gather may be worth more than a maximum and a sum.
        latency = any(each.leaves_storage or each.attention == "keys" for each in strategies)
        self.costs = Redistribution(mesh, kinds["anywhere"], latency)
        self.block_costs = Redistribution(mesh, kinds["blocks"], latency)
        self.slot_costs = Redistribution(mesh, kinds["slots"], latency)
        self.attention_costs = Redistribution(mesh, kinds["attention"], latency)
        self.slicing = Redistribution(mesh, kinds["beside"])
        self.leaves = {
            id(self.costs): "anywhere", id(self.block_costs): "blocks", id(self.slot_costs): "slots",
            id(self.attention_costs): "attention", id(self.slicing): "beside",
        }  # fmt: skip
        self.beside: dict[str, frozenset[str]] = {}
        self.gathered = gathered
        self.gathering = Redistribution(mesh, with_gathers(strategies), latency=False)
        self.excused = excused
        self.of_experts, self.laying = OfExperts(program), _with_experts(mesh, strategies)
        # Gathers of parameters and reductions of gradients go in buckets: a latency for each parameter would count that
        # of one bucket many times.
        self.bucketed = Redistribution(mesh, [strategy.collectives for strategy in strategies], latency=False)
        self.facts: dict[tuple[str, ...], Any] = {} if facts is None else facts
        self.known: Classes = self._fact(("classes",), lambda: value_classes(program))
        self.timeline: Timeline = self._fact(("timeline",), lambda: Timeline.of(program))
        self.nodes: list[Node] = []
        self.edges: list[Edge] = []
        self.links: list[Link] = []
        self.descriptions: list[str] = []
        self.operators: dict[tuple[str, str], tuple[int, Sequence[NodeStrategy]]] = {}
        self.classes: dict[Key, tuple[int, list[Sharding]]] = {}
        self.slots: dict[Key, Slot] = {}
        self.relays: dict[tuple[str, str], tuple[int, tuple[Sharding, ...]]] = {}
        self.options: dict[tuple[str, str], Options] = {}
        self.columns: dict[object, Column] = {}
        self.wanted: dict[tuple[str, str], list[Column]] = {}
        self.gathered_values: set[tuple[str, str]] = set()
        self.near_attention: dict[str, frozenset[str]] = {}
        self.attending: frozenset[str] = self._fact(("attending",), lambda: attending_regions(program))
        self.keys: dict[str, dict[fx.Node, Key]] = {}
        self.firsts: dict[tuple[str, str], str] = {}
        self.repeated = set[tuple[str, str]]()
        self.relayed: dict[tuple[object, ...], int] = {}
        self.looped = set[int]()
        self.joined: dict[tuple[object, ...], Joined] = {}
        self._holders: dict[str, list[fx.Node]] = {}
        self.aliases: set[fx.Node] = self._fact(("aliases",), lambda: _aliases(program))
        self.kept_views: dict[fx.Node, frozenset[str]] = self._fact(
            ("kept views",),
            lambda: {node: region.forward_nodes for region in program.regions for node in _kept_views(region)},
        )

    def _fact(self, name: tuple[str, ...], make: Callable[[], Any]) -> Any:
        """What does not depend on strategies: the same object for all problems of the program."""
        if name not in self.facts:
            self.facts[name] = make()
        return self.facts[name]

    def _node(self, name: str, costs: Sequence[float] | np.ndarray, usages: Sequence[Usage], description: str) -> int:
        self.nodes.append(Node(name, np.array(costs, dtype=float), tuple(usages)))
        self.descriptions.append(description)
        return len(self.nodes) - 1

    def _add_round(self, index: int, costs: Sequence[float] | np.ndarray, usages: Sequence[Usage]) -> None:
        """Add what a further round takes to the node of the first."""
        node = self.nodes[index]
        self.nodes[index] = replace(node, costs=node.costs + costs, usages=(*node.usages, *usages))

    def _edge(
        self,
        u: int,
        sources: Column,
        v: int,
        targets: Column,
        type_: TensorType,
        times: float,
        costs: Redistribution | None = None,
        price: float = 1.0,
        region: str = "",
    ) -> None:
        """costs: what the moves between the two may be; None: anything, in buckets. price: what a second counts."""
        leave = self.leaves.get(id(costs), "")
        key = (u, id(sources), v, id(targets), type_.num_bytes, type_.is_float, id(costs), price)
        if key in self.joined:
            self.joined[key].times += times
            return
        matrix = (costs or self.bucketed).costing(type_, sources.distinct, targets.distinct, free=costs is None)
        if u in self.looped or v in self.looped:
            self.joined[key] = Joined(len(self.links), len(self.edges) if matrix is not None else -1, times, times)
        self.links.append(Link(u, sources, v, targets, type_, times, leave, region))
        if matrix is not None:
            self.edges.append(Edge(u, v, sources.number, targets.number, _priced(matrix, times, price)))

    def _join_rounds(self) -> None:
        """Count what rounds of loops have alike as often as it is moved in all of them."""
        for each in self.joined.values():
            if each.times == each.first:
                continue
            self.links[each.link] = self.links[each.link]._replace(times=each.times)
            if each.edge >= 0:
                costs = self.edges[each.edge].costs * (each.times / each.first)
                self.edges[each.edge] = self.edges[each.edge]._replace(costs=costs)

    def reduction_seconds(self, link: Link, price: float) -> np.ndarray:
        """Of what reduces a gradient, where that takes any: from layout to layout."""
        matrix = self.bucketed.costing(link.type_, link.sources.distinct, link.targets.distinct, free=True)
        assert matrix is not None, "what takes time at one price takes some at another"
        return _priced(matrix, link.times, price)

    def _port_type(self, key: Key) -> tuple[Region, TensorType]:
        region = self.program.region(key[1])
        ports = region.inputs if key[0] in ("in", "gin") else region.outputs
        return region, ports[key[2]].type

    def holders_of(self, region: Region) -> list[fx.Node]:
        """What a region's graph is given."""
        if region.name not in self._holders:
            self._holders[region.name] = placeholders(region.graph)
        return self._holders[region.name]

    def _zigzags(self, keys: Sequence[Key]) -> dict[int, dict[str, tuple[int, ...]]]:
        """axis -> dim -> the numbers of stripes in which values between calls may be split zigzag."""
        axes = [axis for axis, name in enumerate(self.mesh.axis_names) if name in self.program.zigzag]
        return dict.fromkeys(axes, self._stripes(keys, zigzag=True)) if axes else {}

    def _stripes(self, keys: Sequence[Key], *, zigzag: bool = False) -> dict[str, tuple[int, ...]]:
        found: dict[str, set[int]] = {}
        for kind, name, index in keys:
            region = self.program.region(name)
            label = f"{kind}{index}"
            if kind in ("in", "slot"):
                label = self.holders_of(region)[len(region.slots) * (kind == "in") + index].name
            for dim, outers in (region.zigzags if zigzag else region.hints).get(label, {}).items():
                found.setdefault(dim, set()).update(outers)
        return {dim: tuple(sorted(outers)) for dim, outers in found.items()}

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

    def _uses_of_result(self, node: fx.Node, index: int) -> list[fx.Node]:
        """What reads a result of an operator, through views; the backward picks it anew, so there are several picks."""
        if not isinstance(node.meta["val"], (list, tuple)):
            return self._users_through_views(node)
        picks = [user for user in node.users if user.target is operator.getitem and user.args[1] == index]
        return [*picks, *(user for pick in picks for user in self._users_through_views(pick))]

    def _users_through_views(self, node: fx.Node) -> list[fx.Node]:
        found: list[fx.Node] = []
        for user in node.users:
            is_alias = user.target is operator.getitem or user in self.aliases
            users = self._users_through_views(user) if is_alias else []
            kept = self.kept_views.get(user)  # the backward reads the view, not what it is a view of
            found += [user, *(each for each in users if kept is None or each.name in kept)]
        return found


def _priced(matrix: np.ndarray, times: float, price: float) -> np.ndarray:
    seconds = matrix * times
    return seconds if price == 1.0 else seconds * price


def _aliases(program: Program) -> set[fx.Node]:
    return {
        node for region in program.regions for node in region.graph.nodes
        if node.name in region.ops and region.ops[node.name][1].alias
    }  # fmt: skip


def _kept_views(region: Region) -> list[fx.Node]:
    """Views that the forward keeps for the backward (autopar/passes/spread_heads.py)."""
    views = [node for node in region.graph.nodes if node.name in region.forward_nodes and node.name in region.ops]
    late = {node for node in region.graph.nodes if node.name in region.ops and node.name not in region.forward_nodes}
    return [node for node in views if is_view(node) and not late.isdisjoint(node.users)]


def kinds_of(strategies: Sequence[AxisStrategy]) -> dict[str, list[frozenset[str]]]:
    """What each axis may do to values: outside of repeated blocks (anywhere), inside them (blocks), to what attention
    reads and gives there, to values that stand beside others, and to parameters from what is gathered to what is read
    (slots).
    """
    everywhere = [strategy.collectives for strategy in strategies]
    inside = [s.collectives if s.inside_blocks is None else s.inside_blocks for s in strategies]
    return {
        "anywhere": everywhere,
        "blocks": inside,
        # What is gathered is the parameter's own choice, which counts the memory of it.
        "slots": [s.collectives if s.grid else frozenset({"slice"} if s.slices else ()) for s in strategies],
        "attention": [own | s.around_attention for own, s in zip(inside, strategies, strict=True)],
        "beside": [_with_slices(each) for each in strategies],
    }


def _with_slices(strategy: AxisStrategy) -> frozenset[str]:
    """What an axis may do to values without parameters that stand beside others, element by element."""
    splits = strategy.required == "shard_matrices"
    return strategy.collectives | {"slice"} if splits else strategy.collectives


def values_beside(region: Region) -> frozenset[str]:
    """Values that no parameter goes into and that are read element by element: targets of a loss, masks, weights of
    classes. Where the others are in pieces, a piece of these is taken for nothing.
    """
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    ports = zip(holders[len(region.slots) :], region.inputs, strict=False)
    carried = set(holders) - {node for node, port in ports if not port.differentiable}
    found = set[str]()
    for node in region.graph.nodes:
        if any(source in carried for source in node.all_input_nodes):
            carried.add(node)
        elif any(torch.Tag.pointwise in getattr(user.target, "tags", ()) for user in node.users):
            found.add(node.name)
    return frozenset(found)


def with_gathers(strategies: Sequence[AxisStrategy]) -> list[frozenset[str]]:
    """What each axis may do to what an operator reads that cannot be split: those that split the batch may gather."""
    return [
        s.collectives | {"all_gather", "reduce_scatter"} if s.inputs == "batch" else s.collectives for s in strategies
    ]


def _with_experts(mesh: Mesh, strategies: Sequence[AxisStrategy]) -> Redistribution | None:
    """Costs of moves of what experts are given of parameters: axes of which each rank has some experts may move it.
    None where there is no such axis.
    """
    if all(s.experts not in ("whole", "exchange") for s in strategies):
        return None
    kinds = [ANY_COLLECTIVE if s.experts in ("whole", "exchange") else s.collectives for s in strategies]
    return Redistribution(mesh, kinds, latency=False)
