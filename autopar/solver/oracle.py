"""The relaxed problem at given memory prices: a lower bound, and choices that come close to it.

L(prices) = min_x [ cost(x) + sum_t prices_t (alive_t(x) - limit) ]   <=   the cost of every x that fits
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

import numpy as np

from autopar.solver.buckets import Buckets
from autopar.solver.consistency import Network
from autopar.solver.eliminate import Plan, Reduced
from autopar.solver.graph import Graph
from autopar.solver.improve import descend, round_consistently
from autopar.solver.memory import Memory
from autopar.solver.messages import Messages
from autopar.solver.methods import THRESHOLDS
from autopar.solver.problem import Edge, FloatArray, IntArray
from autopar.solver.work import (
    LASTING_SECONDS_A_CELL,
    PASS_SECONDS_A_CELL,
    PASS_SECONDS_AN_EDGE,
    SECONDS_A_STEP,
    Work,
)

if TYPE_CHECKING:
    from autopar.solver.compiled_messages import CompiledMessages

STALL_SWEEPS = 4
STALL_SHARE = 0.02
STALL_RISE = 5e-4
"""Messages are passed on while so many sweeps raise the bound by more than these shares of what is missing to the best
choice, or, as that may be a bad one, of the bound itself."""
LASTING_SWEEPS, STILL_SWEEPS, STILL_RISE = 400, 32, 1e-5
"""Where a sweep costs little beside what would come next: as many at most; they end where so many of the last of them
raised the bound by no more than this share. What rounds badly shortly before messages have settled is often optimal
once they have.
"""
FIRST_ROUNDS, ROUND_EVERY = (3, 7), 16
LOOK_FROM_SWEEP = 3
BRIEF = (1, 2)
QUICK = (2, 8)
THOROUGH = (8, 60)
"""Local search: give up after so many forest moves without gain, and after so many in all. On the whole of a graph a
move takes half as long as a sweep."""
MOVE_PASSES = 0.5
"""What a forest move takes, in passes."""
WORTH = 1.5
"""Forest moves are tried on what is no farther from the bound than so many times the best choice."""


class Evaluator:
    """cost(x) of a graph in a few numpy calls; np.inf where x has a forbidden pair."""

    def __init__(self, graph: Graph) -> None:
        counts = graph.num_choices
        self.node_base: IntArray = np.cumsum([0, *counts], dtype=np.int64)[:-1]
        self.flat_costs = np.concatenate(graph.costs) if counts else np.zeros(0)
        edges = graph.edges
        self.u = np.array([e.u for e in edges], dtype=np.int64)
        self.v = np.array([e.v for e in edges], dtype=np.int64)
        self.width = np.array([e.costs.shape[1] for e in edges], dtype=np.int64)
        self.cells = np.concatenate([e.costs.ravel() for e in edges]) if edges else np.zeros(0)
        sizes = np.array([e.costs.size for e in edges], dtype=np.int64)
        self.cell_base = np.cumsum(sizes) - sizes
        self.u_class, self.u_base = _stack([e.u_class for e in edges])
        self.v_class, self.v_base = _stack([e.v_class for e in edges])

    def cost(self, choice: IntArray) -> float:
        return float(self.node_costs(choice).sum()) + float(self.edge_costs(choice).sum())

    def dearest(self) -> float:
        """The largest cost of a choice or of a pair."""
        costs = np.concatenate([self.flat_costs, self.cells])
        return float(np.abs(costs[np.isfinite(costs)]).max(initial=0.0))

    def node_costs(self, choice: IntArray) -> FloatArray:
        costs: FloatArray = self.flat_costs[self.node_base + choice]
        return costs

    def edge_costs(self, choice: IntArray) -> FloatArray:
        a = self.u_class[self.u_base + choice[self.u]]
        b = self.v_class[self.v_base + choice[self.v]]
        costs: FloatArray = self.cells[self.cell_base + a * self.width + b]
        return costs


class Oracle:
    """One graph, its elimination plan and its messages, at the prices last set.

    `buckets`: how to eliminate the core, too, where that is little work (nodes by their position in the core).
    `compiled`: the messages, where they are passed by compiled loops. `passes`: how often they were, there and back.
    """

    def __init__(
        self,
        graph: Graph,
        plan: Plan,
        buckets: Buckets | None = None,
        compiles: bool = False,
        clock: Work | None = None,
    ) -> None:
        self.graph, self.plan, self.buckets, self.clock = graph, plan, buckets, clock or Work()
        self.memory = Memory(graph.usages, graph.num_choices, graph.num_points)
        self.evaluator = Evaluator(graph)
        self.flat = self.evaluator.flat_costs
        self.state: Reduced = plan.run(list(graph.costs))
        edges = plan.core_problem(self.state)
        self.compiled = _compiled_messages(graph, plan, edges) if compiles else None
        self.messages = Messages(plan.core, edges) if self.compiled is None else self.compiled
        if self.compiled is None:
            self.messages.set_costs(self.state.costs, edges)
        else:
            self.compiled.set_costs(self.state.costs, edges, self.evaluator.cells if plan.whole else None)
        self.prices: FloatArray | None = None
        self.passes = 0
        cells = len(self.evaluator.cells) if plan.whole else sum(edge.costs.size for edge in edges)
        edge_s = 0.0 if compiles else PASS_SECONDS_AN_EDGE
        self.pass_s = PASS_SECONDS_A_CELL * max(1, cells) + edge_s * len(edges)
        self.lasting_s = max(self.pass_s, LASTING_SECONDS_A_CELL * max(1, cells))
        position = self.messages.position
        self.network = Network(
            len(plan.core), [Edge(position[e.u], position[e.v], e.u_class, e.v_class, e.costs) for e in edges]
        )

    def set_prices(self, prices: FloatArray) -> None:
        """Seconds a byte at each point of the timeline, from here on. Where they are the last ones, messages go on."""
        if self.prices is not None and np.array_equal(prices, self.prices):
            return
        self.prices = prices.copy()
        flat = self.flat + self.memory.price(prices) if prices.any() else self.flat
        if self.plan.whole and self.compiled is not None:
            self.compiled.set_flat_costs(flat)
            return
        self.clock.spend(SECONDS_A_STEP * len(self.plan.steps))
        costs = np.split(flat, self.memory.offsets[1:-1]) if len(self.graph.costs) else []
        self.state = self.plan.run(list(costs))
        self.messages.set_costs(self.state.costs, self.plan.core_problem(self.state))

    def run(
        self,
        offer: Callable[[IntArray], float],
        known: float,
        tolerance: Callable[[float], float],
        max_sweeps: int,
        patience: float,
        late: Callable[[], bool],
        *,
        exactly: bool = True,
        hopeless: float = np.inf,
        searches: bool = True,
        lasting: bool = False,
    ) -> float:
        """Eliminate everything, where there are `buckets` (and `exactly`). Otherwise sweep until bound and best priced
        cost meet. Returns the bound on the priced cost (limit not subtracted).

        `offer` is told every choice found and returns its priced cost; `known` is the best priced cost so far,
        `tolerance(cost)` the difference that will do. Stops early when the bound has nearly stopped rising (how nearly:
        `patience`), after `max_sweeps`, when `late`, or where n sweeps (four or more) leave a
        relative gap of more than `hopeless` / n. searches: for choices; if not, only for a bound. lasting: until the
        bound stands still.
        """
        if not self.plan.core:
            offer(self.complete([]))
            return self.state.constant
        if self.buckets is not None and exactly:
            return self._eliminate(self.buckets, offer)

        def least_rise(missing: float, bound: float) -> float:
            return min(STALL_SHARE * missing, STALL_RISE * abs(bound)) / patience

        bounds: list[float] = []
        for sweep in range(max_sweeps):
            bounds.append(max(self.messages.step(), bounds[-1] if bounds else -np.inf))
            self.passes += 1
            self.clock.spend(self.lasting_s if lasting else self.pass_s)
            is_late = late()
            bound = bounds[-1] + self.state.constant
            for forward in self._rounds(sweep, is_late, lasting) if searches else ():
                known = min(known, self._try(offer, known, bound, forward=forward, free=lasting))
            missing = known - bound
            if missing <= tolerance(known) or is_late:
                break
            if lasting:
                if sweep >= STILL_SWEEPS and bounds[-1] - bounds[-1 - STILL_SWEEPS] <= STILL_RISE * abs(bound):
                    break
                continue
            if sweep >= LOOK_FROM_SWEEP and missing * (sweep + 1) > hopeless * abs(known):
                return bound
            # Momentum that has just restarted has yet to show what it does.
            since = STALL_SWEEPS if self.messages.is_moving(STALL_SWEEPS) else 3 * STALL_SWEEPS
            if sweep >= since + STALL_SWEEPS and bounds[-1] - bounds[-1 - since] < least_rise(missing, bound):
                break
        self.messages.back_to_best()
        if searches and known - bounds[-1] - self.state.constant > tolerance(known) and not late():
            self._try(offer, np.inf, 0.0, thorough=True, free=lasting)
        return bounds[-1] + self.state.constant

    def _rounds(self, sweep: int, is_late: bool, lasting: bool) -> tuple[bool, ...]:
        """Whether messages are rounded forwards (True) or backwards after a sweep, in turn."""
        if lasting:
            looks = sweep in FIRST_ROUNDS or sweep % ROUND_EVERY == ROUND_EVERY - 1 or is_late
            return (True, False) if looks else ()
        whole = self.plan.whole
        backward = not whole and sweep % 4 == 2
        forward = sweep % 4 == 0 or is_late or (not whole and sweep in (1, 3))
        return (*((False,) if backward else ()), *((True,) if forward else ()))

    def _eliminate(self, buckets: Buckets, offer: Callable[[IntArray], float]) -> float:
        self.clock.spend(buckets.cells / THRESHOLDS.cells_a_second)
        filled = buckets.run(self.messages.costs, self.messages.matrices)
        if filled.least < np.inf:
            offer(self.complete(buckets.decode(filled)))
        return filled.least + self.state.constant

    def complete(self, core_choice: list[int]) -> IntArray:
        """The choice of every node of the graph, given that of the core by position."""
        choice = np.zeros(len(self.graph.costs), dtype=np.int64)
        choice[self.plan.core] = core_choice
        return self.plan.decode(choice, self.state)

    def _try(
        self,
        offer: Callable[[IntArray], float],
        known: float,
        bound: float,
        *,
        forward: bool = True,
        thorough: bool = False,
        free: bool = False,
    ) -> float:
        """Offer what messages round to, improved; returns its priced cost. free: it is in the price of passes."""
        rounded = self.messages.round(forward)
        if rounded is None and self.compiled is not None:
            rounded = self.compiled.round_consistently()
        elif rounded is None:
            rounded = round_consistently(self.messages, self.network)
        if rounded is None:
            return np.inf
        worth = bound + WORTH * (known - bound) - self.state.constant if known < np.inf else np.inf
        efforts = (BRIEF, QUICK) if self.plan.whole else (QUICK, THOROUGH)
        patience, most = efforts[1 if thorough else 0]
        if not free:
            self.clock.spend(self.pass_s * (1 + MOVE_PASSES * (patience + 1)))
        if self.compiled is not None:
            return offer(self.complete(self.compiled.descend(rounded, patience, most, worth)))
        return offer(self.complete(descend(self.messages, rounded, patience, most, worth)))


def _compiled_messages(graph: Graph, plan: Plan, edges: list[Edge]) -> CompiledMessages:
    from autopar.solver.compiled_messages import CompiledMessages  # it loads numba, which takes as long as many a plan

    return CompiledMessages(plan.core, edges, [len(graph.costs[v]) for v in plan.core])


def _stack(classes: list[IntArray]) -> tuple[IntArray, IntArray]:
    if not classes:
        return np.zeros(0, dtype=np.int64), np.zeros(0, dtype=np.int64)
    lengths = np.array([len(c) for c in classes])
    return np.concatenate(classes).astype(np.int64), np.cumsum(lengths) - lengths
