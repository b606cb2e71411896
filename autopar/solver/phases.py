"""The phases between presolve and answer: prices, blending, fixing, the integer program; all report to a `Search`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.solver.branching import branch, dive
from autopar.solver.consistency import Domains
from autopar.solver.crossover import blend
from autopar.solver.exact import num_pairs
from autopar.solver.fixing import below, reduced_costs
from autopar.solver.graph import Graph
from autopar.solver.narrowing import find_prices
from autopar.solver.oracle import Oracle
from autopar.solver.pool import combine, run_program, with_best
from autopar.solver.prices import ascend, refresh
from autopar.solver.problem import FloatArray, IntArray
from autopar.solver.search import Search, column_of
from autopar.solver.settle import Settled, settle, untangle
from autopar.solver.volume import ascend_by_volume

MAX_FIXINGS = 4
WORTH_REPEATING = 0.7
POOLED_GAP = 0.05
TANGLED_GAP = 0.4
"""Messages are given up where n sweeps leave n times less; where they converge in time, they leave far less."""
SHARE_OF_TIME = 0.8
EFFORT_GROWTH = 3
POOL_COLUMNS = 24
POOL_SECONDS = 10.0
POOL_PAIRS = 60_000
VOLUME_SHARE = 0.15
ANNEALING_SHARE = 0.3
MIX_SECONDS = 20.0
MIX_PAIRS = 120_000
BRANCHING_SHARE = 0.5
NARROW_CELLS = 2e7
"""Cells of costs from which prices are first sought among few choices."""
PROBES = (0.1, 0.25, 0.5, 1.0)
PROBE_PAIRS = 60_000
PROBE_SIZE = 0.35
PROBE_SHARE_OF_TIME = 0.3


def minimise(graph: Graph, search: Search, prices: FloatArray, find_fitting: Callable[[], None] | None = None) -> None:
    """Search the graph (presolved) until closed or late. `find_fitting` is called if nothing that fits turns up.

    Where the search is `anytime`, what time is left after the last phase goes into better choices.
    """
    prices = _minimise(graph, search, prices, find_fitting)
    search.price = float(prices.sum())
    if search.anytime and search.choice is not None and _open(search):
        from autopar.solver.improving import keep_improving  # it loads numba

        keep_improving(graph, search, prices)


def _minimise(graph: Graph, search: Search, prices: FloatArray, find_fitting: Callable[[], None] | None) -> FloatArray:
    """The phases, once each; returns the last prices."""
    pooled, branched = np.inf, False
    for repeat in range(MAX_FIXINGS):
        settled = settle(graph)
        if isinstance(settled, Domains):
            search.raise_bound(np.inf, "consistency")
            return prices
        # Where memory is priced, messages tell more than the least: many good choices, and what each choice costs.
        tables = None if graph.num_points else settled.easy
        plan = settled.working_plan if tables is None else settled.plan
        if plan.whole and not search.anytime:
            _load_loops(search)
        oracle = Oracle(settled.graph, plan, tables, compiles=plan.whole or search.anytime)
        untangles = repeat == 0 and tables is None and settled.buckets is not None
        if settled.large and search.target.overload_price is None:
            prices, fixed = _minimise_large(oracle, search, prices, find_fitting)
            if fixed is None:
                return prices
            graph = fixed
            continue
        if repeat == 0 and plan.whole and search.target.overload_price is None and _is_long(settled.graph):
            prices = find_prices(oracle, search, prices)
            find_fitting = _fit(oracle, search, prices, find_fitting)
            _solve_pool(oracle.graph, search, prices)
        prices = ascend(oracle, search, prices, EFFORT_GROWTH**repeat, TANGLED_GAP if untangles else np.inf)
        find_fitting = _fit(oracle, search, prices, find_fitting)
        if not _open(search):
            return prices
        given_up = untangles and search.relative_gap > POOLED_GAP
        if not given_up and (repeat == 0 or search.cost < pooled):
            _solve_pool(oracle.graph, search, prices)
            pooled = search.cost
        if prices.any() and not branched and search.choice is not None and _open(search):
            branched = True
            smaller = _fix(oracle, search, prices)
            if smaller is not None:
                branch(smaller, search, prices, BRANCHING_SHARE * search.seconds_left)
        if search.choice is not None:
            search.gap = max(search.gap, search.proof_gap)
        if untangles and not prices.any() and _open(search):
            _eliminate_all(settled, oracle, search)
        if settled.whole and _open(search):
            refresh(oracle, search, prices)
            dive(oracle, search, prices)
        if not _open(search):
            return prices
        if search.choice is None:
            search.raise_bound(run_program(oracle.graph, search, prices, search.seconds_left), "program")
            return prices
        fixed = _fix(oracle, search, prices)
        if fixed is None:
            return prices
        little = sum(fixed.num_choices) > WORTH_REPEATING * sum(oracle.graph.num_choices)
        if repeat == MAX_FIXINGS - 1 or (repeat and little):
            _probe(oracle, search, prices)
            return prices
        graph = fixed
    return prices


def _minimise_large(
    oracle: Oracle, search: Search, prices: FloatArray, find_fitting: Callable[[], None] | None
) -> tuple[FloatArray, Graph | None]:
    """(prices, the graph without what they rule out; None: nothing more is to be had from it)."""
    from autopar.solver.improving import anneal_for  # it loads numba

    prices, choices = ascend_by_volume(oracle, search, prices, VOLUME_SHARE * search.seconds_left)
    if _open(search):
        anneal_for(oracle.graph, search, prices, ANNEALING_SHARE * search.seconds_left, choices[-1])
    if _open(search):
        combine(oracle.graph, with_best(choices, oracle.graph, search), search, prices, MIX_SECONDS, MIX_PAIRS)
    if search.choice is None and find_fitting is not None:
        find_fitting()
    if search.choice is None or not _open(search):
        return prices, None
    fixed = _fix(oracle, search, prices)
    if fixed is None or sum(fixed.num_choices) > WORTH_REPEATING * sum(oracle.graph.num_choices):
        return prices, None
    return prices, fixed


def _is_long(graph: Graph) -> bool:
    """Whether prices are too dear to be tried on all choices."""
    return bool(graph.num_points) and sum(edge.costs.size for edge in graph.edges) >= NARROW_CELLS


def _load_loops(search: Search) -> None:
    """Compile what is compiled, on time that is not the search's: how good its answer is should not depend on whether
    it is the first on a machine.
    """
    from autopar.solver.compiled_messages import load

    start = search.clock()
    load()
    search.deadline += search.clock() - start


def _fit(
    oracle: Oracle, search: Search, prices: FloatArray, find_fitting: Callable[[], None] | None
) -> Callable[[], None] | None:
    """Blend what fits with what does not; `find_fitting` is called, once, if nothing fits (returned if not)."""
    _blend_columns(oracle, search, prices)
    if search.choice is not None or find_fitting is None:
        return find_fitting
    find_fitting()
    _blend_columns(oracle, search, prices)
    return None


def _open(search: Search) -> bool:
    return not (search.closed or search.late or search.bound == np.inf)


def _eliminate_all(settled: Settled, oracle: Oracle, search: Search) -> None:
    """The cheapest choice without the limit, by tables. If it fits, nothing is better; else its cost is a bound."""
    free = untangle(settled, SHARE_OF_TIME * search.seconds_left)
    if free is None:
        return
    exact = Oracle(free.graph, free.plan, free.buckets)

    def offer(choice: IntArray) -> float:
        here = oracle.graph.choice_here(free.graph.original_choice(choice))
        assert here is not None, "the graph without the limit has no choices of its own"
        return search.offer(column_of(oracle.graph, oracle.evaluator, oracle.memory, here))

    exact.set_prices(np.zeros(0))
    search.raise_bound(exact.run(offer, np.inf, lambda _: 0.0, 0, 1, lambda: search.late), "tables")


def _blend_columns(oracle: Oracle, search: Search, prices: FloatArray) -> None:
    """Offer blends of the columns that do not fit with those that do, cheapest at the prices first."""
    if search.target.overload_price is not None or not prices.any() or search.closed:
        return
    ranked = sorted(search.columns, key=lambda c: c.cost + float(prices @ c.profile))
    fits = [np.isfinite(search.target.objective(c.cost, c.peak)) for c in ranked]
    fitting = [c for c, fit in zip(ranked, fits, strict=True) if fit][:4]
    cheaper = [c for c, fit in zip(ranked, fits, strict=True) if not fit and c.cost < search.cost][:6]
    here = {c.choice: oracle.graph.choice_here(c.choice) for c in (*fitting, *cheaper)}
    for high in fitting:
        for low in cheaper:
            to, start = here[high.choice], here[low.choice]
            if to is not None and start is not None and not search.late:
                mixed = blend(oracle.evaluator, oracle.memory, search.target.limit, start, to)
                if mixed is not None:
                    search.offer(column_of(oracle.graph, oracle.evaluator, oracle.memory, mixed))


def _solve_pool(graph: Graph, search: Search, prices: FloatArray) -> None:
    """Combine the cheapest columns at the prices, and the best choice."""
    ranked = sorted(search.columns, key=lambda c: c.cost + float(prices @ c.profile))
    used = ranked[:POOL_COLUMNS] + [c for c in ranked if c.choice == search.choice]
    here = [choice for column in used if (choice := graph.choice_here(column.choice)) is not None]
    if here:
        combine(graph, here, search, prices, min(POOL_SECONDS, 0.3 * search.seconds_left), POOL_PAIRS)


def _fix(oracle: Oracle, search: Search, prices: FloatArray) -> Graph | None:
    """The graph without the choices that cannot improve on the incumbent by half the gap; None: closed."""
    refresh(oracle, search, prices)
    if search.closed:
        return None
    threshold = search.cost - 0.5 * search.tolerance(search.cost)
    smaller = below(oracle, *reduced_costs(oracle, _limit_cost(search, prices)), threshold)
    search.floor = min(search.floor, threshold)
    if smaller is None:
        search.raise_bound(np.inf, "fixing")
    return smaller


def _probe(oracle: Oracle, search: Search, prices: FloatArray) -> None:
    """Integer programs over the choices with the lowest reduced costs, more of them each time, until the gap is closed.

    Everything cheaper than the threshold survives, so min(threshold, bound of the program) bounds the whole graph: a
    small program that finds something cheaper than its own threshold has proven it.
    """
    refresh(oracle, search, prices)
    bound, grown = reduced_costs(oracle, _limit_cost(search, prices))
    whole = below(oracle, bound, grown, search.cost - 0.5 * search.tolerance(search.cost))
    enough = PROBE_SIZE * (num_pairs(whole) if whole is not None else 0)
    for share in PROBES:
        if not _open(search):
            return
        last = share == PROBES[-1]
        threshold = min(bound + share * (search.cost - bound), search.cost - 0.5 * search.tolerance(search.cost))
        smaller = below(oracle, bound, grown, threshold)
        proven = np.inf
        if smaller is not None:
            if not last and num_pairs(smaller) > min(enough, PROBE_PAIRS):
                continue
            seconds = search.seconds_left * (1.0 if last else PROBE_SHARE_OF_TIME)
            proven = run_program(smaller, search, prices, seconds)
        search.raise_bound(min(threshold, proven), "program")


def _limit_cost(search: Search, prices: FloatArray) -> float:
    return float(prices.sum()) * search.target.limit if prices.any() else 0.0
