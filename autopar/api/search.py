"""`autopar.search` and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import nn

from autopar.api.plan import Plan
from autopar.api.planning import dressed
from autopar.planner.inputs import Batch, by_name
from autopar.planner.search import run
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.result import Found
from autopar.planner.with_loss import Loss, with_loss
from autopar.views.plots import draw_frontier

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class SearchResult(Found[Plan]):
    """Plans, fastest first, with the estimates that they began as and everything that was estimated (`Found`)."""

    def plot(self, path: str | Path) -> Path:
        """The frontier of time against memory as a picture (.svg, .png, .pdf). Needs matplotlib.

        Raises:
            AutoparError: no matplotlib, or a path that cannot be written.
        """
        return draw_frontier(self, Path(path))


def search(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Batch,
    precision: str | torch.dtype | None = "bf16",
    memory_limit: float | None = None,
    top: int = 3,
    limits: Mapping[str, int] | None = None,
    loss: Loss | None = None,
    expert_imbalance: float | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Compare meshes (pp × node × dp × cp × tp), strategies, schedules, microbatches and rematerialization.

    Points are estimated from one trace of the model, those that cannot be among the best or on the frontier left out;
    the best are planned as `autopar.plan` would, and come back best first, with all the estimates.

    Args:
        cluster: or its text (`h100x64`).
        example_inputs: the global batch of a step, as in `autopar.plan`.
        memory_limit: bytes one rank may use; None takes the hardware profile's.
        top: how many are planned.
        limits: the largest size of an axis, by its name (`{"tp": 8}`); the others have no limit but the cluster. dp:
            of all data ranks.
        loss: a function of the outputs and the batch that becomes a part of the program (see `autopar.compile`).
        expert_imbalance: as in `autopar.plan`.
        progress: called with what is being done, its number from 0, and how many there are.

    Raises:
        AutoparError: bad input; nothing fits (with the smallest memory that would do).
    """
    batch = by_name(model, example_inputs)
    found = run.search(
        with_loss(model, loss, batch), cluster, example_inputs=batch, precision=precision,
        memory_limit=memory_limit, top=top, limits=limits,
        expert_imbalance=expert_imbalance, progress=progress,
    )  # fmt: skip
    planned = tuple((candidate, dressed(record)) for candidate, record in found.planned)
    return SearchResult(
        found.cluster, planned, found.candidates, found.memory_limit_bytes, found.tokens, found.wall_s, found.cpu_s
    )
