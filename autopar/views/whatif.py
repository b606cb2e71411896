"""What more memory, or less, would buy: the same plan made again under other limits."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.text import format_bytes, format_time, plural
from autopar.planner.decide import decide
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.spec import AXIS
from autopar.views.compare import Comparison, compare


@dataclass(frozen=True, slots=True)
class WhatIf:
    """The plan under another memory limit. factor: of the limit. plan: None where nothing fits; why: what was said.
    comparison: of the plan with it.
    """

    factor: float
    limit_bytes: float
    plan: PlanRecord | None
    why: str = ""
    comparison: Comparison | None = None

    @property
    def title(self) -> str:
        return f"{abs(self.factor - 1):.0%} {'more' if self.factor > 1 else 'less'} memory"

    def answer(self, chosen: PlanRecord) -> str:
        """In a sentence or two: what it would change."""
        limits = f"{format_bytes(self.limit_bytes)} instead of {format_bytes(chosen.memory_limit_bytes or 0)} a rank"
        if self.plan is None:
            return f"With {limits} nothing fits: {self.why}"
        before, after = chosen.cost.step_time_s, self.plan.cost.step_time_s
        used = format_bytes(self.plan.cost.peak_memory_bytes)
        if abs(after - before) <= 1e-3 * before:
            fits = "another plan, as fast, serves" if self._changes() else "the same plan serves"
            why = ": memory is not what bounds this step" if self.factor > 1 else ""
            return f"Nothing in time: with {limits} {fits} ({format_time(after)} a step, {used} in use){why}."
        word = "faster" if after < before else "slower"
        changed = self._changes()
        limit = chosen.memory_limit_bytes or 0.0
        if self.plan.cost.peak_memory_bytes > limit:
            used += f", more than the present {format_bytes(limit)}"
        return (
            f"With {limits} a step is predicted {abs(after - before) / before:.1%} {word}: {format_time(after)} "
            f"instead of {format_time(before)}, {used} in use{f' ({changed})' if changed else ''}."
        )

    def _changes(self) -> str:
        """What is decided differently, in words."""
        if self.comparison is None:
            return ""
        own = ("strategy", "computed again in the backward", "microbatches", "schedule", "stages")
        found = [
            f"{row.what}: {row.right} instead of {row.left}" for row in self.comparison.settings if row.what in own
        ]
        if count := len(self.comparison.parameters):
            found.append(f"{plural(count, 'kind', 'kinds')} of parameters lie differently")
        return "; ".join(found)


def with_memory(plan: PlanRecord, factor: float) -> WhatIf:
    """The plan made again with `factor` times its memory limit; number of microbatches and pins stay.

    The plan was made in this process, or has its model (`explain.with_program`).

    Raises:
        AutoparError: a plan without a memory limit, or without its model; or of a forward that draws, or counts, what
            it does: made again, it may be of another step.
    """
    if plan.memory_limit_bytes is None:
        raise AutoparError("the plan has no memory limit", remedy="plan with memory_limit=bytes")
    if plan.model is None or plan.inputs is None:
        raise AutoparError("the plan was loaded from a file, without its model", remedy="make it with autopar.plan")
    if plan.program is not None and plan.program.told is not None:
        raise AutoparError(
            "forward draws, or counts, what it does: planned once more, it may do something else",
            remedy="make both plans yourself, with memory_limit= and the same seed before each",
        )
    limit = plan.memory_limit_bytes * factor
    strategy: dict[str, Any] = dict(zip(plan.stage_mesh.axis_names, plan.strategies, strict=True))
    if plan.asked is not None:
        strategy = {axis: each for axis, each in strategy.items() if axis in plan.mesh.axis_names}
        strategy[AXIS] = plan.asked
    try:
        other = decide(
            plan.model, plan.mesh, example_inputs=plan.inputs, strategy=strategy, precision=plan.precision,
            memory_limit=limit, constraints=plan.pins, inference=not plan.training,
            passes=plan.passes or None, microbatches=plan.interface.microbatches, alone=True,
        )  # fmt: skip
    except DoesNotFit as error:
        return WhatIf(factor, limit, None, str(error))
    title = WhatIf(factor, limit, other).title
    return WhatIf(factor, limit, other, "", compare(plan, other, title=title, names=("this plan", f"with {title}")))
