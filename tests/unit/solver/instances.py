"""Small random problems and their brute-force answers, for the tests of the solver."""

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from unittest.mock import patch

import numpy as np
from hypothesis import strategies as st

from autopar.solver import AssignmentProblem, Edge, Node, Usage, methods
from autopar.solver.consistency import Domains
from autopar.solver.graph import Graph, from_problem
from autopar.solver.memory import binding_points
from autopar.solver.presolve import presolve


@contextmanager
def thresholds(**changed: float) -> Iterator[None]:
    """Let small problems go the ways that large ones go (`autopar.solver.methods`)."""
    with patch.object(methods, "THRESHOLDS", replace(methods.THRESHOLDS, **changed)):
        yield


@dataclass(frozen=True)
class BruteForce:
    """The best cost that fits, the smallest peak and the best cost whatever the memory; np.inf where there is none."""

    cost: float
    peak: float
    cost_without_limit: float


def brute_force(problem: AssignmentProblem) -> BruteForce:
    best = peak = free = np.inf
    for choice in itertools.product(*(range(len(node.costs)) for node in problem.nodes)):
        cost = problem.evaluate(choice)
        if np.isfinite(cost):
            free = min(free, cost)
            peak = min(peak, problem.peak(choice)[1])
            if problem.fits(choice):
                best = min(best, cost)
    return BruteForce(best, peak, free)


def random_problem(
    seed: int,
    max_nodes: int = 6,
    max_choices: int = 4,
    density: float = 1.5,
    forbidden: float = 0.25,
    ties: float = 0.3,
) -> AssignmentProblem:
    """Few distinct integer costs (many equal optima), parallel edges, self edges, hard ties, short intervals."""
    rng = np.random.default_rng(seed)
    nodes = []
    for index in range(int(rng.integers(1, max_nodes + 1))):
        count = int(rng.integers(1, max_choices + 1))
        costs = rng.integers(0, 8, count).astype(float)
        costs[rng.random(count) < forbidden / 3] = np.inf
        usages = []
        for _ in range(rng.integers(0, 3)):
            start = int(rng.integers(0, 6))
            usages.append(Usage(start, start + int(rng.integers(0, 5)), rng.integers(0, 6, count).astype(float)))
        nodes.append(Node(f"n{index}", costs, tuple(usages)))
    edges = [_random_edge(rng, nodes, forbidden, ties) for _ in range(rng.integers(0, int(density * len(nodes)) + 2))]
    return AssignmentProblem(tuple(nodes), tuple(edges))


def _random_edge(rng: np.random.Generator, nodes: list[Node], forbidden: float, ties: float) -> Edge:
    u, v = (int(i) for i in rng.integers(0, len(nodes), 2))
    u_count, v_count = len(nodes[u].costs), len(nodes[v].costs)
    if rng.random() < ties:
        count = max(u_count, v_count)
        costs = np.full((count, count), np.inf)
        costs[np.arange(count), rng.permutation(count)] = rng.integers(0, 3, count)
        return Edge(u, v, np.arange(u_count), np.arange(v_count), costs)
    shape = (int(rng.integers(1, u_count + 1)), int(rng.integers(1, v_count + 1)))
    costs = rng.integers(0, 8, shape).astype(float)
    costs[rng.random(shape) < forbidden] = np.inf
    return Edge(u, v, rng.integers(0, shape[0], u_count), rng.integers(0, shape[1], v_count), costs)


problems = st.integers(0, 2**31).map(random_problem)
dense_problems = st.integers(0, 2**31).map(
    lambda seed: random_problem(seed, max_nodes=7, max_choices=4, density=3.0, forbidden=0.08, ties=0.05)
)


def knot(seed: int, num_nodes: int = 6, num_choices: int = 3) -> AssignmentProblem:
    """Costs over seven orders of magnitude and many (often parallel) edges: what elimination joins and joins again."""
    rng = np.random.default_rng(seed)
    nodes = []
    for index in range(num_nodes):
        start = int(rng.integers(0, 9))
        usage = Usage(start, start + int(rng.integers(1, 6)), 10 ** rng.uniform(5, 9, num_choices))
        nodes.append(Node(f"n{index}", 10 ** rng.uniform(-7, 0, num_choices), (usage,)))
    edges, forbidden = [], rng.choice([0.1, 0.2, 0.3])
    for _ in range(rng.integers(num_nodes, 3 * num_nodes)):
        u, v = (int(i) for i in rng.choice(num_nodes, 2, replace=False))
        costs = 10 ** rng.uniform(-7, 0, (num_choices, num_choices))
        costs[rng.random(costs.shape) < forbidden] = np.inf
        edges.append(Edge(u, v, rng.permutation(num_choices), rng.permutation(num_choices), costs))
    return AssignmentProblem(tuple(nodes), tuple(edges))


knots = st.integers(0, 2**31).map(knot)


def layered(
    seed: int, num_nodes: int = 120, num_choices: int = 12, num_layouts: int = 6, tied: float = 0.2, skips: float = 0.3
) -> AssignmentProblem:
    """A long chain with skip edges, hard ties, forbidden layouts, parameters and saved activations."""
    rng = np.random.default_rng(seed)
    counts = rng.integers(max(2, num_choices // 4), num_choices + 1, num_nodes)
    follows = {v for v in range(1, num_nodes) if rng.random() < tied}
    for v in sorted(follows):
        counts[v] = counts[v - 1]
    position = rng.random((num_layouts, 3))
    distance = np.abs(position[:, None] - position[None]).sum(axis=-1)
    layouts_in = [rng.integers(0, num_layouts, count) for count in counts]
    layouts_out = [rng.integers(0, num_layouts, count) for count in counts]
    nodes, edges = [], []
    for v, count in enumerate(counts):
        speed = rng.choice([1, 0.5, 0.25, 0.125], count)
        kept = 10 ** rng.uniform(5, 9) * rng.choice([1, 0.5, 0.25], count)
        saved = 10 ** rng.uniform(5, 8.5) * rng.choice([1, 0.5, 0.25], count)
        usages = (Usage(0, 2 * num_nodes, kept), Usage(v, 2 * num_nodes - v, saved))
        nodes.append(Node(f"n{v}", 10 ** rng.uniform(-7, -3) * speed * (1 + 0.2 * rng.random(count)), usages))
    for v in range(1, num_nodes):
        sources = [v - 1] + ([max(0, v - int(rng.integers(2, 20)))] if rng.random() < skips and v > 2 else [])
        for u in sources:
            if u == v - 1 and v in follows:
                tie = np.where(np.eye(counts[v], dtype=bool), 0.0, np.inf)
                edges.append(Edge(u, v, np.arange(counts[v]), np.arange(counts[v]), tie))
                continue
            costs = 10 ** rng.uniform(-6.5, -3.5) * distance * (1 + 0.1 * rng.random(distance.shape))
            costs[rng.random(costs.shape) < 0.15] = np.inf
            np.fill_diagonal(costs, 0.0)
            edges.append(Edge(u, v, layouts_out[u], layouts_in[v], costs))
    return AssignmentProblem(tuple(nodes), tuple(edges))


def graph_of(problem: AssignmentProblem) -> Graph | None:
    """The presolved graph; None where nothing is allowed."""
    usages, num_points = binding_points([node.usages for node in problem.nodes])
    graph = presolve(from_problem(problem, usages, num_points))
    return None if isinstance(graph, Domains) else graph
