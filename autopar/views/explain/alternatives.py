"""Solve a plan's placement again with one tensor's sharding given: what it costs, or why it cannot be."""

from __future__ import annotations

import glob
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from autopar import pipeline
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.text import format_bytes
from autopar.cost.beside import with_work_beside
from autopar.cost.collectives import Collective
from autopar.cost.estimate import Cost
from autopar.ir.collectives import COLLECTIVES
from autopar.ir.program import MODES, Mode, Program
from autopar.ir.region import Options
from autopar.ir.rings import NAMES
from autopar.passes.place import place
from autopar.passes.placement.gathers import blocked_operators
from autopar.passes.placement.problem import build_problem
from autopar.passes.placement.unsplit import unsplit_weights
from autopar.passes.placement.variants import Variants
from autopar.planner.plan.record import PlanRecord
from autopar.planner.price import price
from autopar.solver.solve import minimum_peak
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import splits_sequence
from autopar.strategies.names import ANY_COLLECTIVE, AUTO, Pin
from autopar.strategies.request import Attempt
from autopar.views.explain.attention_choices import asked_of_attention
from autopar.views.explain.attribution import moves_of_attention
from autopar.views.explain.exclusions import mixed_splits, overridden, pin_of, pin_text
from autopar.views.explain.explanation import Excluded, Row
from autopar.views.explain.subjects import Layout, Subject, choices_in, layout_of, layout_text, layouts_in, sharding_in

PEAK_SECONDS = 10.0


def request_of(plan: PlanRecord) -> Attempt:
    """What the plan was made for."""
    assert plan.model is not None and plan.inputs is not None
    return Attempt(
        plan.model, plan.inputs, plan.stage_mesh, plan.strategies, plan.pins, plan.memory_limit_bytes, plan.precision,
        plan.training, rematerialize=plan.rematerialize, explain=False, microbatches=plan.interface.microbatches,
        pipeline=plan.asked, spread=plan.spread, roots=plan.roots,
        wanted=plan.wanted,
    )  # fmt: skip


