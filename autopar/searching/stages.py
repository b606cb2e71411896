"""The stages of a pipeline's points: where the calls are cut, and what the ranks take and hold.

What calls compute and hold comes from one lowering, what becomes of parameters from another. Seconds and parameters add
up over calls; what a stage's activations take is worked out once for stages that run the same blocks, and of long rows
of one block from short ones, to which each block more adds the same.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from autopar.call_times import call_time, transfer_times
from autopar.ir import Program, Stage
from autopar.passes.halves import INPUT_HALF, WEIGHT_HALF
from autopar.passes.overlap import shared_names
from autopar.passes.stages.boundaries import boundaries
from autopar.passes.stages.costs import (
    CallCosts,
    CallMoves,
    ParameterCost,
    moves_of_call,
    parameter_costs,
    stage_of_range,
)
from autopar.passes.stages.cut import best_cut, ranges
from autopar.passes.stages.stage_memory import StageMemory
from autopar.step_time import CallTime

Numbers = NDArray[np.float64]
_NOTHING = CallMoves(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_REPEATED = 3
"""Of how many equal blocks in a row the activations are worked out; each further one adds what the last one did."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What the ranks of a pipeline take: by rank, forward, backward, its input and its weight half, of one microbatch,
    and bytes; the rest as in `formulas`. sent_bytes: to the next stage, at most. halved_bytes: what the input half
    leaves of `saved_bytes`, and for the weight half.
    """

    forward_s: Numbers
    backward_s: Numbers
    input_s: Numbers
    weight_s: Numbers
    once_s: float
    optimizer_s: float
    sent_bytes: float
    static_bytes: Numbers
    saved_bytes: Numbers
    halved_bytes: Numbers
    working_bytes: Numbers


@dataclass(frozen=True, slots=True)
class Computing:
    """The calls of one lowering: what they compute and hold, and as steps without a pipeline take them.

    own: phase -> [calls] seconds. held: of rows of blocks, bytes, as of `holding`.
    """

    program: Program
    costs: CallCosts
    times: Mapping[str, CallTime]
    own: Mapping[str, Numbers]
    held: dict[tuple[object, ...], Numbers] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> Computing:
        costs = CallCosts(program).with_moves({region.name: _NOTHING for region in program.regions})
        times = {region.name: call_time(program, region) for region in program.regions}
        phases = ("forward", "backward", INPUT_HALF, WEIGHT_HALF)
        own = {phase: np.array([costs[call.region].own[phase] for call in program.calls]) for phase in phases}
        return Computing(program, costs, times, own)

    @property
    def has_halves(self) -> bool:
        return bool(self.own[INPUT_HALF].any() or self.own[WEIGHT_HALF].any())

    @property
    def output_bytes(self) -> float:
        """Of the model's outputs, of one microbatch: whoever trains has them until the step's end."""
        return sum(self.costs.value_bytes[ref] for ref in self.program.outputs if ref.call >= 0)

    def holding(self, bounds: tuple[tuple[int, int], ...]) -> Numbers:
        """[stages, 4]: bytes of the activations of a stage: saved, beside that in the forward, beside that in the
        backward, and what the input half leaves.

        bounds: the first call of each stage, and where it stops.
        """
        if bounds not in self.held:
            self.held[bounds] = np.array([self._holding(first, stop) for first, stop in bounds])
        return self.held[bounds]

    def _holding(self, first: int, stop: int) -> Numbers:
        row, num = _shortened(self.program, first, stop)
        least = self._held(*row[0])
        return least if num == 0 else least + num * (least - self._held(*row[1]))

    def _held(self, first: int, stop: int) -> Numbers:
        program = self.program
        regions = tuple(call.region for call in program.calls[first:stop])
        key = (regions, first == 0, stop == len(program.calls))
        if key not in self.held:
            stage = StageMemory(program, stage_of_range(program, first, stop), self.costs)
            self.held[key] = np.array(
                [
                    stage.saved_bytes,
                    stage.forward(),
                    stage.backward(self.has_halves),
                    stage.saved_bytes - stage.freed_bytes + stage.kept_bytes,
                ]
            )
        return self.held[key]


def _shortened(program: Program, first: int, stop: int) -> tuple[tuple[tuple[int, int], tuple[int, int]], int]:
    """Two parts of a stage, the second with a block less, and how many blocks more than the first the stage has: where
    it begins or ends with a row of equal blocks that is long.
    """
    runs = [len(list(run)) for _, run in itertools.groupby(program.calls[first:stop], key=lambda call: call.region)]
    for length, at_end in ((runs[0], False), (runs[-1], True)):
        if (more := length - _REPEATED) > 0:
            if at_end or len(runs) == 1:
                return ((first, stop - more), (first, stop - more - 1)), more
            return ((first + more, stop), (first + more + 1, stop)), more
    return ((first, stop), (first, stop)), 0


@dataclass(frozen=True, slots=True)
class Moving:
    """What a lowering does with parameters.

    moves: [calls] of each field of `CallMoves`; own: [calls] of each field of `ParameterCost`, of parameters that one
    call uses; shared: of the others, each with [calls] whether a call uses it.
    """

    program: Program
    times: Mapping[str, CallTime]
    moves: Mapping[str, Numbers]
    own: Mapping[str, Numbers]
    shared: Sequence[tuple[ParameterCost, NDArray[np.bool_]]]

    @staticmethod
    def of(program: Program) -> Moving:
        calls = program.calls
        moved = {region.name: moves_of_call(program, region) for region in program.regions}
        times = {region.name: transfer_times(program, region) for region in program.regions}
        costs = parameter_costs(program)
        many = shared_names(program)
        alone = [[costs[name] for name in dict.fromkeys(call.slots) if name not in many] for call in calls]
        return Moving(
            program,
            times,
            {f: np.array([getattr(moved[c.region], f) for c in calls]) for f in CallMoves.__slots__},
            {f: np.array([sum(getattr(each, f) for each in own) for own in alone]) for f in ParameterCost.__slots__},
            [(costs[name], np.array([name in call.slots for call in calls])) for name in sorted(many & costs.keys())],
        )

    @property
    def update_s(self) -> float:
        """Of the optimizer, where one rank has all parameters."""
        assert self.program.mesh is not None
        return self.whole("update_s") + self.program.mesh.hardware.launch_overhead_s

    def whole(self, name: str) -> float:
        """A field of `ParameterCost`, of all parameters."""
        everything = np.ones((1, len(self.program.calls)), dtype=np.bool_)
        return float(self.parameters(everything, name)[0])

    def parameters(self, members: NDArray[np.bool_], name: str) -> Numbers:
        """[stages]: a field of `ParameterCost`, of the parameters that a stage uses. members: [stages, calls]."""
        total = members @ self.own[name]
        for cost, users in self.shared:
            total = total + getattr(cost, name) * (members & users).any(1)
        return total


@dataclass(frozen=True, slots=True)
class Cut:
    """Where calls are cut. members: [stages, calls]."""

    stages: tuple[Stage, ...]
    bounds: tuple[tuple[int, int], ...]
    members: NDArray[np.bool_]

    @staticmethod
    def of(program: Program, seconds: Numbers, num: int) -> Cut:
        """The most even cut."""
        cut = best_cut(list(seconds), num)
        bounds = tuple(ranges(cut, len(seconds)))
        places = np.arange(len(seconds))
        members = np.array([(first <= places) & (places < stop) for first, stop in bounds])
        return Cut(boundaries(program, cut), bounds, members)


def seconds_of_calls(own: Computing, moving: Moving) -> tuple[Numbers, Numbers]:
    """[calls]: forward, backward, gathers beside the call before."""
    forward = np.maximum(own.own["forward"], moving.moves["gather_s"])
    return forward, np.maximum(own.own["backward"] + moving.moves["add_s"], moving.moves["again_s"])


def stages_of(own: Computing, moving: Moving, cut: Cut, num_ranks: int) -> Stages:
    """What the ranks take; stages go round them. As `passes.stages.costs.stage_cost` has it, but for what is gathered:
    that counts as if it came when a stage holds most.
    """
    members, firsts = cut.members, np.array([first for first, _ in cut.bounds])
    lasts = np.array([stop - 1 for _, stop in cut.bounds])
    moves, has_halves = moving.moves, own.has_halves
    forward, backward = seconds_of_calls(own, moving)
    last_s = np.minimum(own.own["backward"] + moves["add_s"], moves["again_s"])[lasts]
    again_s = moving.parameters(members, "backward_s")
    reading = np.array([call.region in own.costs.reading_weights for call in own.program.calls])
    weight = own.own[WEIGHT_HALF] + moves["add_s"] * has_halves
    halves = [np.maximum(each, moves["again_s"] * has_halves) for each in (own.own[INPUT_HALF], weight)]
    halves[1] = np.where(reading, halves[1], weight)
    holding = own.holding(cut.bounds)
    gathered = moving.parameters(members, "gathered_bytes")
    working = np.maximum(
        holding[:, 1] + _in_flight(moves["forward_gathered"], members),
        holding[:, 2] + _in_flight(moves["backward_gathered"], members),
    )
    once = members @ (moves["unshard_s"] + moves["reduce_s"])
    once += moving.parameters(members, "unshard_s") + moving.parameters(members, "reduce_s")
    static = moving.parameters(members, "static_bytes") + moving.parameters(members, "held_bytes")
    first_s = np.minimum(own.own["forward"], moves["gather_s"])[firsts]
    return Stages(
        forward_s=_by_rank(members @ forward + moving.parameters(members, "forward_s") + first_s, num_ranks),
        backward_s=_by_rank(members @ backward + again_s + last_s, num_ranks),
        input_s=_by_rank(members @ halves[0] + (again_s + last_s) * has_halves, num_ranks),
        weight_s=_by_rank(members @ halves[1] + again_s * (members & reading).any(1) * has_halves, num_ranks),
        once_s=float(_by_rank(once, num_ranks).max()),
        optimizer_s=float(_by_rank(moving.parameters(members, "update_s"), num_ranks).max()),
        sent_bytes=max(sum(own.costs.value_bytes[ref] for ref in stage.sends) for stage in cut.stages),
        static_bytes=_by_rank(static, num_ranks),
        saved_bytes=_by_rank(holding[:, 0], num_ranks),
        halved_bytes=_by_rank(holding[:, 3], num_ranks),
        working_bytes=np.max((working + gathered).reshape(-1, num_ranks), axis=0),
    )


def _by_rank(each: Numbers, num_ranks: int) -> Numbers:
    return np.asarray(each.reshape(-1, num_ranks).sum(axis=0))


def _in_flight(gathered: Numbers, members: NDArray[np.bool_]) -> Numbers:
    """[stages]: what a stage gathers for one call and the next, at most."""
    own = np.where(members, gathered, 0.0)
    return np.asarray((own + np.pad(own[:, 1:], ((0, 0), (0, 1)))).max(axis=1))
