"""The integer program over the choices that are left, by MathOpt (HiGHS; GSCIP where HiGHS refuses).

    x[v,i] in {0,1}: node v takes choice i;  y_e[a,b] in [0,1], continuous: edge e has classes a and b
    min  sum costs_v[i] x[v,i] + sum costs_e[a,b] y_e[a,b] + overload_price * over
    s.t. sum_i x[v,i] = 1                                     (_add_nodes)
         sum_b y_e[a,b] = sum_{i in a} x[u,i]                 (_add_edges; and the same for v)
         sum_v bytes_v,t[i] x[v,i] - over <= limit            (_add_memory_row; only for the points found violated)

Forbidden pairs have no y. Costs and bytes are scaled, so that the solvers' absolute tolerances are relative ones.
"""

from __future__ import annotations

import datetime
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np

from autopar.solver.graph import Graph
from autopar.solver.memory import Memory
from autopar.solver.problem import Edge, IntArray
from autopar.solver.programs import mathopt
from autopar.solver.search import Target
from autopar.solver.work import NET, PROGRAM_SECONDS_A_PIVOT, PROGRAM_SECONDS_A_VARIABLE, Work

MAX_PAIRS = 200_000
ROWS_AT_ONCE = 6
COST_SCALE = 1e3
BYTES_SCALE = 1e3
ROUNDING = 1e-8
MAX_ROUNDS = 50
MAX_SECONDS = 1e6
MOST_NODES = 100_000
TIGHTENING = 1e-5
"""Scaled bytes taken off a limit that a choice exceeds by the solver's tolerance; later bounds do not count."""


@dataclass(frozen=True, slots=True)
class Exact:
    """`choice` of the graph (None: none found), proven lower `bound` (np.inf: there is none), `pairs` in the model."""

    choice: IntArray | None
    bound: float
    pairs: int


def num_pairs(graph: Graph) -> int:
    """The number of y variables the integer program would have."""
    return sum(int(np.isfinite(e.costs).sum()) for e in graph.edges)


def root_s(size: int) -> float:
    """What the relaxation of a program of so many variables is taken to be worth: an iteration for every third."""
    return PROGRAM_SECONDS_A_VARIABLE * size + PROGRAM_SECONDS_A_PIVOT * size * size / 3


def solve_exactly(
    graph: Graph,
    target: Target,
    points: list[int],
    gap: float,
    reference: float,
    seconds_left: Callable[[], float],
    clock: Work,
) -> Exact:
    """Solve to the relative `gap`. `points`: time points likely to bind; `reference`: a cost of the optimum's size.
    `seconds_left`: by the clock, which is told what is spent.

    Nothing is found where the program is too large, or there is no MathOpt.
    """
    pairs = num_pairs(graph)
    if pairs > MAX_PAIRS or seconds_left() <= 0 or mathopt() is None:
        return Exact(None, -np.inf, pairs)
    size = pairs + sum(graph.num_choices)
    if clock.counts and root_s(size) > seconds_left():
        return Exact(None, -np.inf, pairs)
    clock.spend(PROGRAM_SECONDS_A_VARIABLE * size)
    program = Program(graph, target, reference)
    for point in points:
        program.add_memory_row(point)
    bound = -np.inf
    for _ in range(MAX_ROUNDS):
        choice, relaxed = program.solve(gap, seconds_left, clock)
        bound = max(bound, relaxed)
        if choice is None:
            return Exact(None, bound, pairs)
        if not program.add_violated_rows(choice):
            return Exact(choice, bound, pairs)
    return Exact(None, bound, pairs)


