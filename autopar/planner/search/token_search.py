"""A search for `generate()`: every mesh with every batch, estimated."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from autopar.base.errors import AutoparError, DoesNotFit
from autopar.planner.generation import Generation
from autopar.planner.inputs import to_dtype
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.token_estimates import TokenEstimator
from autopar.planner.search.token_families import TokenFamilies
from autopar.planner.search.tokens import TokenCandidate, token_points, trace_rows

Inputs = Callable[[Generation], Mapping[str, Mapping[str, Any]]]
"""What forward gets in each phase of a generation."""


@dataclass(frozen=True, slots=True)
class TokenSearch:
    """What is searched: see `autopar.search`. batches: sequences of all replicas together. limits: the largest size of
    an axis.
    """

    model: nn.Module
    cluster: Cluster
    generation: Generation
    batches: Sequence[int]
    limit_bytes: float
    limits: Mapping[str, int]
    precision: torch.dtype | None = None

    def candidates(self, inputs: Inputs, tell: Callable[[str, int, int], None]) -> list[TokenCandidate]:
        """Everything that can be had, whether or not it fits.

        inputs: of `autopar.api.generation.phase_inputs`. tell: what is done, of how many.

        Raises:
            AutoparError: nothing can be had, or nothing fits (with the smallest memory that would do).
        """
        traced = trace_rows(self.batches)
        families = {}
        for number, rows in enumerate(sorted(set(traced.values()))):
            tell("trace", number, len(set(traced.values())))
            wanted = replace(self.generation, batch=rows)
            families[rows] = TokenFamilies(self.model, self.cluster, wanted.rows, inputs(wanted), self.precision)
        estimator = TokenEstimator(self.cluster, self.generation, self.limit_bytes, families, traced)
        first = next(iter(families.values()))
        limits = {"pp": first.num_calls, "dp": max(self.batches), "tp": self.cluster.num_devices} | dict(self.limits)
        points = list(token_points(self.cluster.num_devices, limits, first.experts))
        found = []
        for number, point in enumerate(points):
            tell("estimate", number, len(points))
            found += [each for batch in sorted(set(self.batches)) if (each := estimator.candidate(point, batch))]
        if not any(each.fits for each in found):
            raise self._nothing_fits(found)
        return found

    def _nothing_fits(self, found: Sequence[TokenCandidate]) -> AutoparError:
        if not found:
            return AutoparError(
                f"no mesh of {self.cluster} can generate with this model and these batches",
                values=f"batches {', '.join(map(str, self.batches))}",
                remedy="add a batch that the devices divide, or use another number of devices",
            )
        least = min(found, key=lambda each: each.peak_bytes)
        return DoesNotFit(
            f"nothing fits {self.limit_bytes / 2**30:.4g} GiB a rank on {self.cluster}",
            values=f"the least of {len(found)} estimates is {least.peak_bytes / 2**30:.4g} GiB: {least.point} with "
            f"{least.batch} sequences",
            remedy="use more devices, smaller batches, fewer tokens, or a larger memory_limit",
        )


def of_model(
    model: nn.Module,
    cluster: Cluster,
    generation: Generation,
    batches: Sequence[int] | None,
    precision: str | torch.dtype | None,
    memory_limit: float | None,
    limits: Mapping[str, int] | None,
) -> TokenSearch:
    """The search of a model, with what was left out put in; on one device as `plan_generation` prices that.

    Raises:
        AutoparError: batches that are none; `cp` among the limits, an axis that has nothing to do with tokens.
    """
    sizes = tuple(batches) if batches is not None else default_batches(generation.batch)
    if not sizes or min(sizes) < 1:
        raise AutoparError(f"batches {list(sizes)} are none", remedy="name sequences, as in batches=(1, 8, 64)")
    if wrong := sorted(set(limits or {}) - {"pp", "dp", "tp"}):
        raise AutoparError(f"a search for generate() has no axis {wrong[0]!r}", remedy="limit pp, dp or tp")
    if cluster.num_devices == 1:
        cluster = Cluster(cluster.hardware.in_graphs(), 1)
    if generation.chunks > 1:
        cluster = replace(cluster, hardware=cluster.hardware.in_chunks())
    limit = float(cluster.hardware.memory_bytes) if memory_limit is None else float(memory_limit)
    return TokenSearch(model, cluster, generation, sizes, limit, dict(limits or {}), to_dtype(precision))


def default_batches(batch: int) -> tuple[int, ...]:
    """1, 4, 16, … and the batch itself."""
    found = []
    size = 1
    while size < batch:
        found.append(size)
        size *= 4
    return (*found, batch)
