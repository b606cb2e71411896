"""The phases between presolve and answer: prices, blending, fixing, the integer program; all report to a `Search`."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from autopar.solver.branching import branch, dive
from autopar.solver.consistency import Domains
from autopar.solver.crossover import blend
from autopar.solver.exact import num_pairs
from autopar.solver.fixing import WORTH_REPEATING, below, fix, limit_paid, reduced_costs
from autopar.solver.graph import Graph
from autopar.solver.methods import Method, is_quick, is_wide, method_for
from autopar.solver.narrowing import find_prices
from autopar.solver.oracle import Oracle
from autopar.solver.pool import combine, run_program
from autopar.solver.prices import ascend, refresh
from autopar.solver.problem import FloatArray, IntArray
from autopar.solver.search import Search, column_of
from autopar.solver.settle import Settled, settle, untangle

MAX_FIXINGS = 4
POOLED_GAP = 0.05
TANGLED_GAP = 0.4
"""Messages are given up where n sweeps leave n times less; where they converge in time, they leave far less."""
SHARE_OF_TIME = 0.8
EFFORT_GROWTH = 3
POOL_COLUMNS = 24
POOL_SECONDS = 10.0
POOL_PAIRS = 60_000
BRANCHING_SHARE = 0.5
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
    if search.anytime and search.choice is not None and search.is_open:
        from autopar.solver.large.improving import keep_improving  # it loads numba

        keep_improving(graph, search, prices)


def _minimise(graph: Graph, search: Search, prices: FloatArray, find_fitting: Callable[[], None] | None) -> FloatArray:
    """The phases, once each; returns the last prices."""
    pooled, branched = np.inf, False
    for repeat in range(MAX_FIXINGS):
        settled = settle(graph, anytime=search.anytime)
        if isinstance(settled, Domains):
            search.raise_bound(np.inf, "consistency")
            return prices
        priced = bool(settled.graph.num_points)
        method = method_for(settled.size, search.target.sought, priced=priced, anytime=search.anytime)
        if method.whole and not search.anytime:
            _load_loops(search)
        # Where memory is priced, messages tell more than the least: many good choices, and what each choice costs.
        tables = settled.buckets if method is Method.TABLES else None
        plan, compiles = settled.working_plan(method), method.compiles(search.anytime)
        oracle = Oracle(settled.graph, plan, tables, compiles, search.clock)
        lasting = method is Method.LOOPS and not priced and is_quick(settled.size)
        untangles = repeat == 0 and tables is None and settled.may_untangle
        if method is Method.LARGE:
            from autopar.solver.large.phases import minimise_large  # it loads numba

            prices, fixed = minimise_large(oracle, search, prices, find_fitting)
            if fixed is None:
                return prices
            graph = fixed
            continue
        if repeat == 0 and method is Method.NARROWED:
            prices = find_prices(oracle, search, prices)
            find_fitting = _fit(oracle, search, prices, find_fitting)
            _solve_pool(oracle.graph, search, prices)
        hopeless = TANGLED_GAP if untangles else np.inf
        prices = ascend(oracle, search, prices, EFFORT_GROWTH**repeat, hopeless, lasting=lasting)
        find_fitting = _fit(oracle, search, prices, find_fitting)
        if lasting:
            search.gap = max(search.gap, search.standing_gap)
        if not search.is_open:
            return prices
        given_up = untangles and not lasting and search.relative_gap > POOLED_GAP
        if not given_up and (repeat == 0 or search.cost < pooled):
            _solve_pool(oracle.graph, search, prices)
            pooled = search.cost
        if prices.any() and not branched and search.choice is not None and search.is_open:
            branched = True
            smaller = fix(oracle, search, prices)
            if smaller is not None:
                branch(smaller, search, prices, BRANCHING_SHARE * search.seconds_left)
        if search.choice is not None:
            search.gap = max(search.gap, search.proof_gap)
        if untangles and not prices.any() and search.is_open:
            _eliminate_all(settled, oracle, search)
        if is_wide(settled.size) and search.is_open:
            refresh(oracle, search, prices)
            dive(oracle, search, prices)
        if not search.is_open:
            return prices
        if search.choice is None:
            search.raise_bound(run_program(oracle.graph, search, prices, search.seconds_left), "program")
            return prices
        fixed = fix(oracle, search, prices)
        if fixed is None:
            return prices
        little = sum(fixed.num_choices) > WORTH_REPEATING * sum(oracle.graph.num_choices)
        if repeat == MAX_FIXINGS - 1 or (repeat and little):
            _probe(oracle, search, prices)
            return prices
        graph = fixed
    return prices


def _load_loops(search: Search) -> None:
    """Compile what is compiled, on time that is not the search's: how good its answer is should not depend on whether
    it is the first on a machine.
    """
    start = search.clock()
    from autopar.solver.compiled_messages import load  # numba, which takes seconds where nothing of it was read before

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


def _eliminate_all(settled: Settled, oracle: Oracle, search: Search) -> None:
    """The cheapest choice without the limit, by tables. If it fits, nothing is better; else its cost is a bound."""
    free = untangle(settled, SHARE_OF_TIME * search.seconds_left)
    if free is None:
        return
    exact = Oracle(free.graph, free.plan, free.buckets, clock=search.clock)

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


def _probe(oracle: Oracle, search: Search, prices: FloatArray) -> None:
    """Integer programs over the choices with the lowest reduced costs, more of them each time, until the gap is closed.

    Everything cheaper than the threshold survives, so min(threshold, bound of the program) bounds the whole graph: a
    small program that finds something cheaper than its own threshold has proven it.
    """
    refresh(oracle, search, prices)
    bound, grown = reduced_costs(oracle, limit_paid(search, prices))
    whole = below(oracle, bound, grown, search.cost - 0.5 * search.tolerance(search.cost))
    enough = PROBE_SIZE * (num_pairs(whole) if whole is not None else 0)
    for share in PROBES:
        if not search.is_open:
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
