"""Exact elimination by tables, and what makes tables small: dominated choices of the core, limits that never bind."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import AssignmentProblem, Edge, Node, Usage, buckets, dominance, oracle, phases, settle, solve
from autopar.solver.buckets import Buckets
from autopar.solver.consistency import Domains, propagate
from autopar.solver.dominance import undominated
from autopar.solver.graph import Graph, from_problem, restrict, tidy
from autopar.solver.memory import Memory, binding_points
from autopar.solver.oracle import Evaluator, Oracle
from autopar.solver.presolve import presolve
from autopar.solver.problem import FloatArray
from tests.unit.solver.instances import brute_force, dense_problems, graph_of, knots, layered, thresholds

SOME = settings(max_examples=60, deadline=None, derandomize=True)
WAYS = ("tables first", "tables once", "messages", "loops", "loops, tables once")


@contextmanager
def solving_by(way: str) -> Iterator[None]:
    """Let small problems, for which tables are always easy, go the ways that large ones go."""
    if way == "tables first":
        yield
    elif way == "messages":
        with thresholds(easy_cells=0, most_cells=0):
            yield
    elif way.startswith("loops"):
        with thresholds(compiled_edges=0, easy_cells=1 if "tables" in way else 0):
            yield
    else:
        with (
            thresholds(easy_cells=0),
            patch.object(phases, "TANGLED_GAP", -1.0),
            patch.object(oracle, "LOOK_FROM_SWEEP", 0),
        ):
            yield


def costs_of(graph: Graph, prices: FloatArray) -> dict[tuple[int, ...], float]:
    """The priced cost of every choice of a small graph."""
    evaluator, memory = Evaluator(graph), Memory(graph.usages, graph.num_choices, graph.num_points)
    return {
        choice: evaluator.cost(np.array(choice)) + float(prices @ memory.profile(np.array(choice)))
        for choice in itertools.product(*map(range, graph.num_choices))
    }


def test_sizes_are_those_of_the_tables() -> None:
    """Breaks if joint classes are counted otherwise than they are made: the order would be that of other tables."""
    halves, parities, whole = np.array([0, 0, 1, 1, 2]), np.array([0, 1, 0, 1, 0]), np.arange(2)
    matrix = np.ones((2, 3))
    edges = (Edge(0, 1, whole, halves, matrix), Edge(0, 1, whole, parities, matrix[:, :2]))
    planned = Buckets([2, 5], edges)
    assert planned._joint_size(1, planned.factors[:2]) == 5
    for factor in planned.factors:
        assert factor.cells == np.prod([int(classes.max()) + 1 for classes in factor.classes.values()])


@pytest.mark.moderate
@SOME
@given(st.one_of(dense_problems, knots), st.sampled_from([1, 7, 131_072]), st.sampled_from([2, 65_536]))
def test_tables_have_the_least_cost(problem: AssignmentProblem, block: int, single: int) -> None:
    """Breaks if a table is gathered, cut into blocks or rounded so that the minimum or the choice is another."""
    graph = graph_of(problem)
    if graph is None:
        return
    costs = costs_of(graph, np.zeros(graph.num_points))
    plan = Buckets(graph.num_choices, graph.edges)
    with patch.object(buckets, "BLOCK_CELLS", block), patch.object(buckets, "SINGLE_CELLS", single):
        filled = plan.run(graph.costs, [e.costs for e in graph.edges])
    assert plan.done
    assert filled.least == pytest.approx(min(costs.values()), abs=1e-9)
    if np.isfinite(filled.least):
        assert costs[tuple(plan.decode(filled))] == pytest.approx(filled.least, rel=1e-5, abs=1e-9)


def test_tables_that_are_too_large_are_not_planned() -> None:
    """Breaks if a problem whose tables would fill the memory is planned to the end, or a small one is not."""
    nodes = tuple(Node(f"n{v}", np.zeros(9)) for v in range(12))
    rng, same = np.random.default_rng(0), np.arange(9)
    edges = [Edge(u, v, same, same, rng.random((9, 9))) for u in range(12) for v in range(u)]
    graph = presolve(from_problem(AssignmentProblem(nodes, tuple(edges)), [()] * 12, 0))
    assert isinstance(graph, Graph)
    plan = Buckets(graph.num_choices, graph.edges, most_cells=1e6)
    assert not plan.done and plan.cells > 1e6
    chain = [Edge(v - 1, v, same, same, rng.random((9, 9))) for v in range(1, 12)]
    small = Buckets([9] * 12, chain, most_cells=1e6)
    assert (small.done, small.cells, small.kept) == (True, 11 * 81 + 9, 11 * 9)


def consistent(problem: AssignmentProblem) -> Graph | None:
    """With every choice that some other choices go with, dominated or not; None where a node has none."""
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = from_problem(problem, usages, num_points)
    for _ in range(9):
        domains = propagate([np.isfinite(costs) for costs in graph.costs], graph.edges)
        if domains.empty is not None:
            return None
        graph = tidy(restrict(graph, domains.alive))
    return graph


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 99))
def test_dominated_choices_are_not_needed_at_any_price(problem: AssignmentProblem, seed: int) -> None:
    """Breaks if comparing all choices, or only at nodes that changed, drops one that some price makes the best."""
    graph = consistent(problem)
    if graph is None:
        return
    prices = np.random.default_rng(seed).integers(0, 3, graph.num_points).astype(float)
    best = min(costs_of(graph, prices).values(), default=np.inf)
    before: Graph | None = None
    for thorough in (False, True, True):
        before, graph = graph, tidy(restrict(graph, undominated(graph, since=before, thorough=thorough)), since=graph)
        assert min(costs_of(graph, prices).values(), default=np.inf) == pytest.approx(best)


@SOME
@given(dense_problems)
def test_what_a_sample_of_the_neighbours_rules_out_is_not_dominated(problem: AssignmentProblem) -> None:
    """Breaks if looking at a few choices of the neighbours first changes what is dominated."""
    graph = consistent(problem)
    if graph is None:
        return
    kept: list[list[list[bool]]] = []
    for sample in (1, 10_000):
        with patch.object(dominance, "SAMPLE", sample):
            kept.append([mask.tolist() for mask in undominated(graph)])
    assert kept[0] == kept[1]


def test_equal_rows_and_columns_become_one() -> None:
    """Breaks if rows that differ are taken for equal, or equal ones for different."""
    matrix = np.array([[1.0, 2.0, 1.0], [3.0, np.inf, 3.0], [1.0, 2.0, 1.0], [3.0, 2.0, 3.0]])
    nodes = tuple(Node(f"n{v}", np.zeros(size)) for v, size in enumerate(matrix.shape))
    edge = Edge(0, 1, np.arange(4), np.arange(3), matrix)
    (joined,) = tidy(from_problem(AssignmentProblem(nodes, (edge,)), [(), ()], 0)).edges
    assert joined.costs.shape == (3, 2)
    np.testing.assert_array_equal(joined.costs[np.ix_(joined.u_class, joined.v_class)], matrix)


@pytest.mark.moderate
@pytest.mark.parametrize("way", ["tables first", "loops, tables once"])
@SOME
@given(problem=dense_problems)
def test_untangling_keeps_the_optimum_without_limit(way: str, problem: AssignmentProblem) -> None:
    """Breaks if a choice that dominates in the core takes the place of one that only memory would pay for, or where
    tables are planned only once messages have left a gap.
    """
    graph = graph_of(problem)
    with solving_by(way):
        settled = graph if graph is None else settle.settle(graph)
    best = brute_force(problem).cost_without_limit
    if settled is None or isinstance(settled, Domains):
        assert best == np.inf
        return
    free = settle.untangle(settled, 60.0)
    assert free is not None and free.buckets is not None
    exact = Oracle(free.graph, free.plan, free.buckets)
    found: list[float] = []
    least = exact.run(
        lambda choice: found.append(exact.evaluator.cost(choice)) or found[-1], np.inf, abs, 0, 1, lambda: False
    )
    assert least == pytest.approx(best)
    assert found == [] if best == np.inf else found == [pytest.approx(best)]


@pytest.mark.moderate
def test_tables_are_planned_when_messages_have_left_a_gap() -> None:
    """Breaks if graphs for compiled loops, whose tables are not planned at once, get none when they are asked for."""
    problem = layered(0, num_nodes=100, num_choices=8, skips=0.9)
    graph = graph_of(replace(problem, nodes=tuple(replace(node, usages=()) for node in problem.nodes)))
    assert graph is not None
    with solving_by("loops, tables once"):
        settled = settle.settle(graph)
        assert isinstance(settled, settle.Settled) and settled.buckets is None
        free = settle.untangle(settled, 60.0)
    assert free is not None and free.buckets is not None
    found: list[float] = []
    exact = Oracle(free.graph, free.plan, free.buckets)
    exact.run(lambda choice: found.append(exact.evaluator.cost(choice)) or found[-1], np.inf, abs, 0, 1, lambda: False)
    assert found == [pytest.approx(solve(problem, gap=1e-6).cost)]


@pytest.mark.moderate
@pytest.mark.parametrize("way", WAYS)
@SOME
@given(problem=dense_problems, room=st.sampled_from([None, 0, 1, 3, 1000]))
def test_all_ways_find_the_optimum(way: str, problem: AssignmentProblem, room: int | None) -> None:
    """Breaks if a way has a bound above the optimum, an answer that does not fit, or one that is not the best."""
    answer = brute_force(problem)
    if room is not None:
        problem = replace(problem, usage_limit=answer.peak + room if np.isfinite(answer.peak) else 5.0)
    best = brute_force(problem).cost
    with solving_by(way):
        solution = solve(problem, gap=0.0)
    assert solution.status == ("optimal" if np.isfinite(best) else "infeasible")
    if np.isfinite(best):
        assert solution.bound <= best + 1e-9
        assert solution.cost == problem.evaluate(solution.choice) == pytest.approx(best, abs=1e-9)
        assert problem.fits(solution.choice)


@pytest.mark.moderate
@pytest.mark.parametrize("seed", range(3))
def test_ways_agree_on_what_is_too_large_for_brute_force(seed: int) -> None:
    """Breaks if tables and messages, with the integer program, disagree on a layered problem of a hundred nodes."""
    problem = layered(seed, num_nodes=100, num_choices=8, skips=0.5)
    found = []
    for way in WAYS:
        with solving_by(way):
            found.append(solve(problem, gap=1e-6))
    best = min(one.cost for one in found)
    for one in found:
        assert one.status == ("optimal" if np.isfinite(best) else "infeasible")
        assert one.status == "infeasible" or one.bound <= best * (1 + 1e-9)


def test_a_limit_that_nothing_reaches_is_left_out() -> None:
    """Breaks if bytes of a forbidden choice count towards what can be alive, or those of an allowed one do not."""
    node = Node("a", np.array([1.0, 2.0, np.inf]), (Usage(0, 1, np.array([4.0, 3.0, 9.0])),))
    for limit, choice in ((4.0, 0), (3.0, 1)):
        solution = solve(AssignmentProblem((node,), (), limit))
        assert (solution.choice, solution.peak_bytes) == ((choice,), 4.0 - choice)
