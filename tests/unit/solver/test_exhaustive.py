"""The solver's optimum against an exhaustive search that shares nothing with it, on the placement problems of small
models: bucket elimination (Dechter 1999) gives the exact cost to go, depth-first search over it tries all that could be
better, and memory prunes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import pytest
import torch
from torch import Tensor, nn

from autopar import pipeline
from autopar.machine.mesh import Mesh
from autopar.passes.placement.problem import build_problem
from autopar.solver.problem import AssignmentProblem
from autopar.solver.solve import solve
from autopar.strategies.names import resolve
from autopar.strategies.request import Request

pytestmark = pytest.mark.slow

MOST_VISITS = 300_000


class Block(nn.Module):
    """One residual block: two products and a nonlinearity between them."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down = nn.Linear(512, 2048, bias=False), nn.Linear(2048, 512, bias=False)

    def forward(self, x_BD: Tensor) -> Tensor:
        return x_BD + self.down(torch.relu(self.up(x_BD)))


class Blocks(nn.Module):
    """Two blocks of one region, and a loss."""

    def __init__(self, num: int = 2) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block() for _ in range(num))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@dataclass(frozen=True)
class Bucket:
    """A variable, the later ones its factors share, and the summed factors over (*later, variable)."""

    variable: int
    later: tuple[int, ...]
    table: np.ndarray


def eliminate(problem: AssignmentProblem, extra: Sequence[np.ndarray]) -> tuple[float, list[Bucket]]:
    """The least cost, memory aside, of the problem with `extra` added to each node's costs; and the way there."""
    factors: list[tuple[tuple[int, ...], np.ndarray]] = []
    for index, node in enumerate(problem.nodes):
        factors.append(((index,), node.costs + extra[index]))
    for edge in problem.edges:
        factors.append(((edge.u, edge.v), edge.costs[edge.u_class][:, edge.v_class]))
    left, buckets = set(range(len(problem.nodes))), []
    total = 0.0
    while left:
        shared = {v: {w for scope, _ in factors if v in scope for w in scope} - {v} for v in left}
        variable = min(left, key=lambda v: math.prod(len(problem.nodes[w].costs) for w in shared[v] | {v}))
        scope = (*sorted(shared[variable]), variable)
        table = np.zeros([len(problem.nodes[w].costs) for w in scope])
        for names, values in (factor for factor in factors if variable in factor[0]):
            positions = [scope.index(name) for name in names]
            values = np.transpose(values, np.argsort(positions))
            table = table + values.reshape([len(problem.nodes[w].costs) if w in names else 1 for w in scope])
        factors = [factor for factor in factors if variable not in factor[0]]
        buckets.append(Bucket(variable, scope[:-1], table))
        if scope[:-1]:
            factors.append((scope[:-1], table.min(axis=-1)))
        else:
            total += float(table.min())
        left.remove(variable)
    return total, buckets


def usage_table(problem: AssignmentProblem) -> list[np.ndarray]:
    """For each node, bytes alive by (choice, time)."""
    times = sorted({usage.start for node in problem.nodes for usage in node.usages if usage.end > usage.start})
    found = []
    for node in problem.nodes:
        table = np.zeros((len(node.costs), len(times)))
        for usage in node.usages:
            alive = np.array([usage.start <= time < usage.end for time in times])
            table += usage.bytes[:, None] * alive
        found.append(table)
    return found


def exhaustive(problem: AssignmentProblem) -> float:
    """The least cost of a choice that fits; np.inf without one."""
    usages, limit = usage_table(problem), problem.usage_limit
    if limit is None:
        return eliminate(problem, [np.zeros(len(node.costs)) for node in problem.nodes])[0]
    best_total, order = -np.inf, list[Bucket]()
    # Any price on bytes at any time gives a valid bound; a good one saves search.
    for time in range(usages[0].shape[1]):
        for price in (0.0, *np.geomspace(1e-12, 1e-9, 8)):
            total, buckets = eliminate(problem, [price * table[:, time] for table in usages])
            if total - price * limit > best_total:
                best_total, order = total - price * limit, buckets[::-1]
    return search(problem, usages, best_total, order)


