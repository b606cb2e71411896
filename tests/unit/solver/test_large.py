"""What is done to large graphs, on small ones that brute force can answer: compiled loops, volume, annealing."""

import subprocess
import sys
from collections.abc import Iterator
from dataclasses import replace
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from autopar.solver import narrowing, solve
from autopar.solver import settle as settling
from autopar.solver.compiled_moves import energy, forest_move
from autopar.solver.consistency import Domains
from autopar.solver.eliminate import Plan
from autopar.solver.forest import forest_pass, shuffled
from autopar.solver.improve import round_consistently
from autopar.solver.large.annealing import Annealer, Landscape
from autopar.solver.large.neighbourhoods import Neighbourhoods
from autopar.solver.memory import Memory
from autopar.solver.messages import Messages
from autopar.solver.oracle import Evaluator, Oracle
from autopar.solver.problem import AssignmentProblem, Node, Usage
from tests.unit.solver.instances import brute_force, dense_problems, graph_of, layered, problems, thresholds

SOME = settings(max_examples=40, deadline=None, derandomize=True)
ROUNDING = 1e-12
"""Costs here are sums of some tens of small whole numbers, divided by degrees: float64 keeps them to 1e-14."""


@pytest.fixture(autouse=True, scope="module")
def everything_is_large() -> Iterator[None]:
    with thresholds(large_edges=0, large_edges_in_brief=0, most_cells=0):
        yield


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 99))
def test_compiled_messages_are_those_of_numpy(problem: AssignmentProblem, seed: int) -> None:
    """Breaks if a compiled sweep, rounding or reduced cost is another than the plain one."""
    graph = graph_of(problem)
    settled = Domains([]) if graph is None else settling.settle(graph)
    if isinstance(settled, Domains):
        return
    oracle = Oracle(settled.graph, Plan(settled.graph, eliminates=False), compiles=True)
    assert oracle.compiled is not None
    prices = np.random.default_rng(seed).integers(0, 3, settled.graph.num_points).astype(float)
    oracle.set_prices(prices)
    plain = Messages(oracle.plan.core, settled.graph.edges)
    flat = oracle.flat + (oracle.memory.price(prices) if len(prices) else 0.0)
    plain.set_costs(np.split(flat, oracle.memory.offsets[1:-1]), settled.graph.edges)
    for forward in (True, False, True):
        assert oracle.messages.sweep(forward) == pytest.approx(plain.sweep(forward), abs=ROUNDING)
        assert oracle.messages.round(forward) == plain.round(forward)
    (bound, grown), (plain_bound, plain_grown) = oracle.messages.excess(), plain.excess()
    assert bound == pytest.approx(plain_bound, abs=ROUNDING)
    for mine, theirs in zip(grown, plain_grown, strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=0.0, atol=ROUNDING)
    for _ in range(4):
        assert oracle.messages.step() == pytest.approx(plain.step(), abs=ROUNDING)
    loops = oracle.compiled
    loops.costs = plain.costs
    rounded = round_consistently(plain, oracle.network)
    assert loops.round_consistently() == rounded
    if rounded is not None:
        moved, order = np.array(rounded), shuffled(len(rounded), seed)
        forest_move(loops.flat, loops.flat_costs, loops.cells, moved, np.array(order))
        best = plain.energy(forest_pass(plain, rounded, order))
        assert plain.energy(moved.tolist()) == pytest.approx(best, abs=ROUNDING)
        assert energy(loops.flat, loops.flat_costs, loops.cells, moved) == pytest.approx(best, abs=ROUNDING)


@pytest.mark.moderate
@SOME
@given(dense_problems, st.one_of(st.none(), st.integers(0, 3)))
def test_bound_and_answer(problem: AssignmentProblem, room: int | None) -> None:
    """Breaks if a bound of the volume algorithm is above the optimum, or an answer does not fit or is missed."""
    bound_and_answer(problem, room)


@pytest.mark.moderate
@SOME
@given(dense_problems, st.one_of(st.none(), st.integers(0, 3)))
def test_bound_and_answer_of_what_is_only_compiled(problem: AssignmentProblem, room: int | None) -> None:
    """Breaks if a graph that is worked on whole, without being large, gets a wrong bound or answer."""
    small = thresholds(
        large_edges=3000, large_edges_in_brief=3000, most_cells=1e9, compiled_edges=0, easy_cells=0, narrow_pairs=0
    )
    with small, patch.object(narrowing, "FEWEST_CELLS", 16):
        bound_and_answer(problem, room)


def bound_and_answer(problem: AssignmentProblem, room: int | None) -> None:
    answer = brute_force(problem)
    if room is not None:
        problem = replace(problem, usage_limit=answer.peak + room if np.isfinite(answer.peak) else 5.0)
    best = brute_force(problem).cost
    found = solve(problem, gap=0.0, time_limit_s=2.0)
    assert found.bound <= best + 1e-9 * max(1.0, abs(best)) or not np.isfinite(best)
    if np.isfinite(best):
        assert found.choice
        assert problem.fits(found.choice)
        assert found.cost == problem.evaluate(found.choice) >= best - 1e-9
    else:
        assert found.status == "infeasible"


