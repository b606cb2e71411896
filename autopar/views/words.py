"""A plan in sentences: what it does, what bounds its step, what each axis of the mesh is for."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Iterator
from typing import TYPE_CHECKING

from autopar.pipelining.spec import plural
from autopar.report import collective_groups, format_bytes, format_count, format_time
from autopar.sharding import Shard
from autopar.tensor_type import dtype_name

if TYPE_CHECKING:
    from autopar.plans import Plan
    from autopar.views.data import Views

_AGAIN = {
    "none": "Nothing is computed again in the backward.",
    "selective": "The backward computes again all but products and attention, to hold less.",
    "full": "The backward computes whole blocks again, to hold less.",
}
_PRODUCTS = ("matmul", "attention", "attention_backward", "convolution", "conv")


def in_words(plan: Plan) -> Iterator[str]:
    """The plan in some sentences."""
    size = format_count(sum(_elements(each.shape) for each in plan.interface.parameters))
    where = f"{plan.mesh.num_devices} × {plan.mesh.hardware.name}" if plan.mesh.num_devices > 1 else "one device"
    yield f"{plan.title} has {size} parameters and runs on {where}, as {plan.mesh}."
    for axis in plan.stage_mesh.axis_names:
        if plan.stage_mesh.size(axis) > 1:
            yield f"{axis} ({plan.stage_mesh.size(axis)} ranks) {axis_does(plan, axis)}."
    if plan.pipeline is not None:
        schedule, timeline = plan.pipeline.schedule, plan.pipeline.timeline
        per_rank = schedule.num_stages // schedule.num_ranks
        each = "" if per_rank == 1 else f", {per_rank} on each rank"
        yield (
            f"{plan.pipeline.axis} ({schedule.num_ranks} ranks) runs the model in {schedule.num_stages} stages{each}, "
            f"schedule {schedule.name}; ranks wait {timeline.bubble_share:.1%} of the step on average."
        )
    if plan.interface.microbatches > 1:
        yield (
            f"A step runs {plan.interface.microbatches} microbatches one after the other and reduces gradients once."
        )
    for axis, at, text in plan.context:
        yield f"Attention over {axis}{f' in {at}' if at else ''}: {text}."
    if plan.training:
        yield _AGAIN[plan.rematerialize]
    overlap, kinds = plan.decisions.overlap, {row.why for row in plan.collectives}
    if overlap is not None and kinds & {"gather parameter", "reduce gradient"}:
        beside = "travel beside the compute" if overlap.prefetch else "are waited for: more in flight would not fit"
        yield f"Gathers of parameters and reductions of gradients {beside}."
    if plan.pins:
        yield f"{plural(len(plan.pins), 'pin was', 'pins were')} asked for: {', '.join(p.pattern for p in plan.pins)}."


def axis_does(plan: Plan, axis: str) -> str:
    """What one axis splits, as a phrase: `splits the batch; keeps 1/8 of the parameters, gathered for use`."""
    number = plan.stage_mesh.axis_names.index(axis)
    inputs = plan.interface.inputs
    parts = []
    if dims := {p.dim for each in inputs if isinstance(p := each.sharding[number], Shard)}:
        parts.append(
            "splits " + " and ".join({0: "the batch", 1: "the sequence"}.get(d, f"dim {d}") for d in sorted(dims))
        )
    stored = used = total = 0
    layouts = plan.decisions.placement.parameters
    for each in plan.interface.parameters:
        size = _elements(each.shape)
        total += size
        stored += size * isinstance(each.sharding[number], Shard)
        layout = layouts.get(each.name)
        used += size * (layout is not None and isinstance(layout.compute[number], Shard))
    if total and used > 0.02 * total:
        parts.append(f"computes with {_most(used / total)} split")
    if total and stored - used > 0.02 * total:
        parts.append(f"stores {_most(stored / total)} split and gathers them for use")
    if not parts:
        sums = any(row.why == "reduce gradient" and row.axis == axis for row in plan.collectives)
        parts.append("holds copies" + (", whose gradients are summed" if sums else ""))
    return "; ".join(parts)


def _most(share: float) -> str:
    return "all parameters" if share > 0.995 else f"{share:.0%} of the parameters"


def bound(plan: Plan) -> str:
    """One sentence: what takes most of the step."""
    cost = plan.cost
    step = cost.step_time_s
    if not step:
        return "The step is predicted to take no time."
    exposed = cost.communication_s - cost.hidden_s
    parts = {
        "compute": cost.compute_s,
        "waiting": cost.waiting_s,
        "communication": exposed,
        "optimizer": cost.optimizer_s,
    }
    most = max(parts, key=parts.__getitem__)
    share = parts[most] / step
    if most == "compute":
        return f"Compute: {share:.0%} of the step{_compute_kinds(plan)}."
    if most == "waiting":
        return f"The pipeline: the busiest rank waits for others {share:.0%} of the step."
    if most == "optimizer":
        return f"The optimizer's update of its own parameters: {share:.0%} of the step."
    first, _, sent, seconds = next(collective_groups(plan.collectives))
    return (
        f"Communication that nothing hides: {share:.0%} of the step; the dearest is {first.kind} over {first.axis} "
        f"({first.why}, {first.phase}): {format_bytes(sent)} a rank, {format_time(seconds)}."
    )


def _compute_kinds(plan: Plan) -> str:
    """`, 71% of which in products (bf16) and attention`."""
    if plan.views is None:
        return ""
    seconds = class_seconds(plan.views)
    total = sum(seconds.values())
    heavy = sum(seconds[kind] for kind in _PRODUCTS if kind in seconds)
    dtype = f" in {dtype_name(plan.precision)}" if plan.precision else ""
    return f", {heavy / total:.0%} of it products and attention{dtype}" if total else ""


def class_seconds(views: Views) -> dict[str, float]:
    """Seconds that operators of each class compute in one microbatch, over all calls."""
    found: dict[str, float] = defaultdict(float)
    for region in views.regions:
        for op in region.ops:
            if op.kind != "collective":
                found[op.op_class or "other"] += op.seconds * region.calls
    return found


def attention_words(plan: Plan) -> str:
    """`32 found, 32 fused into one operator (causal)`; empty where there is none."""
    kinds = Counter(site.what for site in plan.attention if site.fused)
    if not plan.attention:
        return ""
    return f"{len(plan.attention)} found, {kinds.total()} fused ({'; '.join(kinds)})"


def _elements(shape: tuple[int, ...]) -> int:
    size = 1
    for length in shape:
        size *= length
    return size
