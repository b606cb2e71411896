"""Memory prices: maximise the Lagrangian bound over one price per time point.

    max_{prices >= 0}  min_x [ cost(x) + sum_t prices_t (alive_t(x) - limit) ]

by column generation (Dantzig-Wolfe; with one binding point it is bracketing by secants). The master LP mixes the
choices seen so far into a (fractional) one that fits,

    min sum_k a_k cost_k + cap * s   s.t.   sum_k a_k alive_t(x_k) - s <= limit (t),   sum_k a_k = 1,   a, s >= 0;

its duals are the next prices (their sum is at most `cap`), damped towards the best ones so far. Its rows are added as
they are violated: few time points ever bind.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from autopar.solver.oracle import LASTING_SWEEPS, Oracle
from autopar.solver.problem import FloatArray, IntArray
from autopar.solver.programs import mathopt
from autopar.solver.search import Search, column_of
from autopar.solver.work import MASTER_SECONDS, MASTER_SECONDS_A_COEFFICIENT

MAX_ROUNDS = 60
MAX_STALLED = 5
FIRST_SWEEPS = 60
NEXT_SWEEPS = 12
DAMPING = 0.35
ROWS_AT_ONCE = 4
FIRST_CAP = 4.0
"""Times the price at which what is above the limit costs as much as everything else."""
CAP_GROWTH = 10.0
MAX_CAP_GROWTHS = 7
MAX_STEPS, STEPS_BEFORE_HALVING = 500, 8
"""Of prices where there is no LP solver."""


@dataclass(slots=True)
class Master:
    """The master LP. `active`: the time points that have a row."""

    search: Search
    cap: float
    active: list[int]

    def solve(self) -> tuple[float, FloatArray, float] | None:
        """(value, prices [num points], bytes by which no mixture of columns fits); None where the LP solver gave up."""
        columns, limit = self.search.columns, self.search.target.limit
        self.search.clock.spend(MASTER_SECONDS + MASTER_SECONDS_A_COEFFICIENT * len(columns) * len(self.active))
        profiles = np.array([c.profile for c in columns])
        bytes_unit = max(limit, float(profiles.max()), 1.0)
        cost_unit = max(abs(c.cost) for c in columns) or self.cap * bytes_unit
        if mathopt() is None:
            return self._by_steps(profiles)
        while True:
            solved = self._solve_rows(profiles / bytes_unit, bytes_unit, cost_unit)
            if solved is None:
                return None
            value, weights, duals, over = solved
            mixed = weights @ profiles - limit - over * bytes_unit
            worst = [int(t) for t in np.argsort(-mixed, kind="stable")[:ROWS_AT_ONCE] if mixed[t] > 1e-9 * bytes_unit]
            fresh = [t for t in worst if t not in self.active]
            if not fresh:
                break
            self.active.extend(fresh)
        prices = np.zeros(profiles.shape[1])
        prices[self.active] = np.maximum(0.0, -duals) * cost_unit / bytes_unit
        return value * cost_unit, prices, over * bytes_unit

    def _solve_rows(
        self, profiles: FloatArray, bytes_unit: float, cost_unit: float
    ) -> tuple[float, FloatArray, FloatArray, float] | None:
        solvers = mathopt()
        model = solvers.Model()
        limit = self.search.target.limit / bytes_unit
        weights = [model.add_variable(lb=0.0) for _ in self.search.columns]
        over = model.add_variable(lb=0.0)
        rows = [model.add_linear_constraint(ub=limit) for _ in self.active]
        total = model.add_linear_constraint(lb=1.0, ub=1.0)
        for k, weight in enumerate(weights):
            total.set_coefficient(weight, 1.0)
            weight_cost = self.search.columns[k].cost / cost_unit
            model.objective.set_linear_coefficient(weight, weight_cost)
            for row, t in zip(rows, self.active, strict=True):
                row.set_coefficient(weight, float(profiles[k, t]))
        for row in rows:
            row.set_coefficient(over, -1.0)
        model.objective.set_linear_coefficient(over, self.cap * bytes_unit / cost_unit)
        model.objective.is_maximize = False
        result = solvers.solve(model, solvers.SolverType.GLOP)
        if result.termination.reason != solvers.TerminationReason.OPTIMAL:
            return None
        values, duals = result.variable_values(), result.dual_values()
        mix = np.array([values[w] for w in weights])
        return result.objective_value(), mix, np.array([duals[row] for row in rows]), values[over]

    def _by_steps(self, profiles: FloatArray) -> tuple[float, FloatArray, float]:
        """The same without an LP solver: the dual, max over prices of min_k cost_k + prices . (alive(x_k) - limit), by
        steps along its gradient towards what a single column shows to be out of reach (Polyak's; Bertsekas, Nonlinear
        Programming, 6.3). The value is one that is reached, so may be a little low: nothing proven stands on it.
        """
        costs = np.array([c.cost for c in self.search.columns])
        over = profiles - self.search.target.limit
        out_of_reach = float((costs + self.cap * np.maximum(over.max(1), 0.0)).min())
        prices = best_prices = np.zeros(over.shape[1])
        best, factor, stalled = -np.inf, 1.0, 0
        for _ in range(MAX_STEPS):
            values = costs + over @ prices
            k = int(np.argmin(values))
            stalled += 1
            if values[k] > best:
                best, best_prices, stalled = float(values[k]), prices, 0
            slope = np.where((prices <= 0) & (over[k] < 0), 0.0, over[k])
            length = float(slope @ slope)
            if length == 0 or out_of_reach <= best:
                break
            if stalled == STEPS_BEFORE_HALVING:
                prices, factor, stalled = best_prices, 0.5 * factor, 0
                continue
            prices = np.maximum(0.0, prices + factor * (out_of_reach - values[k]) / length * slope)
            prices = prices * min(1.0, self.cap / max(float(prices.sum()), 1e-300))
        is_capped = float(best_prices.sum()) >= (1 - 1e-6) * self.cap
        return best, best_prices, max(0.0, float(over.max(1).min())) if is_capped else 0.0


def ascend(
    oracle: Oracle,
    search: Search,
    start: FloatArray,
    effort: int = 1,
    hopeless: float = np.inf,
    max_rounds: int = MAX_ROUNDS,
    lasting: bool = False,
) -> FloatArray:
    """Raise the bound by message passing and, where memory binds, by prices; returns the best prices [num points].

    Every choice found on the way is offered to the search. `start` are prices to begin with;
    `effort` multiplies how long messages are passed before a bound counts as converged; they are given up where n
    sweeps leave a relative gap of more than `hopeless` / n. max_rounds: of prices tried. lasting: where there are none,
    as of `Oracle.run`.
    """
    if lasting and not len(start):
        return _pass_lastingly(oracle, search, start, effort)
    is_free = not start.any()
    first = NEXT_SWEEPS if len(start) and is_free else FIRST_SWEEPS
    best_bound, best_prices = _query(oracle, search, start, first * effort, effort, hopeless=hopeless)
    # Without a price, few sweeps tell whether memory binds; where it does, more of them say nothing of what is sought.
    if first < FIRST_SWEEPS and not (search.closed or search.late) and not binds(search):
        best_bound, best_prices = _query(oracle, search, start, FIRST_SWEEPS * effort, effort, hopeless=hopeless)
    if search.closed or search.late or not search.columns or not len(start):
        return best_prices
    if search.target.overload_price is None and is_free and not binds(search):
        return best_prices
    cap = search.target.overload_price or FIRST_CAP * overload_price(search, oracle)
    master = Master(search, cap, [worst_point(search)])
    stalled = growths = 0
    for _ in range(max_rounds):
        solved = master.solve()
        if solved is None:
            break
        value, prices, over = solved
        if over > 0 and search.target.overload_price is None:
            if growths == MAX_CAP_GROWTHS:
                break
            master.cap, growths = master.cap * CAP_GROWTH, growths + 1
        elif value - best_bound <= 0.2 * search.tolerance(value):
            break
        damped = prices if over > 0 else DAMPING * best_prices + (1 - DAMPING) * prices
        bound, used = _query(oracle, search, damped, NEXT_SWEEPS * effort, effort)
        stalled = 0 if bound > best_bound + 0.02 * max(0.0, value - best_bound) or over > 0 else stalled + 1
        if bound > best_bound:
            best_bound, best_prices = bound, used
        if search.closed or search.late or stalled == MAX_STALLED:
            break
    return best_prices


def _pass_lastingly(oracle: Oracle, search: Search, prices: FloatArray, effort: int) -> FloatArray:
    """Pass messages until they have settled, or as often as what is left is worth where seconds are counted: not once
    less for what they find. What follows has the rest.
    """
    if not search.clock.counts:
        return _query(oracle, search, prices, LASTING_SWEEPS, effort, lasting=True)[1]
    sweeps = max(1, min(LASTING_SWEEPS, int(search.seconds_left / oracle.lasting_s)))
    deadline, search.deadline = search.deadline, np.inf
    found = _query(oracle, search, prices, sweeps, effort, lasting=True)[1]
    search.deadline = deadline
    return found


def refresh(oracle: Oracle, search: Search, prices: FloatArray) -> None:
    """Bring the messages of the oracle up to date with `prices` (they may last have been used at others)."""
    _query(oracle, search, prices, NEXT_SWEEPS, 1, exactly=False)


def query(oracle: Oracle, search: Search, prices: FloatArray, max_sweeps: int) -> float:
    """The bound that so many sweeps come to; nothing is looked for, unless nothing is known."""
    return _query(oracle, search, prices, max_sweeps, 1, searches=not search.columns)[0]


def _query(
    oracle: Oracle,
    search: Search,
    prices: FloatArray,
    max_sweeps: int,
    patience: float,
    *,
    exactly: bool = True,
    hopeless: float = np.inf,
    searches: bool = True,
    lasting: bool = False,
) -> tuple[float, FloatArray]:
    limit_cost = float(prices.sum()) * search.target.limit if prices.any() else 0.0
    known = min((c.cost + float(prices @ c.profile) for c in search.columns), default=np.inf)

    def offer(choice: IntArray) -> float:
        column = column_of(oracle.graph, oracle.evaluator, oracle.memory, choice)
        search.offer(column)
        return column.cost + float(prices @ column.profile)

    def tolerance(cost: float) -> float:
        least = search.settled_gap * abs(cost) if lasting and np.isfinite(cost) else 0.0
        return max(least, 0.3 * search.tolerance(cost - limit_cost))

    oracle.set_prices(prices)
    bound = oracle.run(
        offer, known, tolerance, max_sweeps, patience, lambda: search.late,
        exactly=exactly, hopeless=hopeless, searches=searches, lasting=lasting,
    )  # fmt: skip
    bound -= limit_cost
    search.raise_bound(bound, "prices" if prices.any() else "messages")
    return bound, prices


def binds(search: Search) -> bool:
    """Whether the cheapest choice seen takes more than the limit."""
    cheapest = min(search.columns, key=lambda c: c.cost, default=None)
    return cheapest is not None and not np.isfinite(search.target.objective(cheapest.cost, cheapest.peak))


def worst_point(search: Search) -> int:
    """The time at which the cheapest choice seen takes most."""
    return int(np.argmax(min(search.columns, key=lambda c: c.cost).profile))


def overload_price(search: Search, oracle: Oracle) -> float:
    """A price at which the bytes above the limit would cost as much as everything else."""
    cheapest = min(search.columns, key=lambda c: c.cost)
    cost = abs(cheapest.cost) or oracle.evaluator.dearest()
    return max(cost, 1e-12) / max(cheapest.peak - search.target.limit, 1e-3 * search.target.limit, 1.0)
