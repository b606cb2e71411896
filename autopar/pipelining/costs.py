"""What one stage takes: the figures that schedules are simulated with."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage on one rank; of one microbatch, unless said otherwise.

    backward_s: both halves at once. input_s, weight_s: its halves. forward_bytes: sent to the next stage,
    backward_bytes to the one before. unshard_s, reduce_s: of the gathers and gradient reductions of a step.
    static_bytes: parameters, gradients and optimizer states, all the time. held_bytes: of parameters gathered for the
    step, from UNSHARD to RESHARD. saved_bytes: what the backward needs, from F to the end of B or W. input_bytes: the
    part of it that the input half (I) frees. kept_bytes: what I leaves for W. forward_working_bytes,
    backward_working_bytes: beyond these, while it computes.
    """

    forward_s: float
    backward_s: float
    input_s: float = 0.0
    weight_s: float = 0.0
    forward_bytes: float = 0.0
    backward_bytes: float = 0.0
    unshard_s: float = 0.0
    reduce_s: float = 0.0
    static_bytes: float = 0.0
    held_bytes: float = 0.0
    saved_bytes: float = 0.0
    input_bytes: float = 0.0
    kept_bytes: float = 0.0
    forward_working_bytes: float = 0.0
    backward_working_bytes: float = 0.0
