"""What the points of a search for `generate()` take, from programs of both phases with other sizes put in.

Without a pipeline a point is priced as its plan is. With one, a prompt and a token each go from stage to stage as one
microbatch: the seconds of all calls, a message between two stages, and the outputs of the last one for every rank; the
fullest rank keeps its stage's parameters and caches, and works as one that has all.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.cost.call_times import calls_of
from autopar.cost.estimate import Cost, state_bytes, stored_bytes, unused_everywhere
from autopar.cost.hosts import host_seconds_of_calls, waited_for_hosts
from autopar.cost.memory.boundaries import boundaries
from autopar.cost.roofline import collective_time_s
from autopar.ir.program import Program
from autopar.ir.sharding import local_shape
from autopar.ir.values import ValueRef
from autopar.machine.links import Link
from autopar.planner.generation import Generation
from autopar.planner.price import price
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.token_families import TokenFamilies
from autopar.planner.search.tokens import TokenCandidate, TokenPoint
from autopar.strategies.pipelining.cut import best_cut, ranges

Numbers = NDArray[np.float64]


@dataclass(frozen=True)
class Phase:
    """One phase on a mesh without a pipeline. seconds: [calls]; host: [calls], what the host takes to queue them;
    states: [calls], bytes of caches that a call makes; numbers: bytes of single numbers among them, which all stages
    have.
    """

    program: Program
    cost: Cost
    seconds: Numbers
    host: Numbers
    states: Numbers
    numbers: int

    @staticmethod
    def of(program: Program) -> Phase:
        made = dict(zip(program.output_names, program.outputs, strict=True))
        shaped = {port.name for port in program.inputs if port.type.shape}
        states, numbers = np.zeros(len(program.calls)), 0
        for name, size in state_bytes(program).items():
            if name in shaped:
                states[made[name].call] += size
            else:
                numbers += size
        seconds = np.array([call.forward_s for call in calls_of(program)])
        host = np.array(host_seconds_of_calls(program))
        return Phase(program, price(program)[0], seconds, host, states, numbers)

    @property
    def working_bytes(self) -> float:
        """What the peak holds beside parameters and caches."""
        return float(self.cost.memory.peak - self.cost.memory.parameters - self.cost.memory.states)


@dataclass
class TokenEstimator:
    """Costs of one model on one cluster.

    families: by the batch that was traced; traced: batch -> that. phases: priced, by rows, rows of a rank, ep and tp.
    """

    cluster: Cluster
    generation: Generation
    limit_bytes: float
    families: Mapping[int, TokenFamilies]
    traced: Mapping[int, int]
    phases: dict[tuple[int, ...], dict[str, Phase] | None] = field(default_factory=dict)

    def candidate(self, point: TokenPoint, batch: int) -> TokenCandidate | None:
        """What a point takes with so many sequences; None where these, or the model, cannot be split so."""
        rows, rest = divmod(batch * self.generation.beams, point.dp * point.ep)
        phases = None if rest or batch % (point.dp * point.ep) else self._phases(point, batch, rows)
        if phases is None or any(point.pp > len(phase.seconds) for phase in phases.values()):
            return None
        taken = {name: self._with_stages(phase, point) for name, phase in phases.items()}
        peak = max(size for _, size, _ in taken.values())
        between_s = self.cluster.hardware.between_s(rows * point.dp * point.ep)
        first_s, then_s = (taken[name][0] + between_s for name in ("prefill", "decode"))
        return TokenCandidate(
            point, batch, self.generation.new_tokens, self.generation.chunks * first_s, then_s, peak,
            taken["decode"][2], peak <= self.limit_bytes,
        )  # fmt: skip

    def _phases(self, point: TokenPoint, batch: int, rows: int) -> dict[str, Phase] | None:
        families = self.families[self.traced[batch]]
        key = (families.rows, rows, point.ep, point.tp)
        if key not in self.phases:
            parts, rest = divmod(families.rows, rows * point.ep)
            found = None if rest else families.on({"dp": parts, "ep": point.ep, "tp": point.tp})
            self.phases[key] = None if found is None else {name: Phase.of(each) for name, each in found.items()}
        return self.phases[key]

    def _with_stages(self, phase: Phase, point: TokenPoint) -> tuple[float, float, float]:
        """Seconds, bytes of the fullest rank, and of caches on that which has most."""
        cost, program = phase.cost, phase.program
        if point.pp == 1:
            return cost.step_time_s, float(cost.peak_memory_bytes), float(cost.memory.states)
        bounds = tuple(ranges(best_cut(list(phase.seconds), point.pp), len(phase.seconds)))
        link = self._stages_link(point)
        stages = boundaries(program, [first for first, _ in bounds])
        messages = [self._message_s(program, stage.sends, link) for stage in stages[:-1]]
        shared = _outputs_seconds(program, point.pp, link)
        parameters = _parameter_bytes(program, bounds)
        states = [float(phase.states[a:b].sum()) + phase.numbers for a, b in bounds]
        kept = max(own + cache for own, cache in zip(parameters, states, strict=True))
        everywhere = stored_bytes(program, unused_everywhere(program))
        peak = kept + everywhere + phase.working_bytes
        own = [float(phase.seconds[a:b].sum()) for a, b in bounds]
        ends = np.cumsum(own) + np.cumsum([0.0, *messages])
        host = [float(phase.host[a:b].sum()) for a, b in bounds]
        late = waited_for_hosts(host, ends.tolist(), range(point.pp))
        return cost.step_time_s - cost.host_s + late + sum(messages) + shared, peak, max(states)

    def _stages_link(self, point: TokenPoint) -> Link:
        return self.cluster.mesh({"pp": point.pp, "rest": point.num_devices // point.pp}).link("pp")

    def _message_s(self, program: Program, refs: Sequence[ValueRef], link: Link) -> float:
        """Of the largest value between two stages; what is computed of inputs alone each stage makes for itself."""
        size = max((_local_bytes(program, ref) for ref in refs), default=0)
        return collective_time_s("permute", size, 2, link, self.cluster.hardware.collective_launch_s) if size else 0.0


def _parameter_bytes(program: Program, bounds: Sequence[tuple[int, int]]) -> list[float]:
    """[stages]: a parameter that several stages use is on each."""
    kept = {variable.name: variable for variable in program.variables if variable.is_parameter}
    found = []
    for first, stop in bounds:
        names = {name for call in program.calls[first:stop] for name in call.slots if name in kept}
        found.append(float(stored_bytes(program, [kept[name] for name in names])))
    return found


def _outputs_seconds(program: Program, ranks: int, link: Link) -> float:
    """What the ranks of a pipeline tell each other behind the last stage, as `shared_outputs` has it."""
    sizes: dict[object, int] = {}
    for name, ref in zip(program.output_names, program.outputs, strict=True):
        type_ = program.port(ref).type
        if name not in program.states or not type_.shape:
            sizes[type_.dtype] = sizes.get(type_.dtype, 0) + _local_bytes(program, ref)
    launch_s = program.on_mesh.hardware.collective_launch_s
    return sum(collective_time_s("all_reduce", size, ranks, link, launch_s) for size in sizes.values())


def _local_bytes(program: Program, ref: ValueRef) -> int:
    placed, type_ = program.placed, program.port(ref).type
    sharding = placed.values[ref.call, ref.index] if ref.call >= 0 else placed.inputs[ref.name]
    return math.prod(local_shape(type_.shape, sharding, program.on_mesh.sizes)) * type_.dtype.itemsize
