"""Every collective of a lowered program, with its bytes and seconds: inside regions, of parameters, between stages.

They are read off the lowered graphs, so they are what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from autopar.cost import exchanges, rings
from autopar.cost.operator_time import exposed_seconds
from autopar.cost.roofline import collective_bytes, collective_time_s
from autopar.ir.op_call import OpCall
from autopar.ir.placement import ParameterLayout
from autopar.ir.program import Program
from autopar.ir.reads import reads_in_half
from autopar.ir.region import Bucket, NodeStrategy, Region
from autopar.ir.rings import NO_COLLECTIVES, is_exchange, sends_inside
from autopar.ir.rule import Rule
from autopar.ir.sharding import local_shape
from autopar.ir.stages import Pipeline
from autopar.ir.uneven import block_shape, resizes, stored_shape
from autopar.ir.values import Variable
from autopar.machine.mesh import Mesh


@dataclass(frozen=True, slots=True)
class Collective:
    """One collective of the program, over a whole step.

    tensor: what is moved. bytes_sent: by one rank, a step. seconds: a step. times: how often. where: region, phase,
    module.
    why: what it is for (`gather parameter`, `reduce gradient`, `sum`, `redistribute`).
    """

    kind: str
    axis: str
    tensor: str
    bytes_sent: float
    seconds: float
    times: int
    phase: str
    where: str
    why: str


def num_calls(program: Program, region: str, rank: int | None = None) -> int:
    """How often a region is called for a microbatch; on one rank of the pipeline, where `rank` says which."""
    return sum(1 for number in calls_on(program, rank) if program.calls[number].region == region)


def calls_on(program: Program, rank: int | None, *, again: bool = True) -> list[int]:
    """The calls that one rank of the pipeline runs, all of them where there is none. again: also those of other stages
    that it computes again.
    """
    if program.pipeline is None or rank is None:
        return list(range(len(program.calls)))
    pipeline = program.pipeline
    stages = [pipeline.stages[stage] for stage in pipeline.schedule.stages_of(rank)]
    return [number for stage in stages for number in stage.calls if again or number not in stage.recomputed]


def collectives(program: Program, rank: int | None = None) -> Iterator[Collective]:
    """Every collective of a step: inside regions, of parameters, of gradients. rank: of the pipeline, where there is
    one; its sends to other stages too.
    """
    for region in program.regions:
        count = num_calls(program, region.name, rank) * program.microbatches
        for phase in region.phases if count else ():
            yield from phase_collectives(program, region, phase, count)
    yield from _parameter_collectives(program, rank)
    if program.pipeline is not None and rank is not None:
        yield from _sends(program, program.pipeline, rank)
        if program.training:
            yield from _tied_sends(program, program.pipeline, rank)


def _sends(program: Program, pipeline: Pipeline, rank: int) -> Iterator[Collective]:
    """What one rank sends to the stages before and after its own."""
    assert program.on_mesh.whole is not None
    whole, placement = program.on_mesh.whole, program.placed
    rank_of = pipeline.schedule.rank_of
    for number in pipeline.schedule.stages_of(rank):
        stage = pipeline.stages[number]
        for refs, other, phase in ((stage.sends, number + 1, "forward"), (stage.receives, number - 1, "backward")):
            if not 0 <= other < len(rank_of) or rank_of[other] == rank:
                continue
            layouts = placement.values if phase == "forward" else placement.gradients
            for ref in refs:
                if (ref.call, ref.index) not in layouts:
                    continue
                port = program.port(ref)
                shape = local_shape(port.type.shape, layouts[(ref.call, ref.index)], program.on_mesh.sizes)
                size = math.prod(shape) * port.type.dtype.itemsize
                link, times = whole.link(pipeline.axis), program.microbatches
                seconds = collective_time_s("permute", size, 2, link, whole.hardware.collective_launch_s)
                where = f"stage {number} to stage {other}"
                why = "activation to the next stage" if phase == "forward" else "gradient to the stage before"
                yield Collective(
                    "send", pipeline.axis, port.name, size * times, seconds * times, times, phase, where, why
                )


def shared_outputs(program: Program) -> Iterator[Collective]:
    """What the ranks of a pipeline tell each other after a prompt or a token: logits, of which every rank chooses the
    token, and how many positions are written. Those of one dtype go together, after the last stage.
    """
    pipeline = program.pipeline
    if pipeline is None or program.training or not program.states:
        return
    assert program.on_mesh.whole is not None
    whole, ranks, states = program.on_mesh.whole, pipeline.schedule.num_ranks, program.states
    sizes: dict[torch.dtype, list[tuple[str, int]]] = {}
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        type_ = program.port(ref).type
        if name not in states or not type_.shape:
            layouts = program.placed
            sharding = layouts.values[ref.call, ref.index] if ref.call >= 0 else layouts.inputs[ref.name]
            shape = local_shape(type_.shape, sharding, program.on_mesh.sizes)
            sizes.setdefault(type_.dtype, []).append((name, math.prod(shape) * type_.dtype.itemsize))
    for found in sizes.values():
        size = sum(each for _, each in found)
        seconds = collective_time_s(
            "all_reduce", size, ranks, whole.link(pipeline.axis), whole.hardware.collective_launch_s
        )
        tensor = ", ".join(name for name, _ in found[:2]) + (", …" if len(found) > 2 else "")
        sent = collective_bytes("all_reduce", size, ranks)
        why = "outputs of the last stage for every rank"
        yield Collective("all_reduce", pipeline.axis, tensor, sent, seconds, 1, "forward", "outputs", why)


def _tied_sends(program: Program, pipeline: Pipeline, rank: int) -> Iterator[Collective]:
    """The reduced gradients of parameters that stages on several ranks use: each rank sends its own to the others."""
    assert program.on_mesh.whole is not None
    whole = program.on_mesh.whole
    users = [_slots_on(program, each) for each in range(pipeline.schedule.num_ranks)]
    for name in sorted(users[rank]):
        variable, layout = program.variable(name), program.placed.parameters[name]
        num = sum(name in each for each in users) - 1
        if variable.trainable and num:
            size = math.prod(stored_shape(variable, layout, program.on_mesh.sizes)) * variable.type.dtype.itemsize
            link = whole.link(pipeline.axis)
            seconds = collective_time_s("permute", size, 2, link, whole.hardware.collective_launch_s)
            why = "gradient of a tied parameter"
            yield Collective("send", pipeline.axis, name, size * num, seconds * num, num, "backward", name, why)


def _slots_on(program: Program, rank: int | None) -> set[str]:
    return {name for number in calls_on(program, rank) for name in program.calls[number].slots}


def phase_collectives(program: Program, region: Region, phase: str, count: int) -> Iterator[Collective]:
    """The collectives of one phase of a region, which runs `count` times."""
    for node in region.lowered[phase].graph.nodes:
        if is_exchange(node):
            yield _exchange(program, region, phase, node, count)
        elif sends_inside(node):
            yield _ring(program, region, phase, node, count)
        elif sends_values(node):
            yield inside_row(program, region, phase, node, count)


def sends_values(node: fx.Node) -> bool:
    """Whether a node of a lowered region is a collective of values, none of an operator's own."""
    return node.op == "call_method" and node.target not in NO_COLLECTIVES and not sends_inside(node)


