"""What memory costs a plan, to first order: the solver's price of a byte in seconds of the predicted step."""

from __future__ import annotations

from autopar.planner.plan.record import PlanRecord

BESIDE = ("gather parameter", "reduce gradient")
"""What the objective may count for less than its seconds."""
UNITS = ((2**30, "GiB"), (2**20, "MiB"), (2**10, "KiB"))
FEW = 8
"""A price is said of a unit that the limit has as many of: what a large part of it would save, no price tells."""


def seconds_per_byte(plan: PlanRecord) -> tuple[float, float]:
    """What one more byte a rank would save of a step, with what is recomputed as it is: least and most; 0 where the
    placement has memory to spare, or keeping to the limit costs it less than its gap.

    The price is in seconds of the objective, which counts gathers and reductions at `overlap_price`. As many seconds
    are saved of what it counts whole, or of what runs beside the compute; where the step waits for gathers and
    reductions and they are what memory would save, 1 / `overlap_price` as many. A pipeline's objective adds up
    the work of its ranks, each of which has the memory that is priced: the price is divided among them.
    """
    solved = plan.solved
    ranks = plan.pipeline.schedule.num_ranks if plan.pipeline is not None else 1
    charged = solved.memory_price_s_per_byte / ranks
    beside_s = sum(row.seconds for row in plan.collectives if row.why in BESIDE)
    waited = charged / solved.overlap_price if beside_s > plan.cost.hidden_s else charged
    return min(charged, waited), max(charged, waited)


def unit(limit_bytes: float) -> tuple[int, str]:
    """The largest of GiB, MiB and KiB that is a small part of the limit: bytes and name."""
    return next((each for each in UNITS if FEW * each[0] <= limit_bytes), UNITS[-1])
