"""What a placed program will cost: seconds of compute, every collective with its bytes, memory by kind.

Nothing is measured here: rooflines and α-β from the hardware profile (autopar/cost.py), counts from the program itself.
The collectives are read off the lowered graphs, so they are what runs.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass

from autopar.cost.accumulation import accumulation_seconds
from autopar.cost.call_times import overlapped_seconds
from autopar.cost.collectives import Collective, calls_on, collectives, num_calls
from autopar.cost.hosts import host_seconds, waited_for_hosts
from autopar.cost.operator_time import region_seconds
from autopar.cost.roofline import optimizer_time_s
from autopar.ir.program import Program
from autopar.ir.sharding import local_shape
from autopar.ir.uneven import block_shape
from autopar.ir.values import Variable

OPTIMIZER_STATES = 2
"""Tensors of the parameter's stored type that the optimizer keeps per parameter (Adam: momentum and variance)."""


@dataclass(frozen=True, slots=True)
class Memory:
    """Bytes of the rank that holds most. peak: the most at any time of the step; the rest by kind. states: caches."""

    parameters: int
    gradients: int
    optimizer_states: int
    peak: int
    states: int = 0

    @property
    def activations(self) -> int:
        """What the peak holds beside parameters, gradients, optimizer states and caches."""
        return max(0, self.peak - self.parameters - self.gradients - self.optimizer_states - self.states)


@dataclass(frozen=True, slots=True)
class Cost:
    """The prediction for one training step. communication_s: of all collectives; hidden_s: what of it runs beside the
    compute. waiting_s: of a rank of a pipeline, the time that it waits for others. optimizer_s: AdamW's update.
    host_s: of a forward, how long the device waits for what the host queues (`autopar.cost.hosts`).
    """

    compute_s: float
    communication_s: float
    memory: Memory
    waiting_s: float = 0.0
    hidden_s: float = 0.0
    optimizer_s: float = 0.0
    host_s: float = 0.0

    @property
    def step_time_s(self) -> float:
        return self.compute_s + self.communication_s - self.hidden_s + self.waiting_s + self.optimizer_s + self.host_s

    @property
    def peak_memory_bytes(self) -> int:
        return self.memory.peak


def estimate(program: Program, peak_bytes: float) -> tuple[Cost, list[Collective]]:
    """The cost of a lowered program, and its collectives in the order of the regions.

    Of a program with a pipeline: compute and collectives of the rank of the pipeline that is busiest; what it waits,
    for other ranks and for hosts, is for whoever simulated its schedule to say.
    """
    seconds = {
        region.name: sum(region_seconds(region, program.on_mesh).values()) + accumulation_seconds(program, region)
        for region in program.regions
    }

    def compute(rank: int | None) -> float:
        return sum(each * num_calls(program, name, rank) for name, each in seconds.items()) * program.microbatches

    ranks: list[int | None] = [None]
    if program.pipeline is not None:
        ranks = list(range(program.pipeline.schedule.num_ranks))
    found = [(compute(rank), list(collectives(program, rank))) for rank in ranks]
    compute_s, rows = max(found, key=lambda each: each[0] + sum(row.seconds for row in each[1]))
    communication_s = sum(row.seconds for row in rows)
    hidden_s = 0.0
    if program.pipeline is None and program.overlap is not None:
        beside = compute_s + communication_s - overlapped_seconds(program, program.overlap)
        hidden_s = max(0.0, difference(beside, compute_s)) * (1.0 - program.on_mesh.hardware.collective_busy)
    memory, optimizer_s = _memory(program, peak_bytes), update_seconds(program)
    host_s = 0.0
    if program.pipeline is None:
        host_s = waited_for_hosts([host_seconds(program)], [compute_s + communication_s - hidden_s], [0])
    return Cost(compute_s, communication_s, memory, 0.0, hidden_s, optimizer_s, host_s), rows


def difference(seconds: float, of: float) -> float:
    """A difference, which is nothing where it is that of equals: sums of the same numbers in another order."""
    return seconds if abs(seconds) > 1e-9 * of else 0.0


def update_seconds(program: Program) -> float:
    """Seconds in which the optimizer updates the parameters of the rank that holds most of them."""
    if not program.training:
        return 0.0
    elements = num_bytes = tensors = 0
    for variable in _fullest(program):
        layout = program.placed.parameters.get(variable.name)
        if variable.trainable and layout is not None:
            local = math.prod(block_shape(variable, layout, program.on_mesh.sizes))
            elements, num_bytes = elements + local, num_bytes + local * variable.stored_dtype.itemsize
            tensors += 1
    return optimizer_time_s(elements, num_bytes, program.on_mesh.hardware, tensors)


def _fullest(program: Program) -> list[Variable]:
    """The parameters of the rank that holds most of them."""
    everything = [v for v in program.variables if v.is_parameter]
    if program.pipeline is None:
        return everything

    def size(variables: list[Variable]) -> int:
        return sum(variable.type.num_bytes for variable in variables)

    held, everywhere = [], {variable.name for variable in unused_everywhere(program)}
    for rank in range(program.pipeline.schedule.num_ranks):
        names = everywhere | {name for number in calls_on(program, rank) for name in program.calls[number].slots}
        held.append([variable for variable in everything if variable.name in names])
    return max(held, key=size)


def unused_everywhere(program: Program) -> tuple[Variable, ...]:
    """The parameters that no call uses and that every rank of a pipeline has all the same: of an encoder, which runs by
    itself before a prompt. Where there is a backward, the first stage keeps them.
    """
    if program.training or not program.states:
        return ()
    used = {name for call in program.calls for name in call.slots}
    return tuple(variable for variable in program.variables if variable.is_parameter and variable.name not in used)


def stored_bytes(program: Program, variables: Iterable[Variable]) -> int:
    """What one rank stores of parameters."""
    size = 0
    for variable in variables:
        layout = program.placed.parameters.get(variable.name)
        shape = block_shape(variable, layout, program.on_mesh.sizes) if layout else variable.type.shape
        size += math.prod(shape) * variable.stored_dtype.itemsize
    return size


def _memory(program: Program, peak_bytes: float) -> Memory:
    held = _fullest(program)
    parameters = stored_bytes(program, held)
    gradients = stored_bytes(program, (each for each in held if each.trainable)) if program.training else 0
    extra = program.overlap.extra_bytes if program.overlap is not None else 0
    return Memory(parameters, gradients, gradients * OPTIMIZER_STATES, int(peak_bytes) + extra, _state_bytes(program))


def _state_bytes(program: Program) -> int:
    """What one rank keeps from call to call: caches. Of the rank of a pipeline that keeps most of them."""
    ranks: list[int | None] = [None]
    if program.pipeline is not None:
        ranks = list(range(program.pipeline.schedule.num_ranks))
    return max(sum(state_bytes(program, rank).values()) for rank in ranks)


def state_bytes(program: Program, rank: int | None = None) -> dict[str, int]:
    """The states that one rank keeps, with their bytes there.

    rank: of a pipeline: those that its stages make, and all that are single numbers, which every rank gets.
    """
    layouts, sizes, states = program.placed.inputs, program.on_mesh.sizes, program.states
    made = dict(zip(program.output_names, program.outputs, strict=True))
    own = set(calls_on(program, rank, again=False))
    return {
        port.name: math.prod(local_shape(port.type.shape, layouts[port.name], sizes)) * port.type.dtype.itemsize
        for port in program.inputs
        if port.name in states and port.name in layouts and (not port.type.shape or made[port.name].call in own)
    }