@pytest.mark.moderate
@SOME
@given(problems, st.integers(0, 5), st.floats(0.0, 10.0))
def test_annealing_keeps_its_books(problem: AssignmentProblem, seed: int, temperature: float) -> None:
    """Breaks if cascades that are taken back leave something behind, or the tree of memory is not the profile."""
    graph = graph_of(problem)
    if graph is None or not (np.array(graph.num_choices) > 1).any():
        return
    land = Landscape.of(graph, np.inf, 50.0)
    memory, evaluator = Memory(graph.usages, graph.num_choices, graph.num_points), Evaluator(graph)
    annealer, start = Annealer(land, seed), np.zeros(len(graph.costs), dtype=np.int64)
    nothing = np.zeros(len(land.costs))
    energy = annealer.start(start, nothing)
    numbers, best = np.array([energy, energy, 0.5 * land.forbidden]), start.copy()
    annealer.run(numbers, best, nothing, 300, temperature, 0.0, np.zeros(0))
    now = annealer.state.choice
    edges = evaluator.edge_costs(now)
    cost = float(evaluator.node_costs(now).sum() + np.where(np.isfinite(edges), edges, land.forbidden).sum())
    assert numbers[0] == numbers[1] == pytest.approx(cost, abs=1e-6)
    assert annealer.state.top[1] == pytest.approx(memory.profile(now).max(initial=0.0), abs=1e-6)
    if numbers[2] < 0.5 * land.forbidden:
        assert evaluator.cost(best) == pytest.approx(numbers[2], abs=1e-6)


@pytest.mark.moderate
def test_annealing_fits_where_it_begins_above_the_limit() -> None:
    """Breaks if bytes above the limit cost nothing, or what does not fit is an answer."""
    problem = layered(0, 40, 6)
    graph = graph_of(problem)
    memory = Memory(graph.usages, graph.num_choices, graph.num_points)
    free = solve(problem).choice
    here = graph.choice_here(free)
    assert here is not None
    limit = 0.5 * (memory.profile(here).max() + memory.least().max())
    land = Landscape.of(graph, limit, problem.evaluate(free))
    annealer, nothing = Annealer(land, 0), np.zeros(len(land.costs))
    found, cost = annealer.round(here, np.inf, nothing, 0.01 * abs(problem.evaluate(free)), land.forbidden / limit, 1.0)
    assert np.isfinite(cost)
    assert memory.profile(found).max() <= limit


@pytest.mark.moderate
@SOME
@given(dense_problems, st.integers(0, 9))
def test_neighbourhoods_keep_the_choice(problem: AssignmentProblem, seed: int) -> None:
    """Breaks if what a neighbourhood holds fixed moves, or its own present choice is not in it at its cost."""
    graph = graph_of(problem)
    best = solve(problem)
    if graph is None or not best.choice or not (np.array(graph.num_choices) > 1).any():
        return
    here = graph.choice_here(best.choice)
    if here is None:
        return
    memory = Memory(graph.usages, graph.num_choices, graph.num_points)
    small = Neighbourhoods(graph, memory, seed).draw(here)
    assert min(Evaluator(small).cost(np.array(choice)) for choice in np.ndindex(*small.num_choices)) == pytest.approx(
        best.cost, abs=1e-9
    )


@pytest.mark.moderate
def test_one_node_that_memory_leaves_one_choice() -> None:
    """Breaks if what is left when everything is eliminated, which is nothing, is not nothing to compiled loops."""
    node = Node("n", np.array([1.0, 2.0]), (Usage(0, 1, np.array([5.0, 1.0])),))
    found = solve(AssignmentProblem((node,), usage_limit=2.0), anytime=True, time_limit_s=2.0)
    assert (found.choice, found.cost) == ((1,), 2.0)


WITHOUT_NUMBA = """
import sys
sys.modules["numba"] = None
from dataclasses import replace
from autopar.solver import methods, solve
from tests.unit.solver.instances import brute_force, random_problem
methods.THRESHOLDS = replace(methods.THRESHOLDS, large_edges=0, large_edges_in_brief=0, most_cells=0)
for seed in range(8):
    problem = random_problem(seed)
    best, found = brute_force(problem).cost, solve(problem, gap=0.0, time_limit_s=2.0)
    assert found.cost == best, (seed, found.cost, best)
    assert found.bound <= best + 1e-9
"""


@pytest.mark.moderate
def test_without_numba_the_numbers_are_the_same() -> None:
    """Breaks if the loops need a compiler to run."""
    done = subprocess.run([sys.executable, "-c", WITHOUT_NUMBA], capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
