"""Less than a step can take under strategies by name: found on a problem in which all is left to the solver, before
anything is placed.

Such a problem has all that strategies by name may choose from. What they do not allow is forbidden in it, all that they
might be let off (conceding.py) is allowed, and messages bound what is left from below. Latencies count here: a named
strategy is placed by its bytes, but its step is not priced so.

    auto: ring | gather | sum     ddp: gather ∞, ring ∞   →   Σ sums ≥ 309 ms: not placed where 73 ms are known

Where a gradient of a call is made as terms of a sum over an axis, whatever is chosen, something of that call is reduced
over it; where each way to keep a parameter is in pieces, one is gathered. A step takes no less than these either.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost.call_times import lane_of
from autopar.cost.roofline import CollectiveKind, collective_time_s
from autopar.cost.step_time import Lane
from autopar.ir.classes import Key, value_name
from autopar.ir.graphs import operands_of
from autopar.ir.program import Program
from autopar.ir.region import Call
from autopar.ir.sharding import Partial, Replicate
from autopar.passes.placement.gathers import Blocked, blocked_operators
from autopar.passes.placement.moves import Redistribution
from autopar.passes.placement.narrow import alike
from autopar.passes.placement.parts import Link, Slot, kinds_of, with_gathers
from autopar.passes.placement.problem import PlacementProblem, choices_within
from autopar.solver.lower import Lower
from autopar.solver.methods import is_long
from autopar.strategies.axis import AxisStrategy

FREE = ("free",)
"""Under which `place` leaves the problem in which all is left to the solver, among facts."""
LEAST = ("least",)
"""What is known of it, among facts."""
MOST_PAIRS = 2e7
"""Of layouts: of more, numbers are not kept for all."""
Kinds = tuple[frozenset[str], ...]
"""What each axis may use to move values."""


def _ends(link: Link) -> tuple[int, np.ndarray, int, np.ndarray]:
    return link.u, link.sources.number, link.v, link.targets.number


def _together(one: Sequence[frozenset[str]], other: Sequence[frozenset[str]]) -> Kinds:
    return tuple(a | b for a, b in zip(one, other, strict=True))


def without_edges(built: PlacementProblem) -> PlacementProblem:
    """The problem as it is kept: its links say what its edges do, in less memory."""
    return replace(built, problem=replace(built.problem, edges=()))


def _num_pairs(built: PlacementProblem) -> int:
    return sum(len(link.sources.distinct) * len(link.targets.distinct) for link in built.links)


class Least:
    """Of the problem of a program in which all is left to the solver (`auto`), memory aside."""

    def __init__(self, program: Program, built: PlacementProblem, facts: dict[tuple[str, ...], Any]) -> None:
        self.program, self.built, self.facts = program, built, facts
        self.links = [link for link in built.links if link.leave and link.u != link.v]
        """What lies between nodes, where leave is asked for what is moved there."""
        kept = {slot.node for slot in built.slots.values()} | {slot.gradient for slot in built.slots.values()}
        nodes = built.problem.nodes
        self._costs = np.concatenate(
            [
                np.where(np.isfinite(node.costs), 0.0, np.inf) if index in kept else node.costs
                for index, node in enumerate(nodes)
            ]
        )
        gradients = {slot.gradient for slot in built.slots.values()}
        relays = {index for index, _ in built.relays.values()}
        makers = [link for link in built.links if link.v in gradients or link.v in relays]
        several = Counter(link.v for link in makers)
        self._makers = {link.v: link for link in makers if several[link.v] == 1}
        """Of gradients and of relays: what makes what they are of, where that is one alone."""
        self._lower = Lower([len(node.costs) for node in nodes], [_ends(link) for link in self.links])
        self._asked: tuple[object, np.ndarray] | None = None
        sizes = [len(link.sources.distinct) * len(link.targets.distinct) for link in self.links]
        self._starts = np.cumsum([0, *sizes])[:-1].tolist()
        self._times = np.repeat([link.times for link in self.links], sizes)

    @staticmethod
    def of(program: Program, facts: dict[tuple[str, ...], Any]) -> Least | None:
        """Of the problem that was built of the program for `auto` first, kept among facts; None where there was none,
        or it is so small that a placement takes no longer.
        """
        built = facts.get(FREE)
        if built is None or not is_long(len(built.links)) or _num_pairs(built) > MOST_PAIRS:
            return None
        found = facts.get(LEAST)
        if not isinstance(found, Least):
            found = facts[LEAST] = Least(program, built, facts)
        return found

    def seconds(
        self, strategies: Sequence[AxisStrategy], enough: float, like: Program | None = None, lost: float = math.inf
    ) -> tuple[float, float]:
        """Of computing and moving values, and of moving parameters and gradients over one kind of links: no step takes
        less than either under these strategies. Nothing more is looked for once the first is `enough`, and not even
        that where the second is `lost`; infinite where there is no placement.

        like: a placed program; operators do as they do there, and the first is not looked for.

        Raises:
            AutoparError: an input that a strategy must split and cannot.
        """
        blocked = blocked_operators(self.program, strategies, self.facts)
        if like is None and (found := self._at_first(strategies, blocked, enough, lost)) is not None:
            return found
        alive = choices_within(self.built, self.program, strategies, self.facts)
        if like is not None:
            axes = range(len(strategies))
            for (region, node), (index, options) in self.built.operators.items():
                does = np.zeros(len(options), dtype=bool)
                does[alike(options, like.region(region).strategies[node], axes)] = True
                alive[index] = does if does.any() else alive[index]
        regions = frozenset(each.region for each in blocked)
        more = with_gathers(strategies)
        both = {leave: _together(each, more) for leave, each in kinds_of(strategies).items()}
        gathered = {i: both[link.leave] for i, link in enumerate(self.links) if link.region in regions}
        flat, cells = np.concatenate(alive) & np.isfinite(self._costs), self._cells(strategies, gathered)
        if self._lower.narrow(flat, cells):
            return np.inf, np.inf
        transfers_s = self._transfers_s(strategies, self._lower.split(flat))
        if like is not None or transfers_s >= lost:
            return 0.0, transfers_s
        return self._lower.bound(np.where(flat, self._costs, np.inf), cells * self._times, enough), transfers_s

    def _at_first(
        self, strategies: Sequence[AxisStrategy], blocked: Sequence[Blocked], enough: float, lost: float
    ) -> tuple[float, float] | None:
        """As `seconds`, where strategies are let off no more than that what blocked operators read is gathered: where
        there is a placement so, they get no other. None where none is found.
        """
        if not blocked and all(each.required != "shard_matrices" for each in strategies):
            return None
        alive = choices_within(self.built, self.program, strategies, self.facts, excused=())
        flat = np.concatenate(alive) & np.isfinite(self._costs)
        at = {self.built.operators[each.region, each.node][0] for each in blocked} | self._relays_to(blocked)
        more = tuple(with_gathers(strategies))
        cells = self._cells(strategies, {i: more for i, link in enumerate(self.links) if link.v in at})
        if self._lower.narrow(flat, cells):
            return None
        transfers_s = self._transfers_s(strategies, self._lower.split(flat))
        costs, cells = np.where(flat, self._costs, np.inf), cells * self._times
        bound = self._lower.bound(costs, cells, 0.0 if transfers_s >= lost else enough)
        choice = self._lower.found(costs, cells)
        return None if choice is None or not self._is_allowed(choice, strategies) else (bound, transfers_s)

    def _relays_to(self, blocked: Sequence[Blocked]) -> set[int]:
        """Nodes of the relays through which blocked operators read."""
        found = set[int]()
        names = {(each.region, each.node) for each in blocked}
        for region in self.program.regions:
            for node in region.graph.nodes if any(name == region.name for name, _ in names) else ():
                if (region.name, node.name) in names:
                    keys = [(region.name, value_name(source)) for source in operands_of(node)]
                    found |= {self.built.relays[key][0] for key in keys if key in self.built.relays}
        return found

    def _is_allowed(self, choice: np.ndarray, strategies: Sequence[AxisStrategy]) -> bool:
        """Whether a choice goes together, too, where no leave is asked for, or a node is joined to itself."""
        kinds = {leave: Redistribution(self.program.on_mesh, each) for leave, each in kinds_of(strategies).items()}
        for link in self.built.links:
            if link.leave and link.u != link.v:
                continue
            moves = kinds.get(link.leave, kinds["anywhere"])
            source, target = link.sources.each[choice[link.u]], link.targets.each[choice[link.v]]
            if not np.isfinite(moves.seconds(link.type_, source, target, free=not link.leave)):
                return False
        return True

    def forbids(self, strategies: Sequence[AxisStrategy]) -> bool:
        """Whether there is no placement, memory aside, where strategies are let off nothing but matrices that stay
        whole: as far as what neighbours forbid each other tells.

        Raises:
            AutoparError: an input that a strategy must split and cannot.
        """
        alive = choices_within(self.built, self.program, strategies, self.facts)
        return self.forbids_all(alive, self._cells(strategies, {}))

    def forbids_all(self, alive: Sequence[np.ndarray], cells: np.ndarray) -> bool:
        """Whether what pairs of layouts forbid (infinite: of one link after the other) leaves some node none of these
        choices.
        """
        return self._lower.narrow(np.concatenate(alive), cells)

    def _cells(self, strategies: Sequence[AxisStrategy], others: Mapping[int, Kinds]) -> np.ndarray:
        """Seconds of all pairs of layouts, of one link after the other, each once. others: what the axes may do at
        links, by their numbers, where that is not what strategies say. Strategies that may move the same ask one after
        the other.
        """
        kinds = {leave: tuple(each) for leave, each in kinds_of(strategies).items()}
        moves = {each: Redistribution(self.program.on_mesh, each) for each in (*kinds.values(), *others.values())}
        known: dict[tuple[object, ...], np.ndarray] = {}

        def of(link: Link, may: Kinds) -> np.ndarray:
            key = (may, link.type_.num_bytes, link.type_.is_float, id(link.sources), id(link.targets))
            found = known.get(key)
            if found is None:
                matrix = moves[may].matrix(link.type_, link.sources.distinct, link.targets.distinct)
                found = known[key] = matrix.ravel()
            return found

        if self._asked is None or self._asked[0] != kinds:
            joined = np.concatenate([of(link, kinds[link.leave]) for link in self.links])
            self._asked = kinds, joined
        cells = self._asked[1].copy() if others else self._asked[1]
        for index, may in others.items():
            found = of(self.links[index], may)
            cells[self._starts[index] : self._starts[index] + len(found)] = found
        return cells

    def _transfers_s(self, strategies: Sequence[AxisStrategy], alive: Sequence[np.ndarray]) -> float:
        """Of parameters and gradients, in a step of one rank: what the links carry that carry the most, as those of a
        node and the network's go side by side.
        """
        found = dict[Lane, float]()
        for region in self.program.regions:
            calls = [call for _, call in self.program.calls_of(region.name)]
            for lane, seconds in self._of_call(calls[0], strategies, alive).items() if calls else ():
                found[lane] = found.get(lane, 0.0) + len(calls) * seconds
        return max(found.values(), default=0.0)

    def _of_call(
        self, call: Call, strategies: Sequence[AxisStrategy], alive: Sequence[np.ndarray]
    ) -> dict[Lane, float]:
        mesh, found = self.program.on_mesh, dict[Lane, float]()
        slots = [(name, slot) for name in call.slots if (slot := self._slot(name)) is not None]
        for axis, size in enumerate(mesh.sizes):
            if size == 1:
                continue
            held, summed, whole = 0.0, 0.0, False
            for name, slot in slots:
                num_bytes = self.program.variable(name).seen.num_bytes / mesh.num_devices
                ways = [slot.choices[i] for i in np.flatnonzero(alive[slot.node])]
                if all(way.modes[axis] in ("gather", "keep") for way in ways):
                    held += num_bytes
                if slot.gradient < 0:
                    continue
                if self._is_term(slot.gradient, axis, alive):
                    summed += num_bytes
                    whole |= all(isinstance(way.stored[axis], Replicate) for way in ways)
            again = self.program.training and strategies[axis].regather == "all"
            seconds = held and self._seconds("all_gather", axis, held) * (1 + again)
            if summed:
                kinds: list[CollectiveKind] = ["all_reduce"] if whole else ["all_reduce", "reduce_scatter"]
                seconds += min(self._seconds(kind, axis, summed) for kind in kinds)
            lane = lane_of(mesh, mesh.axis_names[axis])
            found[lane] = found.get(lane, 0.0) + seconds
        return found

    def _is_term(self, gradient: int, axis: int, alive: Sequence[np.ndarray]) -> bool:
        """Whether what makes a gradient gives each rank of an axis a term of it, whatever is chosen."""
        link = self._makers.get(gradient)
        while link is not None and link.u in self._makers:
            link = self._makers[link.u]
        if link is None:
            return False
        return all(isinstance(link.sources.each[i][axis], Partial) for i in np.flatnonzero(alive[link.u]))

    def _slot(self, name: str) -> Slot | None:
        """The variable of a parameter that one call alone uses."""
        root: Key | None = self.built.value_classes.of.get(("var", name, 0))
        if root is None or name in self._shared:
            return None
        return self.built.slots[root]

    @property
    def _shared(self) -> frozenset[str]:
        if ("shared",) not in self.facts:
            names = [name for call in self.program.calls for name in dict.fromkeys(call.slots)]
            self.facts["shared",] = frozenset(name for name in names if names.count(name) > 1)
        shared: frozenset[str] = self.facts["shared",]
        return shared

    def _seconds(self, kind: CollectiveKind, axis: int, num_bytes: float) -> float:
        mesh = self.program.on_mesh
        link = mesh.link(mesh.axis_names[axis])
        return collective_time_s(kind, num_bytes, mesh.sizes[axis], link, mesh.hardware.collective_launch_s)
