"""Prices sought among few choices, branch and bound, dives, answers made of several: against brute force."""

from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import AssignmentProblem, Node, Usage, narrowing, solve
from autopar.solver import settle as settling
from autopar.solver.branching import branch, dive
from autopar.solver.consistency import Domains
from autopar.solver.eliminate import Plan
from autopar.solver.graph import from_problem
from autopar.solver.memory import binding_points
from autopar.solver.narrowing import find_prices
from autopar.solver.oracle import Oracle
from autopar.solver.pool import combine
from autopar.solver.presolve import presolve
from autopar.solver.prices import ascend, refresh
from autopar.solver.problem import FloatArray
from autopar.solver.search import Search, Target
from tests.unit.solver.instances import brute_force, dense_problems, layered

SOME = settings(max_examples=60, deadline=None, derandomize=True)


def begun(problem: AssignmentProblem, whole: bool = False) -> tuple[Oracle, Search] | None:
    """Before anything is known; None where no choice is consistent."""
    assert problem.usage_limit is not None
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = presolve(from_problem(problem, usages, num_points))
    settled = graph if isinstance(graph, Domains) else settling.settle(graph)
    if isinstance(settled, Domains):
        return None
    search = Search(Target(problem.usage_limit), 1e-7, 60.0)
    plan = Plan(settled.graph, eliminates=False) if whole else settled.plan
    return Oracle(settled.graph, plan, compiles=whole), search


def priced(problem: AssignmentProblem) -> tuple[Oracle, Search, FloatArray] | None:
    """After prices alone, before any program; None where no choice is consistent."""
    start = begun(problem)
    if start is None:
        return None
    oracle, search = start
    return oracle, search, ascend(oracle, search, np.zeros(oracle.graph.num_points))


def limited(problem: AssignmentProblem, room: int) -> AssignmentProblem | None:
    """The problem with so much more memory than the least that will do; None where nothing will do."""
    peak = brute_force(problem).peak
    return replace(problem, usage_limit=peak + room) if np.isfinite(peak) else None


def check(problem: AssignmentProblem, search: Search) -> None:
    best = brute_force(problem).cost
    assert search.bound <= best + 1e-9 * max(1.0, abs(best))
    if search.choice is not None:
        assert problem.fits(search.choice)
        assert search.cost == pytest.approx(problem.evaluate(search.choice), abs=1e-9)
        assert search.cost >= best - 1e-9


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 4))
def test_branches_and_dives_keep_the_optimum(problem: AssignmentProblem, room: int) -> None:
    """Breaks if a split loses choices, a part's bound counts for the whole, or what a dive leaves out is forgotten."""
    case = limited(problem, room)
    for step in (dive, lambda oracle, search, prices: branch(oracle.graph, search, prices, 30.0)):
        start = None if case is None else priced(case)
        if case is None or start is None:
            return
        oracle, search, prices = start
        before = search.bound
        step(oracle, search, prices)
        assert search.bound >= before
        check(case, search)


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 4))
def test_prices_of_the_few_are_prices_of_all(problem: AssignmentProblem, room: int) -> None:
    """Breaks if a bound of the few counts for all, or the few are so few that nothing is found among them."""
    case = limited(problem, room)
    start = None if case is None else begun(case, whole=True)
    if case is None or start is None:
        return
    oracle, search = start
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(narrowing, "FEWEST_CELLS", 8)
        patch.setattr(narrowing, "SHARE_OF_CELLS", 0.3)
        prices = find_prices(oracle, search, np.zeros(oracle.graph.num_points))
    assert (prices >= 0).all()
    check(case, search)


@pytest.mark.moderate
def test_prices_of_the_few_are_near_the_best_ones() -> None:
    """Breaks if the bound at prices found among a tenth of the cells is far below the one at prices found among all."""
    free = layered(1, 60, 24, 16)
    limit = 0.85 * free.peak(solve(free).choice)[1]
    bounds: list[float] = []
    for among_few in (True, False):
        start = begun(replace(free, usage_limit=limit), whole=True)
        assert start is not None
        oracle, search = start
        prices = np.zeros(oracle.graph.num_points)
        if among_few:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(narrowing, "FEWEST_CELLS", 0.1 * sum(e.costs.size for e in oracle.graph.edges))
                prices = find_prices(oracle, search, prices)
            assert prices.any()
            refresh(oracle, search, prices)
        else:
            ascend(oracle, search, prices)
        bounds.append(search.bound)
    assert bounds[0] >= bounds[1] - 0.01 * abs(bounds[1])


@pytest.mark.moderate
def test_prices_are_not_sought_where_memory_is_to_spare() -> None:
    """Breaks if what fits anyway is priced."""
    problem = layered(1, 30, 5)
    start = begun(replace(problem, usage_limit=2 * problem.peak(solve(problem).choice)[1]), whole=True)
    assert start is not None
    oracle, search = start
    assert not find_prices(oracle, search, np.zeros(oracle.graph.num_points)).any()
    assert search.choice is not None


def test_branches_close_what_prices_cannot() -> None:
    """Of three that cost 10 without their 7 bytes each, one fits into 10 bytes: 20. Prices alone prove that
    ten sevenths of them do not pay.
    """
    usage = Usage(0, 1, np.array([7.0, 0.0]))
    problem = AssignmentProblem(
        tuple(Node(f"n{i}", np.array([0.0, 10.0 + 1e-3 * i]), (usage,)) for i in range(3)), usage_limit=10.0
    )
    start = priced(problem)
    assert start is not None
    oracle, search, prices = start
    assert search.bound == pytest.approx(10.0 + 10.001 * 4 / 7, rel=1e-3)
    branch(oracle.graph, search, prices, 30.0)
    assert search.closed
    assert search.cost == pytest.approx(20.001)


def test_choices_that_do_not_fit_are_combined_into_one_that_does() -> None:
    """Breaks if the pieces of several choices are not weighed against the limit together."""
    nodes = tuple(Node(f"n{i}", np.array([0.0, 1.0 + i]), (Usage(0, 1, np.array([4.0, 1.0])),)) for i in range(3))
    problem = AssignmentProblem(nodes, usage_limit=9.0)
    usages, num_points = binding_points([node.usages for node in nodes])
    graph = from_problem(problem, usages, num_points)
    search = Search(Target(9.0), 1e-7, 60.0)
    choices = [np.array([0, 0, 0]), np.array([1, 1, 1])]
    combine(graph, choices, search, np.zeros(num_points), 10.0, 1000)
    assert search.choice == (1, 0, 0)
    assert search.cost == 1.0
