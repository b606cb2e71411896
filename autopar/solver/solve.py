"""Solve an assignment problem: presolve, message passing under memory prices, reduced-cost fixing, an integer program.

    problem -> presolve -> [ prices <-> elimination + (messages | tables) ] -> blend -> pool -> tables, once
            -> fix -> ... -> integer program -> Solution

Lower bounds and choices are collected in a `Search`, which ends as soon as they are within the requested gap.
"""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from autopar.solver.consistency import Domains, explain, propagate
from autopar.solver.graph import Graph, from_problem
from autopar.solver.memory import Memory, binding_points
from autopar.solver.methods import is_long
from autopar.solver.phases import minimise
from autopar.solver.presolve import presolve
from autopar.solver.problem import (
    USAGE_TOLERANCE,
    AssignmentProblem,
    Conflict,
    Edge,
    FloatArray,
    Node,
    Solution,
    Status,
    Usage,
    relative_gap,
)
from autopar.solver.search import Column, Progress, Search, Target
from autopar.solver.work import Work

MOST_THREADS = 8
SMALLEST_GAP = 1e-7
PEAK_SHARE_OF_TIME = 0.4
CONFLICT_GAP = 1e-3
CONFLICT_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class PeakResult:
    """The smallest peak found and a proven lower bound on it, both in bytes.

    `choice` is empty and `bytes` np.inf where none was found; then `conflict` says why, if that was proven.
    """

    bytes: float
    choice: tuple[int, ...]
    bound: float
    conflict: Conflict | None = None


def solve(
    problem: AssignmentProblem,
    *,
    gap: float = 1e-3,
    proof_gap: float = 0.0,
    time_limit_s: float = 60.0,
    warm_starts: Sequence[Sequence[int]] = (),
    progress: Progress | None = None,
    explain: bool = True,
    anytime: bool = False,
    wall_clock: bool = False,
) -> Solution:
    """The cheapest choice that fits, to a proven relative `gap`, or the best found in `time_limit_s`: seconds
    of work that is counted (`work.py`), not timed, as a busy machine is not to change the answer. Where the gap is
    `proof_gap` or less, no integer program is asked to prove a smaller one.

    `warm_starts`: choices to begin with, one index per node; ones that are forbidden or do not fit are of no harm.
    anytime: what time is left once nothing more can be proven goes into better choices; of CPU time. wall_clock: the
    time limit is in seconds of wall clock, and all cores are used. With either, the answer depends on the machine.
    `progress(phase, cost, bound)` is called whenever a bound was computed. Deterministic, unless
    `Solution.is_ended_by_clock`.
    "infeasible" is only said with a proof; "unknown" otherwise. explain: work out what makes a problem infeasible.
    """
    clock = Work(time.perf_counter if wall_clock else time.process_time if anytime else None)
    begun = time.process_time()
    if is_long(len(problem.edges)):
        from autopar.solver import compiled_presolve  # it loads numba

        compiled_presolve.load()  # on time that is not the search's
    start = clock()
    limited = problem.usage_limit is not None and _may_exceed(problem, problem.usage_limit)
    usages, num_points = binding_points([node.usages if limited else () for node in problem.nodes])
    target = Target(np.inf if problem.usage_limit is None else problem.usage_limit)
    search = Search(target, max(gap, SMALLEST_GAP), start + time_limit_s, proof_gap, progress, clock, anytime)
    search.threads = min(os.cpu_count() or 1, MOST_THREADS) if wall_clock else 1
    full = from_problem(problem, usages, num_points)
    _offer_starts(problem, full, search, warm_starts)
    # What is eliminated once need not be small; what is priced again and again should be.
    graph = presolve(full) if num_points else presolve(full, rounds=1)
    conflict: Conflict | None = None
    excluded = isinstance(graph, Domains)
    if isinstance(graph, Domains):
        search.raise_bound(np.inf, "consistency")
    else:
        minimise(graph, search, np.zeros(num_points), lambda: _find_fitting(problem, full, search))
    if explain and search.choice is None and search.bound == np.inf:
        conflict = _conflict(problem, search.deadline, clock)
    seconds = clock() - start if wall_clock else time.process_time() - begun
    found = _solution(problem, search, conflict, excluded, seconds)
    return replace(found, is_ended_by_clock=clock.is_ended_by_clock)


