"""Whether a small twin that was proven has all that the model itself is made of."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from autopar import pipeline
from autopar.ir.likeness import without_like
from autopar.ir.program import Program
from autopar.strategies.request import Attempt

if TYPE_CHECKING:
    from autopar.api.plan import Plan
    from autopar.cli.models.catalogue import LoadedModel


@dataclass(frozen=True, slots=True)
class Likeness:
    """regions: how many the model has; missing: those without their like in the twin, and of which module each is."""

    regions: int
    missing: tuple[str, ...]

    def __str__(self) -> str:
        if not self.missing:
            return f"Each of the {self.regions} regions of the model in its own size has its like in this one."
        return f"Not proven here: {', '.join(self.missing)} of the model in its own size ({self.regions} regions)."


def compared(large: LoadedModel, small: LoadedModel, plan: Plan) -> Likeness:
    """The regions of a model on meta beside those of its twin, as they are before strategies change them.

    Raises:
        AutoparError: the model does not trace in its own size.
    """
    whole, twin = _outlined(large, plan), _outlined(small, plan)
    missing = [f"{each.name} ({each.module})" if each.module else each.name for each in without_like(whole, twin)]
    return Likeness(len(whole.regions), tuple(missing))


def _outlined(loaded: LoadedModel, plan: Plan) -> Program:
    request = Attempt(loaded.model, loaded.batch, plan.mesh, plan.strategies, training=plan.training)
    names = [step.name for step in pipeline.TRACE]
    program, _ = pipeline.run(request, pipeline.TRACE[: names.index("outline") + 1])
    return program
