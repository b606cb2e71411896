"""What one trace becomes on the way to plans: prepared for a mode of recomputation, placed, lowered; each made once."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.base.garbage import spare
from autopar.cost.context import computing_seconds, zigzag_axes
from autopar.cost.fusion import FUSED, OPAQUE
from autopar.cost.roofline import optimizer_time_s
from autopar.ir.placement import Learnt
from autopar.ir.program import Mode, Program
from autopar.passes.placement.least import Least
from autopar.passes.placement.one_axis import cannot_split
from autopar.planner.assembly import make_plan
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import Spread, family_of
from autopar.strategies.request import Attempt, Progress

NEEDED = ("rematerialize", "annotate", "place", "insert_collectives")
"""The passes without which nothing is chosen: a list that lacks one is run through once."""


@dataclass(slots=True)
class Programs:
    """The programs of one request and its trace, which is differentiated.

    asked: the request, as nothing has been tried for it. steps: all passes. times: of the passes that have run.
    """

    asked: Attempt
    steps: tuple[pipeline.Pass, ...]
    traced: Program
    progress: Progress | None = None
    times: list[pipeline.PassTime] = field(default_factory=list)
    _recomputing: dict[tuple[Mode, Spread | None], Program] = field(default_factory=dict)
    _annotated: dict[tuple[Mode, Spread | None], Program] = field(default_factory=dict)
    _placed: dict[tuple[object, ...], Program] = field(default_factory=dict)
    _computing_s: dict[Mode, float] = field(default_factory=dict)
    _least_s: dict[Mode, float] = field(default_factory=dict)
    _learnt: dict[tuple[Mode, Spread | None], Learnt] = field(default_factory=dict)
    _refused: list[tuple[str, ...]] = field(default_factory=list)
    _unlimited: tuple[Program, PlanRecord] | None = None
    """The last placement that was lowered with all the memory there is: within a limit that it keeps it is the same."""

    @staticmethod
    def of(request: Attempt, steps: Iterable[pipeline.Pass], progress: Progress | None = None) -> Programs:
        """The programs of a request: its model is traced."""
        steps = tuple(steps)
        traced, times = pipeline.run(request, pipeline.Phases.of(steps).trace, progress=progress)
        spare()
        return Programs(request, steps, traced, progress, list(times))

    @property
    def phases(self) -> pipeline.Phases:
        """The passes in their phases."""
        return pipeline.Phases.of(self.steps)

    def recomputing(self, mode: Mode, spread: Spread | None = None) -> Program:
        """With what the backward computes again; before `annotate`."""
        if (mode, spread) not in self._recomputing:
            attempt = replace(self.asked, rematerialize=mode, spread=spread)
            self._recomputing[mode, spread] = self._prepared(attempt, self.phases.recompute, self.traced)
        return self._recomputing[mode, spread]

    def annotated(self, mode: Mode, spread: Spread | None = None) -> Program:
        """With all strategies of all operators; before `place`."""
        if (mode, spread) not in self._annotated:
            attempt = replace(self.asked, rematerialize=mode, spread=spread)
            program = self.recomputing(mode, spread)
            self._annotated[mode, spread] = self._prepared(attempt, self.phases.annotate, program)
        return self._annotated[mode, spread]

    def placed(self, attempt: Attempt) -> tuple[Program, tuple[pipeline.PassTime, ...]]:
        """As the attempt says, and the times of the passes that ran for it.

        Raises:
            DoesNotFit: nothing is found within the limit.
            AutoparError: the strategies cannot be had.
        """
        limit = attempt.placement_limit_bytes
        key = (
            attempt.rematerialize, attempt.spread, attempt.placing, limit, attempt.checks_limit and limit is not None,
            attempt.overlap_price, attempt.hides_exchanges, None if attempt.alike is None else id(attempt.alike),
        )  # fmt: skip
        if key in self._placed:
            return self._placed[key], ()
        attempt = replace(attempt, learnt=self.learnt(attempt.rematerialize, attempt.spread))
        program, times = self._run(attempt, self.phases.place, self.annotated(attempt.rematerialize, attempt.spread))
        self._placed[key] = program
        return program, times

    def learnt(self, mode: Mode, spread: Spread | None = None) -> Learnt:
        """What placements of the annotated program tell of others on it."""
        return self._learnt.setdefault((mode, spread), Learnt(refused=self._refused))

    def layouts(self, mode: Mode, placed_by: tuple[AxisStrategy, ...] | None = None) -> Program | None:
        """What named strategies place without recomputing and without a limit, for another mode to do alike; None where
        that is to be decided, or cannot be had: it will be said of the placement that is asked for.
        """
        if mode == "none":
            return None
        try:
            return self.placed(replace(self.asked, placed_by=placed_by, memory_limit_bytes=None, explain=False))[0]
        except AutoparError:
            return None

    def placed_by(self, mode: Mode, strategies: tuple[AxisStrategy, ...]) -> Program | None:
        """As named strategies place it without a limit; None where they cannot."""
        alike = self.layouts(mode, strategies)
        attempt = replace(self.asked, rematerialize=mode, placed_by=strategies, alike=alike)
        try:
            return self.placed(replace(attempt, memory_limit_bytes=None, explain=False))[0]
        except AutoparError:
            return None

    def objective_s(self, attempt: Attempt) -> float | None:
        """Of the attempt's placement; None where there is none."""
        try:
            result = self.placed(attempt)[0].result
        except AutoparError:
            return None
        return None if result is None else result.cost_s

    def plan(self, attempt: Attempt) -> PlanRecord:
        """What comes of an attempt, priced; whether its peak fits is for the caller to see.

        Raises:
            DoesNotFit: nothing is found within the limit.
        """
        placed, before = self.placed(attempt)
        limit, plain = attempt.memory_limit_bytes, attempt.pipeline is None and attempt.together == 1
        if self._unlimited is not None and self._unlimited[0] is placed and plain:
            free = self._unlimited[1]
            if limit is not None and free.cost.peak_memory_bytes <= limit:
                return replace(free, memory_limit_bytes=limit)
        lowered, after = self._run(attempt, self.phases.lower, placed)
        plan = make_plan(attempt, lowered, self.steps, (*before, *after))
        if limit is None and plain:
            self._unlimited = placed, plan
        return plan

    def computing_s(self, mode: Mode) -> float:
        """Seconds that one rank would compute alone, but for the attention of repeated blocks."""
        if mode not in self._computing_s:
            self._computing_s[mode] = computing_seconds(self.recomputing(mode, Spread()), self.asked.mesh)
        return self._computing_s[mode]

    def least_s(self, mode: Mode) -> float:
        """Less than any step takes that computes so much again (`least_step_s`)."""
        if mode not in self._least_s:
            self._least_s[mode] = least_step_s(self.annotated(mode))
        return self._least_s[mode]

    def least_named_s(
        self,
        mode: Mode,
        strategies: tuple[AxisStrategy, ...],
        enough: float,
        like: Program | None = None,
        lost: float = math.inf,
    ) -> tuple[float, float]:
        """As `Least.seconds`, once something was placed for `auto`; nothing where that cannot be had, or takes longer
        than it saves.
        """
        if enough == math.inf or any(each.experts in ("whole", "exchange") for each in strategies):
            return 0.0, 0.0
        least = Least.of(self.annotated(mode), self.learnt(mode).facts)
        try:
            return (0.0, 0.0) if least is None else least.seconds(strategies, enough, like, lost)
        except AutoparError:  # the placement says the same
            return 0.0, 0.0

    def cannot_split(self, mode: Mode, strategies: tuple[AxisStrategy, ...]) -> bool:
        """Whether it is known, once something was placed for `auto`, that strategies cannot split the sequence,
        whatever attention does (`one_axis.cannot_split`): the program need not be prepared for them.
        """
        spread = Spread.of(strategies, self.asked.mesh)
        least = Least.of(self.annotated(mode), self.learnt(mode).facts)
        if least is None or zigzag_axes(self.recomputing(mode, spread), self.asked.mesh, spread.zigzag):
            return False
        try:
            found = cannot_split(least, strategies)
        except AutoparError:  # the placement says the same
            return False
        if found:
            self._refused.append(family_of(strategies))
        return found

    def _prepared(self, attempt: Attempt, passes: tuple[pipeline.Pass, ...], program: Program) -> Program:
        found, times = self._run(attempt, passes, program)
        spare()
        self.times += times
        return found

    def _run(
        self, attempt: Attempt, passes: tuple[pipeline.Pass, ...], program: Program
    ) -> tuple[Program, tuple[pipeline.PassTime, ...]]:
        first = self.steps.index(passes[0]) if passes else 0
        return pipeline.run(attempt, passes, program=program, progress=self.progress, first=first)


def least_step_s(program: Program) -> float:
    """Seconds that any placement of an annotated program computes and updates, in one step of one rank: every operator
    split as suits it best, and nothing moved. Of regions that are compiled, what is not fused.
    """
    assert program.mesh is not None
    mesh = program.mesh
    found = 0.0
    for region in program.regions:
        times = program.num_calls(region.name) * program.microbatches
        for name, options in region.options.items():
            call, rule = region.ops[name]
            fuses = rule.op_class in FUSED and call.name.split(".")[1] not in OPAQUE
            if not (mesh.hardware.compiled and fuses):
                found += times * min(options.seconds, default=0.0)
    trained = [v for v in program.variables if v.is_parameter and v.trainable and program.training]
    elements = sum(variable.type.num_elements for variable in trained) // mesh.num_devices
    size = sum(variable.type.num_elements * variable.stored_dtype.itemsize for variable in trained) / mesh.num_devices
    return found + (optimizer_time_s(elements, size, mesh.hardware) if elements else 0.0)