def inside_row(program: Program, region: Region, phase: str, node: fx.Node, count: int) -> Collective:
    """Such a node of a region's phase, which runs `count` times."""
    source: fx.Node = node.args[1]  # type: ignore[assignment]
    axis = str(node.args[2])
    type_, before = source.meta["type"], source.meta["sharding"]
    why = "redistribute" if node.target in ("all_gather", "all_to_all") else str(node.kwargs.get("op", "sum"))
    where = f"{region.name} {phase}: {node.meta.get('origin') or source.name}"
    local = math.prod(local_shape(type_.shape, before, program.on_mesh.sizes)) * type_.dtype.itemsize
    return _row(program.on_mesh, str(node.target), axis, local, source.name, count, phase, where, why)


def _ring(program: Program, region: Region, phase: str, node: fx.Node, count: int) -> Collective:
    call, rule, strategy = _operator(region, node)
    ring = rings.ring_of(call, rule, strategy, program.on_mesh.sizes)
    assert ring is not None
    why = "keys and values go round" if not ring.gradients else "keys, values, gradients go round"
    return _sent_inside("ring", ring.axis, ring.bytes_sent, why, program, region, phase, node, count)


def _exchange(program: Program, region: Region, phase: str, node: fx.Node, count: int) -> Collective:
    call, rule, strategy = _operator(region, node)
    exchange = exchanges.exchange_of(call, rule, strategy, program.on_mesh.sizes)
    assert exchange is not None
    why = "tokens go to their experts" + (" with their gradients, theirs come back" if len(exchange.back) > 1 else "")
    return _sent_inside("exchange", exchange.axis, exchange.bytes_sent, why, program, region, phase, node, count)


