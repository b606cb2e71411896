"""How a program depends on the rows of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

Combine = Literal["concat", "mean", "sum", "weighted", "same"]


@dataclass(frozen=True, slots=True)
class OutputBatching:
    """How the outputs of microbatches become the step's: `concat` along batch_dim, `mean`, `sum`, `weighted` by
    `loss_weight`, `same`.
    """

    combine: Combine
    batch_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Batching:
    """How a program depends on its batch.

    inputs: the dim along which microbatches cut each input; None: every microbatch has it whole. outputs: one for each
    of the program's, in order. updates: of the buffers that forward changes, each microbatch of which starts from what
    the step found. weight: the text of `loss_weight(inputs)`, empty where no output is weighted. It gives a
    scalar (float64 on the CPU, else float32) and is to be run where `torch`, `F` (torch.nn.functional), `ops`
    (autopar.operators) and `aten` (torch.ops.aten) are known.
    """

    inputs: Mapping[str, int | None]
    outputs: tuple[OutputBatching, ...]
    weight: str = ""
    updates: Mapping[str, OutputBatching] = field(default_factory=dict)
