"""What the calls of a lowered program take on one rank, for one microbatch, and what a stage of them does.

Seconds are those of autopar/operator_time.py and autopar/collectives.py: operators by roofline, collectives by α-β, one
after the other. Bytes are of storages (memory.py): what several calls of a stage save alike, such as a mask that all
blocks read, or a hidden state that one block makes and the next one keeps, counts once.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

from autopar.cost.accumulation import accumulation_seconds
from autopar.cost.collectives import Collective, bucket_rows, phase_collectives
from autopar.cost.estimate import OPTIMIZER_STATES
from autopar.cost.memory.buckets import local_bytes as parameter_bytes
from autopar.cost.memory.regions import RegionMemory, region_memory
from autopar.cost.operator_time import region_seconds
from autopar.cost.roofline import optimizer_time_s
from autopar.cost.under_way import hidden_beside
from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF, half_of, weight_half_reads_parameters
from autopar.ir.placement import ParameterLayout
from autopar.ir.program import Program
from autopar.ir.region import Bucket, Call, Region
from autopar.ir.sharding import Sharding, local_shape
from autopar.ir.stages import Stage
from autopar.ir.uneven import block_shape
from autopar.ir.values import ValueRef, Variable
from autopar.machine.mesh import Mesh
from autopar.strategies.pipelining.costs import StageCost


@dataclass(frozen=True, slots=True)
class CallMoves:
    """What one call of a region moves of its parameters.

    gather_s, again_s: of the gathers for each use, in the forward and in the backward. unshard_s, reduce_s: once a
    step. forward_gathered, backward_gathered: bytes of parameters gathered or cast for one use. add_s: of adding its
    gradients to those of the microbatches before.
    """

    gather_s: float
    again_s: float
    unshard_s: float
    reduce_s: float
    forward_gathered: float
    backward_gathered: float
    add_s: float = 0.0


@dataclass(frozen=True, slots=True)
class CallCost:
    """One call of a region, on one rank.

    own: by phase, seconds of operators and of collectives inside, of one microbatch; a half of the backward is 0 where
    it is not lowered. hides: what part of gathers the call before hides, of what both take (`Hardware.collective_busy`
    takes the rest of it from the device). halves_gather: whether the input half, the
    weight half gather parameters for themselves.

    forward_s, backward_s, input_s, weight_s: of one microbatch, with what the gathers for each use take longer, where
    the call before hides them. first_s, last_s: what forward and backward take longer where no call is before.
    """

    own: Mapping[str, float]
    moves: CallMoves
    hides: float
    halves_gather: tuple[bool, bool]
    memory: RegionMemory

    @property
    def forward_s(self) -> float:
        return self._beside(self.own["forward"], self.moves.gather_s)

    @property
    def backward_s(self) -> float:
        return self._beside(self.own["backward"] + self.moves.add_s, self.moves.again_s)

    @property
    def input_s(self) -> float:
        return self._beside(self.own[INPUT_HALF], self.moves.again_s * self.halves_gather[0])

    @property
    def weight_s(self) -> float:
        own = self.own[WEIGHT_HALF] + self.moves.add_s * self.halves_gather[0]
        return self._beside(own, self.moves.again_s * self.halves_gather[1])

    @property
    def first_s(self) -> float:
        return min(self.own["forward"], self.moves.gather_s) * self.hides

    @property
    def last_s(self) -> float:
        return min(self.own["backward"] + self.moves.add_s, self.moves.again_s) * self.hides

    def _beside(self, computing: float, gathering: float) -> float:
        return max(computing, gathering) + (1.0 - self.hides) * min(computing, gathering)


@dataclass(frozen=True, slots=True)
class ParameterCost:
    """A parameter or buffer on one rank: bytes all the time, held for the step, seconds of its update, and, where
    several calls share its gathers and reductions, their seconds and bytes for a phase in which some call of a stage
    uses it.

    waiting_bytes: of `static_bytes`, what its gradient takes over microbatches, unreduced. raw_bytes, reduced_bytes: of
    the gradient as a backward makes it, and once it is reduced.
    """

    static_bytes: float
    held_bytes: float
    forward_s: float = 0.0
    backward_s: float = 0.0
    unshard_s: float = 0.0
    reduce_s: float = 0.0
    gathered_bytes: float = 0.0
    update_s: float = 0.0
    waiting_bytes: float = 0.0
    raw_bytes: float = 0.0
    reduced_bytes: float = 0.0


class CallCosts(Mapping[str, CallCost]):
    """The costs of a program's calls, by region; beside them what a stage needs: `parameters` by name, the bytes of
    values between calls (`value_bytes`) and of their gradients (`gradient_bytes`) on one rank, of the states that each
    call makes (`kept_of_call`), and the regions whose weight half reads parameters.

    moved: what the regions' calls move, where that is not to be worked out: then there are no `parameters`.
    """

    def __init__(self, program: Program, moved: Mapping[str, CallMoves] | None = None) -> None:
        self._mesh = mesh = program.on_mesh
        memories = {region.name: region_memory(region, mesh) for region in program.regions}
        moves = {r.name: moves_of_call(program, r) for r in program.regions} if moved is None else moved
        self._calls = {r.name: _call_cost(program, r, memories[r.name], moves[r.name]) for r in program.regions}
        self.parameters = parameter_costs(program) if moved is None else {}
        self.value_bytes: dict[ValueRef, float] = {}
        self.gradient_bytes: dict[ValueRef, float] = {}
        regions = {region.name: region for region in program.regions}
        placement = program.placement
        assert placement is not None
        for number, call in enumerate(program.calls):
            region = regions[call.region]
            for index, port in enumerate(region.outputs):
                ref = ValueRef(number, index)
                size = port.type.dtype.itemsize
                self.value_bytes[ref] = _local(port.type.shape, placement.values[number, index], mesh) * size
                if index in region.tangents:
                    sharding = placement.gradients[number, index]
                    self.gradient_bytes[ref] = _local(port.type.shape, sharding, mesh) * size
        for port in program.inputs:
            if port.name in placement.inputs:
                size = _local(port.type.shape, placement.inputs[port.name], mesh) * port.type.dtype.itemsize
                self.value_bytes[ValueRef(name=port.name)] = size
                if port.differentiable:
                    self.gradient_bytes[ValueRef(name=port.name)] = size
        uses: dict[str, int] = {}
        for call in program.calls:
            for name in dict.fromkeys(call.slots):
                uses[name] = uses.get(name, 0) + 1
        # What tells one call of a region from another.
        static = {name: each.static_bytes for name, each in self.parameters.items()}
        self.kept_of_call = self._kept_of(program)
        parameters = [sum(static.get(name, 0.0) for name in call.slots) for call in program.calls]
        self.static_of_call = [size + kept for size, kept in zip(parameters, self.kept_of_call, strict=True)]
        self.shared_by_call = [tuple(name for name in call.slots if uses[name] > 1) for call in program.calls]
        self.stages: dict[tuple[object, ...], StageCost] = {}
        self.reading_weights = frozenset(r.name for r in program.regions if weight_half_reads_parameters(r))
        self.prefetches = program.overlap is not None and program.overlap.prefetch

    def _kept_of(self, program: Program) -> list[float]:
        """Bytes of the states that each call makes, which its rank keeps until it is called again; without a backward
        also of its outputs, which are there to the end of the step: of states the old and the new.
        """
        found, states = [0.0] * len(program.calls), program.states
        for name, ref in zip(program.output_names, program.outputs, strict=True):
            if ref.call >= 0:
                found[ref.call] += self.value_bytes[ref] * ((name in states) + (not program.training))
        return found

    def __getitem__(self, region: str) -> CallCost:
        return self._calls[region]

    def __iter__(self) -> Iterator[str]:
        return iter(self._calls)

    def __len__(self) -> int:
        return len(self._calls)


def call_costs(program: Program) -> CallCosts:
    """The cost of each region's calls on one rank, for one microbatch.

    Args:
        program: lowered, with its buckets (`overlap`), and with the halves of its backward where a schedule splits it.
    """
    assert program.phase == "lowered", program.phase
    return CallCosts(program)


def seconds_of_calls(program: Program, costs: Mapping[str, CallCost]) -> list[float]:
    """Seconds of each call, forward and backward together: what a cut balances."""
    return [costs[call.region].forward_s + costs[call.region].backward_s for call in program.calls]


def stage_of_range(program: Program, first: int, stop: int) -> Stage:
    """Calls first … stop-1 as the stage that `boundaries` makes of them when nothing is computed again."""
    received: set[ValueRef] = set()
    sent: set[ValueRef] = set()
    for number in range(first, len(program.calls)):
        for ref in program.calls[number].arguments:
            if 0 <= ref.call < first:
                received.add(ref)
            if 0 <= ref.call < stop <= number:
                sent.add(ref)
    receives, sends = (tuple(sorted(refs, key=lambda ref: (ref.call, ref.index))) for refs in (received, sent))
    return Stage(tuple(range(first, stop)), (), receives, sends)


# -- one call
# ------------------------------------------------------------------------------------------------------------


def _call_cost(program: Program, region: Region, memory: RegionMemory, moves: CallMoves) -> CallCost:
    return CallCost(
        _phase_seconds(program, region),
        moves,
        hides=hidden_part(program),
        halves_gather=(INPUT_HALF in region.lowered, weight_half_reads_parameters(region)),
        memory=memory,
    )


def hidden_part(program: Program) -> float:
    """As of `CallCost.hides`."""
    prefetches = program.overlap is not None and program.overlap.prefetch
    return (1.0 - program.on_mesh.hardware.collective_busy) * prefetches


def moves_of_call(program: Program, region: Region) -> CallMoves:
    """What a call of a region moves of its parameters; nothing of it depends on the size of the batch."""
    _, call = next(program.calls_of(region.name))
    gathers = {which: _transfer_seconds(program, region, call, which) for which in region.transfers}
    forward, again = gathers["gather"], gathers.get("gather_for_backward", (0.0, 0.0))
    return CallMoves(
        gather_s=forward[0],
        again_s=again[0],
        unshard_s=forward[1],
        reduce_s=gathers.get("reduce", (0.0, 0.0))[1],
        forward_gathered=_gathered_bytes(program, region, call, "gather"),
        backward_gathered=_gathered_bytes(program, region, call, "gather_for_backward"),
        add_s=accumulation_seconds(program, region),
    )


def parameter_costs(program: Program) -> dict[str, ParameterCost]:
    """What becomes of every parameter and buffer that some call uses, by name."""
    shared = {each.name: each for each in program.shared}
    variables = {variable.name: variable for variable in program.variables}
    alike: dict[object, ParameterCost] = {}
    found: dict[str, ParameterCost] = {}
    for call in program.calls:
        for slot, name in enumerate(call.slots):
            variable = variables[name]
            if name in shared:
                found[name] = _parameter_cost(program, variable, shared[name].gather, shared[name].reduce)
            elif name not in found:
                # What calls of a region have in one slot is alike, and lies alike.
                key = (call.region, slot, variable.stored_dtype, variable.trainable)
                if key not in alike:
                    alike[key] = _parameter_cost(program, variable)
                found[name] = alike[key]
    return found


def _phase_seconds(program: Program, region: Region) -> dict[str, float]:
    """Seconds of operators and of collectives inside each phase."""
    mesh = program.on_mesh
    halves = half_of(region)
    found: dict[str, float] = {"forward": 0.0, "backward": 0.0, INPUT_HALF: 0.0, WEIGHT_HALF: 0.0}
    phases: dict[str, tuple[str, ...]] = {
        "forward": ("forward",), "input": ("backward", INPUT_HALF), "weight": ("backward", WEIGHT_HALF)
    }  # fmt: skip
    seconds = region_seconds(region, mesh)
    for name, taken in seconds.items():
        for phase in phases[halves[name]]:
            if phase in region.lowered:
                found[phase] += taken
    for phase in region.lowered:
        found[phase] += sum(row.seconds for row in phase_collectives(program, region, phase, 1))
        found[phase] -= hidden_beside(program, region, phase, seconds)
    return found


def _transfer_seconds(program: Program, region: Region, call: Call, which: str) -> tuple[float, float]:
    """Seconds of a call's gathers or reductions: for each use, and once a step."""
    each = once = 0.0
    for bucket in region.transfers[which]:
        more = _bucket_seconds(program, which, bucket, [call.slots[move.slot] for move in bucket.moves])
        each, once = each + more[0], once + more[1]
    return each, once