def _operator(region: Region, node: fx.Node) -> tuple[OpCall, Rule, NodeStrategy]:
    name = node.meta["operator"]
    return *region.ops[name], region.strategies[name]


def _sent_inside(
    kind: str, axis: int, sent: float, why: str, program: Program, region: Region, phase: str, node: fx.Node, count: int
) -> Collective:
    """Of an operator that communicates by itself: bytes that each rank sends in one call, over an axis."""
    name = node.meta["operator"]
    seconds = exposed_seconds(*_operator(region, node), program.on_mesh)
    where = f"{region.name} {phase}: {node.meta.get('origin') or name}"
    axis_name = program.on_mesh.axis_names[axis]
    return Collective(kind, axis_name, name, sent * count, seconds * count, count, phase, where, why)


def _row(
    mesh: Mesh, kind: str, axis: str, local: int, tensor: str, count: int, phase: str, where: str, why: str
) -> Collective:
    """local: bytes of the tensors that one rank hands in."""
    size = mesh.size(axis)
    handled = local * size if kind == "all_gather" else local
    sent = collective_bytes(kind, handled, size)  # type: ignore[arg-type]
    seconds = collective_time_s(kind, handled, size, mesh.link(axis), mesh.hardware.collective_launch_s)  # type: ignore[arg-type]
    return Collective(kind, axis, tensor, sent * count, seconds * count, count, phase, where, why)


def _parameter_collectives(program: Program, rank: int | None) -> Iterator[Collective]:
    """Gathers and reductions, a row for each step of each bucket."""
    stages = _stages_on(program, rank)
    for region in program.regions:
        _, first = next(program.calls_of(region.name))
        own = [(stage, [n for n in calls if program.calls[n].region == region.name]) for stage, calls in stages]
        count = sum(len(calls) for _, calls in own)
        for which, buckets in region.transfers.items():
            uses = sum(len(calls) * _num_uses(program, which, stage, calls) for stage, calls in own)
            for bucket in buckets if count else ():
                names = [first.slots[move.slot] for move in bucket.moves]
                yield from bucket_rows(program, which, bucket, names, count, region.name, uses)
    for stage, calls in stages:
        mine = {name for number in calls for name in program.calls[number].slots}
        for shared in program.shared:
            if shared.name not in mine:
                continue
            phases = ("gather", "gather_for_backward") if program.training else ("gather",)
            for which in phases if shared.gather else ():
                assert shared.gather is not None
                uses = _num_uses(program, which, stage, calls, shared.name)
                yield from bucket_rows(program, which, shared.gather, [shared.name], 1, "several calls", uses)
            if shared.reduce is not None and program.training:
                yield from bucket_rows(program, "reduce", shared.reduce, [shared.name], 1, "several calls")


def _stages_on(program: Program, rank: int | None) -> list[tuple[int, Sequence[int]]]:
    """The stages of a rank with their calls; one of all calls where there is no pipeline."""
    if program.pipeline is None or rank is None:
        return [(0, range(len(program.calls)))]
    return [(stage, program.pipeline.stages[stage].calls) for stage in program.pipeline.schedule.stages_of(rank)]


