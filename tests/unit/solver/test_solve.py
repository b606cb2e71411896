"""The solver as a whole, against brute force on small problems and against its own promises on larger ones."""

import ast
import importlib
import itertools
from dataclasses import replace
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import autopar.solver
from autopar.solver import AssignmentProblem, Edge, Node, Usage, minimum_peak, solve
from tests.unit.solver.instances import brute_force, dense_problems, knots, layered, problems

EXACT = settings(max_examples=150, deadline=None, derandomize=True)
SOME = settings(max_examples=60, deadline=None, derandomize=True)


def assert_optimal(problem: AssignmentProblem) -> None:
    best = brute_force(problem).cost
    solution = solve(problem, gap=0.0)
    if not np.isfinite(best):
        assert (solution.status, solution.choice, solution.cost) == ("infeasible", (), np.inf)
        assert solution.conflict is not None
        return
    assert solution.status == "optimal"
    assert solution.cost == problem.evaluate(solution.choice) == pytest.approx(best, abs=1e-9)
    assert solution.bound <= best + 1e-9
    assert problem.fits(solution.choice)
    assert solution.peak_bytes == problem.peak(solution.choice)[1]


def test_what_fits_is_seen_at_the_points_of_its_search() -> None:
    """Breaks if a choice that is found where messages find none has bytes at points that the search does not have: its
    columns could not be put side by side then.
    """
    nodes = [Node(f"v{i}", np.ones(2), (Usage(i, i + 2, np.array([1, 2])),)) for i in range(3)]
    module = importlib.import_module("autopar.solver.solve")
    real, lengths = module.minimise, []

    def minimise(graph: Any, search: Any, prices: Any, find_fitting: Any = None) -> None:
        if find_fitting is None:  # of the smallest peak
            return real(graph, search, prices)
        find_fitting()
        lengths.append((len(prices), {len(column.profile) for column in search.columns}))

    with patch.object(module, "minimise", minimise):
        for limit in (None, 100, 3):
            assert solve(AssignmentProblem(tuple(nodes), usage_limit=limit)).choice
    assert [found for _, found in lengths] == [{points} for points, _ in lengths]
    assert lengths[0][0] == 0 < lengths[2][0]


@pytest.mark.moderate
@EXACT
@given(problems)
def test_optimum_without_limit(problem: AssignmentProblem) -> None:
    """Breaks if presolve, elimination, messages or the program lose an optimum, or claim a bound above it."""
    assert_optimal(problem)


@pytest.mark.moderate
@EXACT
@given(problems, st.integers(0, 20))
def test_optimum_under_any_limit(problem: AssignmentProblem, limit: int) -> None:
    """Breaks if a step is exact only without a memory price, or "infeasible" is claimed or missed."""
    assert_optimal(replace(problem, usage_limit=float(limit)))


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 3))
def test_optimum_of_dense_problems_under_a_tight_limit(problem: AssignmentProblem, room: int) -> None:
    """Breaks if a bound, a reduced cost or a blend is wrong where elimination leaves a core and few choices fit."""
    smallest = brute_force(problem).peak
    assert_optimal(replace(problem, usage_limit=smallest + room if np.isfinite(smallest) else 5.0))


@pytest.mark.slow
@SOME
@given(knots, st.sampled_from([None, 0.999, 1.0, 1.01, 1.3]))
def test_optimum_of_knots(problem: AssignmentProblem, room: float | None) -> None:
    """Breaks if joining parallel edges during elimination counts one twice, or loses the way its classes run."""
    answer = brute_force(problem)
    if room is not None:
        problem = replace(problem, usage_limit=answer.peak * room if np.isfinite(answer.peak) else 1.0)
    assert_optimal(problem)


@pytest.mark.moderate
@SOME
@given(dense_problems)
def test_minimum_peak(problem: AssignmentProblem) -> None:
    """Breaks if the limit found is not the smallest one that brute force can satisfy, or its bound is above it."""
    smallest = brute_force(problem).peak
    found = minimum_peak(problem, gap=0.0)
    assert found.bytes == smallest
    assert found.bound <= smallest + 1e-6
    if found.choice:
        assert np.isfinite(problem.evaluate(found.choice))


@SOME
@given(problems, st.floats(0.0, 0.5))
def test_requested_gap_is_kept(problem: AssignmentProblem, gap: float) -> None:
    """Breaks if "optimal" is said of a choice that is worse than promised."""
    best = brute_force(problem).cost
    solution = solve(problem, gap=gap)
    if solution.choice:
        assert solution.bound <= best + 1e-9
        assert solution.cost - best <= gap * abs(solution.cost) + 1e-6