def minimum_peak(problem: AssignmentProblem, *, gap: float = 1e-3, time_limit_s: float = 60.0) -> PeakResult:
    """The smallest usage limit under which there is a choice (to a relative `gap`), whatever it costs."""
    search = _search_peak(problem, max(gap, SMALLEST_GAP), time_limit_s, Work())
    if search.choice is None:
        conflict = _forbidden_conflict(problem) if search.bound == np.inf else None
        return PeakResult(np.inf, (), search.bound, conflict)
    return PeakResult(problem.peak(search.choice)[1], search.choice, search.bound)


def _may_exceed(problem: AssignmentProblem, limit: float) -> bool:
    """Whether some choice might take more than so many bytes."""
    sizes = [usage.bytes for node in problem.nodes for usage in node.usages]
    if not sizes:
        return False
    starts = np.cumsum([0, *map(len, sizes[:-1])])
    together = float(np.maximum.reduceat(np.concatenate(sizes), starts).sum())  # though not all are alive at once
    return together > limit and _most_bytes(problem) > limit


def _most_bytes(problem: AssignmentProblem) -> float:
    """What no choice can take more than: the peak where every node holds the most that it may."""
    most: list[Node] = []
    for node in problem.nodes:
        allowed = np.isfinite(node.costs)
        sizes = (np.array([u.bytes[allowed].max(initial=0.0)]) for u in node.usages)
        usages = tuple(Usage(u.start, u.end, size) for u, size in zip(node.usages, sizes, strict=True))
        most.append(Node(node.name, np.zeros(1), usages))
    return AssignmentProblem(tuple(most)).peak([0] * len(most))[1]


def _offer_starts(problem: AssignmentProblem, full: Graph, search: Search, starts: Sequence[Sequence[int]]) -> None:
    memory = Memory(full.usages, full.num_choices, full.num_points)
    for given in starts:
        choice = tuple(int(i) for i in given)
        in_range = len(choice) == len(full.costs) and all(
            0 <= i < count for i, count in zip(choice, full.num_choices, strict=True)
        )
        if not in_range:
            raise ValueError(f"a warm start must have one choice for each of the {len(full.costs)} nodes: {choice}")
        cost = problem.evaluate(choice)
        if np.isfinite(cost):
            search.offer(Column(cost, memory.profile(np.array(choice, dtype=np.int64)), choice))


def _search_peak(
    problem: AssignmentProblem,
    gap: float,
    deadline: float,
    clock: Work,
    progress: Progress | None = None,
    decide: float | None = None,
) -> Search:
    """Minimise the peak: the same search with no costs, a limit of zero, and a price of one a byte above it.

    With `decide`, only until it is known whether the smallest peak is above that many bytes.
    """
    free = AssignmentProblem(
        tuple(replace(node, costs=_forbid(node.costs)) for node in problem.nodes),
        tuple(Edge(e.u, e.v, e.u_class, e.v_class, _forbid(e.costs)) for e in problem.edges),
    )
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    search = Search(Target(0.0, overload_price=1.0), gap, deadline, progress=progress, clock=clock)
    if decide is not None:
        search.good_enough, search.hopeless = decide, decide * (1 + USAGE_TOLERANCE)
    graph = presolve(from_problem(free, usages, num_points))
    if isinstance(graph, Domains):
        search.raise_bound(np.inf, "consistency")
        return search
    least = Memory(graph.usages, graph.num_choices, num_points).least()
    search.raise_bound(float(least.max()) if num_points else 0.0, "least")
    prices = np.zeros(num_points)
    if num_points:
        prices[int(np.argmax(least))] = 1.0
    minimise(graph, search, prices)
    return search


def _forbid(costs: FloatArray) -> FloatArray:
    return np.where(np.isfinite(costs), 0.0, np.inf)


