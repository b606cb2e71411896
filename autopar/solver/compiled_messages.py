"""`Messages` for large graphs: the same sweeps, rounding and reduced costs, compiled; local search by annealing."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache

import numpy as np

from autopar.solver import compiled, compiled_moves, compiled_sweep
from autopar.solver.forest import shuffled
from autopar.solver.improve import TRIES_PER_NODE
from autopar.solver.messages import Messages
from autopar.solver.problem import BoolArray, Edge, FloatArray, IntArray

MOST_PASSES = 100


@lru_cache(maxsize=1)
def load() -> None:
    """Compile all loops (seconds, at the first call on a machine), or read them (tenths of a second)."""
    same = np.array([0, 1])
    edges = [Edge(u, 2, same, same, np.eye(2)) for u in (0, 1)]
    messages = CompiledMessages([0, 1, 2], edges, [2, 2, 2])
    messages.set_costs([np.zeros(2)] * 3, edges)
    messages.step()
    messages.excess()
    messages.round_consistently()
    messages.descend(messages.round(True) or [0, 0, 0], 1, 1, np.inf)


class CompiledMessages(Messages):
    """See `Messages`; where nothing else is said, a method does what it does there."""

    def __init__(self, nodes: Sequence[int], edges: Sequence[Edge], num_choices: Sequence[int]) -> None:
        self._num_choices = num_choices
        super().__init__(nodes, edges)
        self.flat_costs = np.zeros(int(self.flat.base[-1]))
        self.cells = np.zeros(0)
        self.forbids: BoolArray = np.zeros(0, dtype=bool)
        self._sides: compiled_sweep.Sides | None = None

    def _connect(self, edges: Sequence[Edge]) -> None:
        between = [Edge(self.position[e.u], self.position[e.v], e.u_class, e.v_class, e.costs) for e in edges]
        self.flat = compiled.flatten(self._num_choices, between)

    def set_costs(self, costs: Sequence[FloatArray], edges: Sequence[Edge], cells: FloatArray | None = None) -> None:
        """cells: those of all edges in turn, where they are in one array already."""
        super().set_costs(costs, edges)
        self.flat_costs = np.concatenate([np.zeros(0), *self.costs])
        self.cells = np.concatenate([np.zeros(0), *(e.costs.ravel() for e in edges)]) if cells is None else cells
        self._sides = None
        self.forbids = np.array([bool(np.isinf(matrix).any()) for matrix in self.matrices], dtype=bool)

    def set_flat_costs(self, costs: FloatArray) -> None:
        """Node costs, by position, of a graph whose edges stay as they are."""
        self.flat_costs = costs
        self.keep_going()

    def sweep(self, forward: bool) -> float:
        if self._sides is None:
            self._sides = compiled_sweep.sides(self.flat, self.cells)
        return compiled_sweep.sweep(self._sides, self.flat_costs, self.values, forward)

    def round(self, forward: bool) -> list[int] | None:
        choice = np.zeros(len(self.nodes), dtype=np.int64)
        if not compiled_moves.decode(self.flat, self.flat_costs, self.cells, self.values, forward, choice):
            return None
        return [int(i) for i in choice]

    def round_consistently(self) -> list[int] | None:
        """`autopar.solver.improve.round_consistently`."""
        choice = np.zeros(len(self.nodes), dtype=np.int64)
        if not compiled_moves.decode_consistently(
            self.flat, self.flat_costs, self.cells, self.values, self.forbids, choice, TRIES_PER_NODE
        ):
            return None
        return [int(i) for i in choice]

    def relaxed_round(self) -> IntArray:
        """Like `round`; a node that is left nothing takes anything."""
        choice = np.zeros(len(self.nodes), dtype=np.int64)
        compiled_moves.decode(self.flat, self.flat_costs, self.cells, self.values, True, choice)
        return choice

    def excess(self) -> tuple[float, list[FloatArray]]:
        grown = np.zeros(len(self.flat_costs))
        bound = compiled.excess(self.flat, self.flat_costs, self.cells, self.values, grown)
        return bound, list(np.split(grown, self.flat.base[1:-1])) if self.nodes else []

    def descend(self, choice: list[int], patience: int, max_moves: int, worth: float) -> list[int]:
        """`autopar.solver.improve.descend`."""
        best = np.array(choice, dtype=np.int64)
        compiled_moves.single_moves(self.flat, self.flat_costs, self.cells, best, MOST_PASSES)
        least, idle = compiled_moves.energy(self.flat, self.flat_costs, self.cells, best), 0
        for seed in range(max_moves):
            if idle == patience or least > worth:
                break
            moved = best.copy()
            compiled_moves.forest_move(
                self.flat, self.flat_costs, self.cells, moved, np.array(shuffled(len(best), seed))
            )
            now = compiled_moves.energy(self.flat, self.flat_costs, self.cells, moved)
            idle = 0 if now < least - 1e-9 * abs(least) else idle + 1
            if now <= least:
                best, least = moved, now
        return [int(i) for i in best]
