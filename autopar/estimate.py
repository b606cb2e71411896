"""What a placed program will cost: seconds of compute, every collective with its bytes, memory by kind.

Nothing is measured here: rooflines and α-β from the hardware profile (autopar/cost.py), counts from the program itself.
The collectives are read off the lowered graphs, so they are what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import torch
from torch import fx

from autopar.blocks import block_shape, resizes
from autopar.cost import collective_bytes, collective_time_s, compute_time_s
from autopar.ir import Bucket, NodeStrategy, ParameterLayout, Program, Region, TensorType, Variable
from autopar.mesh import Mesh
from autopar.rules.notation import Rule
from autopar.rules.registry import OpCall
from autopar.sharding import local_shape, num_pieces

_COST_CLASSES = {"gather": "elementwise", "conv": "convolution"}
OPTIMIZER_STATES = 2
"""Tensors of the parameter's stored type that the optimizer keeps per parameter (Adam: momentum and variance)."""


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


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the rank that holds most. peak: the most at any time of the step; the rest by kind."""

    parameters: int
    gradients: int
    optimizer_states: int
    peak: int

    @property
    def activations(self) -> int:
        """What the peak holds beside parameters, gradients and optimizer states."""
        return max(0, self.peak - self.parameters - self.gradients - self.optimizer_states)


@dataclass(frozen=True, slots=True)
class Cost:
    """The prediction for one training step. step_time_s: compute and communication one after the other."""

    compute_s: float
    communication_s: float
    memory: Memory

    @property
    def step_time_s(self) -> float:
        return self.compute_s + self.communication_s

    @property
    def peak_memory_bytes(self) -> int:
        return self.memory.peak


def operator_seconds(call: OpCall, rule: Rule, strategy: NodeStrategy, mesh: Mesh) -> float:
    """Seconds of one operator on one rank."""
    if rule.alias:
        return 0.0
    split = 1
    for choice, size in zip(strategy.choices, mesh.sizes, strict=True):
        split *= size if choice.kind == "factor" else 1
    moved = 0.0
    for specs, layouts in ((call.operands, strategy.operands), (call.results, strategy.results)):
        for spec, layout in zip(specs, layouts, strict=True):
            if spec is not None and layout is not None:
                moved += TensorType(spec.shape, spec.dtype).num_bytes / num_pieces(layout, mesh.sizes)
    dtype = next((spec.dtype for spec in call.results if spec is not None), torch.float32)
    kind = _COST_CLASSES.get(rule.op_class, rule.op_class)
    return compute_time_s(rule.flops / split, moved, dtype, kind, mesh.hardware)


def estimate(program: Program, peak_bytes: float) -> tuple[Cost, list[Collective]]:
    """The cost of a lowered program, and its collectives in the order of the regions."""
    assert program.mesh is not None
    compute = 0.0
    for region in program.regions:
        seconds = sum(operator_seconds(*region.ops[name], s, program.mesh) for name, s in region.strategies.items())
        compute += seconds * program.num_calls(region.name) * program.microbatches
    rows = list(collectives(program))
    memory = _memory(program, peak_bytes)
    return Cost(compute, sum(row.seconds for row in rows), memory), rows


def _memory(program: Program, peak_bytes: float) -> Memory:
    assert program.mesh is not None and program.placement is not None
    parameters = gradients = 0
    for variable in (v for v in program.variables if v.is_parameter):
        layout = program.placement.parameters.get(variable.name)
        shape = block_shape(variable, layout, program.mesh.sizes) if layout else variable.type.shape
        local = math.prod(shape) * variable.stored_dtype.itemsize
        parameters += local
        gradients += local if variable.trainable and program.training else 0
    extra = program.overlap.extra_bytes if program.overlap is not None else 0
    return Memory(parameters, gradients, gradients * OPTIMIZER_STATES, int(peak_bytes) + extra)


def collectives(program: Program) -> Iterator[Collective]:
    """Every collective of a step: inside regions, of parameters, of gradients."""
    for region in program.regions:
        count = program.num_calls(region.name) * program.microbatches
        for phase, lowered in region.phases.items():
            for node in lowered.graph.nodes:
                if node.op == "call_method" and node.target not in ("slice", "index", "positions"):
                    yield _inside(program, region, phase, node, count)
    yield from _parameter_collectives(program)


def _inside(program: Program, region: Region, phase: str, node: fx.Node, count: int) -> Collective:
    assert program.mesh is not None
    source: fx.Node = node.args[1]  # type: ignore[assignment]
    axis = str(node.args[2])
    type_, before = source.meta["type"], source.meta["sharding"]
    why = "redistribute" if node.target in ("all_gather", "all_to_all") else str(node.kwargs.get("op", "sum"))
    where = f"{region.name} {phase}: {node.meta.get('origin') or source.name}"
    local = math.prod(local_shape(type_.shape, before, program.mesh.sizes)) * type_.dtype.itemsize
    return _row(program.mesh, str(node.target), axis, local, source.name, count, phase, where, why)


def _row(
    mesh: Mesh, kind: str, axis: str, local: int, tensor: str, count: int, phase: str, where: str, why: str
) -> Collective:
    """local: bytes of the tensors that one rank hands in."""
    size = mesh.size(axis)
    handled = local * size if kind == "all_gather" else local
    sent = collective_bytes(kind, handled, size)  # type: ignore[arg-type]
    seconds = collective_time_s(kind, handled, size, mesh.link(axis), mesh.hardware.collective_launch_s)  # type: ignore[arg-type]
    return Collective(kind, axis, tensor, sent * count, seconds * count, count, phase, where, why)


def _parameter_collectives(program: Program) -> Iterator[Collective]:
    """Gathers and reductions, a row for each step of each bucket."""
    for region in program.regions:
        calls = list(program.calls_of(region.name))
        _, call = calls[0]
        for which, buckets in region.transfers.items():
            for bucket in buckets:
                names = [call.slots[move.slot] for move in bucket.moves]
                yield from bucket_rows(program, which, bucket, names, len(calls), region.name)
    for shared in program.shared:
        phases = ("gather", "gather_for_backward") if program.training else ("gather",)
        for which in phases if shared.gather else ():
            assert shared.gather is not None
            yield from bucket_rows(program, which, shared.gather, [shared.name], 1, "several calls")
        if shared.reduce is not None and program.training:
            yield from bucket_rows(program, "reduce", shared.reduce, [shared.name], 1, "several calls")


def bucket_rows(
    program: Program, which: str, bucket: Bucket, names: Sequence[str], count: int, where: str
) -> Iterator[Collective]:
    """The collectives of one bucket: a row for each of its steps that sends anything.

    which: `gather`, `gather_for_backward` or `reduce`. names: of the bucket's parameters. count: how often a step.
    """
    assert program.mesh is not None and program.placement is not None
    mesh, reduces = program.mesh, which == "reduce"
    variables = [program.variable(name) for name in names]
    layouts = [program.placement.parameters[variable.name] for variable in variables]
    pairs = zip(variables, layouts, strict=True)
    shapes = [_before_moves(variable, layout, mesh.sizes, reduces) for variable, layout in pairs]
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
        times = count if once else count * program.microbatches
        yield _row(mesh, kind, axis, local, tensor, times, phase, f"{where}: {names[0]}", why)


def _before_moves(variable: Variable, layout: ParameterLayout, sizes: Sequence[int], reduces: bool) -> list[int]:
    """The local shape with which a parameter, or its gradient, starts on its way."""
    if not reduces:
        return list(block_shape(variable, layout, sizes))
    shape = list(local_shape(variable.seen.shape, layout.gradient, sizes))
    for dim, gathered, seen in resizes(variable, layout, sizes):
        shape[dim] = shape[dim] * gathered // seen if shape[dim] != seen else gathered
    return shape


def reads_in_backward(region: Region, slot: int) -> bool:
    """Whether a region's backward reads this slot."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    return any(u.op == "call_function" and u.name not in region.forward_nodes for u in holders[slot].users)
