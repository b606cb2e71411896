"""Solve a plan's placement again with one tensor's sharding given: what it costs, or why it cannot be."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.errors import AutoparError, DoesNotFit
from autopar.estimate import Collective, Cost, estimate
from autopar.exclusions import mixed_splits, overridden, pin_of, pin_text
from autopar.explanation import Excluded, Row
from autopar.ir import Options, Program
from autopar.passes.place import place
from autopar.passes.placement.problem import build_problem
from autopar.passes.rematerialize import MODES
from autopar.plans import Plan
from autopar.report import format_bytes
from autopar.sharding import Sharding
from autopar.solver.solve import minimum_peak
from autopar.strategies import ANY_COLLECTIVE, AxisStrategy, Pin
from autopar.subjects import Subject, layouts_in

PEAK_SECONDS = 10.0


def request_of(plan: Plan) -> pipeline.Request:
    """What the plan was made for."""
    assert plan.model is not None and plan.inputs is not None
    return pipeline.Request(
        plan.model, plan.inputs, plan.mesh, plan.strategies, plan.pins, plan.memory_limit_bytes, plan.precision,
        plan.training, plan.rematerialize, explain=False,
    )  # fmt: skip


@dataclass(slots=True)
class Study:
    """One subject of one plan, and the annotated programs that its alternatives are solved on."""

    plan: Plan
    subject: Subject
    request: pipeline.Request = field(init=False)
    annotated: dict[str, Program] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.request = request_of(self.plan)
        self.annotated[self.plan.rematerialize] = replace(self.program, phase="annotated", placement=None, result=None)

    @property
    def program(self) -> Program:
        assert self.plan.program is not None
        return self.plan.program

    @property
    def axes(self) -> tuple[str, ...]:
        return self.plan.mesh.axis_names

    @property
    def chosen(self) -> Sharding:
        return layouts_in(self.program, self.subject)["stored"]

    def text(self, sharding: Sharding) -> str:
        return self.subject.text(sharding, self.axes, stored=True)

    def layout_texts(self, program: Program) -> dict[str, str]:
        found = layouts_in(program, self.subject)
        return {name: self.subject.text(s, self.axes, stored=name == "stored") for name, s in found.items()}

    def programs(self) -> Iterator[tuple[str, Program]]:
        """As it was planned; then, where the plan was free to, with more computed again in the backward."""
        own = self.plan.rematerialize
        yield own, self.annotated[own]
        if self.plan.traced is None or self.subject.kind == "operator":
            return
        names = [step.name for step in self.plan.passes]
        steps = self.plan.passes[names.index("rematerialize") : names.index("place")]
        for mode in MODES[MODES.index(own) + 1 :]:
            if mode not in self.annotated:
                request = replace(self.request, rematerialize=mode)
                self.annotated[mode], _ = pipeline.run(request, steps, program=self.plan.traced)
            yield mode, self.annotated[mode]

    def constrained(self, program: Program, sharding: Sharding) -> tuple[Program, tuple[Pin, ...]]:
        """The annotated program and the pins that leave only this sharding to the subject."""
        if self.subject.kind != "operator":
            wanted = pin_of(glob.escape(self.subject.members[0]), sharding, self.plan.mesh)
            return program, (*self.plan.pins, *([wanted] if wanted else []))
        region = program.region(self.subject.region)
        all_of = region.options[self.subject.node]
        kept = [i for i, s in enumerate(all_of.strategies) if s.results[self.subject.result] == sharding]
        some = Options(tuple(all_of.strategies[i] for i in kept), tuple(all_of.seconds[i] for i in kept))
        options = {**region.options, self.subject.node: some}
        return program.with_regions({region.name: replace(region, options=options)}), self.plan.pins

    def price(self, sharding: Sharding) -> Row | Excluded:
        """The cost of the best plan with this sharding, or why there is none."""
        last = self.annotated[self.plan.rematerialize]
        for mode, program in self.programs():
            last = program
            try:
                placed = self.place(program, sharding, self.plan.memory_limit_bytes)
            except DoesNotFit:
                continue
            except AutoparError as error:
                reason = mixed_splits(self.plan, sharding) or f"{error.what}; {error.values}"
                return Excluded(self.text(sharding), "strategy", reason)
            lowered, cost, _ = self.finish(placed)
            notes = overridden(self.plan, self.subject, sharding)
            notes += [f"computes more again: {mode}"] if mode != self.plan.rematerialize else []
            pinned = pin_of(self.subject.name, sharding, self.plan.mesh)
            return Row.of(
                self.layout_texts(lowered),
                cost,
                self.plan.cost,
                rematerialize=mode,
                pin=pin_text(pinned) if pinned and self.subject.kind != "operator" else "",
                note="; ".join(notes),
            )
        return _why_not(self, last, sharding)

    def place(
        self,
        program: Program,
        sharding: Sharding,
        limit: float | None,
        strategies: Sequence[AxisStrategy] | None = None,
    ) -> Program:
        program, pins = self.constrained(program, sharding)
        wanted = strategies or self.plan.strategies
        return place(program, strategies=wanted, pins=pins, memory_limit_bytes=limit, explain=False)

    def finish(self, placed: Program) -> tuple[Program, Cost, list[Collective]]:
        """Lowered by the passes after `place`, with its cost and its collectives."""
        names = [step.name for step in self.plan.passes]
        program = placed
        for step in self.plan.passes[names.index("place") + 1 :]:
            program = step.apply(program, self.request)
        return program, *estimate(program, self.plan.strategies, placed.result.peak_bytes)


def _why_not(study: Study, program: Program, sharding: Sharding) -> Excluded:
    """What stands in the way where the solver found nothing: the memory limit, or the collectives allowed."""
    text, limit = study.text(sharding), study.plan.memory_limit_bytes
    try:
        if limit is not None:
            study.place(program, sharding, None)
            return _over_limit(study, program, sharding, limit)
    except DoesNotFit:
        pass
    strategies = [replace(strategy, collectives=ANY_COLLECTIVE) for strategy in study.plan.strategies]
    try:
        placed = study.place(program, sharding, None, strategies)
    except DoesNotFit:
        return Excluded(text, "none found", "no placement of the operators around it goes with it")
    _, _, rows = study.finish(placed)
    variables = {variable.name for variable in study.program.variables}
    for axis, strategy in zip(study.axes, study.plan.strategies, strict=True):
        used = {row.kind for row in rows if row.axis == axis and row.tensor not in variables}
        if needed := sorted(used - strategy.collectives):
            may = ", ".join(sorted(strategy.collectives - {"slice"})) or "none"
            reason = f"activations would use {', '.join(needed)} on {axis}, where {strategy.name} allows {may}"
            return Excluded(text, "strategy", reason)
    return Excluded(text, "none found", "the strategy's constraints on the operators around it exclude it")


def _over_limit(study: Study, program: Program, sharding: Sharding, limit: float) -> Excluded:
    """By how many bytes the smallest placement with it is too large."""
    text = study.text(sharding)
    program, pins = study.constrained(program, sharding)
    problem = build_problem(program, study.plan.strategies, pins, limit).problem
    smallest = minimum_peak(problem, time_limit_s=PEAK_SECONDS)
    needed = smallest.bytes if smallest.choice else smallest.bound
    over = math.ceil(needed - limit)
    least = "" if smallest.choice else "at least "
    if over <= 0:
        return Excluded(
            text, "none found", f"nothing within the memory limit of {format_bytes(limit)} was found in time"
        )
    reason = (
        f"the smallest placement with it needs {least}{format_bytes(needed)}, {least}{over} bytes "
        f"over the memory limit of {format_bytes(limit)}"
    )
    return Excluded(text, "memory", reason, over)
