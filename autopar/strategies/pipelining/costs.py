"""What one stage takes: the figures that schedules are simulated with."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class StageCost:
    """Seconds and bytes of one stage on one rank; of one microbatch, unless said otherwise.

    backward_s: both halves at once. input_s, weight_s: its halves. forward_bytes: sent to the next stage,
    backward_bytes to the one before. unshard_s, reduce_s: of the gathers and gradient reductions of a step.
    static_bytes: parameters, gradients, optimizer states, caches and outputs that are kept, all the time. held_bytes:
    of parameters gathered for the step, from UNSHARD to RESHARD. saved_bytes: what the backward needs, from F to the
    end of B or W. input_bytes: the part of it that the input half (I) frees. kept_bytes: what I leaves for W.
    forward_working_bytes, backward_working_bytes: beyond these, while it computes. update_s: of the optimizer. add_s:
    of backward_s, and of weight_s, what adding gradients to those of other microbatches takes.
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
    update_s: float = 0.0
    add_s: float = 0.0


def update_seconds(rank_of: Sequence[int], costs: Sequence[StageCost]) -> float:
    """Of the optimizer on the rank that has most to update, after the step. rank_of: of each stage."""
    by_rank: dict[int, float] = {}
    for rank, cost in zip(rank_of, costs, strict=True):
        by_rank[rank] = by_rank.get(rank, 0.0) + cost.update_s
    return max(by_rank.values(), default=0.0)
