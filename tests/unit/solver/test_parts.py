"""The parts that a wrong answer would come from: bounds, reduced costs, timelines, consistency, blending."""

from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import AssignmentProblem, Edge, Node, Usage, exact, solve
from autopar.solver.consistency import Domains, explain, propagate
from autopar.solver.crossover import blend
from autopar.solver.exact import solve_exactly
from autopar.solver.fixing import reduced_costs
from autopar.solver.graph import from_problem
from autopar.solver.memory import Memory, binding_points
from autopar.solver.oracle import Evaluator, Oracle
from autopar.solver.presolve import presolve
from autopar.solver.problem import FloatArray
from autopar.solver.search import Target
from autopar.solver.settle import settle
from autopar.solver.work import Work
from tests.unit.solver.instances import brute_force, dense_problems, layered, random_problem

SOME = settings(max_examples=60, deadline=None, derandomize=True)


def priced_oracle(problem: AssignmentProblem, seed: int) -> tuple[Oracle, FloatArray] | None:
    """The oracle of the presolved problem at random prices on its time points."""
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = presolve(from_problem(problem, usages, num_points))
    settled = graph if isinstance(graph, Domains) else settle(graph)
    if isinstance(settled, Domains):
        return None
    oracle = Oracle(settled.graph, settled.plan, settled.buckets)
    prices = np.random.default_rng(seed).integers(0, 3, num_points).astype(float)
    oracle.set_prices(prices)
    return oracle, prices


def priced_costs(oracle: Oracle, prices: FloatArray) -> dict[tuple[int, ...], float]:
    """The priced cost of every choice of the (small) graph."""
    return {
        choice: oracle.evaluator.cost(np.array(choice)) + float(prices @ oracle.memory.profile(np.array(choice)))
        for choice in np.ndindex(*oracle.graph.num_choices)
    }


@SOME
@given(dense_problems, st.integers(0, 99), st.integers(1, 4))
def test_bounds_and_reduced_costs_hold(problem: AssignmentProblem, seed: int, sweeps: int) -> None:
    """Breaks if a bound exceeds the best priced cost, or a reduced cost the best with that choice, at any time."""
    made = priced_oracle(problem, seed)
    if made is None:
        assert brute_force(problem).cost_without_limit == np.inf
        return
    oracle, prices = made
    costs = priced_costs(oracle, prices)
    for _ in range(sweeps):
        for forward in (True, False):
            assert oracle.messages.sweep(forward) + oracle.state.constant <= min(costs.values()) + 1e-9
    bound, grown = reduced_costs(oracle, 0.0)
    for node, values in enumerate(grown):
        for i, more in enumerate(values):
            best = min(cost for choice, cost in costs.items() if choice[node] == i)
            assert bound + more <= best + 1e-9


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 99))
def test_presolve_keeps_the_priced_optimum(problem: AssignmentProblem, seed: int) -> None:
    """Breaks if a dropped or merged choice was needed once memory has a price."""
    made = priced_oracle(problem, seed)
    if made is None:
        return
    oracle, prices = made
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    memory = Memory(usages, [len(node.costs) for node in problem.nodes], num_points)
    best = min(
        problem.evaluate(choice) + float(prices @ memory.profile(np.array(choice)))
        for choice in np.ndindex(*(len(node.costs) for node in problem.nodes))
    )
    costs = priced_costs(oracle, prices)
    assert min(costs.values()) == pytest.approx(best)
    cheapest = min(costs, key=lambda choice: costs[choice])
    original = oracle.graph.original_choice(np.array(cheapest))
    assert problem.evaluate(original) == pytest.approx(oracle.evaluator.cost(np.array(cheapest)))
    back = oracle.graph.choice_here(original)
    assert back is not None and oracle.graph.original_choice(back) == original


@SOME
@given(st.integers(0, 2**31))
def test_shortened_timeline_has_the_same_peak(seed: int) -> None:
    """Breaks if a time point that can be a peak is dropped."""
    problem = random_problem(seed)
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    counts = [len(node.costs) for node in problem.nodes]
    memory = Memory(usages, counts, num_points)
    for choice in list(np.ndindex(*counts))[:40]:
        profile = memory.profile(np.array(choice))
        assert (profile.max() if num_points else 0.0) == problem.peak(choice)[1]
        assert num_points == 0 or (memory.least() <= profile).all()
        rows = [sum(memory.row(t)[memory.offsets[v] + i] for v, i in enumerate(choice)) for t in range(num_points)]
        assert rows == profile.tolist()


def test_half_open_intervals_that_touch_do_not_overlap() -> None:
    """Breaks if an end counts as alive: the second would not fit next to the first."""
    nodes = tuple(Node(n, np.zeros(1), (Usage(s, s + 2, np.array([3.0])),)) for n, s in (("a", 0), ("b", 2)))
    assert solve(AssignmentProblem(nodes, (), 3.0)).status == "optimal"
    assert solve(AssignmentProblem(nodes, (), 2.0)).status == "infeasible"


