"""How fast a step is, as its users count: tokens and rows a second, and the share of what the devices could compute."""

from __future__ import annotations

import math
from dataclasses import dataclass

from autopar.planner.plan.record import PlanRecord


@dataclass(frozen=True, slots=True)
class Rates:
    """Of a whole step of all devices. None where the inputs do not say.

    tokens_per_s: where an input is [rows, tokens] of integers. mfu: `model_flops_utilization`.
    """

    rows_per_s: float | None
    tokens_per_s: float | None
    tokens_per_s_per_device: float | None
    mfu: float | None

    @staticmethod
    def of(plan: PlanRecord) -> Rates:
        """Of the predicted step."""
        step, (rows, tokens) = plan.cost.step_time_s, _batch_size(plan)
        tokens_per_s = tokens / step if tokens and step else None
        each = tokens_per_s / plan.mesh.num_devices if tokens_per_s else None
        return Rates(rows / step if rows and step else None, tokens_per_s, each, model_flops_utilization(plan))


def model_flops_utilization(plan: PlanRecord) -> float | None:
    """The model's own floating point operations (three times the forward's in training: what is computed again does not
    count) against the peak of all devices (PaLM, Chowdhery et al. 2022, appendix B); None where there are none.
    """
    views, step = plan.views, plan.cost.step_time_s
    if views is None or not views.forward_flops or not step:
        return None
    dtype = plan.precision or next(
        (p.dtype for p in plan.interface.parameters if p.dtype.startswith(("float", "bfloat"))), "float32"
    )
    peak = plan.mesh.hardware.peak_flops_per_s(dtype) * plan.mesh.num_devices
    flops = views.forward_flops * (3 if plan.training else 1) * plan.interface.runs
    return flops / (peak * step)


def _batch_size(plan: PlanRecord) -> tuple[int, int]:
    """Rows, and tokens where an input is [rows, tokens] of integers; of a whole step."""
    inputs, parts = plan.interface.inputs, plan.interface.microbatches
    ids = [each for each in inputs if each.dtype.startswith("int") and len(each.shape) == 2 and each.name != "labels"]
    rows = inputs[0].shape[0] if inputs and inputs[0].shape else 0
    return rows * parts, math.prod(ids[0].shape) * parts if ids else 0
