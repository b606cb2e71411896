"""`Messages` for large graphs: the same sweeps, rounding and reduced costs, compiled; local search by annealing."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver import compiled
from autopar.solver.messages import Messages
from autopar.solver.problem import Edge, FloatArray, IntArray

MOST_PASSES = 100


class CompiledMessages(Messages):
    """See `Messages`; where nothing else is said, a method does what it does there."""

    def __init__(self, nodes: Sequence[int], edges: Sequence[Edge], num_choices: Sequence[int]) -> None:
        super().__init__(nodes, edges)
        between = [Edge(self.position[e.u], self.position[e.v], e.u_class, e.v_class, e.costs) for e in edges]
        self.flat = compiled.flatten(num_choices, between)
        self.flat_costs = np.zeros(int(self.flat.base[-1]))
        self.cells = np.zeros(0)

    def set_costs(self, costs: Sequence[FloatArray], edges: Sequence[Edge]) -> None:
        super().set_costs(costs, edges)
        self.flat_costs = np.concatenate([np.zeros(0), *self.costs])
        if not len(self.cells):
            self.cells = np.concatenate([np.zeros(0), *(matrix.ravel() for matrix in self.matrices)])

    def set_flat_costs(self, costs: FloatArray) -> None:
        """Node costs, by position, of a graph whose edges stay as they are."""
        self.flat_costs = costs

    def sweep(self, forward: bool) -> float:
        return compiled.sweep(self.flat, self.flat_costs, self.cells, self.values, forward)

    def round(self, forward: bool) -> list[int] | None:
        choice = np.zeros(len(self.nodes), dtype=np.int64)
        if not compiled.decode(self.flat, self.flat_costs, self.cells, self.values, forward, choice):
            return None
        return [int(i) for i in choice]

    def relaxed_round(self) -> IntArray:
        """Like `round`; a node that is left nothing takes anything."""
        choice = np.zeros(len(self.nodes), dtype=np.int64)
        compiled.decode(self.flat, self.flat_costs, self.cells, self.values, True, choice)
        return choice

    def excess(self) -> tuple[float, list[FloatArray]]:
        grown = np.zeros(len(self.flat_costs))
        bound = compiled.excess(self.flat, self.flat_costs, self.cells, self.values, grown)
        return bound, list(np.split(grown, self.flat.base[1:-1]))

    def improved(self, choice: list[int]) -> list[int]:
        """The choice after single moves, until none gains."""
        moved = np.array(choice, dtype=np.int64)
        compiled.single_moves(self.flat, self.flat_costs, self.cells, moved, MOST_PASSES)
        return [int(i) for i in moved]
