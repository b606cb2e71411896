"""`autopar.search` and what it gives back."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import overload

import torch
from torch import nn

from autopar.api.plan import Plan
from autopar.api.planning import dressed
from autopar.api.search_generation import GenerationSearch, search_generation
from autopar.base.errors import AutoparError
from autopar.planner.generation import Generation
from autopar.planner.inputs import Batch, by_name
from autopar.planner.search import run
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.result import Found
from autopar.planner.with_loss import Loss, with_loss
from autopar.views.plots import draw_frontier

Progress = Callable[[str, int, int], None]
_UNSAID = "unsaid"
"""Of a precision that is left out: it is another one for training than for `generate()`."""


@dataclass(frozen=True, slots=True)
class SearchResult(Found[Plan]):
    """Plans, fastest first, with the estimates that they began as and everything that was estimated (`Found`)."""

    def plot(self, path: str | Path) -> Path:
        """The frontier of time against memory as a picture (.svg, .png, .pdf). Needs matplotlib.

        Raises:
            AutoparError: no matplotlib, or a path that cannot be written.
        """
        return draw_frontier(self, Path(path))


@overload
def search(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Batch,
    precision: str | torch.dtype | None = ...,
    memory_limit: float | None = ...,
    top: int = ...,
    limits: Mapping[str, int] | None = ...,
    halves: bool | None = ...,
    loss: Loss | None = ...,
    expert_imbalance: float | None = ...,
    progress: Progress | None = ...,
) -> SearchResult: ...


@overload
def search(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    generate: Generation,
    batches: Sequence[int] | None = ...,
    precision: str | torch.dtype | None = ...,
    memory_limit: float | None = ...,
    top: int = ...,
    limits: Mapping[str, int] | None = ...,
    others: bool = ...,
    expert_imbalance: float | None = ...,
    progress: Progress | None = ...,
) -> GenerationSearch: ...


def search(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Batch | None = None,
    generate: Generation | None = None,
    batches: Sequence[int] | None = None,
    precision: str | torch.dtype | None = _UNSAID,
    memory_limit: float | None = None,
    top: int = 3,
    limits: Mapping[str, int] | None = None,
    others: bool = False,
    halves: bool | None = None,
    loss: Loss | None = None,
    expert_imbalance: float | None = None,
    progress: Progress | None = None,
) -> SearchResult | GenerationSearch:
    """Compare meshes (pp × node × dp × cp × tp), strategies, schedules, microbatches and rematerialization.

    Points are estimated from one trace of the model, those that cannot be among the best or on the frontier left out;
    the best are planned as `autopar.plan` would, and come back best first, with all the estimates.

    With `generate` it compares meshes (pp × dp × ep × tp) and batches for `model.generate()`: seconds to the first
    token and for each other one against tokens a second and device, `top` of the frontier planned in both phases.

    Args:
        cluster: or its text (`h100x64`).
        example_inputs: the global batch of a step, as in `autopar.plan`.
        generate: tokens of a prompt and new ones, as in `autopar.plan_generation`; in the place of `example_inputs`.
        batches: with `generate`: sequences that are generated at once, by all replicas together; None: 1, 4, 16, … and
            that of `generate`.
        precision: what parameters are cast to; where it is left out, bf16, with `generate` as they are stored.
        memory_limit: bytes one rank may use; None takes the hardware profile's.
        top: how many are planned.
        limits: the largest size of an axis, by its name (`{"tp": 8}`); the others have no limit but the cluster. dp:
            of all data ranks.
        others: with `generate`: whether those that are planned are planned by other ways on the same devices, too:
            `zero3` over replicas, caches in pieces along their length (`split_kv`), `auto`; what cannot be had or does
            not fit is left out.
        halves: whether two microbatches go through a program together, as in `autopar.plan`. True: what cannot be so
            is not planned; None: of those that are planned, where it is faster (estimates are of one at a time).
        loss: a function of the outputs and the batch that becomes a part of the program (see `autopar.compile`).
        expert_imbalance: as in `autopar.plan`.
        progress: called with what is being done, its number from 0, and how many there are.

    Raises:
        AutoparError: bad input; nothing fits (with the smallest memory that would do).
    """
    if (example_inputs is None) == (generate is None):
        raise AutoparError("a search is for training or for generate()", remedy="pass example_inputs=, or generate=")
    if generate is not None:
        if loss is not None:
            raise AutoparError("generate() has no loss", remedy="leave loss= out")
        if halves is not None:
            raise AutoparError("generate() has no microbatches", remedy="leave halves= out")
        cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
        if expert_imbalance is not None:
            cluster = Cluster(cluster.hardware.with_experts(expert_imbalance), cluster.nodes)
        return search_generation(
            model, cluster, generate, batches=batches, precision=None if precision is _UNSAID else precision,
            memory_limit=memory_limit, top=top, limits=limits, others=others, progress=progress,
        )  # fmt: skip
    if others:
        raise AutoparError("others= is for generate()", remedy="leave it out: a search for training tries all of its")
    if batches is not None:
        raise AutoparError("batches= are for generate()", remedy="leave it out: example_inputs is the batch of a step")
    assert example_inputs is not None
    precision = "bf16" if precision is _UNSAID else precision
    batch = by_name(model, example_inputs)
    found = run.search(
        with_loss(model, loss, batch), cluster, example_inputs=batch, precision=precision,
        memory_limit=memory_limit, top=top, limits=limits, halves=halves,
        expert_imbalance=expert_imbalance, progress=progress,
    )  # fmt: skip
    planned = tuple((candidate, dressed(record)) for candidate, record in found.planned)
    return SearchResult(
        found.cluster, planned, found.candidates, found.memory_limit_bytes, found.tokens, found.wall_s, found.cpu_s
    )
