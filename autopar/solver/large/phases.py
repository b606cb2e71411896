"""The phases of large graphs: prices by volume, choices by annealing, and what can be made of both."""

from __future__ import annotations

from collections.abc import Callable

from autopar.solver.fixing import WORTH_REPEATING, fix
from autopar.solver.graph import Graph
from autopar.solver.large.improving import anneal_for
from autopar.solver.large.volume import ascend_by_volume
from autopar.solver.oracle import Oracle
from autopar.solver.pool import combine, with_best
from autopar.solver.problem import FloatArray
from autopar.solver.search import Search

VOLUME_SHARE = 0.15
ANNEALING_SHARE = 0.3
MIX_SECONDS = 20.0
MIX_PAIRS = 120_000


def minimise_large(
    oracle: Oracle, search: Search, prices: FloatArray, find_fitting: Callable[[], None] | None
) -> tuple[FloatArray, Graph | None]:
    """(prices, the graph without what they rule out; None: nothing more is to be had from it)."""
    prices, choices = ascend_by_volume(oracle, search, prices, VOLUME_SHARE * search.seconds_left)
    if search.is_open:
        anneal_for(oracle.graph, search, prices, ANNEALING_SHARE * search.seconds_left, choices[-1])
    if search.is_open:
        combine(oracle.graph, with_best(choices, oracle.graph, search), search, prices, MIX_SECONDS, MIX_PAIRS)
    if search.choice is None and find_fitting is not None:
        find_fitting()
    if search.choice is None or not search.is_open:
        return prices, None
    fixed = fix(oracle, search, prices)
    if fixed is None or sum(fixed.num_choices) > WORTH_REPEATING * sum(oracle.graph.num_choices):
        return prices, None
    return prices, fixed
