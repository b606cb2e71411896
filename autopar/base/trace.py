"""What a drawn timeline is made of: spans of time, predicted or recorded, and curves of bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Span:
    """Something that a rank does in a step of a plan without a pipeline.

    track: `compute`, `node` or `network` (the links that carry it). name: `model.layers.3 forward`, `all_gather dp`.
    call: its number, -1 for none. start_s, end_s: from the step's start. times: for how many like it, one after the
    other, it stands (microbatches in the middle of a step). bytes_sent, why: of a collective, as `Collective` has it.
    """

    track: str
    name: str
    phase: str
    call: int
    start_s: float
    end_s: float
    bytes_sent: float = 0.0
    times: int = 1
    why: str = ""


@dataclass(frozen=True, slots=True)
class Recorded:
    """One action as it ran, on a clock that all ranks share.

    rank: in the whole mesh, or of the pipeline. action: its text (2F0); of a RECV the time that the stage waited for
    it. step: from 0, of those that were recorded together. microbatch: -1 where none says so. axis: of a collective,
    `bytes_sent` by this rank. note: what is to be known of the times.
    """

    rank: int
    action: str
    start_s: float
    end_s: float
    step: int = 0
    microbatch: int = -1
    axis: str = ""
    bytes_sent: float = 0.0
    note: str = ""


@dataclass(frozen=True, slots=True)
class MemoryCurve:
    """What a rank holds over a step, by category. rank: of the pipeline, 0 where there is none. times_s: when it
    changes; series: for each category (`parameters`, `gradients`, `optimizer states`, `activations`, `gathered`, …) the
    bytes from that time on; their sum's maximum is the rank's predicted peak.
    """

    rank: int
    times_s: tuple[float, ...]
    series: Mapping[str, tuple[float, ...]]

    @property
    def peak_bytes(self) -> float:
        return max((sum(values) for values in zip(*self.series.values(), strict=True)), default=0.0)