def _find_fitting(problem: AssignmentProblem, full: Graph, search: Search) -> None:
    """Look for any choice that fits; if even the smallest possible peak does not, that proves that there is none."""
    deadline = search.clock() + PEAK_SHARE_OF_TIME * search.seconds_left
    peak = _search_peak(problem, search.gap, deadline, search.clock, decide=search.target.limit)
    if peak.bound > search.target.limit * (1 + USAGE_TOLERANCE):
        search.raise_bound(np.inf, "memory")
    elif peak.choice is not None:
        # Over the points that this search looks at: none where all choices fit.
        profile = Memory(full.usages, full.num_choices, full.num_points).profile(np.array(peak.choice, dtype=np.int64))
        search.offer(Column(problem.evaluate(peak.choice), profile, peak.choice))


def _conflict(problem: AssignmentProblem, deadline: float, clock: Work) -> Conflict:
    """Say what makes a problem infeasible that was proven to be so."""
    if problem.usage_limit is None:
        return _forbidden_conflict(problem)
    now = clock()
    peak = _search_peak(problem, CONFLICT_GAP, min(max(deadline, now + 1.0), now + CONFLICT_SECONDS), clock)
    if peak.choice is None and peak.bound == np.inf:
        return _forbidden_conflict(problem)
    needed = None if peak.choice is None else problem.peak(peak.choice)[1]
    least = peak.bound
    when = "" if peak.choice is None else f" (at time {problem.peak(peak.choice)[0]})"
    known = "no choice was found" if needed is None else f"the smallest peak found is {needed:.0f} bytes{when}"
    alive = () if peak.choice is None else _alive_at_peak(problem, peak.choice)
    names = ", ".join(repr(problem.nodes[v].name) for v in alive[:8])
    largest = f", most of them held by {names}" if alive else ""
    message = (
        f"at most {problem.usage_limit:.0f} bytes may be alive at once, at least {least:.0f} must be; {known}{largest}"
    )
    return Conflict(message, alive, needed_bytes=needed)


def _alive_at_peak(problem: AssignmentProblem, choice: tuple[int, ...]) -> tuple[int, ...]:
    """The nodes that hold memory at the peak, the largest first."""
    time_of_peak, _ = problem.peak(choice)
    held = [
        sum(float(u.bytes[i]) for u in node.usages if u.start <= time_of_peak < u.end)
        for node, i in zip(problem.nodes, choice, strict=True)
    ]
    return tuple(sorted((v for v, size in enumerate(held) if size > 0), key=lambda v: (-held[v], v)))


def _forbidden_conflict(problem: AssignmentProblem) -> Conflict:
    """Name the nodes and edges that forbid each other every choice."""
    alive = [np.isfinite(node.costs) for node in problem.nodes]
    domains = propagate(alive, problem.edges)
    if domains.empty is None:
        nodes = tuple(range(len(problem.nodes)))
        edges = tuple(i for i, e in enumerate(problem.edges) if not np.isfinite(e.costs).all())
        message = f"no choice satisfies all {len(edges)} edges that forbid something (proven by search)"
        return Conflict(message, nodes, edges)
    nodes, edges = explain(alive, problem.edges, domains)
    names = ", ".join(repr(problem.nodes[v].name) for v in nodes[:8]) + (", ..." if len(nodes) > 8 else "")
    if not edges:
        return Conflict(f"node {names} has no allowed choice", nodes)
    pairs = ", ".join(
        f"{problem.nodes[problem.edges[i].u].name}-{problem.nodes[problem.edges[i].v].name}" for i in edges[:8]
    )
    message = f"nodes {names} have no choices that go together: edges {pairs}{', ...' if len(edges) > 8 else ''}"
    return Conflict(message, nodes, edges)


def _solution(
    problem: AssignmentProblem, search: Search, conflict: Conflict | None, excluded: bool, seconds: float
) -> Solution:
    if search.choice is None:
        status: Status = "infeasible" if search.bound == np.inf else "unknown"
        return Solution((), np.inf, search.bound, np.inf, status, 0.0, 0.0, seconds, conflict, excluded)
    cost = problem.evaluate(search.choice)
    bound = min(search.bound, cost)
    gap = relative_gap(cost, bound)
    status = "optimal" if gap <= search.gap * (1 + 1e-9) else "feasible"
    return Solution(search.choice, cost, bound, gap, status, search.price, problem.peak(search.choice)[1], seconds)
