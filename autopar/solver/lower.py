"""Lower bounds of problems that differ in their costs alone: what joins what is laid out in arrays once."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver import compiled, compiled_presolve, compiled_sweep
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
        self.alive: list[BoolArray] | None = None
        """What the last bound left of the choices; None: nothing of some node's."""

    def bound(self, costs: Sequence[FloatArray], cells: FloatArray, enough: float) -> float:
        """No choice costs less. costs: of nodes; cells: of the pairs of classes of each edge, one edge after the other.
        Neither is negative. Messages are passed until the bound is `enough`, or will not be.
        """
        flat = np.concatenate(costs)
        alive = np.isfinite(flat)
        self.alive = None
        if self._forbids(alive, cells):
            return np.inf
        self.alive = np.split(alive, self._sides.base[1:-1])
        # What costs as much as is enough need not be told from what is forbidden.
        most = 2.0 * enough
        flat, cells = np.where(alive, np.minimum(flat, most), most), np.minimum(cells, most)
        messages = np.zeros(int((self._flat.into_v + self._flat.width)[-1]) if len(self._flat.u) else 0)
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

    def forbids_all(self, alive: Sequence[BoolArray], cells: FloatArray) -> bool:
        """Whether what cells forbid, as of `bound`, leaves some node none of these choices."""
        return self._forbids(np.concatenate(alive), cells)

    def _forbids(self, alive: BoolArray, cells: FloatArray) -> bool:
        """As `forbids_all`, of all choices one after the other; else `alive` is left what goes together, in place."""
        counts = np.add.reduceat(alive.astype(np.int64), self._sides.base[:-1])
        return not counts.all() or compiled_presolve.narrow(self._sides, np.isfinite(cells), alive) >= 0
