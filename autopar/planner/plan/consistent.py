"""Whether the parts of a plan that was read from a file fit each other: axes, dims, stages, what pictures refer to.

Those who show a plan, or send its decisions to other ranks, may then rely on it. Each of these checks raises ValueError
(or an AutoparError), which becomes the error of the file.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.sharding import Shard, Sharding, parse_sharding
from autopar.ir.values import gradient_key
from autopar.planner.plan.drawn import RegionView, ValueView, Views
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.pipelining.check import check as check_schedule

MOST_DEVICES = 1 << 18
"""Of a plan that is loaded: what is drawn and said of every rank stays bounded."""
MOST_ELEMENTS = 1 << 60
"""Of one tensor."""
_GIVEN = ("in:", "p:", "saved:", "grad:")
"""What the names of values begin with that operators of a phase do not make."""
_COMBINE = ("concat", "mean", "sum", "weighted", "same")


def check(plan: PlanRecord) -> None:
    """Nothing for a plan whose parts fit.

    Raises:
        ValueError, AutoparError: says which do not.
    """
    if plan.mesh.num_devices > MOST_DEVICES:
        raise ValueError(f"its mesh has {plan.mesh.num_devices} devices, at most {MOST_DEVICES} are read")
    _same("strategies", len(plan.strategies), "axes", len(plan.stage_mesh.axes))
    _same("sizes of the interface", plan.interface.sizes, "those of the mesh", plan.stage_mesh.sizes)
    _known("collectives", [row.axis for row in plan.collectives], plan.mesh.axis_names)
    for name, axes in (("pins", [a for p in plan.pins for a, _ in p.placements]),
                       ("context", [row[0] for row in plan.context])):  # fmt: skip
        _known(name, axes, plan.stage_mesh.axis_names)  # a pipeline alone has one that is not the mesh's
    _check_interface(plan)
    _check_pipeline(plan)
    if plan.views is not None:
        _check_views(plan.views, plan)


def dtype_of(name: str) -> torch.dtype:
    """`float32` to torch's. Raises ValueError for anything else of torch."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise ValueError(f"{name[:40]!r} is no dtype")
    return found


def _same(one: str, left: object, other: str, right: object) -> None:
    if left != right:
        raise ValueError(f"{one} are {left}, {other} {right}")


def _known(what: str, names: Iterable[str], known: Iterable[str]) -> None:
    if unknown := sorted(set(names) - set(known)):
        raise ValueError(f"{what} name {unknown[0][:60]!r}, which is not there")


# -- what goes in and out


def _check_interface(plan: PlanRecord) -> None:
    interface = plan.interface
    if interface.microbatches < 1:
        raise ValueError(f"it has {interface.microbatches} microbatches")
    if interface.microbatches % interface.together:
        raise ValueError(f"{interface.together} of its {interface.microbatches} microbatches go together")
    if (meaning := interface.meaning) is not None:
        outputs = interface.of_program().outputs
        _same("outputs that mean something", len(meaning.outputs), "outputs", len(outputs))
        _same("updates that mean something", len(meaning.updates), "updates", len(interface.updates))
        if meaning.shapes is not None:
            _same("shapes of outputs", len(meaning.shapes), "outputs", len(outputs))
        _known("gradients", [name for name, _ in meaning.gradients], _with_gradients(interface))
    groups = [interface.parameters, interface.buffers, interface.inputs, interface.outputs, interface.updates]
    groups += [each for stage in (interface.pipeline.stages if interface.pipeline else ())
               for each in (stage.receives, stage.sends)]  # fmt: skip
    for tensor in (tensor for group in groups for tensor in group):
        _check_tensor(tensor)
    _known("updates", [each.name for each in interface.updates], [each.name for each in interface.buffers])
    _known("by_value", interface.by_value, [each.name for each in interface.inputs])
    for layer in interface.experts:
        _known("the experts' parameters", layer.parameters, [each.name for each in interface.parameters])
        _known("the experts' axes", [layer.axis, *layer.token_axes], interface.axes)
    for each in (*interface.parameters, *interface.inputs):
        if any(not 0 <= place < len(interface.outputs) for place in each.reached_by or ()):
            raise ValueError(f"{each.name[:60]} is reached by {each.reached_by[:8] if each.reached_by else ()}")
        if each.summed_over and each.summed_over not in interface.axes:
            raise ValueError(f"{each.name[:60]} is summed over {each.summed_over[:60]}, which is no axis")
    leaves = [leaf for leaf in plan.output_leaves if isinstance(leaf, int)]
    if any(not 0 <= leaf < len(interface.outputs) for leaf in leaves):
        raise ValueError(f"output_leaves are {leaves[:8]}, and there are {len(interface.outputs)} outputs")