def _num_uses(program: Program, which: str, stage: int, calls: Sequence[int], name: str | None = None) -> int:
    """How often a step runs a gather for one of these calls of a stage: once a microbatch, each half of a backward by
    itself if it reads what is gathered. name: of one parameter; None: whatever the calls read.
    """
    if which != "gather_for_backward" or program.pipeline is None:
        return program.microbatches
    kinds = program.pipeline.schedule.num_actions(stage)
    found = kinds["B"]
    for phase, kind in (("backward_input", "I"), ("backward_weight", "W")):
        reads = False
        for call in (program.calls[number] for number in calls if kinds[kind]):
            region = program.region(call.region)
            slots = [slot for slot, own in enumerate(call.slots) if name in (None, own) and phase in region.lowered]
            reads = reads or any(reads_in_half(region, slot, phase) for slot in slots)
        found += kinds[kind] if reads else 0
    return found


def bucket_rows(
    program: Program, which: str, bucket: Bucket, names: Sequence[str], count: int, where: str, uses: int | None = None
) -> Iterator[Collective]:
    """The collectives of one bucket: a row for each of its steps that sends anything.

    which: `gather`, `gather_for_backward` or `reduce`. names: of the bucket's parameters. count: how often a step
    what is kept runs, uses: the rest; None: `count` times for every microbatch.
    """
    uses = count * program.microbatches if uses is None else uses
    mesh, reduces = program.on_mesh, which == "reduce"
    variables = [program.variable(name) for name in names]
    layouts = [program.placed.parameters[variable.name] for variable in variables]
    pairs = zip(variables, layouts, strict=True)
    shapes = [before_moves(variable, layout, mesh.sizes, reduces) for variable, layout in pairs]
    tensor = names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
    why = "reduce gradient" if reduces else "gather parameter"
    phase = "forward" if which == "gather" else "backward"
    for number, (kind, axis_number) in enumerate(bucket.chain):
        axis, size = mesh.axis_names[axis_number], mesh.sizes[axis_number]
        local = sum(math.prod(shape) * v.type.dtype.itemsize for v, shape in zip(variables, shapes, strict=True))
        for move, shape in zip(bucket.moves, shapes, strict=True):
            step = move.steps[number]
            if kind in ("reduce_scatter", "slice", "all_to_all"):
                shape[step.dim] //= size
            if kind in ("all_gather", "all_to_all"):
                shape[step.dim if kind == "all_gather" else step.from_dim] *= size
        once = reduces or number < bucket.keep
        if kind == "slice" or (number < bucket.keep and phase == "backward"):
            continue
        times = count if once else uses
        if not times:
            continue
        row = _row(mesh, kind, axis, local, tensor, times, phase, f"{where}: {names[0]}", why)
        copying = _copying_seconds(mesh, bucket, kind, number, local * size if kind == "all_gather" else local)
        yield replace(row, seconds=row.seconds + copying * times)


def _copying_seconds(mesh: Mesh, bucket: Bucket, kind: str, number: int, whole: float) -> float:
    """What a rank takes to bring the tensors of a bucket together for one of its steps, and apart again
    (runtime/transfers.py): tensors that share a message are copied into it; what was gathered is copied out of it,
    where a message had several, or dims beyond the first are joined; pieces of other dims are cut out before.

    whole: bytes of the larger side of the step.
    """
    several = len(bucket.moves) > 1
    size = mesh.sizes[bucket.chain[number][1]]
    inner = any(move.steps[number].dim for move in bucket.moves)
    times_over = 0.0
    if kind == "all_gather":
        times_over = several / size + (several or inner)
    elif kind in ("reduce_scatter", "all_to_all"):
        times_over = float(several or inner)
    elif kind == "all_reduce":
        times_over = float(several)
    if size == 1 or not times_over:
        return 0.0
    moved = 2.0 * times_over * whole
    hardware = mesh.hardware
    return hardware.launch_overhead_s * (1 + len(bucket.moves)) + moved / hardware.memory_bytes_per_s(moved)


def before_moves(variable: Variable, layout: ParameterLayout, sizes: Sequence[int], reduces: bool) -> list[int]:
    """The local shape with which a parameter, or its gradient, starts on its way."""
    if not reduces:
        return list(block_shape(variable, layout, sizes))
    shape = list(local_shape(variable.seen.shape, layout.gradient, sizes))
    for dim, gathered, seen in resizes(variable, layout, sizes):
        shape[dim] = shape[dim] * gathered // seen if shape[dim] != seen else gathered
    return shape
