"""Compiled sweeps over matrices that edges share, and what presolving works out once for those that do."""

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import compiled, compiled_sweep
from autopar.solver.graph import Graph, restrict, tidy
from autopar.solver.messages import Messages
from autopar.solver.oracle import Evaluator
from autopar.solver.problem import AssignmentProblem, Edge, FloatArray, IntArray, Node, Usage
from autopar.solver.solve import _may_exceed, _most_bytes

MANY = settings(max_examples=60, deadline=None, derandomize=True)


def shared(seed: int, forbids: bool) -> tuple[list[FloatArray], list[Edge]]:
    """Costs of nodes, and edges of few matrices, whose ends have all of their classes or some, in any order."""
    draw = np.random.default_rng(seed)
    counts = draw.integers(1, 11, 7)
    shapes = draw.integers(1, 11, (3, 2)).tolist()
    matrices: list[FloatArray] = [draw.integers(0, 9, shape).astype(float) for shape in shapes]
    if forbids:
        for matrix in matrices:
            matrix[draw.random(matrix.shape) < 0.1] = np.inf
            matrix[0] = matrix[:, 0] = 1.0
    matrices += [matrix.reshape(matrix.shape[::-1]) for matrix in matrices]  # the same numbers in another shape
    edges = []
    pairs = list(itertools.combinations(range(7), 2))
    for u, v in (pairs[i] for i in draw.choice(len(pairs), 12, replace=False)):
        matrix = matrices[draw.integers(0, 6)]
        ends: list[IntArray] = [
            np.arange(count) if count == num and draw.random() < 0.6 else draw.integers(0, num, count)
            for count, num in zip((counts[u], counts[v]), matrix.shape, strict=True)
        ]
        edges.append(Edge(u, v, ends[0], ends[1], matrix))
    return [draw.integers(0, 9, count) * 1.0 for count in counts], edges


@pytest.mark.moderate
@MANY
@given(st.integers(0, 10**6), st.booleans())
def test_sweeps_are_those_of_numpy(seed: int, forbids: bool) -> None:
    """Breaks if a matrix is taken for another's, read from the wrong end, or what pads it counts."""
    costs, edges = shared(seed, forbids)
    edges = [edge for edge in edges if _whole(edge)]
    plain = Messages(range(len(costs)), edges)
    plain.set_costs(costs, edges)
    flat = compiled.flatten([len(each) for each in costs], edges)
    cells = np.concatenate([np.zeros(0), *(edge.costs.ravel() for edge in edges)])
    sides = compiled_sweep.sides(flat, cells)
    values = np.zeros(len(plain.values))
    for forward in (True, False, True, False):
        bound = compiled_sweep.sweep(sides, np.concatenate(costs), values, forward)
        assert bound == pytest.approx(plain.sweep(forward), abs=1e-12)
        np.testing.assert_allclose(values, plain.values, rtol=0.0, atol=1e-12)


def _whole(edge: Edge) -> bool:
    """Whether each class has a choice, as presolving leaves it."""
    return all(
        len(np.unique(classes)) == num
        for classes, num in zip((edge.u_class, edge.v_class), edge.costs.shape, strict=True)
    )


def test_a_matrix_is_kept_once() -> None:
    """Breaks if cells of edges that share their matrix are kept for each: thousands of them leave the caches."""
    same, matrix = np.arange(3), np.arange(9.0).reshape(3, 3)
    edges = [Edge(v, v + 1, same, same, matrix.copy()) for v in range(20)]
    flat = compiled.flatten([3] * 21, edges)
    sides = compiled_sweep.sides(flat, np.tile(matrix.ravel(), 20))
    assert len(sides.cells) == 2 * 3 * compiled_sweep.LANES


@pytest.mark.moderate
@MANY
@given(st.integers(0, 10**6))
def test_tidy_keeps_the_cost_of_every_choice(seed: int) -> None:
    """Breaks if edges of one matrix, or ends of one classing, are taken for the same where they differ."""
    costs, edges = shared(seed, False)
    draw = np.random.default_rng(seed)
    lift = tuple((v, np.arange(len(each))) for v, each in enumerate(costs))
    graph = Graph(tuple(costs), tuple(edges), ((),) * len(costs), lift, 0)
    alive = [draw.random(len(each)) < 0.7 for each in costs]
    for mask in alive:
        mask[draw.integers(0, len(mask))] = True
    smaller = tidy(restrict(graph, alive, tidied=True))
    whole, less = Evaluator(graph), Evaluator(smaller)
    for _ in range(5):
        choice = np.array([draw.integers(0, mask.sum()) for mask in alive])
        assert less.cost(choice) == whole.cost(np.array(smaller.original_choice(choice)))
    assert all(_whole(edge) for edge in smaller.edges)
    for edge in smaller.edges:
        assert len(np.unique(edge.costs, axis=0)) == edge.costs.shape[0]
        assert len(np.unique(edge.costs, axis=1).T) == edge.costs.shape[1]


def test_what_may_exceed_a_limit() -> None:
    """Breaks if a limit is taken for slack that some choice exceeds, or for tight where usages never meet."""
    sizes = np.array([1.0, 6.0])
    nodes = tuple(Node(f"n{i}", np.zeros(2), (Usage(i, i + 1 + (i == 0), sizes),)) for i in range(3))
    problem = AssignmentProblem(nodes)
    assert _most_bytes(problem) == 12.0
    assert [_may_exceed(problem, limit) for limit in (11.0, 12.0, 17.0, 18.0)] == [True, False, False, False]
    assert not _may_exceed(AssignmentProblem((Node("n", np.zeros(2)),)), 0.0)