def _with_gradients(interface: ProgramInterface) -> list[str]:
    """What a gradient may be of: parameters, and inputs by their keys."""
    wanted = interface.of_program().wanted
    return [*(each.name for each in interface.parameters), *(gradient_key(each.name) for each in wanted)]


def _check_tensor(tensor: TensorInterface) -> None:
    dtype_of(tensor.dtype)
    _check_shape(tensor.name, tensor.shape)
    for sharding in (tensor.sharding, tensor.gradient or ()):
        _check_sharding(tensor.name, sharding, len(tensor.shape))
    if tensor.block is not None:
        _check_shape(tensor.name, tensor.block)
        _same(f"the dims of {tensor.name[:60]}", len(tensor.shape), "of its block", len(tensor.block))
    if tensor.batch_dim is not None and not 0 <= tensor.batch_dim < len(tensor.shape):
        raise ValueError(f"{tensor.name[:60]} has no dim {tensor.batch_dim}")
    _known("combine", [tensor.combine], _COMBINE)


def _check_shape(name: str, shape: Sequence[int]) -> None:
    count = 1
    for size in shape:
        count *= max(size, 1)
        if size < 0 or count > MOST_ELEMENTS:
            raise ValueError(f"{name[:60]} has a size {size}")


def _check_sharding(name: str, sharding: Sharding, num_dims: int) -> None:
    for placement in sharding:
        if isinstance(placement, Shard) and (placement.dim >= num_dims or placement.outer < 1):
            raise ValueError(f"{name[:60]} has {num_dims} dims, and no {placement}")


# -- stages


def _check_pipeline(plan: PlanRecord) -> None:
    border, decided, summary = plan.interface.pipeline, plan.decisions.pipeline, plan.pipeline
    if border is None or decided is None or summary is None or plan.asked is None:
        if any(each is not None for each in (border, decided, summary, plan.asked)):
            raise ValueError("it has a pipeline in some of its parts only")
        return
    if plan.asked.is_file and not plan.asked.rows:
        raise ValueError("it has the name of a schedule's file, and not its rows")
    _same("axes of the pipeline", (border.axis, decided.axis), "of its summary", (summary.axis, summary.axis))
    _same("the mesh of the pipeline", tuple(zip(border.axes, border.sizes, strict=True)), "the plan's", plan.mesh.axes)
    schedule = summary.schedule
    _same("ranks of the schedule", schedule.num_ranks, "of the mesh", plan.mesh.size(summary.axis))
    check_schedule(schedule, backward=plan.training)
    texts = tuple(tuple(map(str, actions)) for actions in schedule.order)
    if decided.schedule.order != schedule.order or border.order != texts:
        raise ValueError("its parts have different schedules")
    counts = (schedule.num_microbatches, schedule.rank_of)
    _same(
        "microbatches and ranks", counts, "in decisions", (decided.schedule.num_microbatches, decided.schedule.rank_of)
    )
    _same("ranks of stages", tuple(schedule.rank_of), "of the interface", border.rank_of)
    _same("what a schedule runs", schedule.num_microbatches, "of the interface", plan.interface.runs)
    _same("stages", [len(border.stages), len(decided.stages)], "of the schedule", [schedule.num_stages] * 2)
    _same("costs", len(summary.stages), "stages", schedule.num_stages)
    for stage in border.stages:
        _known("stages", stage.parameters, [each.name for each in plan.interface.parameters])
        _known("stages", stage.buffers, [each.name for each in plan.interface.buffers])
        if any(not 0 <= place < len(plan.interface.of_program().outputs) for place in stage.outputs):
            raise ValueError(f"a stage makes the outputs {stage.outputs[:8]}")
    if not summary.link.bandwidth_bytes_per_s > 0:
        raise ValueError("the link of its pipeline carries nothing")


