"""A plan in sentences: what it does, what bounds its step, what each axis of the mesh is for."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Iterator

from autopar.base.text import format_bytes, format_count, format_time, plural
from autopar.ir.interface_text import starred
from autopar.ir.sharding import Shard, parse_sharding
from autopar.ir.tensor_type import dtype_name
from autopar.planner.plan.drawn import Views
from autopar.planner.plan.record import PlanRecord
from autopar.views.text import AGAIN, collective_groups

_PRODUCTS = ("matmul", "attention", "attention_backward", "convolution", "conv")


def in_words(plan: PlanRecord) -> Iterator[str]:
    """The plan in some sentences."""
    size = format_count(sum(math.prod(each.shape) for each in plan.interface.parameters))
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
        turn = "one after the other" if plan.interface.together == 1 else "two at a time"
        yield f"A step runs {plan.interface.microbatches} microbatches {turn} and reduces gradients once."
    for axis, at, text in plan.context:
        yield f"Attention over {axis}{f' in {at}' if at else ''}: {text.split('; each layer')[0]}."
    if plan.training:
        yield f"The backward computes {AGAIN[plan.rematerialize]}."
    overlap, kinds = plan.decisions.overlap, {row.why for row in plan.collectives}
    if overlap is not None and kinds & {"gather parameter", "reduce gradient"}:
        beside = "travel beside the compute" if overlap.prefetch else "are waited for: more in flight would not fit"
        yield f"Gathers of parameters and reductions of gradients {beside}."
    if plan.pins:
        asked = [starred(pin.pattern) for pin in plan.pins if not pin.taken]
        if asked:
            yield f"{plural(len(asked), 'pin was', 'pins were')} asked for: {', '.join(dict.fromkeys(asked))}."
        if taken := len(plan.pins) - len(asked):
            lie = plural(taken, "tensor lies", "tensors lie")
            yield f"{lie} as in another program of the model: none moves between the two."


def axis_does(plan: PlanRecord, axis: str) -> str:
    """What one axis splits, as a phrase: `splits the batch; stores all parameters split and gathers them for use`."""
    number = plan.stage_mesh.axis_names.index(axis)
    parts = []
    if dims := _split_between_blocks(plan, number):
        parts.append("splits " + " and ".join(dims))
    stored = used = total = 0
    layouts = plan.decisions.placement.parameters
    for each in plan.interface.parameters:
        size = math.prod(each.shape)
        total += size
        layout = layouts.get(each.name)
        is_used = layout is not None and isinstance(layout.compute[number], Shard)
        used += size * is_used
        stored += size * (isinstance(each.sharding[number], Shard) and not is_used)
    if total and used > 0.02 * total:
        parts.append(f"computes with {_most(used / total)} split")
    if total and stored > 0.02 * total:
        parts.append(f"stores {_most(stored / total)} split and gathers them for use")
    if not parts or not stored + used:
        sums = any(row.why == "reduce gradient" and row.axis == axis for row in plan.collectives)
        parts.append("holds all parameters" + (", whose gradients it sums" if sums else ""))
    return "; ".join(parts)


def _split_between_blocks(plan: PlanRecord, number: int) -> list[str]:
    """The dims that an axis splits of what flows between calls, and of the batch; in words."""
    found: dict[str, None] = {}
    for each in plan.interface.inputs:
        if isinstance(placement := each.sharding[number], Shard):
            found[_dim_name(placement.dim, len(each.shape))] = None
    axes = plan.stage_mesh.axis_names
    for region in plan.views.regions if plan.views is not None else ():
        for port in region.inputs:
            placement = parse_sharding(port.value.sharding, axes)[number]
            if port.differentiable and isinstance(placement, Shard):
                found[_dim_name(placement.dim, len(port.value.shape))] = None
    return list(found)


def _dim_name(dim: int, num_dims: int) -> str:
    """Of values as models pass them between blocks: [batch, sequence, hidden], pictures [batch, channels, …]."""
    if dim == 0:
        return "the batch"
    if num_dims > 3:
        return "the channels" if dim == 1 else f"dim {dim}"
    return "the sequence" if dim == 1 else "the hidden dim"


def _most(share: float) -> str:
    return "all parameters" if share > 0.995 else f"{share:.0%} of the parameters"


def bound(plan: PlanRecord) -> str:
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
        "host": cost.host_s,
    }
    most = max(parts, key=parts.__getitem__)
    share = parts[most] / step
    if most == "compute":
        more = f" Communication adds {format_time(exposed)} ({exposed / step:.0%})." if exposed > 0.005 * step else ""
        return f"Compute: {share:.0%} of the step{_compute_kinds(plan)}.{more}"
    if most == "waiting":
        return f"The pipeline: the busiest rank waits for others {share:.0%} of the step."
    if most == "host":
        return f"The host: {share:.0%} of the step the device waits for what is launched operator by operator."
    if most == "optimizer":
        return f"The optimizer's update of its own parameters: {share:.0%} of the step."
    first, _, sent, seconds = next(collective_groups(plan.collectives))
    return (
        f"Communication that nothing hides: {share:.0%} of the step; the dearest is {first.kind} over {first.axis} "
        f"({first.why}, {first.phase}): {format_bytes(sent)} a rank, {format_time(seconds)}."
    )


def _compute_kinds(plan: PlanRecord) -> str:
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
