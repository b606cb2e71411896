"""What `autopar.search` does: enumerate, estimate, plan the best."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from autopar import pipeline
from autopar.base.errors import AutoparError, DoesNotFit
from autopar.base.huggingface import experts
from autopar.base.torch_compat import tracing
from autopar.planner import planning
from autopar.planner.inputs import bind_inputs, to_dtype
from autopar.planner.microbatches import num_rows
from autopar.planner.plan.record import PlanRecord
from autopar.planner.search.candidate import Candidate, Point
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.compare import Comparison
from autopar.planner.search.estimates import Estimator
from autopar.planner.search.families import Families
from autopar.planner.search.result import Found
from autopar.planner.search.space import Shape, Space, all_rows
from autopar.planner.search.worth import Worth
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt

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
    halves: bool | None = None,
    expert_imbalance: float | None = None,
    progress: Progress | None = None,
) -> Found[PlanRecord]:
    """See `autopar.search`, which dresses the plans that this finds."""
    start = time.perf_counter(), time.process_time()
    cluster = Cluster.parse(cluster) if isinstance(cluster, str) else cluster
    if expert_imbalance is not None:
        cluster = Cluster(cluster.hardware.with_experts(expert_imbalance), cluster.nodes)
    limit = float(cluster.hardware.memory_bytes) if memory_limit is None else float(memory_limit)
    tell = progress or (lambda what, number, count: None)
    tell("trace", 0, 3 + top)
    estimator, batch = _estimator(model, cluster, example_inputs, precision, limit)
    sizes = {"pp": estimator.num_calls, "dp": batch, **MOST_SIZES}
    space = Space({axis: min(size, (limits or {}).get(axis, size)) for axis, size in sizes.items()})
    tell("estimate", 1, 3 + top)
    shape = Shape(batch, estimator.num_calls, estimator.num_blocks, estimator.experts)
    candidates = Comparison(estimator, space, shape, limit, Worth(limit, top)).run()
    # Where all are far too large, the error says how much too large.
    candidates = candidates or Comparison(estimator, space, shape, limit, None).run()
    fitting = sorted((each for each in candidates if each.fits), key=lambda each: (each.step_s, str(each.point)))
    if not fitting:
        raise _nothing_fits(candidates, cluster, limit)
    if halves and not (fitting := [each for each in fitting if each.point.may_pair]):
        raise AutoparError(
            f"halves=True: nothing that fits {cluster} sends tokens to experts in an even number of microbatches",
            where="halves",
            remedy="search without halves, or with a model of experts and a batch that more microbatches divide",
        )
    tell("compare", 2, 3 + top)
    plans = _planned(estimator, fitting, top, halves, lambda number: tell("plan", 3 + number, 3 + top))
    seconds = time.perf_counter() - start[0], time.process_time() - start[1]
    return Found(cluster, plans, tuple(candidates), limit, _tokens(example_inputs), *seconds)


def _estimator(
    model: nn.Module, cluster: Cluster, inputs: Mapping[str, Any], precision: str | torch.dtype | None, limit: float
) -> tuple[Estimator, int]:
    batch = num_rows(inputs)
    rows = max(2, *all_rows(batch)) if batch % 2 == 0 else 2
    bound = bind_inputs(model, (), inputs)
    if batch % 2 == 0 and experts.has_layers(model):
        rows = batch  # of all ranks that exchange tokens, each with its own
    mesh = cluster.mesh({"dp": 2, "cp": 2, "tp": 2})
    request = Attempt(
        model,
        pipeline.one_microbatch(bound, batch // rows) if batch % 2 == 0 else _two_rows(bound, batch),
        mesh,
        resolve({"dp": "ddp", "cp": "ring", "tp": "tensor"}, mesh),
        memory_limit_bytes=limit,
        precision=to_dtype(precision),
        explain=False,
    )
    steps = pipeline.DEFAULT
    traced, _ = pipeline.run(request, pipeline.TRACE)
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
    estimator: Estimator, fitting: Sequence[Candidate], top: int, halves: bool | None, tell: Callable[[int], None]
) -> tuple[tuple[Candidate, PlanRecord], ...]:
    """The best candidates as plans, fastest first; of those that differ in nothing but the schedule, one."""
    done: list[tuple[Candidate, PlanRecord]] = []
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
            plan = _plan_of(estimator, point, halves, captured)
        except DoesNotFit as error:
            logger.info("%s was estimated to fit: %s", point, error)
            continue
        if halves is None and all(plan.cost.step_time_s <= other.cost.step_time_s for _, other in done):
            candidate, plan = _in_pairs(estimator, candidate, plan, captured)
        done.append((candidate, plan))
    return tuple(sorted(done, key=lambda each: each[1].cost.step_time_s))


def _plan_of(estimator: Estimator, point: Point, halves: bool | None, captured: dict[object, Any]) -> PlanRecord:
    request = replace(estimator.families.request, halves=halves)
    mesh = estimator.cluster.mesh(point.axes)
    return planning.plan_point(request, mesh, point.strategy, point.rematerialize, point.microbatches, captured)


def _in_pairs(
    estimator: Estimator, candidate: Candidate, plan: PlanRecord, captured: dict[object, Any]
) -> tuple[Candidate, PlanRecord]:
    """The candidate, or where that is faster its stages with microbatches that are cut in two, which go through them
    together: the schedule and what a rank holds are about the same.
    """
    point = candidate.point
    twice = replace(point, microbatches=2 * point.microbatches, rows=point.rows // 2)
    if point.pp == 1 or point.rows % 2 or not twice.may_pair:
        return candidate, plan
    try:
        other = _plan_of(estimator, twice, True, captured)
    except DoesNotFit as error:
        logger.info("%s in pairs: %s", point, error)
        return candidate, plan
    logger.info("in pairs %.3g s a step, %.3g without", other.cost.step_time_s, plan.cost.step_time_s)
    if other.cost.step_time_s >= plan.cost.step_time_s:
        return candidate, plan
    return replace(candidate, point=twice), other


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