# -- what pictures show


def _check_views(views: Views, plan: PlanRecord) -> None:
    axes = plan.stage_mesh.axis_names
    for region in views.regions:
        _check_region(region, axes)
    regions = {region.name: region for region in views.regions}
    num_stages = plan.pipeline.schedule.num_stages if plan.pipeline is not None else 1
    for call in views.calls:
        _known("calls", [call.region], regions)
        _same("what a call reads", len(call.reads), "inputs of its region", len(regions[call.region].inputs))
        if not 0 <= call.stage < num_stages:
            raise ValueError(f"a call is of stage {call.stage}")
    border = plan.interface.of_program()
    inputs = {f"in:{each.name}" for each in border.inputs}
    made: set[str] = set()
    for number, call in enumerate(views.calls):
        _known("calls", set(call.reads) - made, inputs)
        made |= {f"{number}.{index}" for index in range(len(regions[call.region].outputs))}
    _known("outputs", [ref for _, ref in views.outputs], made | inputs)
    _known("outputs", [name for name, _ in views.outputs], [each.name for each in border.outputs])
    for curve in views.memory:
        if any(len(values) != len(curve.times_s) for values in curve.series.values()):
            raise ValueError("a curve of memory has other numbers of times and values")
    if plan.pipeline is None and len(views.memory) > 1:
        raise ValueError("it has several curves of memory and no pipeline")


def _check_region(region: RegionView, axes: Sequence[str]) -> None:
    values = [port.value for port in (*region.inputs, *region.outputs)]
    values += [value for slot in region.slots for value in (slot.stored, slot.used)]
    values += [op.result for op in region.ops if op.result is not None]
    for value in values:
        _check_value(value, region.name, axes)
    names = [op.name for op in region.ops]
    _same("operators", len(set(names)), "their names", len(names))
    inputs = [f"in:{port.name}" for port in region.inputs]
    given = [each.name for each in region.outputs if not each.name.startswith(_GIVEN[1:])]
    _known("outputs", given, [*names, *inputs])  # some come in as they go out
    _known("operators", [op.axis for op in region.ops if op.axis or op.kind == "collective"], axes)
    _known("operators", [op.kind for op in region.ops], ("compute", "view", "collective"))
    _known("moves", [move.axis for move in region.moves], axes)
    _known("experts", [each.op for each in region.experts], names)
    _known("experts", [each.axis for each in region.experts if each.axis], axes)
    _known("gradients", [name for _, name in region.gradients if not name.startswith(_GIVEN)], names)
    _check_reads(region)
    slots = {slot.name for slot in region.slots}
    _known("moves", [slot for move in region.moves for slot in move.slots], slots)


def _check_reads(region: RegionView) -> None:
    """Operators read those before them of their phase, and what comes in: `in:seed`, `p:weight`."""
    made: dict[str, set[str]] = {}
    for op in region.ops:
        before = made.setdefault(op.phase, set())
        _known("operators", [read for read in op.reads if not read.startswith(_GIVEN)], before)
        if op.kind == "collective" and not op.reads:
            raise ValueError(f"a collective of {region.name[:60]} moves nothing")
        before.add(op.name)


def _check_value(value: ValueView, name: str, axes: Sequence[str]) -> None:
    _check_shape(name, value.shape)
    _check_sharding(name, parse_sharding(value.sharding, axes), len(value.shape))