def search(problem: AssignmentProblem, usages: list[np.ndarray], bound: float, order: list[Bucket]) -> float:
    """Depth first in the reverse order of elimination: what a choice adds to the bound is exact."""
    limit = problem.usage_limit
    assert limit is not None
    rest = [np.zeros(usages[0].shape[1])]
    for bucket in reversed(order):
        rest.append(rest[-1] + usages[bucket.variable].min(axis=0))
    rest.reverse()  # rest[d]: the least that the variables from depth d on hold
    choice = [0] * len(problem.nodes)
    best, visits = np.inf, 0

    def visit(depth: int, reached: float, held: np.ndarray) -> None:
        nonlocal best, visits
        visits += 1
        assert visits < MOST_VISITS, "the search grew too large for a test"
        if depth == len(order):
            best = min(best, problem.evaluate(choice))
            return
        bucket = order[depth]
        row = bucket.table[tuple(choice[w] for w in bucket.later)]
        for index in np.argsort(row, kind="stable"):
            after = reached + float(row[index] - row.min())
            if not np.isfinite(row[index]) or after >= best * (1 - 1e-9):
                return
            alive = held + usages[bucket.variable][index]
            if (alive + rest[depth + 1] <= limit * (1 + 1e-9)).all():
                choice[bucket.variable] = int(index)
                visit(depth + 1, after, alive)

    visit(0, bound, np.zeros(usages[0].shape[1]))
    return best


@lru_cache
def problem_of(mesh_text: str) -> AssignmentProblem:
    mesh = Mesh.parse(mesh_text, hardware="h100")
    with torch.device("meta"):
        model, inputs = Blocks(), {"x": torch.empty(4096, 512)}
    request = Request(model, inputs, mesh, resolve("auto", mesh))
    program, _ = pipeline.run(request, (*pipeline.TRACE, *pipeline.RECOMPUTE, *pipeline.ANNOTATE))
    return build_problem(program, request.strategies, (), None).problem


@pytest.mark.parametrize("mesh", ["dp=2", "dp=2,tp=2"])
def test_the_solver_finds_the_optimum(mesh: str) -> None:
    """Breaks if presolve, elimination, fixing or rounding loses the best choice, or if a bound is no bound."""
    problem = problem_of(mesh)
    least = exhaustive(problem)
    solution = solve(problem, gap=1e-7)
    assert solution.status == "optimal"
    assert problem.evaluate(solution.choice) == pytest.approx(least, rel=1e-6)
    assert solution.bound <= least * (1 + 1e-9)


@pytest.mark.parametrize(("mesh", "share"), [("dp=2", 0.88), ("dp=2", 0.85)])
def test_the_solver_finds_the_optimum_under_a_limit(mesh: str, share: float) -> None:
    """The limit binds: the best choice without it does not fit. Breaks if a price or a memory row is wrong."""
    free = problem_of(mesh)
    limit = share * free.peak(solve(free, gap=1e-7).choice)[1]
    problem = AssignmentProblem(free.nodes, free.edges, limit)
    least = exhaustive(problem)
    solution = solve(problem, gap=1e-7)
    assert solution.status == "optimal" and problem.fits(solution.choice)
    assert least > exhaustive(free)
    assert problem.evaluate(solution.choice) == pytest.approx(least, rel=1e-6)
    assert solution.bound <= least * (1 + 1e-9)


def test_both_find_nothing_where_nothing_fits() -> None:
    free = problem_of("dp=2")
    limit = 0.6 * free.peak(solve(free, gap=1e-7).choice)[1]
    problem = AssignmentProblem(free.nodes, free.edges, limit)
    assert exhaustive(problem) == np.inf
    assert solve(problem, gap=1e-7).status == "infeasible"
