"""Messages that are passed by compiled loops, without prices of memory, until they have settled."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest

from autopar.solver import AssignmentProblem, Edge, Node, oracle, phases, pool, prices, solve, work
from autopar.solver.compiled_messages import CompiledMessages, load
from autopar.solver.graph import Graph
from autopar.solver.oracle import Oracle
from autopar.solver.search import SETTLED_GAP, STANDING, Search
from tests.unit.solver.instances import layered, thresholds

pytestmark = pytest.mark.unit


@contextmanager
def loops() -> Iterator[list[float]]:
    """Small problems go the way of wide ones, and no tables end the search. Yields the bounds of all sweeps."""
    load()  # in a process that has not yet, with a sweep of its own
    bounds: list[float] = []
    step = CompiledMessages.step

    def noted(messages: CompiledMessages) -> float:
        bounds.append(step(messages))
        return bounds[-1]

    limits = thresholds(compiled_edges=0, easy_cells=0, most_cells=0)
    with limits, patch.object(CompiledMessages, "step", noted):
        yield bounds


@pytest.mark.moderate
def test_what_rounds_badly_is_optimal_once_messages_have_settled() -> None:
    """Breaks if sweeps stop where the bound rises little: an integer program of all edges takes longer than they do."""
    problem = layered(2, num_nodes=400, num_choices=10, skips=0.9)
    best = solve(problem, gap=1e-6).cost
    with loops(), patch.object(pool, "solve_exactly", side_effect=AssertionError("messages had not settled")):
        found = solve(problem)
    assert found.status == "optimal"
    assert found.cost == problem.evaluate(found.choice) == pytest.approx(best, rel=1e-3)
    assert found.bound <= best * (1 + 1e-9)


def test_messages_that_cannot_settle_are_given_up() -> None:
    """Breaks if sweeps go on, to the last that there may be, where the bound has long stopped: a ring of odd length of
    nodes that all want to differ is half a conflict each to messages.
    """
    differ, whole = np.where(np.eye(2, dtype=bool), 1.0, 0.0), np.arange(2)
    nodes = tuple(Node(f"n{v}", np.zeros(2)) for v in range(9))
    edges = [Edge(v, (v + 1) % 9, whole, whole, differ) for v in range(9)]
    edges += [Edge(v, (v + 2) % 9, whole, whole, 0.1 * differ) for v in range(9)]
    with loops() as bounds:
        found = solve(AssignmentProblem(nodes, tuple(edges)))
    assert found.status == "optimal"
    assert found.cost == pytest.approx(1.0 + 0.7)
    first = bounds[: oracle.LASTING_SWEEPS]
    assert len(first) < oracle.LASTING_SWEEPS
    assert max(first[: oracle.STILL_SWEEPS]) < found.cost


@pytest.mark.parametrize("proof_gap", [0.85, 0.75])
def test_little_that_standing_messages_leave_is_left(proof_gap: float) -> None:
    """Breaks if programs are asked about what messages that stand still leave within `STANDING` times the gap that will
    do, or are not where they leave more: the ring's bound is 0, so its gap is 1.
    """
    differ, whole = np.where(np.eye(2, dtype=bool), 1.0, 0.0), np.arange(2)
    nodes = tuple(Node(f"n{v}", np.zeros(2)) for v in range(9))
    edges = tuple(Edge(v, (v + step) % 9, whole, whole, differ) for v in range(9) for step in (1, 2))
    asked: list[object] = []
    with loops(), patch.object(phases, "_solve_pool", lambda *given: asked.append(given)):
        found = solve(AssignmentProblem(nodes, edges), proof_gap=proof_gap)
    assert found.choice
    assert bool(asked) == (proof_gap * STANDING < 1)


def test_choices_are_looked_for_while_messages_settle() -> None:
    """Breaks if choices are only looked for at the end: what is late by then has none, however good messages are."""
    problem = layered(1, num_nodes=200, num_choices=8, skips=0.9)
    with loops(), patch.object(oracle, "LASTING_SWEEPS", oracle.FIRST_ROUNDS[0] + 1):
        seen: list[float] = []
        solve(problem, progress=lambda phase, cost, bound: seen.append(cost) if phase == "messages" else None)
    assert np.isfinite(seen[0])


def test_messages_end_where_little_is_left_to_gain() -> None:
    """Breaks if sweeps go on within the gap that is not worth effort, or end above what the caller wants proven."""
    problem = layered(2, num_nodes=200, num_choices=10, skips=0.9)
    with loops() as bounds:
        near = solve(problem, proof_gap=1.0)
        few = len(bounds)
        exact = solve(problem)
    assert few < len(bounds) - few
    assert exact.gap < 2e-3
    assert near.gap <= SETTLED_GAP
    assert near.cost <= exact.cost * (1 + SETTLED_GAP)


def test_how_far_messages_come_does_not_depend_on_the_machine() -> None:
    """Breaks if passes over wide graphs end with the clock: a busy machine would place something else. Here each look
    at the clock takes ten minutes.
    """
    problem, hours = layered(2, num_nodes=200, num_choices=10, skips=0.9), itertools.count(step=600.0)
    with loops() as bounds:
        quiet = solve(problem, proof_gap=0.01, time_limit_s=6.0)
        few = len(bounds)
        with patch("time.process_time", lambda: next(hours)):
            busy = solve(problem, proof_gap=0.01, time_limit_s=6.0)
    assert 3 < few == len(bounds) - few
    assert (busy.choice, busy.cost, busy.bound) == (quiet.choice, quiet.cost, quiet.bound)


@pytest.mark.moderate
def test_what_ends_a_search_does_not_depend_on_the_machine() -> None:
    """Breaks if prices, pools, branches or programs end with the clock. Each look at a clock takes ten minutes; what is
    given is little enough to end the search.
    """
    problem, hours, found = layered(3, num_nodes=60, num_choices=6, skips=0.9), itertools.count(step=600.0), []
    peak = problem.peak(solve(problem).choice)[1]
    tight = replace(problem, usage_limit=0.8 * peak)
    for given_s in (0.02, 0.2, 20.0):
        quiet = solve(tight, time_limit_s=given_s)
        with patch("time.process_time", lambda: next(hours)), patch("time.perf_counter", lambda: next(hours)):
            busy = solve(tight, time_limit_s=given_s)
        assert (busy.choice, busy.cost, busy.bound) == (quiet.choice, quiet.cost, quiet.bound)
        assert not busy.is_ended_by_clock
        found.append(quiet)
    assert found[0].gap > found[2].gap


def test_passes_are_as_many_as_the_time_is_worth() -> None:
    """Breaks if passes that are counted never end, or leave all of the time to what follows."""
    problem = layered(2, num_nodes=200, num_choices=10, skips=0.9)
    given_s = work.LASTING_SECONDS_A_CELL * sum(edge.costs.size for edge in problem.edges)
    told: list[tuple[int, float, float]] = []

    def noted(asked: Oracle, search: Search, *given: Any, **named: Any) -> Any:
        found = prices.ascend(asked, search, *given, **named)
        told.append((asked.passes, asked.lasting_s, search.seconds_left))
        return found

    with loops(), patch.object(phases, "ascend", noted):
        solve(problem, time_limit_s=given_s)
    passes, pass_s, left_s = told[0]
    assert 1 < passes == int(given_s / pass_s)
    assert left_s == pytest.approx(given_s - passes * pass_s)


def test_a_choice_is_found_in_a_smaller_graph_or_known_to_be_gone() -> None:
    """Breaks if a choice of the whole becomes another one where nodes were merged and choices dropped."""
    lift = ((1, np.array([2, 0])), (0, np.array([1])), (1, np.array([0, 3])), (2, np.array([4, 5, 6])))
    graph = Graph((np.zeros(1), np.zeros(2), np.zeros(3), np.zeros(2)), (), ((),) * 4, lift, 0)
    for choice in ([0, 0, 2, 0], [0, 1, 1, 0]):
        here = graph.choice_here(graph.original_choice(np.array(choice)))
        assert here is not None
        assert here.tolist() == choice
    assert graph.choice_here((2, 1, 3, 4)) is None  # no choice here is both
    assert graph.choice_here((2, 0, 0, 4)) is None  # dropped
