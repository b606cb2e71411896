"""`autopar.search`: enumerate, estimate, plan the best."""

from __future__ import annotations

import itertools
import logging
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import nn

from autopar import api, pipeline, planning
from autopar.errors import AutoparError, DoesNotFit
from autopar.passes.rematerialize import MODES
from autopar.pipelining import schedules
from autopar.pipelining.microbatches import num_rows
from autopar.plans import Plan
from autopar.searching.candidate import Candidate, Point, divisors, factorizations
from autopar.searching.cluster import Cluster
from autopar.searching.estimates import CONTEXTS, Estimator
from autopar.searching.families import Families
from autopar.searching.formulas import compiled
from autopar.searching.result import SearchResult
from autopar.searching.stages import Stages
from autopar.strategies import resolve
from autopar.torch_compat import tracing

logger = logging.getLogger("autopar.search")
MOST_ROWS = 4
"""Rows of a microbatch on one rank, at most: more of them gain nothing but fewer launches."""
MOST_STAGES = 8
MOST_MICROBATCHES = 4096
DATA = ("ddp", "zero2", "zero3")
TENSOR = ("tensor", "tensor+sequence")
Progress = Callable[[str, int, int], None]


@dataclass(frozen=True, slots=True)
class Space:
    """What is enumerated. limits: the largest size of each axis."""

    limits: Mapping[str, int]
    data: Sequence[str] = DATA
    tensor: Sequence[str] = TENSOR
    context: Sequence[str] = CONTEXTS
    schedules: Sequence[str] = ("1f1b", "interleaved", "zero_bubble")


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
    """Compare meshes (pp × dp × cp × tp), strategies, schedules, microbatches and rematerialization on a cluster.

    Every point is estimated from one trace of the model; the best are planned as `autopar.plan` would, and come back
    best first, with all the estimates.

    Args:
        cluster: or its text (`h100x64`).
        example_inputs: the global batch of a step.
        memory_limit: bytes one rank may use; None takes the hardware profile's.
        top: how many are planned.
        limits: the largest size of an axis, by its name (`{"tp": 8}`); the others have no limit but the cluster.
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
    sizes = {"pp": estimator.num_calls, "dp": batch, "cp": 64, "tp": 64}
    space = Space({axis: min(size, (limits or {}).get(axis, size)) for axis, size in sizes.items()})
    tell("estimate", 1, 3 + top)
    candidates = _estimated(estimator, points(cluster, space, batch), limit)
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
    rows = next((each for each in (MOST_ROWS, 2) if batch % each == 0), 2)
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
    families = Families(replace(request, inputs=bound), steps, traced, cluster)
    return Estimator(families, cluster, rows), batch


def _two_rows(inputs: Mapping[str, Any], batch: int) -> dict[str, Any]:
    """Two rows of an odd batch, its first one twice: the mesh on which families are placed splits them."""

    def doubled(leaf: Any) -> Any:
        is_of_batch = isinstance(leaf, torch.Tensor) and leaf.dim() and leaf.shape[0] == batch
        return torch.cat([leaf[:1], leaf[:1]]) if is_of_batch else leaf

    leaves, spec = tracing.tree_flatten(dict(inputs))
    return dict(tracing.tree_unflatten([doubled(leaf) for leaf in leaves], spec))


def points(cluster: Cluster, space: Space, batch: int) -> Iterator[Point]:
    """All points of the space that the batch admits, with nothing recomputed."""
    for sizes in factorizations(cluster.num_devices, space.limits):
        tensors = space.tensor if sizes["tp"] > 1 else ("",)
        contexts = space.context if sizes["cp"] > 1 else ("",)
        data = space.data if sizes["dp"] > 1 else ("ddp",)
        for rows in (each for each in divisors(MOST_ROWS) if batch % each == 0):
            microbatches, rest = divmod(batch, sizes["dp"] * rows)
            if rest or not microbatches or microbatches > MOST_MICROBATCHES:
                continue
            for schedule, stages in _schedules(space, sizes["pp"], microbatches):
                for d, c, t in itertools.product(data, contexts, tensors):
                    yield Point(**sizes, data=d, context=c, tensor=t, schedule=schedule, stages_per_rank=stages,
                                microbatches=microbatches, rows=rows, rematerialize="none")  # fmt: skip


def _schedules(space: Space, ranks: int, microbatches: int) -> Iterator[tuple[str, int]]:
    if ranks == 1:
        yield "", 1
        return
    for name in space.schedules:
        if name != "interleaved":
            if schedules.refusal(name, ranks, microbatches, 1) is None:
                yield name, 1
        elif microbatches % ranks == 0:
            yield from ((name, v) for v in (2, 4, MOST_STAGES) if ranks * v <= space.limits["pp"])


def _estimated(estimator: Estimator, found: Iterator[Point], limit: float) -> list[Candidate]:
    """Every point that can be had, with what it takes. What fits is not recomputed: that would only take longer."""
    waiting = [point for point in found if not point.context or point.context in _contexts(estimator, point)]
    done: list[Candidate] = []
    for mode in MODES:
        now = _evaluated(estimator, [replace(point, rematerialize=mode) for point in waiting], limit)
        done += now
        waiting = [each.point for each in now if not each.fits]
    return done


def _contexts(estimator: Estimator, point: Point) -> tuple[str, ...]:
    """The fastest way to split the sequence, of those that divide."""
    ways = estimator.contexts(point)
    own = (way for way in ways if estimator.computing(replace(point, context=way)) is not None)
    return tuple(itertools.islice(own, 1))


def _evaluated(estimator: Estimator, found: Sequence[Point], limit: float) -> list[Candidate]:
    """The formulas of a schedule over all of its points at once."""
    done: list[Candidate] = []
    staged: dict[str, list[tuple[Point, Stages]]] = {}
    for point in found:
        stages = estimator.stages(point)
        if stages is None:
            continue
        if not point.schedule:
            seconds = estimator.alone_seconds(point)
            if seconds is not None:
                size = estimator.alone_bytes(point, stages)
                done.append(Candidate(point, seconds, size, size <= limit))
            continue
        staged.setdefault(point.schedule, []).append((point, stages))
    for schedule, rows in staged.items():
        seconds_of, bytes_of = compiled(schedule)
        sends = (estimator.send_seconds(point, stages.sent_bytes) for point, stages in rows)
        steps = seconds_of(*np.array([_timing(*each, send) for each, send in zip(rows, sends, strict=True)]).T)
        sizes = bytes_of(*np.concatenate([_holding(*each) for each in rows]).T)
        ranks = np.cumsum([0, *(point.pp for point, _ in rows[:-1])])
        peaks = np.maximum.reduceat(sizes, ranks)
        done += [
            Candidate(point, float(step), float(size), bool(size <= limit))
            for (point, _), step, size in zip(rows, steps, peaks, strict=True)
        ]
    return done


def _timing(point: Point, stages: Stages, send_s: float) -> tuple[float, ...]:
    """The symbols of a schedule's seconds."""
    slowest = int((stages.forward_s + stages.backward_s).argmax())
    return (
        float(point.pp), float(point.stages_per_rank), float(point.microbatches), stages.forward_s[slowest],
        stages.backward_s[slowest], stages.input_s[slowest], stages.weight_s[slowest],
        float((stages.forward_s + stages.backward_s).sum()), send_s, stages.once_s, stages.optimizer_s,
    )  # fmt: skip


def _holding(point: Point, stages: Stages) -> NDArray[np.float64]:
    """The symbols of a schedule's bytes, a row for each rank."""
    shared = (float(point.pp), float(point.stages_per_rank), float(point.microbatches))
    own = (
        np.arange(point.pp, dtype=np.float64),
        stages.static_bytes,
        stages.saved_bytes,
        stages.halved_bytes,
        stages.working_bytes,
    )
    return np.stack([*(np.full(point.pp, each) for each in shared), *own], axis=1)


def _planned(
    estimator: Estimator, fitting: Sequence[Candidate], top: int, tell: Callable[[int], None]
) -> tuple[tuple[Candidate, Plan], ...]:
    """The best candidates as plans, fastest first; of those that differ in nothing but the schedule, one."""
    done: list[tuple[Candidate, Plan]] = []
    kinds: set[tuple[object, ...]] = set()
    captured: dict[object, Any] = {}
    for candidate in fitting:
        point = candidate.point
        kind = (point.pp, point.dp, point.cp, point.tp, point.data, point.context, point.tensor, point.rematerialize)
        if kind in kinds:
            continue
        if len(done) >= top:
            break
        kinds.add(kind)
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
