"""The stages of a pipeline's points: where the calls are cut, and what the ranks take and hold.

What calls compute and hold comes from one lowering, what becomes of parameters from another. Seconds and parameters add
up over calls; what a stage's activations take is worked out once for stages that run the same blocks, and of long rows
of one block from short ones, to which each block more adds the same.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields

import numpy as np
from numpy.typing import NDArray

from autopar.cost.call_times import call_time, transfer_times
from autopar.cost.memory.boundaries import boundaries
from autopar.cost.memory.buckets import shared_names
from autopar.cost.memory.calls import (
    CallCosts,
    CallMoves,
    ParameterCost,
    hidden_part,
    moves_of_call,
    parameter_costs,
    stage_of_range,
)
from autopar.cost.memory.stages import StageMemory
from autopar.cost.step_time import CallTime
from autopar.ir.halves import INPUT_HALF, WEIGHT_HALF
from autopar.ir.program import Program
from autopar.ir.region import Call
from autopar.ir.stages import Stage
from autopar.strategies.pipelining.cut import best_cut, ranges

Numbers = NDArray[np.float64]
_NOTHING = CallMoves(0.0, 0.0, 0.0, 0.0, 0.0, 0.0)
_FIELDS = tuple(each.name for each in fields(ParameterCost))
_REPEATED = 3
"""Of how many equal blocks in a row the activations are worked out; each further one adds what the last one did."""


@dataclass(frozen=True, slots=True)
class Stages:
    """What the ranks of a pipeline take: by rank, forward, backward, its input and its weight half, of one microbatch,
    and bytes; the rest as in `formulas`. filling_s, stall_s: as of `uneven`. sent_bytes:
    to the next stage, at most. halved_bytes: what the input half leaves of `saved_bytes`, and for the weight half.
    """

    forward_s: Numbers
    backward_s: Numbers
    input_s: Numbers
    weight_s: Numbers
    filling_s: float
    stall_s: float
    once_s: float
    optimizer_s: float
    sent_bytes: float
    static_bytes: Numbers
    saved_bytes: Numbers
    halved_bytes: Numbers
    working_bytes: Numbers
    halving_bytes: Numbers


@dataclass(frozen=True)
class Computing:
    """The calls of one lowering: what they compute and hold.

    own: phase -> [calls] seconds. held: of rows of blocks, bytes, as of `holding`.
    """

    program: Program
    costs: CallCosts
    own: Mapping[str, Numbers]
    held: dict[tuple[object, ...], Numbers] = field(default_factory=dict)

    @staticmethod
    def of(program: Program) -> Computing:
        costs = CallCosts(program, {region.name: _NOTHING for region in program.regions})
        phases = ("forward", "backward", INPUT_HALF, WEIGHT_HALF)
        own = {phase: np.array([costs[call.region].own[phase] for call in program.calls]) for phase in phases}
        return Computing(program, costs, own)

    @functools.cached_property
    def times(self) -> Mapping[str, CallTime]:
        """The calls, as steps without a pipeline take them."""
        return {region.name: call_time(self.program, region) for region in self.program.regions}

    @functools.cached_property
    def total_s(self) -> float:
        """Of all calls, forward and backward."""
        return float(self.own["forward"].sum() + self.own["backward"].sum())

    @functools.cached_property
    def saved_bytes(self) -> float:
        """Activations of one microbatch, of all calls, in two stages."""
        num = len(self.program.calls)
        parts = ((0, num // 2), (num // 2, num)) if num > 1 else ((0, num),)
        return float(self.holding(parts)[:, 0].sum())

    @functools.cached_property
    def has_halves(self) -> bool:
        return bool(self.own[INPUT_HALF].any() or self.own[WEIGHT_HALF].any())

    @property
    def output_bytes(self) -> float:
        """Of the model's outputs, of one microbatch: whoever trains has them until the step's end."""
        return sum(self.costs.value_bytes[ref] for ref in self.program.outputs if ref.call >= 0)

    @functools.cached_property
    def reads_weights(self) -> NDArray[np.bool_]:
        """[calls]: whether a call's weight half reads parameters."""
        return np.array([call.region in self.costs.reading_weights for call in self.program.calls])

    def holding(self, bounds: tuple[tuple[int, int], ...]) -> Numbers:
        """[stages, 5]: bytes of the activations of a stage: saved, beside that in the forward, beside that in the
        backward, what the input half leaves, and what of that it makes.

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
                    stage.kept_bytes,
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


@dataclass(frozen=True)
class Moving:
    """What a lowering does with parameters.

    moves: [calls] of each field of `CallMoves`; own: [calls, fields of `ParameterCost`] of parameters that one call
    uses; shared: of the others, each with [calls] whether a call uses it.
    """

    program: Program
    moves: Mapping[str, Numbers]
    own: Numbers
    shared: Sequence[tuple[Numbers, NDArray[np.bool_]]]

    @staticmethod
    def of(program: Program) -> Moving:
        calls = program.calls
        moved = {region.name: moves_of_call(program, region) for region in program.regions}
        costs = parameter_costs(program)
        many = shared_names(program)
        sums: dict[tuple[int, ...], Numbers] = {}

        def sum_of(call: Call) -> Numbers:
            own = [costs[name] for name in dict.fromkeys(call.slots) if name not in many]
            key = tuple(map(id, own))  # parameters that lie alike share their costs
            if key not in sums:
                sums[key] = np.sum([_values(each) for each in own], axis=0) if own else np.zeros(len(_FIELDS))
            return sums[key]

        return Moving(
            program,
            {f: np.array([getattr(moved[c.region], f) for c in calls]) for f in CallMoves.__slots__},
            np.array([sum_of(call) for call in calls]),
            [
                (_values(costs[name]), np.array([name in c.slots for c in calls]))
                for name in sorted(many & costs.keys())
            ],
        )

    @functools.cached_property
    def times(self) -> Mapping[str, CallTime]:
        """What the calls move, as steps without a pipeline do."""
        return {region.name: transfer_times(self.program, region) for region in self.program.regions}

    @functools.cached_property
    def whole(self) -> Mapping[str, float]:
        """The fields of `ParameterCost`, of all parameters."""
        everything = np.ones((1, len(self.program.calls)), dtype=np.bool_)
        return {name: float(each[0]) for name, each in self.parameters(everything).items()}

    @property
    def largest_gradient_bytes(self) -> float:
        """Of one call, as its backward makes it."""
        return float(self.own[:, _FIELDS.index("raw_bytes")].max())

    @property
    def update_s(self) -> float:
        """Of the optimizer, where one rank has all parameters."""
        return self.whole["update_s"] + self.program.on_mesh.hardware.launch_overhead_s

    @functools.cached_property
    def hidden_part(self) -> float:
        return hidden_part(self.program)

    def beside(self, computing: Numbers, gathering: Numbers) -> Numbers:
        """Seconds of calls with gathers beside them, as of `CallCost`."""
        both = np.minimum(computing, gathering)
        return np.asarray(np.maximum(computing, gathering) + (1.0 - self.hidden_part) * both)

    def parameters(self, members: NDArray[np.bool_]) -> Mapping[str, Numbers]:
        """Field of `ParameterCost` -> [stages], of the parameters that a stage uses. members: [stages, calls]."""
        total = members.astype(np.float64) @ self.own
        for cost, users in self.shared:
            total += np.outer((members & users).any(1), cost)
        return dict(zip(_FIELDS, total.T, strict=True))


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


def _values(cost: ParameterCost) -> Numbers:
    return np.array([getattr(cost, name) for name in _FIELDS])


def seconds_of_calls(own: Computing, moving: Moving) -> tuple[Numbers, Numbers]:
    """[calls]: forward, backward, gathers beside the call before."""
    moves = moving.moves
    backward = moving.beside(own.own["backward"] + moves["add_s"], moves["again_s"])
    return moving.beside(own.own["forward"], moves["gather_s"]), backward


def stages_of(own: Computing, moving: Moving, cut: Cut, num_ranks: int, *, back: bool = False) -> Stages:
    """What the ranks take; stages go round them, or there and `back`. As `passes.stages.costs.stage_cost` has it, but
    for what is gathered: that counts as if it came when a stage holds most.
    """
    members, firsts = cut.members, np.array([first for first, _ in cut.bounds])
    lasts = np.array([stop - 1 for _, stop in cut.bounds])
    moves, has_halves, counted = moving.moves, own.has_halves, cut.members.astype(np.float64)
    parameters = moving.parameters(members)
    forward, backward = seconds_of_calls(own, moving)
    first_s = moving.hidden_part * np.minimum(own.own["forward"], moves["gather_s"])[firsts]
    last_s = moving.hidden_part * np.minimum(own.own["backward"] + moves["add_s"], moves["again_s"])[lasts]
    weight = own.own[WEIGHT_HALF] + moves["add_s"] * has_halves
    halves = [moving.beside(each, moves["again_s"] * has_halves) for each in (own.own[INPUT_HALF], weight)]
    halves[1] = np.where(own.reads_weights, halves[1], weight)
    reading = (members & own.reads_weights).any(1) * has_halves
    forward_s = counted @ forward + parameters["forward_s"] + first_s
    backward_s = counted @ backward + parameters["backward_s"] + last_s
    once = counted @ (moves["unshard_s"] + moves["reduce_s"]) + parameters["unshard_s"] + parameters["reduce_s"]
    holding = own.holding(cut.bounds)
    gathered = parameters["gathered_bytes"]
    in_forward = holding[:, 1] + _in_flight(moves["forward_gathered"], members) + gathered
    in_backward = holding[:, 2] + _in_flight(moves["backward_gathered"], members) + gathered

    def fullest(each: Numbers) -> Numbers:
        return np.asarray(_rows(each, num_ranks, back).max(axis=0))

    def by_rank(each: Numbers) -> Numbers:
        rows = _rows(each, num_ranks, back)
        return np.asarray(rows.sum(axis=0))

    filling_s, stall_s = uneven(_rows(forward_s + backward_s, num_ranks, back))
    return Stages(
        forward_s=by_rank(forward_s),
        backward_s=by_rank(backward_s),
        input_s=by_rank(counted @ halves[0] + (parameters["backward_s"] + last_s) * has_halves),
        weight_s=by_rank(counted @ halves[1] + parameters["backward_s"] * reading),
        filling_s=filling_s,
        stall_s=stall_s,
        once_s=float(by_rank(once).max()),
        optimizer_s=float(by_rank(parameters["update_s"]).max()),
        sent_bytes=max(sum(own.costs.value_bytes[ref] for ref in stage.sends) for stage in cut.stages),
        static_bytes=by_rank(parameters["static_bytes"] + parameters["held_bytes"]),
        saved_bytes=by_rank(holding[:, 0]),
        halved_bytes=by_rank(holding[:, 3]),
        working_bytes=fullest(np.maximum(in_forward, in_backward)),
        halving_bytes=fullest(in_backward + holding[:, 4]),
    )


def _rows(each: Numbers, num_ranks: int, back: bool) -> Numbers:
    """[stages a rank, ranks] of what is given by stage."""
    rows = each.reshape(-1, num_ranks)
    return np.stack([rows[0], rows[1, ::-1]]) if back else rows


def uneven(seconds: Numbers) -> tuple[float, float]:
    """What interleaved stages take beside the work of the slowest rank: to fill and drain the pipeline, and how long a
    round of microbatches, one for each rank, stands still. seconds: [turns, ranks] of the stages, which go round.

    It is what simulated schedules take (tests/unit/searching). Where stages of one turn are longer than those of
    another, ranks in different turns wait for each other: p - 1 times the difference, less one stage, and less what
    ranks have to spare beside the slowest one.
    """
    turns, ranks = seconds.max(axis=1), seconds.sum(axis=0)
    others = len(ranks) - 1
    apart = others * (turns.max() - turns.min()) - turns.max()
    stall = max(0.0, float(apart - len(ranks) * (ranks.max() - ranks.mean())))
    return others * float(turns.max() if stall else ranks.max() / len(turns)), stall


def _in_flight(gathered: Numbers, members: NDArray[np.bool_]) -> Numbers:
    """[stages]: what a stage gathers for one call and the next, at most."""
    if not gathered.any():
        return np.zeros(len(members))
    own = np.where(members, gathered, 0.0)
    return np.asarray((own + np.pad(own[:, 1:], ((0, 0), (0, 1)))).max(axis=1))