def test_empty_problem() -> None:
    """Breaks if a model without decisions is an error."""
    solution = solve(AssignmentProblem((), (), 0.0))
    assert (solution.choice, solution.cost, solution.gap, solution.status) == ((), 0.0, 0.0, "optimal")


def test_single_node_takes_the_cheapest_choice_that_fits() -> None:
    """Breaks if a node without edges ignores the limit or its forbidden choices."""
    node = Node("w", np.array([np.inf, 1.0, 2.0, 3.0]), (Usage(0, 5, np.array([0.0, 9.0, 4.0, 1.0])),))
    assert solve(AssignmentProblem((node,))).choice == (1,)
    limited = solve(AssignmentProblem((node,), (), 5.0))
    assert limited.choice == (2,)
    assert limited.peak_bytes == 4.0


def test_nodes_with_one_choice() -> None:
    """Breaks if edges between decided nodes are not counted."""
    one = np.zeros(1, dtype=np.int64)
    nodes = (Node("a", np.array([1.0])), Node("b", np.array([2.0])))
    assert solve(AssignmentProblem(nodes, (Edge(0, 1, one, one, np.array([[4.0]])),))).cost == 7.0


def test_equal_costs_go_to_the_lower_index() -> None:
    """Breaks if the preferred (first) of equal choices is not kept, tied nodes included."""
    same = np.arange(3)
    tie = np.where(np.eye(3, dtype=bool), 0.0, np.inf)
    nodes = tuple(Node(name, np.zeros(3)) for name in "abc")
    solution = solve(AssignmentProblem(nodes, (Edge(0, 1, same, same, tie), Edge(2, 1, same, same, tie))))
    assert solution.choice == (0, 0, 0)


def test_parallel_edges_add_up() -> None:
    """Breaks if one of several edges between the same nodes, in either direction, is lost."""
    same = np.arange(2)
    nodes = (Node("a", np.zeros(2)), Node("b", np.zeros(2)))
    first = Edge(0, 1, same, same, np.array([[0.0, 3.0], [2.0, 2.0]]))
    second = Edge(1, 0, same, same, np.array([[4.0, 3.0], [5.0, 1.0]]))
    problem = AssignmentProblem(nodes, (first, second))
    costs = {choice: problem.evaluate(choice) for choice in itertools.product(range(2), repeat=2)}
    assert costs == {(0, 0): 4.0, (0, 1): 8.0, (1, 0): 5.0, (1, 1): 3.0}
    assert solve(problem).choice == (1, 1)


def test_conflict_names_exactly_the_edges_that_conflict() -> None:
    """Breaks if the explanation has edges that can be spared, or misses one."""
    same = np.arange(2)
    tie, opposite = np.array([[0.0, np.inf], [np.inf, 0.0]]), np.array([[np.inf, 0.0], [0.0, np.inf]])
    nodes = tuple(Node(name, np.zeros(2)) for name in "abcd")
    fixed = (Node("a", np.array([0.0, np.inf])), *nodes[1:])
    edges = (
        Edge(0, 1, same, same, tie),
        Edge(1, 3, same, same, np.ones((2, 2))),
        Edge(1, 2, same, same, tie),
        Edge(0, 2, same, same, opposite),
    )
    solution = solve(AssignmentProblem(fixed, edges))
    assert solution.status == "infeasible"
    assert (solution.conflict.nodes, solution.conflict.edges) == ((0, 1, 2), (0, 2, 3))
    assert "'a', 'b', 'c'" in solution.conflict.message and solution.excluded
    hidden = solve(AssignmentProblem(nodes, edges))
    assert hidden.status == "infeasible"
    assert hidden.conflict is not None and set(hidden.conflict.edges) >= {0, 2, 3}


def test_conflict_of_memory_says_how_much_would_do() -> None:
    """Breaks if an impossible limit is reported without the smallest possible one."""
    usage = Usage(0, 4, np.array([6.0, 5.0]))
    nodes = (Node("a", np.zeros(2), (usage,)), Node("b", np.zeros(2), (Usage(2, 3, np.array([3.0, 4.0])),)))
    solution = solve(AssignmentProblem(nodes, (), 7.0))
    assert solution.status == "infeasible"
    assert solution.conflict.needed_bytes == 8.0
    assert "at time 2" in solution.conflict.message and not solution.excluded


def test_memory_price_is_zero_where_the_limit_is_slack() -> None:
    """Breaks if callers cannot tell from the price whether more memory would help."""
    problem = layered(0)
    free = solve(problem)
    slack = solve(replace(problem, usage_limit=1.01 * free.peak_bytes))
    assert (slack.memory_price, slack.choice) == (0.0, free.choice)


