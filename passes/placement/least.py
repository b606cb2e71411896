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

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.cost.roofline import CollectiveKind, collective_time_s
from autopar.ir.classes import Key
from autopar.ir.program import Program
from autopar.ir.region import Call, Region
from autopar.ir.sharding import Partial, Replicate
from autopar.passes.placement.gathers import blocked_operators
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
GATHERED = "gathered"
"""The leave of what operators read in regions of which some cannot be split."""


def _ends(link: Link) -> tuple[int, np.ndarray, int, np.ndarray]:
    return link.u, link.sources.number, link.v, link.targets.number


def without_edges(built: PlacementProblem) -> PlacementProblem:
    """The problem as it is kept: its links say what its edges do, in less memory."""
    return replace(built, problem=replace(built.problem, edges=()))


def _num_pairs(built: PlacementProblem) -> int:
    return sum(len(link.sources.distinct) * len(link.targets.distinct) for link in built.links)


class Least:
    """Of the problem of a program in which all is left to the solver (`auto`), memory aside."""

    def __init__(self, program: Program, built: PlacementProblem, facts: dict[tuple[str, ...], Any]) -> None:
        self.program, self.built, self.facts = program, built, facts
        self._links = [link for link in built.links if link.leave and link.u != link.v]
        kept = {slot.node for slot in built.slots.values()} | {slot.gradient for slot in built.slots.values()}
        nodes = built.problem.nodes
        self._costs = [
            np.where(np.isfinite(node.costs), 0.0, np.inf) if index in kept else node.costs
            for index, node in enumerate(nodes)
        ]
        gradients = {slot.gradient for slot in built.slots.values()}
        relays = {index for index, _ in built.relays.values()}
        self._makers = {link.v: link for link in built.links if link.v in gradients or link.v in relays}
        """Of gradients and of relays: what makes what they are of."""
        self._lower = Lower([len(node.costs) for node in nodes], [_ends(link) for link in self._links])
        self._times = np.repeat(
            [link.times for link in self._links],
            [len(link.sources.distinct) * len(link.targets.distinct) for link in self._links],
        )

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
        self, strategies: Sequence[AxisStrategy], enough: float, like: Program | None = None
    ) -> tuple[float, float]:
        """Of computing and moving values, and of moving parameters and gradients: no step takes less than either under
        these strategies. Nothing more is looked for once the first is `enough`; infinite where there is no placement.

        like: a placed program; operators do as they do there, and the first is not looked for.

        Raises:
            AutoparError: an input that a strategy must split and cannot.
        """
        alive = choices_within(self.built, self.program, strategies, self.facts)
        if like is not None:
            axes = range(len(strategies))
            for (region, node), (index, options) in self.built.operators.items():
                does = np.zeros(len(options), dtype=bool)
                does[alike(options, like.region(region).strategies[node], axes)] = True
                alive[index] = does if does.any() else alive[index]
        costs = [np.where(mask, own, np.inf) for mask, own in zip(alive, self._costs, strict=True)]
        blocked = blocked_operators(self.program, strategies, self.facts)
        cells = self._cells(strategies, frozenset(each.region for each in blocked))
        bound = self._lower.bound(costs, cells, enough if like is None else 0.0)
        kept = self._lower.alive
        return bound, np.inf if kept is None else self._transfers_s(strategies, kept)

    def forbids(self, strategies: Sequence[AxisStrategy]) -> bool:
        """Whether there is no placement, memory aside, where strategies are let off nothing but matrices that stay
        whole: as far as what neighbours forbid each other tells.

        Raises:
            AutoparError: an input that a strategy must split and cannot.
        """
        alive = choices_within(self.built, self.program, strategies, self.facts)
        return self._lower.forbids_all(alive, self._cells(strategies, ()))

    def _cells(self, strategies: Sequence[AxisStrategy], gathered: Collection[str]) -> np.ndarray:
        """Seconds of all pairs of layouts, of one link after the other."""
        kinds = kinds_of(strategies)
        more = with_gathers(strategies)
        leaves = {leave: Redistribution(self.program.on_mesh, each) for leave, each in kinds.items()}
        for leave, each in kinds.items():
            both = [own | other for own, other in zip(each, more, strict=True)]
            leaves[GATHERED + leave] = Redistribution(self.program.on_mesh, both)
        known: dict[tuple[object, ...], np.ndarray] = {}
        cells = []
        for link in self._links:
            leave = GATHERED + link.leave if link.region in gathered else link.leave
            key = (leave, link.type_.num_bytes, link.type_.is_float, id(link.sources), id(link.targets))
            found = known.get(key)
            if found is None:
                asked = leaves[leave].matrix(link.type_, link.sources.distinct, link.targets.distinct)
                found = known[key] = asked.ravel()
            cells.append(found)
        return np.concatenate(cells) * self._times

    def _transfers_s(self, strategies: Sequence[AxisStrategy], alive: Sequence[np.ndarray]) -> float:
        """Of parameters and gradients, in a step of one rank."""
        found = 0.0
        for region in self.program.regions:
            calls = [call for _, call in self.program.calls_of(region.name)]
            if calls:
                found += len(calls) * self._of_call(region, calls[0], strategies, alive)
        return found

    def _of_call(
        self, region: Region, call: Call, strategies: Sequence[AxisStrategy], alive: Sequence[np.ndarray]
    ) -> float:
        mesh, found = self.program.on_mesh, 0.0
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
            found += held and self._seconds("all_gather", axis, held) * (1 + again)
            if summed:
                kinds: list[CollectiveKind] = ["all_reduce"] if whole else ["all_reduce", "reduce_scatter"]
                found += min(self._seconds(kind, axis, summed) for kind in kinds)
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
