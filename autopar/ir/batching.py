"""How a program depends on the rows of its batch."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Literal

OF_BATCH = "of_batch_"
"""How the buffers are named that a step fills from its whole batch before microbatches run."""

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
    (autopar.operators) and `aten` (torch.ops.aten) are known. of_batch: the text of `of_batch(inputs, state)`, which
    gives the values of buffers that microbatches read of the whole batch; empty where they read none. It is given all
    inputs, and the model's buffers. told_by: the inputs that these or the weight follow from.
    """

    inputs: Mapping[str, int | None]
    outputs: tuple[OutputBatching, ...]
    weight: str = ""
    updates: Mapping[str, OutputBatching] = field(default_factory=dict)
    of_batch: str = ""
    told_by: frozenset[str] = frozenset()


def is_of_batch(name: str) -> bool:
    """Whether a buffer is filled from the whole batch in each step."""
    return name.startswith(OF_BATCH)
