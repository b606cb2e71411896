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
from autopar.ir import Mode, Options, Program
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

    def recomputing_more(self) -> Iterator[tuple[Mode, Program]]:
        """Where the plan was free to choose, what computes more again in the backward than it does."""
        if self.plan.traced is None or self.subject.kind == "operator":
            return
        names = [step.name for step in self.plan.passes]
        steps = self.plan.passes[names.index("rematerialize") : names.index("place")]
        for mode in MODES[MODES.index(self.plan.rematerialize) + 1 :]:
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

    def price(self, sharding: Sharding) -> Row | Excluded | None:
        """The cost of the best plan with this sharding, or why there is none.

        None where neither the pin nor memory forbids it: `why_not` says what does, and takes longer.
        """
        limit, own = self.plan.memory_limit_bytes, self.plan.rematerialize
        program = self.annotated[own]
        try:
            return self._row(self.place(program, sharding, limit), sharding, own)
        except DoesNotFit:
            if limit is None or not self.can_be(program, sharding, self.plan.strategies):
                return None
        except AutoparError as error:
            reason = mixed_splits(self.plan, sharding) or f"{error.what}; {error.values}"
            return Excluded(self.text(sharding), "strategy", reason)
        for mode, program in self.recomputing_more():
            try:
                return self._row(self.place(program, sharding, limit), sharding, mode)
            except DoesNotFit:
                continue
        return self._over_limit(program, sharding, limit)

    def _row(self, placed: Program, sharding: Sharding, mode: Mode) -> Row:
        lowered, cost, _ = self.finish(placed)
        pinned = pin_of(self.subject.name, sharding, self.plan.mesh) if self.subject.kind != "operator" else None
        notes = overridden(self.plan, self.subject, sharding)
        notes += [f"recomputes {mode}"] if mode != self.plan.rematerialize else []
        return Row.of(
            self.layout_texts(lowered),
            cost,
            self.plan.cost,
            rematerialize=mode,
            pin=pin_text(pinned) if pinned else "",
            note="; ".join(notes),
        )

    def can_be(self, program: Program, sharding: Sharding, strategies: Sequence[AxisStrategy]) -> Program | None:
        """Some placement with it under these strategies, memory aside; None where there is none."""
        try:
            return self.place(program, sharding, None, strategies, gap=0.5)
        except DoesNotFit:
            return None

    def why_not(self, sharding: Sharding) -> Excluded:
        """Which axis would have to allow activations more collectives, for the sharding to be possible at all."""
        text, program = self.text(sharding), self.annotated[self.plan.rematerialize]
        strategies, chosen = self.plan.strategies, self.chosen
        free = [replace(strategy, collectives=ANY_COLLECTIVE) for strategy in strategies]
        ordered = sorted(range(len(free)), key=lambda axis: sharding[axis] == chosen[axis])
        one_by_one = [[free[a] if a == axis else strategies[a] for a in range(len(free))] for axis in ordered]
        for relaxed in (*one_by_one, free):
            placed = self.can_be(program, sharding, relaxed) if relaxed != [*strategies] else None
            if placed is not None:
                return Excluded(text, "strategy", self._more_than_allowed(placed))
        return Excluded(text, "none found", "no placement of the operators around it goes with it")

    def _more_than_allowed(self, placed: Program) -> str:
        """The moves of activations that the strategies do not allow."""
        lowered, _, rows = self.finish(placed)
        variables = {variable.name for variable in self.program.variables}
        moves = {(row.axis, row.kind) for row in rows if row.tensor not in variables}
        for region in lowered.regions:
            nodes = [node for phase in region.lowered.values() for node in phase.graph.nodes]
            cuts = [node for node in nodes if node.op == "call_method" and node.target == "slice"]
            moves |= {(str(node.args[2]), "slice") for node in cuts if node.meta["type"].is_float}
        found = []
        for axis, strategy in zip(self.axes, self.plan.strategies, strict=True):
            if more := sorted({kind for where, kind in moves if where == axis} - strategy.collectives):
                allowed = " and ".join(sorted(strategy.collectives)) or "nothing"
                found.append(
                    f"{strategy.name} lets activations on {axis} use {allowed} alone, and with this they need more "
                    f"(without that limit: {', '.join(more)})"
                )
        return "; ".join(found) or "the strategy's constraints on the operators around it exclude it"

    def place(
        self,
        program: Program,
        sharding: Sharding,
        limit: float | None,
        strategies: Sequence[AxisStrategy] | None = None,
        gap: float = 1e-3,
    ) -> Program:
        """The annotated program placed with this sharding. Raises DoesNotFit, or AutoparError for a refused pin."""
        program, pins = self.constrained(program, sharding)
        wanted = strategies or self.plan.strategies
        return place(program, strategies=wanted, pins=pins, memory_limit_bytes=limit, gap=gap, explain=False)

    def finish(self, placed: Program) -> tuple[Program, Cost, list[Collective]]:
        """Lowered by the passes after `place`, with its cost and its collectives."""
        names = [step.name for step in self.plan.passes]
        program = placed
        for step in self.plan.passes[names.index("place") + 1 :]:
            program = step.apply(program, self.request)
        return program, *estimate(program, self.plan.strategies, placed.result.peak_bytes)

    def _over_limit(self, program: Program, sharding: Sharding, limit: float) -> Excluded:
        """By how many bytes the smallest placement with it is too large."""
        text = self.text(sharding)
        program, pins = self.constrained(program, sharding)
        problem = build_problem(program, self.plan.strategies, pins, limit).problem
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
