"""Which method searches a graph, by its size. The only place where sizes decide; the first row that holds names it.

    what is sought     the core                             tables       method
    -----------------  -----------------------------------  -----------  --------
    a cheapest choice  >= 20,000 edges (>= 3,000 if         > 1e10       LARGE
                       anytime), no memory priced
    a cheapest choice  the same, memory priced              any          LARGE
    cost or peak       no memory priced                     <= 2e7       TABLES
    a cheapest choice  that of LOOPS, memory priced, and    any          NARROWED
                       >= 2e7 pairs before elimination
    anything           >= 500 edges or >= 5e6 pairs         any          LOOPS
    anything           smaller                              any          MESSAGES

    TABLES    eliminates the core exactly (`buckets`): no messages, no programs.
    MESSAGES  passes messages on the core, at prices of a master problem; then pool, branching, fixing, programs.
    LOOPS     the same on the whole graph, by compiled loops, with dives: eliminating at every price takes longer. Where
              nothing is priced, messages are passed until they have settled.
    NARROWED  LOOPS; prices are first sought among the few choices that matter (`narrowing`): a pass over all is long.
    LARGE     prices by the volume algorithm, choices by annealing, and programs over what both came to (`large`).

The *core* is what eliminating nodes of two neighbours or fewer leaves; *pairs* are cells of the costs of edges;
*tables* the cells it takes to eliminate the core. A least peak prices the bytes themselves, which LARGE and NARROWED
know nothing of. A part of a problem (`parts`) is asked for its messages, which tables do not have: its rows are LOOPS
and MESSAGES.

Where 6 seconds are all there is, as in placement, LOOPS came nearer on all cores of more than 3,000 edges that were
measured: with memory priced (ResNet-101, 3,267: 0.1% to 0.4% where LARGE leaves 3% to 13%), and without (a PP-OCRv5
recognizer, 4,745: 0.08% and 0.02% in 4 s, where it leaves 14% and 6% in 7 to 10; a decoder of 65 unrolled steps,
15,026: a fifth of the cost in a quarter of the time). From where on LARGE gains is not measured; 20,000 is a guess.

An `anytime` search passes messages by compiled loops whatever its method, and goes on, when that is done, with what
improves choices of any size (`large.improving`): annealing, and neighbourhoods beside it where there are no more than
4,000 nodes.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum
from typing import Literal

import numpy as np


@dataclass(frozen=True, slots=True)
class Thresholds:
    """The numbers of the table.

    easy_cells: tables of so many are added up in a tenth of a second. most_cells: once, in a few seconds;
    cells_a_second: at this rate. most_kept: cells that are kept meanwhile (half a GB, less where they become single
    precision). undominated_share: the least share of the cells that leaving out dominated choices has been seen to
    leave. compiled_edges, compiled_pairs: from here on numba is worth its second of loading; long_edges: so it is for
    presolving alone. large_edges, large_edges_in_brief: from here on master problems and programs over all choices are
    out of reach, in minutes and in seconds. narrow_pairs: from here on, so are prices tried on all choices.
    neighbourhood_nodes: up to which presolving a neighbourhood is a matter of tenths of a second.
    """

    easy_cells: float = 2e7
    most_cells: float = 1e9
    most_kept: float = 6e7
    cells_a_second: float = 2e8
    undominated_share: float = 0.1
    compiled_edges: int = 500
    compiled_pairs: float = 5e6
    long_edges: int = 1000
    large_edges: int = 3000
    large_edges_in_brief: int = 20_000
    narrow_pairs: float = 2e7
    neighbourhood_nodes: int = 4000


THRESHOLDS = Thresholds()


@dataclass(frozen=True, slots=True)
class Size:
    """Of a graph: edges and pairs of its core, pairs of all its edges, cells of the tables that eliminate the core
    (np.inf: more than are looked at).
    """

    edges: int
    pairs: int
    all_pairs: int
    tables: float = np.inf


class Method(Enum):
    """The last column of the table."""

    TABLES = "tables"
    MESSAGES = "messages"
    LOOPS = "loops"
    NARROWED = "narrowed"
    LARGE = "large"

    @property
    def whole(self) -> bool:
        """Whether messages are passed on the whole graph, not on its core."""
        return self in (Method.LOOPS, Method.NARROWED, Method.LARGE)

    def compiles(self, anytime: bool) -> bool:
        """Whether messages are passed by compiled loops."""
        return self.whole or anytime


Sought = Literal["cost", "peak", "part"]


def method_for(size: Size, sought: Sought, *, priced: bool, anytime: bool = False) -> Method:
    """The method for a graph of this size. priced: it has points in time at which memory may bind."""
    least_edges = THRESHOLDS.large_edges if anytime else THRESHOLDS.large_edges_in_brief
    if sought == "cost" and size.edges >= least_edges and (priced or size.tables == np.inf):
        return Method.LARGE
    if sought != "part" and not priced and size.tables <= THRESHOLDS.easy_cells:
        return Method.TABLES
    if not is_wide(size):
        return Method.MESSAGES
    if sought == "cost" and priced and size.all_pairs >= THRESHOLDS.narrow_pairs:
        return Method.NARROWED
    return Method.LOOPS


def is_wide(size: Size) -> bool:
    """Whether passes over the core are many cells' work: the row of LOOPS. Dives are for such graphs only."""
    edges = min(THRESHOLDS.compiled_edges, THRESHOLDS.large_edges)
    return size.edges >= edges or size.pairs >= THRESHOLDS.compiled_pairs


def is_long(num_edges: int) -> bool:
    """Whether what Python takes for each edge of a graph outlasts the loading of compiled loops."""
    return num_edges >= THRESHOLDS.long_edges


def is_quick(size: Size) -> bool:
    """Whether compiled passes over a graph take so little that they go on until nothing moves any more."""
    return size.all_pairs < THRESHOLDS.narrow_pairs


def most_cells_planned(size: Size, *, priced: bool, anytime: bool = False) -> float:
    """Tables are planned up to so many cells, which may be fewer once dominated choices are left out; 0: not at all.
    Of graphs for quick LOOPS only those that are TABLES: more are planned where passes leave a gap.
    """
    if priced and size.edges >= THRESHOLDS.large_edges:
        return 0.0
    if not priced and not anytime and is_wide(size) and is_quick(size) and size.edges < THRESHOLDS.large_edges_in_brief:
        return THRESHOLDS.easy_cells
    return most_cells_asked()


def most_cells_asked() -> float:
    """The most cells that are planned."""
    return THRESHOLDS.most_cells / THRESHOLDS.undominated_share


def worth_untangling(cells: float, kept: float, seconds: float) -> bool:
    """Whether tables of so many cells, of which so many are kept, are added up once in so many seconds."""
    return cells <= min(THRESHOLDS.most_cells, THRESHOLDS.cells_a_second * seconds) and kept <= THRESHOLDS.most_kept


def draws_neighbourhoods(num_nodes: int) -> bool:
    """Whether neighbourhoods are solved beside annealing, in a graph with so many nodes that have neighbours."""
    return 1 < num_nodes <= THRESHOLDS.neighbourhood_nodes
