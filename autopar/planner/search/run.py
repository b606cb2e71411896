"""`autopar.search`: enumerate, estimate, plan the best."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar import api, pipeline, planning
from autopar.errors import AutoparError, DoesNotFit
from autopar.pipelining.microbatches import num_rows
from autopar.plans import Plan
from autopar.searching.candidate import Candidate
from autopar.searching.cluster import Cluster
from autopar.searching.compare import Comparison
from autopar.searching.estimates import Estimator
from autopar.searching.families import Families
from autopar.searching.result import SearchResult
from autopar.searching.space import Shape, Space, all_rows
from autopar.searching.worth import Worth
from autopar.strategies import resolve
from autopar.torch_compat import tracing

logger = logging.getLogger("autopar.search")
MOST_SIZES = {"cp": 64, "tp": 64}
Progress = Callable[[str, int, int], None]


def search(
    model: nn.Module,
    cluster: Cluster | str,
    *,
    example_inputs: Mapping[str, Any],
    precision: str | torch.dtype | None = "bf16",
    memory_limit: float | None = None,
    top: int = 3,
    limits: Mapping[str, int] | None = None,
    progress: Progress | None = None,
) -> SearchResult:
    """Compare meshes (pp × node × dp × cp × tp), strategies, schedules, microbatches and rematerialization.

    Points are estimated from one trace of the model, those that cannot be among the best or on the frontier left out;
    the best are planned as `autopar.plan` would, and come back best first, with all the estimates.

    Args:
        cluster: or its text (`h100x64`).
        example_inputs: the global batch of a step.
        memory_limit: bytes one rank may use; None takes the hardware profile's.
        top: how many are planned.
        limits: the largest size of an axis, by its name (`{"tp": 8}`); the others have no limit but the cluster. dp:
            of all data ranks.
        progress: called with what is being done, its number from 0, and how many there are.

    Raises:
        AutoparError: bad input; nothing fits (with the smallest memory that would do).
    """
    start = time.perf_counter(), time.process_time()
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    limit = float(cluster.hardware.memory_bytes) if memory_limit is None else float(memory_limit)
    tell = progress or (lambda what, number, count: None)
    tell("trace", 0, 3 + top)
    estimator, batch = _estimator(model, cluster, example_inputs, precision, limit)
    sizes = {"pp": estimator.num_calls, "dp": batch, **MOST_SIZES}
    space = Space({axis: min(size, (limits or {}).get(axis, size)) for axis, size in sizes.items()})
    tell("estimate", 1, 3 + top)
    shape = Shape(batch, estimator.num_calls, estimator.num_blocks)
    candidates = Comparison(estimator, space, shape, limit, Worth(limit, top)).run()
    # Where all are far too large, the error says how much too large.
    candidates = candidates or Comparison(estimator, space, shape, limit, None).run()
    fitting = sorted((each for each in candidates if each.fits), key=lambda each: (each.step_s, str(each.point)))
    if not fitting:
        raise _nothing_fits(candidates, cluster, limit)
    tell("compare", 2, 3 + top)
    plans = _planned(estimator, fitting, top, lambda number: tell("plan", 3 + number, 3 + top))
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    return SearchResult(cluster, plans, tuple(candidates), limit, _tokens(example_inputs), *seconds)


def _estimator(
    model: nn.Module, cluster: Cluster, inputs: Mapping[str, Any], precision: str | torch.dtype | None, limit: float
) -> tuple[Estimator, int]:
    batch = num_rows(inputs)
    rows = max(2, *all_rows(batch)) if batch % 2 == 0 else 2
    bound = api.bind_inputs(model, (), inputs)
    mesh = cluster.mesh({"dp": 2, "cp": 2, "tp": 2})
    request = pipeline.Request(
        model,
        pipeline.one_microbatch(bound, batch // rows) if batch % 2 == 0 else _two_rows(bound, batch),
        mesh,
        resolve({"dp": "ddp", "cp": "ring", "tp": "tensor"}, mesh),
        memory_limit_bytes=limit,
        precision=api.to_dtype(precision),
        explain=False,
    )
    steps = pipeline.DEFAULT
    names = [step.name for step in steps]
    traced, _ = pipeline.run(request, steps[: names.index("rematerialize")])
    families = Families(replace(request, inputs=bound), steps, traced, cluster, rows)
    return Estimator(families, cluster, rows), batch


def _two_rows(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Two rows of an odd batch, its first one twice: the mesh on which families are placed splits them."""

    def doubled(leaf: Any) -> Any:
        is_of_batch = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch
        return torch.cat([leaf[:1], leaf[:1]]) if is_of_batch else leaf

    leaves, spec = tracing.tree_flatten(dict(inputs))
    return dict(tracing.tree_unflatten([doubled(leaf) for leaf in leaves], spec))


def _planned(
    estimator: Estimator, fitting: Sequence[Candidate], top: int, tell: Callable[[int], None]
) -> tuple[tuple[Candidate, Plan], ...]:
    """The best candidates as plans, fastest first; of those that differ in nothing but the schedule, one."""
    done: list[tuple[Candidate, Plan]] = []
    kinds: set[tuple[object, ...]] = set()
    captured: dict[object, Any] = {}
    for candidate in fitting:
        point = candidate.point
        if point.kind in kinds:
            continue
        if len(done) >= top:
            break
        kinds.add(point.kind)
        tell(len(done))
        try:
            plan = planning.plan_point(
                estimator.families.request, estimator.cluster.mesh(point.axes), point.strategy, point.rematerialize,
                point.microbatches, captured,
            )  # fmt: skip
        except DoesNotFit as error:
            logger.info("%s was estimated to fit: %s", point, error)
            continue
        done.append((candidate, plan))
    return tuple(sorted(done, key=lambda each: each[1].cost.step_time_s))


def _tokens(inputs: Mapping[str, Any]) -> int:
    """Tokens of a batch: the elements of its largest input of two dims; its rows where there is none."""
    leaves = [leaf for leaf in inputs.values() if isinstance(leaf, torch.Tensor) and leaf.dim() == 2]
    return max((leaf.numel() for leaf in leaves), default=num_rows(inputs))


def _nothing_fits(candidates: Sequence[Candidate], cluster: Cluster, limit: float) -> AutoparError:
    if not candidates:
        return AutoparError(
            f"no mesh of {cluster} can run this model and batch",
            remedy="use a batch that more numbers of ranks divide, or another number of devices",
        )
    least = min(candidates, key=lambda each: each.peak_bytes)
    return DoesNotFit(
        f"nothing fits {limit / 2**30:.4g} GiB a rank on {cluster}",
        values=f"the least of {len(candidates)} estimates is {least.peak_bytes / 2**30:.4g} GiB: {least.point}",
        remedy="use more devices, a larger memory_limit, or shorter sequences",
    )
