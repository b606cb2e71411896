"""What a search has done so far, in the seconds that it is worth: a clock that every machine reads alike.

A search that ends by the clock of a machine finds another answer on a busy one. So what takes time is counted, and
priced at what it took where it was measured, on one core of an Intel Xeon at 2.6 GHz that others used, too. Prices need
not be exact: they say when something else is tried, and when to end.
"""

from __future__ import annotations

from collections.abc import Callable

from autopar.solver.graph import Graph

LASTING_SECONDS_A_CELL, PASS_SECONDS_A_CELL = 8e-9, 2e-9
"""Compiled messages there and back, of the costs of edges: until they have settled, with what is looked for; and some
once and a half what a pass takes.
"""
PASS_SECONDS_AN_EDGE = 4e-5
"""Of messages that numpy passes, beside that of the cells."""
SECONDS_A_STEP = 3e-5
"""Of eliminating a node."""
SECONDS_A_NODE, SECONDS_A_PAIR = 1e-4, 2e-8
"""Of a graph that is presolved: nodes and edges, and cells of the costs of edges."""
MASTER_SECONDS, MASTER_SECONDS_A_COEFFICIENT = 1e-2, 1e-6
PROGRAM_SECONDS_A_VARIABLE, PROGRAM_SECONDS_A_PIVOT = 2e-5, 6e-8
"""Of an integer program: of making it, and of an iteration of the simplex algorithm, for each variable."""
NET = 10.0
"""So many times what it is given, by the clock of the machine, ends a program that counts do not."""


class Work:
    """Seconds that were spent. clock: of the machine, where seconds are not to be counted.

    is_ended_by_clock: whether something was ended by the machine's clock after all, so that another machine may find
    something else.
    """

    def __init__(self, clock: Callable[[], float] | None = None) -> None:
        self._clock, self._spent_s, self.is_ended_by_clock = clock, 0.0, clock is not None

    def __call__(self) -> float:
        return self._spent_s if self._clock is None else self._clock()

    @property
    def counts(self) -> bool:
        """Whether seconds are counted."""
        return self._clock is None

    def spend(self, seconds: float) -> None:
        """Count what was done."""
        self._spent_s += seconds

    def presolve(self, graph: Graph) -> None:
        """Count a presolving that led to this graph."""
        self.spend(presolving_s(graph))


def presolving_s(graph: Graph) -> float:
    """What presolving a graph takes."""
    pairs = sum(edge.costs.size for edge in graph.edges)
    return SECONDS_A_NODE * (len(graph.costs) + len(graph.edges)) + SECONDS_A_PAIR * pairs
