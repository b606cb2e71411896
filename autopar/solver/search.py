"""What a search knows at any moment: the target, the best choice so far, the proven bound, every choice seen."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from autopar.solver.graph import Graph
from autopar.solver.memory import Memory
from autopar.solver.methods import Sought
from autopar.solver.oracle import Evaluator
from autopar.solver.problem import USAGE_TOLERANCE, FloatArray, IntArray, relative_gap
from autopar.solver.work import Work

MAX_COLUMNS = 400
SETTLED_GAP = 5e-3
"""What remains below this takes a wide graph as long again, and is less than what objectives of such leave out."""
STANDING = 1.25
"""So many times the `proof_gap` will do where messages stand still: pools, dives and programs of wide graphs take as
long again, and found nothing better where so little was left.
"""

Progress = Callable[[str, float, float], None]


@dataclass(frozen=True, slots=True)
class Target:
    """Minimise cost + overload_price * (bytes above the limit at the peak); None: nothing above the limit.

    With costs of zero, a limit of zero and a price of one, this is the smallest peak.
    """

    limit: float
    overload_price: float | None = None

    @property
    def sought(self) -> Sought:
        return "cost" if self.overload_price is None else "peak"

    def objective(self, cost: float, peak: float) -> float:
        if self.overload_price is not None:
            return cost + self.overload_price * max(0.0, peak - self.limit)
        return cost if peak <= self.limit * (1 + USAGE_TOLERANCE) else np.inf


@dataclass(frozen=True, slots=True)
class Column:
    """A choice that was seen: its cost, the bytes it keeps alive at each point, itself (in the original problem)."""

    cost: float
    profile: FloatArray
    choice: tuple[int, ...]

    @property
    def peak(self) -> float:
        return float(self.profile.max()) if len(self.profile) else 0.0


@dataclass(slots=True)
class Search:
    """Incumbent, bound and columns.

    `proof_gap`: the gap that will do, once good choices are known and only integer programs can prove more. `floor`:
    choices that cost less than this were never discarded. The search is closed, too, once it has a choice no
    dearer than `good_enough`, or a bound above `hopeless`. `deadline`: by its clock, which counts work (`work`).
    """

    target: Target
    gap: float
    deadline: float
    proof_gap: float = 0.0
    progress: Progress | None = None
    clock: Work = field(default_factory=Work)
    anytime: bool = False
    threads: int = 1
    cost: float = np.inf
    choice: tuple[int, ...] | None = None
    bound: float = -np.inf
    floor: float = np.inf
    good_enough: float = -np.inf
    hopeless: float = np.inf
    price: float = 0.0
    columns: list[Column] = field(default_factory=list[Column])
    seen: set[tuple[int, ...]] = field(default_factory=set[tuple[int, ...]])

    def offer(self, column: Column) -> float:
        """Take note of a choice; returns its objective."""
        value = self.target.objective(column.cost, column.peak)
        better = value < self.cost or (value == self.cost and self.choice is not None and column.choice < self.choice)
        if better and np.isfinite(value):
            self.cost, self.choice = value, column.choice
        if np.isfinite(column.cost) and column.choice not in self.seen and len(self.columns) < MAX_COLUMNS:
            self.seen.add(column.choice)
            self.columns.append(column)
        return value

    def raise_bound(self, bound: float, phase: str) -> None:
        """`bound` holds for every choice not discarded so far."""
        proven = min(bound, self.floor, self.cost)
        if proven > self.bound:
            self.bound = proven
        if self.progress is not None:
            self.progress(phase, self.cost, self.bound)

    def tolerance(self, cost: float) -> float:
        """The difference between cost and bound that will do."""
        return self.gap * abs(cost) if np.isfinite(cost) else 0.0

    @property
    def settled_gap(self) -> float:
        """The gap at which messages that are passed until they settle need not go on."""
        return min(self.proof_gap, SETTLED_GAP)

    @property
    def standing_gap(self) -> float:
        """The gap at which nothing follows on messages that stand still."""
        return STANDING * self.proof_gap

    @property
    def relative_gap(self) -> float:
        """Between the best choice and the bound; np.inf without a choice."""
        return relative_gap(self.cost, self.bound)

    @property
    def closed(self) -> bool:
        if self.choice is None:
            return self.bound > self.hopeless
        return (
            self.cost <= self.good_enough
            or self.bound > self.hopeless
            or relative_gap(self.cost, self.bound) <= self.gap
        )

    @property
    def is_open(self) -> bool:
        """Whether there is anything left to find, and time for it."""
        return not (self.closed or self.late or self.bound == np.inf)

    @property
    def late(self) -> bool:
        return self.clock() > self.deadline

    def time_for(self, seconds: float) -> Callable[[], float]:
        """The seconds that are left of so many from now on."""
        end = min(self.deadline, self.clock() + seconds)
        return lambda: end - self.clock()

    @property
    def seconds_left(self) -> float:
        return max(0.0, self.deadline - self.clock())


def column_of(graph: Graph, evaluator: Evaluator, memory: Memory, choice: IntArray) -> Column:
    """A choice of the graph as a column."""
    return Column(evaluator.cost(choice), memory.profile(choice), graph.original_choice(choice))
