"""Lower bounds of problems that differ in their costs alone: what joins what is laid out in arrays once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver import compiled, compiled_moves, compiled_presolve, compiled_sweep
from autopar.solver.improve import TRIES_PER_NODE
from autopar.solver.problem import BoolArray, Edge, FloatArray, IntArray

SWEEPS = 40
HOPE = 8
"""Messages are given up where so many sweeps that raise the bound as the last one did would not bring it there."""


class Lower:
    """Of nodes with so many choices, and edges (u, classes of u's choices, v, classes of v's choices)."""

    def __init__(self, num_choices: Sequence[int], ends: Sequence[tuple[int, IntArray, int, IntArray]]) -> None:
        edges = [
            Edge(u, v, u_class, v_class, np.broadcast_to(0.0, (int(u_class.max()) + 1, int(v_class.max()) + 1)))
            for u, u_class, v, v_class in ends
        ]
        self._sides = compiled_presolve.sides(num_choices, edges)
        self._flat = compiled.flatten(num_choices, edges)
        self._starts = (self._sides.rows * self._sides.columns).cumsum() - self._sides.rows * self._sides.columns
        self.messages = np.zeros(int((self._flat.into_v + self._flat.width)[-1]) if len(edges) else 0)
        """Of the last bound."""

    def bound(self, costs: FloatArray, cells: FloatArray, enough: float) -> float:
        """No choice costs less. costs: of choices, of one node after the other; cells: of the pairs of classes of each
        edge, likewise. Neither is negative, and what is infinite is so as `narrow` leaves it. Messages are passed until
        the bound is `enough`, or will not be.
        """
        # What costs as much as is enough need not be told from what is forbidden.
        most = 2.0 * enough
        flat, cells = np.minimum(costs, most), np.minimum(cells, most)
        messages = self.messages = np.zeros(len(self.messages))
        best = 0.0
        if enough <= 0.0:
            return best
        sides = compiled_sweep.sides(self._flat, cells)
        for _ in range(SWEEPS):
            before = best
            for forward in (True, False):
                best = max(best, compiled_sweep.sweep(sides, flat, messages, forward))
            if best + HOPE * (best - before) < enough or best >= enough:
                break
        return best

    def found(self, costs: FloatArray, cells: FloatArray) -> IntArray | None:
        """A choice of every node that nothing forbids; None where it is not found by going from node to node as the
        messages of the last bound say, and leaving the others what goes together.
        """
        choice = np.zeros(len(self._sides.base) - 1, dtype=np.int64)
        forbids = np.logical_or.reduceat(np.isinf(cells), self._starts) if len(cells) else np.zeros(0, dtype=bool)
        given = (self._flat, costs, cells, self.messages, forbids, choice, TRIES_PER_NODE)
        return choice if compiled_moves.decode_consistently(*given) else None

    def narrow(self, alive: BoolArray, cells: FloatArray) -> bool:
        """Leave of choices, of one node after the other, those that go together, in place. Whether that is none of some
        node's. cells: as of `bound`.
        """
        counts = np.add.reduceat(alive.astype(np.int64), self._sides.base[:-1])
        return not counts.all() or compiled_presolve.narrow(self._sides, np.isfinite(cells), alive) >= 0

    def split(self, alive: BoolArray) -> list[BoolArray]:
        """Of choices, of one node after the other, those of each node."""
        return np.split(alive, self._sides.base[1:-1])
