"""Problems of one program under the same strategies that differ in what these are let off: built once where they are
alike.

Where one axis splits every weight matrix, a placement is sought with all of them split, then which must stay whole
(unsplit.py), then with these whole. All three are one problem, in which any may stay whole, with choices forbidden:

    excused: None    gate: rows | columns | whole
    excused: ()      gate: rows | columns | ∞           nothing is built but the costs of parameters

Nor is anything else built for `auto` at another price of gathers and reductions.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from autopar.ir.program import Program
from autopar.passes.placement.problem import PlacementProblem, at_price, build_problem
from autopar.solver.problem import AssignmentProblem, Node
from autopar.strategies.axis import AUTO, AxisStrategy
from autopar.strategies.names import Pin

PRICED = ("at a price",)
"""Among facts: a program, and the problem in which all is left to the solver, at some price."""
MOST_PAIRS = 1e7
"""Of choices: problems of more are not kept (their costs take 80 MB), but built for each price."""


class Variants:
    """The problems of a program under these strategies and pins. overlap_price, facts: as of `build_problem`."""

    def __init__(
        self,
        program: Program,
        strategies: Sequence[AxisStrategy],
        pins: Sequence[Pin],
        overlap_price: float = 1.0,
        facts: dict[tuple[str, ...], Any] | None = None,
    ) -> None:
        self.program, self.strategies, self.pins, self.overlap_price = program, strategies, pins, overlap_price
        self.facts: dict[tuple[str, ...], Any] = {} if facts is None else facts
        self._free: dict[tuple[tuple[str, str], ...], PlacementProblem] = {}
        axes = [
            each for each, size in zip(strategies, program.on_mesh.sizes, strict=True)
            if each.required == "shard_matrices" and size > 1
        ]  # fmt: skip
        # What one axis may choose depends on what is left of another's choices.
        self._one_axis = len(axes) == 1 and not any(each.grid for each in strategies)

    def free(self, gathered: Collection[tuple[str, str]]) -> PlacementProblem:
        """With matrices that may all stay whole, and no memory limit; gathered: as of `build_problem`."""
        key = tuple(gathered)
        if key not in self._free:
            self._free[key] = self._built(None, key, None)
        return self._free[key]

    def problem(
        self, limit: float | None, gathered: Collection[tuple[str, str]], excused: Collection[tuple[str, int]]
    ) -> PlacementProblem:
        """Arguments as of `build_problem`, limit in bytes.

        Raises:
            AutoparError: as `build_problem`.
        """
        if not self._one_axis:
            return self._built(limit, gathered, excused)
        free = self.free(gathered)
        nodes = _without(free, frozenset(excused))
        if nodes is None:  # a matrix whose choices all ask for more: strategies are content with less then
            return self._built(limit, gathered, excused)
        return replace(free, problem=AssignmentProblem(nodes, free.problem.edges, limit))

    def _built(
        self, limit: float | None, gathered: Collection[tuple[str, str]], excused: Collection[tuple[str, int]] | None
    ) -> PlacementProblem:
        given = (self.program, self.strategies, self.pins, limit, self.overlap_price)
        if self.pins or gathered or excused or any(each is not AUTO for each in self.strategies):
            return build_problem(*given, gathered, excused, self.facts)
        # All of `auto`, which is placed at several prices.
        program, known = self.facts.get(PRICED, (None, None))
        if program is self.program:
            return at_price(known, self.program, self.strategies, limit, self.overlap_price, self.facts)
        built = build_problem(*given, gathered, excused, self.facts)
        if sum(edge.costs.size for edge in built.problem.edges) <= MOST_PAIRS:
            self.facts[PRICED] = self.program, built
        return built


def _without(free: PlacementProblem, excused: frozenset[tuple[str, int]]) -> tuple[Node, ...] | None:
    """The nodes of the problem, matrices that are not excused forbidden to stay whole; None where that leaves one of
    them nothing.
    """
    nodes = list(free.problem.nodes)
    for root, slot in free.slots.items():
        if not any(slot.unmet):
            continue
        names = [key[1] for key in free.value_classes.members[root] if key[0] == "var"]
        less = np.array([any((names[0], axis) not in excused for axis in unmet) for unmet in slot.unmet])
        costs = np.where(less, np.inf, nodes[slot.node].costs)
        if not np.isfinite(costs).any():
            return None
        nodes[slot.node] = replace(nodes[slot.node], costs=costs)
    return tuple(nodes)
