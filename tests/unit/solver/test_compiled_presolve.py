"""What compiled loops leave of large graphs is what numpy leaves, to the last choice."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import compiled_presolve, consistency, presolve, solve
from autopar.solver.dominance import NUM_RIVALS, undominated
from autopar.solver.graph import Graph, from_problem, restrict, tidy
from autopar.solver.memory import binding_points
from autopar.solver.problem import AssignmentProblem
from tests.unit.solver.instances import brute_force, knots, layered, problems, thresholds

SOME = settings(max_examples=60, deadline=None, derandomize=True)


def _consistent(problem: AssignmentProblem) -> Graph | None:
    """The graph of a problem without what its edges forbid; None where nothing is left."""
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = from_problem(problem, usages, num_points)
    alive = [np.isfinite(costs) for costs in graph.costs]
    domains = consistency.propagate(alive, graph.edges)
    found, empty = compiled_presolve.propagate(alive, graph.edges)
    assert (domains.empty is None) == (empty is None)
    if domains.empty is not None:
        return None
    assert all(map(np.array_equal, domains.alive, found))
    return tidy(restrict(graph, domains.alive))


@pytest.mark.moderate
@SOME
@given(st.one_of(problems, knots))
def test_the_same_choices_are_left(problem: AssignmentProblem) -> None:
    """Breaks if a loop sums in another order, takes a forbidden pair for a dear one, counts choices of a neighbour that
    are gone, or breaks ties otherwise.
    """
    graph = _consistent(problem)
    if graph is None:
        return
    fresh = [True] * len(graph.costs)
    with np.errstate(invalid="ignore"):  # choices that tidying has forbidden are still there
        plain, loops = undominated(graph), compiled_presolve.undominated(graph, fresh, NUM_RIVALS)
    assert all(map(np.array_equal, plain, loops))


@pytest.mark.moderate
def test_nodes_that_are_known_are_not_looked_at() -> None:
    """Breaks if a loop forgets which nodes are as they were."""
    graph = _consistent(layered(3, num_nodes=30))
    assert graph is not None
    every = compiled_presolve.undominated(graph, [True] * len(graph.costs), NUM_RIVALS)
    none = compiled_presolve.undominated(graph, [False] * len(graph.costs), NUM_RIVALS)
    assert not all(mask.all() for mask in every) and all(mask.all() for mask in none)


@pytest.mark.moderate
@SOME
@given(problems)
def test_what_is_long_is_solved_as_well(problem: AssignmentProblem) -> None:
    """Breaks if a long graph loses its optimum."""
    with thresholds(long_edges=0):
        solution = solve(problem, gap=0.0)
    best = brute_force(problem).cost
    assert solution.cost == pytest.approx(best) or (solution.status == "infeasible" and best == np.inf)


@pytest.mark.moderate
def test_a_long_graph_becomes_as_small() -> None:
    """Breaks if the rounds of presolving differ between the two."""
    problem = layered(5, num_nodes=60)
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = from_problem(problem, usages, num_points)
    plain = presolve.presolve(graph)
    with thresholds(long_edges=0):
        loops = presolve.presolve(graph)
    assert isinstance(plain, Graph) and isinstance(loops, Graph)
    assert all(map(np.array_equal, plain.costs, loops.costs)) and len(plain.edges) == len(loops.edges)