@pytest.mark.moderate
@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("tightness", [0.5, 0.1, 0.02])
def test_gap_is_closed_under_a_binding_limit(seed: int, tightness: float) -> None:
    """Breaks if prices, blending or the program no longer reach 0.1% on a chain of 120 nodes."""
    problem = layered(seed)
    free, least = solve(problem), minimum_peak(problem)
    assert free.status == "optimal"
    limit = least.bytes + tightness * (free.peak_bytes - least.bytes)
    solution = solve(replace(problem, usage_limit=limit))
    assert solution.status == "optimal"
    assert solution.gap <= 1e-3
    assert solution.cost >= free.bound
    assert solution.peak_bytes <= limit * (1 + 1e-9)
    assert solution.memory_price > 0


@pytest.mark.moderate
def test_same_problem_same_answer() -> None:
    """Breaks if anything depends on hashing, timing or global random state."""
    problem = replace(layered(4), usage_limit=8e9)
    first, second = solve(problem), solve(problem)
    assert (first.choice, first.cost, first.bound) == (second.choice, second.cost, second.bound)


def test_warm_start_is_never_beaten_downwards() -> None:
    """Breaks if a good choice that the caller knows is lost, even without time to search."""
    problem = layered(5)
    best = solve(problem)
    again = solve(problem, warm_starts=[best.choice], time_limit_s=0.0)
    assert again.cost <= best.cost
    with pytest.raises(ValueError, match="one choice for each of the 120 nodes"):
        solve(problem, warm_starts=[(0,)])


def test_progress_reports_rising_bounds() -> None:
    """Breaks if callers cannot watch a long search."""
    seen: list[tuple[str, float, float]] = []
    solve(layered(6), progress=lambda phase, cost, bound: seen.append((phase, cost, bound)))
    bounds = [bound for _, _, bound in seen]
    assert seen and bounds == sorted(bounds)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: AssignmentProblem((Node("a", np.zeros(0)),)), "at least one choice"),
        (lambda: AssignmentProblem((Node("a", np.array([np.nan])),)), "finite or"),
        (lambda: AssignmentProblem((Node("a", np.zeros(2), (Usage(0, 1, np.zeros(3)),)),)), "2 choices"),
        (lambda: AssignmentProblem((Node("a", np.zeros(1), (Usage(0, 1, np.array([-1.0])),)),)), "bytes must be"),
        (lambda: AssignmentProblem((), (), -1.0), "usage_limit"),
        (
            lambda: AssignmentProblem(
                (Node("a", np.zeros(2)),), (Edge(0, 1, np.arange(2), np.arange(2), np.zeros((2, 2))),)
            ),
            "there are 1 nodes",
        ),
        (
            lambda: AssignmentProblem(
                (Node("a", np.zeros(2)),), (Edge(0, 0, np.arange(2), np.arange(2), np.zeros((1, 2))),)
            ),
            "do not index costs",
        ),
    ],
)
def test_malformed_problems_are_refused(make: object, message: str) -> None:
    """Breaks if shapes that do not fit together surface as index errors deep inside."""
    assert callable(make)
    with pytest.raises(ValueError, match=message):
        make()


def test_solver_knows_nothing_of_torch() -> None:
    """Breaks if the solver stops being plain data in, plain data out."""
    for file in Path(autopar.solver.__file__).parent.rglob("*.py"):
        for node in ast.walk(ast.parse(file.read_text())):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            assert all(name.split(".")[0] in ALLOWED or name.startswith("autopar.solver") for name in names), (
                file,
                names,
            )


ALLOWED = {
    "__future__", "bisect", "collections", "dataclasses", "enum", "functools", "datetime", "heapq", "math", "itertools",
    "numba", "numpy", "os", "concurrent", "logging", "ortools", "time", "typing",
}  # fmt: skip


@pytest.mark.moderate
@SOME
@given(st.one_of(problems, dense_problems), st.integers(0, 20))
def test_without_mathopt_choices_fit_and_bounds_hold(problem: AssignmentProblem, limit: int) -> None:
    """Breaks if prices by steps lead nowhere, or what is said to be a bound without MathOpt is none."""
    problem = replace(problem, usage_limit=float(limit))
    best = brute_force(problem).cost
    with patch("autopar.solver.exact.mathopt", lambda: None), patch("autopar.solver.prices.mathopt", lambda: None):
        solution = solve(problem, gap=0.0, time_limit_s=5.0)
    assert solution.bound <= best + 1e-9
    if solution.status == "infeasible":
        assert best == np.inf
    if solution.choice:
        assert problem.fits(solution.choice) and solution.cost == problem.evaluate(solution.choice) >= best - 1e-9
    if solution.status == "optimal":
        assert solution.cost == pytest.approx(best, abs=1e-6)
