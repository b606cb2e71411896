"""Branch and bound on memory prices, dives above the bound, and answers made of several, against brute force."""

import time
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import AssignmentProblem, Node, Usage
from autopar.solver import settle as settling
from autopar.solver.branching import branch, dive
from autopar.solver.consistency import Domains
from autopar.solver.graph import from_problem
from autopar.solver.memory import binding_points
from autopar.solver.oracle import Oracle
from autopar.solver.pool import combine
from autopar.solver.presolve import presolve
from autopar.solver.prices import ascend
from autopar.solver.problem import FloatArray
from autopar.solver.search import Search, Target
from tests.unit.solver.instances import brute_force, dense_problems

SOME = settings(max_examples=60, deadline=None, derandomize=True)


def priced(problem: AssignmentProblem) -> tuple[Oracle, Search, FloatArray] | None:
    """After prices alone, before any program; None where no choice is consistent."""
    assert problem.usage_limit is not None
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = presolve(from_problem(problem, usages, num_points))
    settled = graph if isinstance(graph, Domains) else settling.settle(graph)
    if isinstance(settled, Domains):
        return None
    search = Search(Target(problem.usage_limit), 1e-7, time.process_time() + 60.0)
    oracle = Oracle(settled.graph, settled.plan)
    return oracle, search, ascend(oracle, search, np.zeros(num_points))


def limited(problem: AssignmentProblem, room: int) -> tuple[AssignmentProblem, float] | None:
    """The problem with so much more memory than the least that will do, and its best cost."""
    peak = brute_force(problem).peak
    if not np.isfinite(peak):
        return None
    problem = replace(problem, usage_limit=peak + room)
    return problem, brute_force(problem).cost


def check(problem: AssignmentProblem, search: Search, best: float) -> None:
    assert search.bound <= best + 1e-9 * max(1.0, abs(best))
    if search.choice is not None:
        assert problem.fits(search.choice)
        assert search.cost == pytest.approx(problem.evaluate(search.choice), abs=1e-9)
        assert search.cost >= best - 1e-9


@SOME
@given(dense_problems, st.integers(0, 4))
def test_branches_keep_the_optimum(problem: AssignmentProblem, room: int) -> None:
    """Breaks if a split loses choices, or a part's bound counts for the whole."""
    case = limited(problem, room)
    start = None if case is None else priced(case[0])
    if case is None or start is None:
        return
    oracle, search, prices = start
    before = search.bound
    branch(oracle.graph, search, prices, 30.0)
    assert search.bound >= before
    check(case[0], search, case[1])


@SOME
@given(dense_problems, st.integers(0, 4))
def test_dives_keep_the_optimum(problem: AssignmentProblem, room: int) -> None:
    """Breaks if what is left out above the threshold is not counted in the bound."""
    case = limited(problem, room)
    start = None if case is None else priced(case[0])
    if case is None or start is None:
        return
    oracle, search, prices = start
    dive(oracle, search, prices)
    check(case[0], search, case[1])


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
    search = Search(Target(9.0), 1e-7, time.process_time() + 60.0)
    choices = [np.array([0, 0, 0]), np.array([1, 1, 1])]
    combine(graph, choices, search, np.zeros(num_points), 10.0, 1000)
    assert search.choice == (1, 0, 0)
    assert search.cost == 1.0