class Program:
    """The integer program of one graph; memory rows are added between solves."""

    def __init__(self, graph: Graph, target: Target, reference: float) -> None:
        self.graph, self.target = graph, target
        self.memory = Memory(graph.usages, graph.num_choices, graph.num_points)
        self.model: Any = mathopt().Model()
        self.scale = COST_SCALE / max(abs(reference), 1e-30)
        least = float(self.memory.least().max()) if graph.num_points else 0.0
        size = target.limit if np.isfinite(target.limit) else 0.0
        self.bytes_scale = BYTES_SCALE / max(size if target.overload_price is None else abs(reference), least, 1.0)
        self.over = None if target.overload_price is None else self.model.add_variable(lb=0.0, name="over")
        self.rows: dict[int, float] = {}
        self.tightened = False
        self.offset = 0.0
        self._add_nodes()
        of_free = np.repeat([bool(row) for row in self.x], graph.num_choices)
        self.free, self.variables = np.flatnonzero(of_free), [variable for row in self.x for variable in row]
        for index, edge in enumerate(graph.edges):
            self._add_edge(index, edge)
        if self.over is not None and target.overload_price is not None:
            price = target.overload_price * self.scale / self.bytes_scale
            self.model.objective.set_linear_coefficient(self.over, price)
        self.model.objective.offset = self.offset
        self.model.objective.is_maximize = False

    def _add_nodes(self) -> None:
        self.x: list[list[Any]] = []
        for costs in self.graph.costs:
            if len(costs) == 1:
                self.x.append([])
                self.offset += float(costs[0]) * self.scale
                continue
            row = self.model.add_linear_constraint(lb=1.0, ub=1.0)
            self.x.append([self.model.add_binary_variable() for _ in costs])
            for variable, cost in zip(self.x[-1], costs.tolist(), strict=True):
                row.set_coefficient(variable, 1.0)
                self.model.objective.set_linear_coefficient(variable, cost * self.scale)

    def _add_edge(self, index: int, edge: Edge) -> None:
        """Both ends have a choice (`tidy` folds the other edges into node costs)."""
        ends = ((edge.u, edge.u_class, edge.costs.shape[0]), (edge.v, edge.v_class, edge.costs.shape[1]))
        rows: list[list[Any]] = []
        for node, classes, count in ends:
            assert self.x[node], f"edge {index} at node {node} with a single choice"
            rows.append([self.model.add_linear_constraint(lb=0.0, ub=0.0) for _ in range(count)])
            for variable, c in zip(self.x[node], classes.tolist(), strict=True):
                rows[-1][c].set_coefficient(variable, -1.0)
        for a, b in zip(*(axis.tolist() for axis in np.nonzero(np.isfinite(edge.costs))), strict=True):
            pair = self.model.add_variable(lb=0.0)
            rows[0][a].set_coefficient(pair, 1.0)
            rows[1][b].set_coefficient(pair, 1.0)
            self.model.objective.set_linear_coefficient(pair, float(edge.costs[a, b]) * self.scale)

    def add_memory_row(self, point: int, tighten: float = 0.0) -> None:
        """The limit at one time point, less `tighten` in scaled bytes."""
        self.rows[point] = tighten
        flat = self.memory.row(point) * self.bytes_scale
        least = np.minimum.reduceat(flat, self.memory.offsets[:-1])
        limit = self.target.limit * self.bytes_scale - tighten - float(least.sum())
        row = self.model.add_linear_constraint(ub=limit)
        more = (flat - np.repeat(least, self.graph.num_choices))[self.free]
        for index in np.flatnonzero(more > 0).tolist():
            row.set_coefficient(self.variables[index], float(more[index]))
        if self.over is not None:
            row.set_coefficient(self.over, -1.0)

    def add_violated_rows(self, choice: IntArray) -> bool:
        """Add rows for the worst points where `choice` is above the limit (or above what the rows say is the peak)."""
        profile = self.memory.profile(choice)
        if not len(profile):
            return False
        allowed = self.target.limit * (1 + 1e-9)
        if self.over is not None:
            known = max((profile[t] for t in self.rows), default=-np.inf)
            allowed = max(allowed, known * (1 + 1e-9))
        worst = [int(t) for t in np.argsort(-profile, kind="stable")[:ROWS_AT_ONCE] if profile[t] > allowed]
        for point in worst:
            self.tightened |= point in self.rows
            self.add_memory_row(point, self.rows.get(point, -TIGHTENING) + TIGHTENING)
        return bool(worst)

    def solve(self, gap: float, seconds_left: Callable[[], float], clock: Work) -> tuple[IntArray | None, float]:
        """(the best choice found under the rows so far, a lower bound). Where seconds are counted, nodes of the search
        are limited, each taken to be worth a tenth of its root; the machine's clock ends it long after.
        """
        solvers, size = mathopt(), num_pairs(self.graph) + sum(self.graph.num_choices)
        empty = (solvers.TerminationReason.INFEASIBLE, solvers.TerminationReason.INFEASIBLE_OR_UNBOUNDED)
        for solver in (solvers.SolverType.HIGHS, solvers.SolverType.GSCIP):
            left = min(seconds_left(), MAX_SECONDS)
            if left <= 0:
                return None, -np.inf
            nodes = max(1, int(10 * left / root_s(size)) - 10) if clock.counts else None
            parameters = solvers.SolveParameters(
                time_limit=datetime.timedelta(seconds=NET * left if clock.counts else left),
                node_limit=min(nodes, MOST_NODES) if nodes is not None else None,
                relative_gap_tolerance=0.5 * gap,
            )
            try:
                result = solvers.solve(self.model, solver, params=parameters)
            except (RuntimeError, ValueError):
                continue
            clock.spend(PROGRAM_SECONDS_A_PIVOT * size * result.solve_stats.simplex_iterations)
            clock.is_ended_by_clock |= result.termination.limit == solvers.Limit.TIME
            if result.termination.reason in empty:
                return None, -np.inf if self.tightened else np.inf
            bound = result.termination.objective_bounds.dual_bound
            if self.tightened or not np.isfinite(bound):
                bound = -np.inf
            bound = (bound - ROUNDING * max(COST_SCALE, abs(bound))) / self.scale
            if result.has_primal_feasible_solution():
                return self._read(result), bound
            return None, bound
        return None, -np.inf

    def _read(self, result: Any) -> IntArray:
        values = result.variable_values()
        picks = [int(np.argmax([values[variable] for variable in row])) if row else 0 for row in self.x]
        return np.array(picks, dtype=np.int64)