def test_infeasible_though_every_pair_is_possible() -> None:
    """Breaks if three-colouring a complete graph of four, where no single edge rules anything out, is not refuted."""
    same, differ = np.arange(3), np.where(np.eye(3, dtype=bool), np.inf, 0.0)
    nodes = tuple(Node(name, np.zeros(3)) for name in "abcdefgh")
    k4 = [Edge(u, v, same, same, differ) for u in range(4) for v in range(u)]
    assert solve(AssignmentProblem(nodes[:4], tuple(k4))).status == "infeasible"
    assert solve(AssignmentProblem(nodes[:4], tuple(k4[1:]))).status == "optimal"
    ring = [Edge(u, (u + step) % 7, same, same, differ) for u in range(7) for step in (1, 2)]
    solution = solve(AssignmentProblem(nodes[:7], tuple(ring)))
    assert solution.status == "infeasible"
    assert solution.conflict is not None and "satisfies all 14 edges" in solution.conflict.message


@pytest.mark.parametrize("seed", range(4))
def test_pipeline_and_integer_program_agree(seed: int) -> None:
    """Breaks if either is wrong on problems too large for brute force."""
    problem = layered(seed, num_nodes=24, num_choices=6, skips=0.9)
    free = solve(problem, gap=1e-6)
    problem = replace(problem, usage_limit=0.7 * free.peak_bytes)
    solution = solve(problem, gap=1e-6)
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = presolve(from_problem(problem, usages, num_points))
    assert not isinstance(graph, Domains) and problem.usage_limit is not None
    found = solve_exactly(graph, Target(problem.usage_limit), [], 1e-6, free.cost, lambda: np.inf, Work())
    if found.choice is None:
        assert solution.status == "infeasible"
    else:
        assert solution.status == "optimal"
        assert solution.cost == pytest.approx(Evaluator(graph).cost(found.choice), rel=3e-6)


def test_a_program_that_the_clock_ends_says_so() -> None:
    """Breaks if what depends on the machine after all is not told from what does not."""
    graph = from_problem(layered(0, num_nodes=24, num_choices=6, skips=0.9), [() for _ in range(24)], 0)
    for net, is_ended in ((10.0, False), (1e-12, True)):
        clock = Work()
        with patch.object(exact, "NET", net):
            found = solve_exactly(graph, Target(np.inf), [], 1e-6, 1.0, lambda: 60.0, clock)
        assert (clock.is_ended_by_clock, found.choice is None) == (is_ended, is_ended)
        assert clock() > 0


def test_blend_switches_whole_components() -> None:
    """Breaks if a blend takes a forbidden mixture, does not fit, or switches the dear component, not the cheap."""
    same, tie = np.arange(2), np.where(np.eye(2, dtype=bool), 0.0, np.inf)
    usage = Usage(0, 1, np.array([4.0, 1.0]))
    nodes = tuple(Node(str(v), np.array([0.0, 1.0 + v]), (usage,)) for v in range(4))
    problem = AssignmentProblem(nodes, (Edge(0, 1, same, same, tie), Edge(2, 3, same, same, tie)), 10.0)
    graph = from_problem(problem, [node.usages for node in nodes], 1)
    memory = Memory(graph.usages, graph.num_choices, 1)
    mixed = blend(Evaluator(graph), memory, 10.0, np.zeros(4, dtype=np.int64), np.ones(4, dtype=np.int64))
    assert mixed is not None and mixed.tolist() == [1, 1, 0, 0]


def test_an_explanation_needs_each_of_its_edges() -> None:
    """Breaks if an explanation names edges that are in nobody's way, or too few for the wipe-out."""
    rng = np.random.default_rng(3)
    explained = 0
    for _ in range(40):
        num = 12
        edges = []
        for _ in range(26):
            u, v = sorted(rng.choice(num, 2, replace=False).tolist())
            costs = np.where(rng.random((4, 4)) < 0.55, np.inf, 0.0)
            edges.append(Edge(u, v, np.arange(4), np.arange(4), costs))
        alive = [np.ones(4, dtype=bool) for _ in range(num)]
        domains = propagate(alive, edges)
        if domains.empty is None:
            continue
        explained += 1
        nodes, core = explain(alive, edges, domains)
        kept = [edges[i] for i in core]
        assert propagate(alive, kept).empty is not None
        assert all(propagate(alive, kept[:i] + kept[i + 1 :]).empty is None for i in range(len(kept)))
        assert set(nodes) == {end for edge in kept for end in (edge.u, edge.v)}
    assert explained > 10
