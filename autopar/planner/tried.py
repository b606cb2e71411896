"""What came of the attempts so far, and the rule that picks (attempts.py)."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.ir.program import Mode
from autopar.planner.plan.record import PlanRecord
from autopar.planner.shares import faster, values_s
from autopar.strategies.axis import DDP, TENSOR, AxisStrategy
from autopar.strategies.context import Spread, family_of, keeping_of, splits_of
from autopar.strategies.request import Attempt


@dataclass(slots=True)
class Tried:
    """What came of the attempts so far.

    best: of all plans, by the rule; plain: of those whose program is prepared as the strategies need; own: of the
    request's own placements, by mode and spread. last: of the last attempt; None where it did not fit, error then says
    why. errors: of the request's own attempts. named: of strategies by name that do the same with values the fastest,
    with all the memory there is; steps: seconds of each, by what they do with values, with experts, and with
    parameters.
    """

    limit_bytes: float | None
    best: tuple[Attempt, PlanRecord] | None = None
    plain: tuple[Attempt, PlanRecord] | None = None
    own: dict[tuple[Mode, Spread | None], PlanRecord] = field(default_factory=dict)
    last: PlanRecord | None = None
    error: AutoparError | None = None
    errors: list[tuple[Attempt, DoesNotFit]] = field(default_factory=list)
    named: dict[tuple[str, ...], PlanRecord] = field(default_factory=dict)
    steps: dict[tuple[object, ...], float] = field(default_factory=dict)

    @property
    def step_s(self) -> float:
        """Of the best plan; infinite without one."""
        return math.inf if self.best is None else self.best[1].cost.step_time_s

    def takes(self, attempt: Attempt, plan: PlanRecord) -> None:
        """Keep the plan where the rule prefers it."""
        self.last, self.error = plan, None
        if attempt.memory_limit_bytes != self.limit_bytes:
            return  # tells what could be had with all the memory there is
        self.best = _preferred(self.best, (attempt, plan))
        if attempt.spread is None:
            self.plain = _preferred(self.plain, (attempt, plan))
        if attempt.placed_by is None:
            key = (attempt.rematerialize, attempt.spread)
            self.own[key] = faster(self.own.get(key), plan) or plan

    def fails(self, attempt: Attempt, error: AutoparError) -> None:
        """Keep why nothing came of an attempt. What left memory out of it can be told nothing of less of it."""
        self.last, self.error = None, error
        if attempt.placed_by is None and not attempt.checks_limit and isinstance(error, DoesNotFit):
            self.errors.append((attempt, error))

    def knows(self, strategies: tuple[AxisStrategy, ...], free: PlanRecord | None) -> None:
        """Keep what strategies by name give with all the memory there is."""
        family = family_of(strategies)
        found = faster(self.named.get(family), free)
        if found is not None:
            self.named[family] = found
        if free is not None:
            key = (*family, *map(keeping_of, strategies))
            self.steps[key] = min(self.steps.get(key, math.inf), free.cost.step_time_s)

    def splits_hidden_in_vain(self, strategies: tuple[AxisStrategy, ...], beyond: float) -> bool:
        """Whether strategies that cut along the sequence what flows between blocks take too long by what the same move
        without it, `beyond` times the best step: each of these sums becomes two messages of as many bytes.
        """
        together = self.named.get(family_of([TENSOR if each.hidden == "split" else each for each in strategies]))
        if together is None or all(each.hidden != "split" for each in strategies):
            return False
        return values_s(together) - together.cost.compute_s > beyond * self.step_s

    def keeping_is_no_help(
        self, strategies: tuple[AxisStrategy, ...], first: tuple[AxisStrategy, ...], beyond: float
    ) -> bool:
        """Whether strategies that keep experts apart take too long, as the first of them does, from which they differ
        in how parameters are kept: that took `beyond` times the best step, and the same, but for experts, were no
        faster for it.
        """
        plain = (*splits_of(first), *(DDP.experts for _ in first))
        step_s = self._step_of(first, family_of(first))
        plain_s, first_plain_s = self._step_of(strategies, plain), self._step_of(first, plain)
        if step_s is None or plain_s is None or first_plain_s is None or family_of(first) == plain:
            return False
        return plain_s >= first_plain_s and step_s > beyond * self.step_s

    def _step_of(self, strategies: tuple[AxisStrategy, ...], family: tuple[str, ...]) -> float | None:
        """Of what keeps parameters so, in a family; None where that was not asked."""
        return self.steps.get((*family, *map(keeping_of, strategies)))

    @property
    def excluded(self) -> bool:
        """Whether the last attempt's strategies exclude each other: it is not for want of memory that nothing came."""
        return isinstance(self.error, DoesNotFit) and self.error.excluded

    def reason(self) -> tuple[Attempt, DoesNotFit]:
        """Why nothing fits: of the last mode what the first step that was walked takes; else the last."""
        mode = self.errors[-1][0].rematerialize
        walked = (each for each in self.errors if each[0].rematerialize == mode and each[1].ratio is not None)
        return next(walked, self.errors[-1])


def _preferred(
    best: tuple[Attempt, PlanRecord] | None, other: tuple[Attempt, PlanRecord]
) -> tuple[Attempt, PlanRecord]:
    def key(made: tuple[Attempt, PlanRecord]) -> tuple[float, bool]:
        return made[1].cost.step_time_s, made[0].placed_by is not None

    return other if best is None or key(other) < key(best) else best