def _bucket_seconds(program: Program, which: str, bucket: Bucket, names: Sequence[str]) -> tuple[float, float]:
    # What is done for each use is done twice: so it is told from what is done once.
    rows: Iterable[Collective] = bucket_rows(program, which, bucket, names, 1, "", uses=2)
    each = once = 0.0
    for row in rows:
        if row.times == 1:
            once += row.seconds
        else:
            each += row.seconds / row.times
    return each, once


def _gathered_bytes(program: Program, region: Region, call: Call, which: str) -> float:
    slots = [move.slot for bucket in region.transfers.get(which, ()) for move in bucket.moves]
    variables = [program.variable(call.slots[slot]) for slot in slots]
    return sum(_copy_bytes(program, v, program.placed.parameters[v.name]) for v in variables)


def _copy_bytes(program: Program, variable: Variable, layout: ParameterLayout) -> float:
    """What is made of a parameter for one use: gathered, or cast where it lies."""
    casts = variable.stored_dtype != variable.type.dtype
    if layout.held != layout.compute or (casts and layout.stored == layout.compute):
        return float(parameter_bytes(program, variable, layout.compute, variable.type.dtype))
    return 0.0


def _parameter_cost(
    program: Program, variable: Variable, gather: Bucket | None = None, reduce: Bucket | None = None
) -> ParameterCost:
    mesh, layout = program.on_mesh, program.placed.parameters[variable.name]
    stored = math.prod(block_shape(variable, layout, mesh.sizes)) * variable.stored_dtype.itemsize
    trained = variable.trainable and program.training
    waiting = raw = 0
    if trained:
        dtype = variable.stored_dtype if program.microbatches > 1 else variable.type.dtype
        # Over the step gradients wait unreduced; the reduced ones take their place.
        waiting = max(stored, parameter_bytes(program, variable, layout.gradient, dtype))
        raw = parameter_bytes(program, variable, layout.gradient, variable.type.dtype)
    held = 0
    if layout.held != layout.stored:
        held = parameter_bytes(program, variable, layout.held, variable.type.dtype)
    static = stored * (1 + OPTIMIZER_STATES * trained) + waiting
    seconds = dict.fromkeys(("gather", "gather_for_backward", "reduce"), (0.0, 0.0))
    if gather is not None:
        seconds["gather"] = _bucket_seconds(program, "gather", gather, [variable.name])
        if trained:
            seconds["gather_for_backward"] = _bucket_seconds(program, "gather_for_backward", gather, [variable.name])
    if reduce is not None and trained:
        seconds["reduce"] = _bucket_seconds(program, "reduce", reduce, [variable.name])
    return ParameterCost(
        static_bytes=static,
        held_bytes=held,
        forward_s=seconds["gather"][0],
        backward_s=seconds["gather_for_backward"][0],
        unshard_s=seconds["gather"][1],
        reduce_s=seconds["reduce"][1],
        gathered_bytes=_copy_bytes(program, variable, layout) if gather is not None else 0.0,
        update_s=_update_seconds(mesh, stored, variable.stored_dtype.itemsize) if trained else 0.0,
        waiting_bytes=waiting,
        raw_bytes=raw,
        reduced_bytes=stored / variable.stored_dtype.itemsize * variable.type.dtype.itemsize * trained,
    )


def _update_seconds(mesh: Mesh, stored: int, itemsize: int) -> float:
    """The optimizer's for one of many parameters, which share its launches."""
    hardware = mesh.hardware
    return max(0.0, optimizer_time_s(stored // itemsize, stored, hardware, 1) - hardware.launch_overhead_s)


def _local(shape: Sequence[int], sharding: Sharding, mesh: Mesh) -> int:
    return math.prod(local_shape(shape, sharding, mesh.sizes))