@dataclass(slots=True)
class Alternatives:
    """One subject of one plan, and the annotated programs that its alternatives are solved on."""

    plan: PlanRecord
    subject: Subject
    request: Attempt = field(init=False)
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
        return self.plan.stage_mesh.axis_names

    @property
    def chosen(self) -> Layout:
        return layout_of(self.program, self.subject)

    def text(self, sharding: Layout) -> str:
        return layout_text(self.program, self.subject, sharding)

    def layout_texts(self, program: Program) -> dict[str, str]:
        if self.subject.kind == "attention":
            return {"stored": layout_text(program, self.subject, layout_of(program, self.subject))}
        found = layouts_in(program, self.subject)
        return {name: self.subject.text(s, self.axes, stored=name == "stored") for name, s in found.items()}

    def modes(self) -> Iterator[tuple[Mode, Program]]:
        """What the backward may compute again, with the annotated program: the plan's own mode alone where it was given
        (or where an operator is named, which another mode may not have).

        Of an `auto` plan, a mode that did not fit without a pin does not with one: at most the last before its own did.
        """
        own = self.plan.rematerialize
        if not self.is_free:
            yield own, self.annotated[own]
            return
        steps = pipeline.Phases.of(self.plan.passes).prepare
        assert self.plan.traced is not None
        for mode in MODES[0 if self.is_named else max(0, MODES.index(own) - 1) :]:
            if mode not in self.annotated:
                request = replace(self.request, rematerialize=mode)
                program, _ = pipeline.run(request, steps, program=self.plan.traced)
                self.annotated[mode] = replace(program, pipeline=self.program.pipeline)  # cut as it is
            yield mode, self.annotated[mode]

    @property
    def is_free(self) -> bool:
        """Whether another rematerialization may be taken."""
        return self.plan.traced is not None and not self.is_operator

    @property
    def is_operator(self) -> bool:
        """Whether the subject is decided by an operator, which has strategies and cannot be pinned."""
        return self.subject.kind in ("operator", "attention")

    @property
    def is_named(self) -> bool:
        return AUTO not in self.plan.strategies

    def constrained(self, program: Program, sharding: Layout) -> tuple[Program, tuple[Pin, ...]]:
        """The annotated program and the pins that leave only this sharding to the subject; to attention, its gradient
        and what computes it again, only these choices.
        """
        if not self.is_operator:
            wanted = pin_of(glob.escape(self.subject.members[0]), sharding_in(sharding), self.plan.stage_mesh)
            return program, (*self.plan.pins, *([wanted] if wanted else []))
        region = program.region(self.subject.region)
        options = dict(region.options)
        for node in self.subject.nodes or (self.subject.node,):
            all_of = region.options[node]
            if self.subject.nodes:
                kept = [i for i, s in enumerate(all_of.strategies) if s.choices == choices_in(sharding)]
            else:
                kept = [i for i, s in enumerate(all_of.strategies) if s.results[self.subject.result] == sharding]
            if kept:
                options[node] = Options(
                    tuple(all_of.strategies[i] for i in kept), tuple(all_of.seconds[i] for i in kept)
                )
        return program.with_regions({region.name: region.with_options(options)}), self.plan.pins

    def price(self, sharding: Layout) -> Row | Excluded | None:
        """The cost of the best plan with this sharding, or why there is none.

        As `autopar.plan` with the pin: what the backward computes again is chosen by the same rules. None where neither
        the pin nor memory forbids it: `why_not` says what does, and takes longer.
        """
        limit = self.plan.memory_limit_bytes
        row: Row | None = None
        tried: Program | None = None
        over = 0.0
        for mode, program in self.modes():
            checks = self.is_named and self.plan.traced is not None and mode != MODES[-1]
            try:
                placed = self.place(program, sharding, self._placement_limit(checks), checks_limit=checks)
            except DoesNotFit:
                if row is not None:
                    break
                if limit is None or (tried is None and not self.can_be(program, sharding, self.plan.strategies)):
                    return None
                tried = program
                continue
            except AutoparError as error:
                reason = mixed_splits(self.plan, sharding) or f"{error.what}; {error.values}"
                return Excluded(self.text(sharding), "strategy", reason)
            other = self._row(placed, sharding, mode)
            if limit is not None and (checks or self.plan.pipeline is not None) and other.peak_bytes > limit:
                over, tried = other.peak_bytes - limit if self.plan.pipeline is not None else 0.0, program
                if row is not None:
                    break
                continue
            if row is not None and row.step_time_s <= other.step_time_s:
                break
            row = other
            if self.is_named or placed.result is None or not placed.result.memory_price_s_per_byte:
                break
        if row is None:
            assert tried is not None and limit is not None
            if over:
                reason = f"the fullest rank of the pipeline would hold {math.ceil(over)} bytes over the memory limit"
                return Excluded(self.text(sharding), "memory", f"{reason} of {format_bytes(limit)}", math.ceil(over))
            return self._over_limit(tried, sharding, limit)
        return row

    def _placement_limit(self, checks: bool) -> float | None:
        """The limit that the placement gets: none where the step that is walked decides; of a pipeline, whose stages
        decide, no less than the plan's own took.
        """
        limit, result = self.plan.memory_limit_bytes, self.program.result
        if self.plan.pipeline is None or limit is None:
            return None if checks and self.plan.training else limit
        return None if checks else max(limit, result.peak_bytes if result is not None else 0.0)

    def _row(self, placed: Program, sharding: Layout, mode: Mode) -> Row:
        lowered, cost, _ = self.finish(placed)
        subject, mesh = self.subject, self.plan.stage_mesh
        pinned = None if self.is_operator else pin_of(subject.name, sharding_in(sharding), mesh)
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

    def can_be(self, program: Program, sharding: Layout, strategies: Sequence[AxisStrategy]) -> Program | None:
        """Some placement with it under these strategies, memory aside; None where there is none."""
        try:
            return self.place(program, sharding, None, strategies, gap=0.5)
        except DoesNotFit:
            return None

    def why_not(self, sharding: Layout) -> Excluded:
        """Which axis would have to allow activations more, or ask less of parameters, for it to be possible."""
        text, program = self.text(sharding), self.annotated[self.plan.rematerialize]
        strategies, chosen = self.plan.strategies, self.chosen
        moving = [replace(each, collectives=ANY_COLLECTIVE, inside_blocks=None) for each in strategies]
        asking = [replace(each, required="none", hidden="free", grid=False) for each in strategies]
        attending = [
            replace(each, attention="free", around_attention=ANY_COLLECTIVE) if splits_sequence(each) else each
            for each in strategies
        ]
        free = [
            replace(each, required="none", hidden="free", grid=False, attention="free", around_attention=ANY_COLLECTIVE)
            for each in moving
        ]
        ordered = sorted(range(len(free)), key=lambda axis: sharding[axis] == chosen[axis])
        for relaxed in (attending, moving, asking):
            for axis in ordered:
                one = [relaxed[a] if a == axis else strategies[a] for a in range(len(free))]
                placed = self.can_be(program, sharding, one) if one != [*strategies] else None
                if placed is not None and relaxed is attending:
                    return Excluded(text, "strategy", asked_of_attention(strategies[axis], self.axes[axis]))
                if placed is not None and relaxed is moving:
                    return Excluded(text, "strategy", self._more_than_allowed(placed))
                if placed is not None:
                    named, where = strategies[axis], self.axes[axis]
                    return Excluded(text, "strategy", f"what {named.name} splits on {where}: {named.shards}")
        placed = self.can_be(program, sharding, free) if free != [*strategies] else None
        if placed is not None:
            return Excluded(text, "strategy", self._more_than_allowed(placed))
        return Excluded(text, "none found", "no placement of the operators around it goes with it")

    def _more_than_allowed(self, placed: Program) -> str:
        """The moves of activations that the strategies do not allow."""
        lowered, _, _ = self.finish(placed)
        found = []
        for axis, strategy in zip(self.axes, self.plan.strategies, strict=True):
            for where, allowed in (("activations", strategy.collectives), ("blocks", strategy.inside_blocks)):
                if allowed is None:
                    continue
                around = allowed | strategy.around_attention
                used = _moves(lowered, axis, in_blocks=where == "blocks")
                if more := sorted({kind for kind, is_near in used if kind not in (around if is_near else allowed)}):
                    inside = " inside blocks" if where == "blocks" else ""
                    found.append(
                        f"{strategy.name} lets activations{inside} on {axis} use "
                        f"{' and '.join(sorted(allowed)) or 'nothing'} alone, and with this they need more "
                        f"(without that limit: {', '.join(more)})"
                    )
        return "; ".join(found) or "the strategy's constraints on the operators around it exclude it"

    def place(
        self,
        program: Program,
        sharding: Layout,
        limit: float | None,
        strategies: Sequence[AxisStrategy] | None = None,
        *,
        gap: float = 1e-3,
        checks_limit: bool = False,
    ) -> Program:
        """The annotated program placed with this sharding. Raises DoesNotFit, or AutoparError for a refused pin."""
        wanted = strategies or self.plan.strategies
        gathered = blocked_operators(program, wanted)  # not for what is constrained alone
        excused = unsplit_weights(Variants(program, wanted, self.plan.pins), gathered)
        program, pins = self.constrained(program, sharding)
        priced = with_work_beside(program) if self.plan.solved.hides_exchanges else program
        return place(
            priced, strategies=wanted, pins=pins, memory_limit_bytes=limit, gap=gap, explain=False,
            checks_limit=checks_limit, overlap_price=self.plan.solved.overlap_price, gathered=gathered,
            excused=excused,
        )  # fmt: skip

    def finish(self, placed: Program) -> tuple[Program, Cost, list[Collective]]:
        """Lowered by the passes after `place`, with its cost and its collectives."""
        program = placed
        for step in pipeline.Phases.of(self.plan.passes).lower:
            program = step.apply(program, self.request)
        return program, *price(program)[:2]

    def _over_limit(self, program: Program, sharding: Layout, limit: float) -> Excluded:
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


def _moves(program: Program, axis: str, *, in_blocks: bool) -> set[tuple[str, bool]]:
    """What activations of a lowered program use on an axis, cuts included, and whether around attention; of the
    repeated blocks alone if asked.
    """
    found: set[tuple[str, bool]] = set()
    for region in program.regions:
        attention = [name for name, (call, _) in region.ops.items() if call.name in NAMES]
        near = set(moves_of_attention(region, attention))
        for phase, lowered in region.phases.items() if region.module or not in_blocks else ():
            for node in lowered.graph.nodes:
                if node.op == "call_method" and node.target in (*COLLECTIVES, "slice") and node.args[2] == axis:
                    source: Any = node.args[1]
                    # Indices may be cut, whatever the strategy says.
                    if node.target != "slice" or source.meta["type"].is_float:
                        kind = str(node.target)
                        found.add((kind, (region.name, phase, source.name, kind, axis) in near))
    return found
