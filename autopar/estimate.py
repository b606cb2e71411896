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

from autopar.cost import collective_bytes, collective_time_s, compute_time_s
from autopar.ir import NodeStrategy, Program, Region, TensorType, Variable
from autopar.mesh import Mesh
from autopar.rules.notation import Rule
from autopar.rules.registry import OpCall
from autopar.sharding import REPLICATE, Shard, Sharding, Step, local_shape, num_pieces, redistribution_steps
from autopar.strategies import AxisStrategy

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
    """Bytes of one rank. peak: the most at any time of the step; the rest by kind."""

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


def estimate(program: Program, strategies: Sequence[AxisStrategy], peak_bytes: float) -> tuple[Cost, list[Collective]]:
    """The cost of a lowered program, and its collectives in the order of the regions."""
    assert program.mesh is not None
    compute = 0.0
    for region in program.regions:
        seconds = sum(operator_seconds(*region.ops[name], s, program.mesh) for name, s in region.strategies.items())
        compute += seconds * program.num_calls(region.name)
    rows = list(collectives(program, strategies))
    memory = _memory(program, peak_bytes)
    return Cost(compute, sum(row.seconds for row in rows), memory), rows


def _memory(program: Program, peak_bytes: float) -> Memory:
    assert program.mesh is not None and program.placement is not None
    parameters = gradients = 0
    for variable in (v for v in program.variables if v.is_parameter):
        layout = program.placement.parameters.get(variable.name)
        sharding = layout.stored if layout else (REPLICATE,) * len(program.mesh.sizes)
        local = (
            math.prod(local_shape(variable.type.shape, sharding, program.mesh.sizes)) * variable.stored_dtype.itemsize
        )
        parameters += local
        gradients += local if variable.trainable and program.training else 0
    return Memory(parameters, gradients, gradients * OPTIMIZER_STATES, int(peak_bytes))


def collectives(program: Program, strategies: Sequence[AxisStrategy]) -> Iterator[Collective]:
    """Every collective of a step: inside regions, of parameters, of gradients."""
    for region in program.regions:
        count = program.num_calls(region.name)
        for phase, lowered in region.lowered.items():
            for node in lowered.graph.nodes:
                if node.op == "call_method" and node.target not in ("slice", "index", "positions"):
                    yield _inside(program, region, phase, node, count)
    yield from _parameter_collectives(program, strategies)


def _inside(program: Program, region: Region, phase: str, node: fx.Node, count: int) -> Collective:
    assert program.mesh is not None
    source: fx.Node = node.args[1]  # type: ignore[assignment]
    axis = str(node.args[2])
    type_, before = source.meta["type"], source.meta["sharding"]
    why = "redistribute" if node.target in ("all_gather", "all_to_all") else str(node.kwargs.get("op", "sum"))
    where = f"{region.name} {phase}: {node.meta.get('origin') or source.name}"
    return _row(program.mesh, str(node.target), axis, type_, before, source.name, count, phase, where, why)


def _row(
    mesh: Mesh, kind: str, axis: str, type_: TensorType, before: Sharding, tensor: str, count: int, phase: str,
    where: str, why: str,
) -> Collective:  # fmt: skip
    size = mesh.size(axis)
    local = math.prod(local_shape(type_.shape, before, mesh.sizes)) * type_.dtype.itemsize
    handled = local * size if kind == "all_gather" else local
    sent = collective_bytes(kind, handled, size)  # type: ignore[arg-type]
    seconds = collective_time_s(kind, handled, size, mesh.link(axis), mesh.hardware.collective_launch_s)  # type: ignore[arg-type]
    return Collective(kind, axis, tensor, sent * count, seconds * count, count, phase, where, why)


def _parameter_collectives(program: Program, strategies: Sequence[AxisStrategy]) -> Iterator[Collective]:
    assert program.mesh is not None and program.placement is not None
    for variable, count, regions in _parameter_groups(program):
        layout = program.placement.parameters[variable.name]
        where = f"{regions[0].name}: {variable.name}"
        phases = ["forward"]
        if program.training and gathers_again(program, strategies, variable):
            phases.append("backward")
        for phase in phases:
            yield from _moves(
                program.mesh, variable, layout.stored, layout.compute, count, phase, where, "gather parameter"
            )
        if variable.trainable and program.training:
            args = (count, "backward", where, "reduce gradient")
            yield from _moves(program.mesh, variable, layout.gradient, layout.stored, *args)


def _parameter_groups(program: Program) -> Iterator[tuple[Variable, int, list[Region]]]:
    """Parameters that fill the same slot of one region count as one with multiplicity."""
    users: dict[str, list[tuple[str, int]]] = {}
    for call in program.calls:
        for index, name in enumerate(call.slots):
            users.setdefault(name, []).append((call.region, index))
    groups: dict[tuple[tuple[str, int], ...], list[str]] = {}
    for name, slots in users.items():
        groups.setdefault(tuple(slots), []).append(name)
    for filled, names in groups.items():
        variable = program.variable(names[0])
        if variable.is_parameter:
            yield variable, len(names), [program.region(region) for region, _ in filled]


def gathers_again(program: Program, strategies: Sequence[AxisStrategy], variable: Variable) -> bool:
    """Whether the backward gathers a parameter a second time: it reads it, or the strategy says so."""
    assert program.placement is not None
    layout = program.placement.parameters[variable.name]
    for strategy, stored, compute in zip(strategies, layout.stored, layout.compute, strict=True):
        if strategy.regather == "all" and stored != compute:
            return True
    for call in program.calls:
        if variable.name in call.slots and reads_in_backward(
            program.region(call.region), call.slots.index(variable.name)
        ):
            return True
    return False


def reads_in_backward(region: Region, slot: int) -> bool:
    """Whether a region's backward reads this slot."""
    holders = [node for node in region.graph.nodes if node.op == "placeholder"]
    return any(u.op == "call_function" and u.name not in region.forward_nodes for u in holders[slot].users)


def _moves(
    mesh: Mesh, variable: Variable, source: Sharding, target: Sharding, count: int, phase: str, where: str, why: str
) -> Iterator[Collective]:
    steps: Sequence[Step] = redistribution_steps(source, target) or ()
    current = list(source)
    for step in steps:
        if step.kind != "slice":
            axis = mesh.axis_names[step.axis]
            yield _row(mesh, step.kind, axis, variable.type, tuple(current), variable.name, count, phase, where, why)
        done = step.kind in ("all_gather", "all_reduce")
        current[step.axis] = REPLICATE if done else Shard(step.dim, step.outer)
