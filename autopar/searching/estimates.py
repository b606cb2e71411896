"""What the points of a search take: one trace, a placement for each family of strategies, the rest by substitution.

Operators' strategies are factors, not sizes: what was placed on one mesh is lowered again on another by putting the
other's sizes in. So a model is traced once, for the rows of one microbatch, and a rank's rows follow from the size of
the data axis that is put in: 4 traced rows over dp=2 are what 128 rows over dp=64 are, to every operator. What is moved
of parameters does not depend on rows, and is read off the same placement with the data axis as large as it is.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.call_times import call_time, transfer_times
from autopar.errors import AutoparError
from autopar.estimate import update_seconds
from autopar.hardware import Link
from autopar.ir import Mode, ParameterLayout, Program, Stage
from autopar.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.place import try_place
from autopar.passes.stages.boundaries import boundaries
from autopar.passes.stages.costs import (
    CallCost,
    CallCosts,
    CallMoves,
    ParameterCost,
    moves_of_call,
    parameter_costs,
    seconds_of_calls,
    stage_cost,
)
from autopar.passes.stages.cut import best_cut
from autopar.pipelining.costs import StageCost
from autopar.searching.candidate import Point
from autopar.searching.cluster import Cluster
from autopar.sharding import REPLICATE, Shard, Sharding
from autopar.step_time import CallTime, step_seconds
from autopar.strategies import AxisStrategy, resolve

logger = logging.getLogger("autopar.search")
_REFERENCE = {"dp": 2, "cp": 2, "tp": 2}
"""The mesh on which a family is placed: any that its rows, tokens and heads divide."""


@dataclass(frozen=True, slots=True)
class Family:
    """What decides a placement, whatever the sizes of the axes. context, tensor: "" where there is no such axis."""

    data: str
    context: str
    tensor: str
    rematerialize: Mode

    @property
    def axes(self) -> tuple[str, ...]:
        return ("dp", *["cp"] * bool(self.context), *["tp"] * bool(self.tensor))

    def strategies(self, mesh: Mesh) -> tuple[AxisStrategy, ...]:
        named = {"dp": self.data, "cp": self.context, "tp": self.tensor}
        return resolve({axis: named[axis] for axis in self.axes}, mesh)


@dataclass(frozen=True, slots=True)
class Stages:
    """What the ranks of a pipeline take: by rank, forward, backward, its input and its weight half, of one microbatch,
    and bytes; the rest as in `formulas`.
    """

    forward_s: tuple[float, ...]
    backward_s: tuple[float, ...]
    input_s: tuple[float, ...]
    weight_s: tuple[float, ...]
    once_s: float
    optimizer_s: float
    send_s: float
    static_bytes: tuple[float, ...]
    saved_bytes: tuple[float, ...]
    working_bytes: tuple[float, ...]


@dataclass
class Estimator:
    """Costs of one model on one cluster. rows: of one traced microbatch."""

    request: pipeline.Request
    steps: tuple[pipeline.Pass, ...]
    traced: Program
    cluster: Cluster
    rows: int
    placed: dict[Family, Program | None] = field(default_factory=dict)
    annotated: dict[tuple[object, ...], Program] = field(default_factory=dict)
    computed: dict[tuple[object, ...], _Computing | None] = field(default_factory=dict)
    moved: dict[tuple[object, ...], _Moving | None] = field(default_factory=dict)
    programs: dict[Family, Program | None] = field(default_factory=dict)
    splits: dict[Family, frozenset[Split]] = field(default_factory=dict)
    staged: dict[tuple[object, ...], Stages | None] = field(default_factory=dict)
    cuts: dict[tuple[object, ...], tuple[Stage, ...]] = field(default_factory=dict)

    # -- placements

    def placement(self, family: Family) -> Program | None:
        """The placed program of a family; None where its strategies cannot be had."""
        if family not in self.placed:
            self.placed[family] = self._place(family)
        return self.placed[family]

    def _place(self, family: Family) -> Program | None:
        mesh = self.cluster.mesh({axis: _REFERENCE[axis] for axis in family.axes})
        try:
            strategies = family.strategies(mesh)
            request = replace(self.request, mesh=mesh, strategies=strategies, rematerialize=family.rematerialize)
            key = (family.rematerialize, mesh.axes, request.prepared)
            if key not in self.annotated:
                names = [step.name for step in self.steps]
                steps = self.steps[names.index("rematerialize") : names.index("place")]
                self.annotated[key] = pipeline.run(request, steps, program=self.traced)[0]
            return try_place(self.annotated[key], strategies=strategies, memory_limit_bytes=None)
        except AutoparError as error:
            logger.info("%s cannot be had: %s", family, error)
            return None

    def lowered(self, family: Family) -> Program | None:
        """A family's program on the reference mesh, lowered."""
        if family not in self.programs:
            placed = self.placement(family)
            if placed is not None:
                assert placed.mesh is not None
                program = insert_collectives(placed, halves=True)
                placed = overlap(program, strategies=family.strategies(placed.mesh))
            self.programs[family] = placed
        return self.programs[family]

    def on(self, family: Family, mesh: Mesh, *, rows: bool = True) -> Program | None:
        """A family's program on another mesh; None where that does not divide what its axes split. rows: whether the
        traced rows are a microbatch's, and count.
        """
        program = self.lowered(family)
        if program is None:
            return None
        if family not in self.splits:
            self.splits[family] = frozenset(_splits(program))
        for size, axes, stripes, is_parameter in self.splits[family]:
            if is_parameter and 0 in axes:
                continue  # `_in_pieces` looks for another dim
            counted = [axis for axis in axes if rows or axis != 0]
            if size % (stripes * math.prod(mesh.sizes[axis] for axis in counted)):
                return None
        return replace(program, mesh=mesh)

    # -- costs

    def computing(self, point: Point) -> _Computing | None:
        """Seconds and activations of the calls, whatever becomes of parameters."""
        key = (point.context, point.tensor, point.rematerialize, point.cp, point.tp, point.rows)
        if key not in self.computed:
            family = Family("ddp", point.context, point.tensor, point.rematerialize)
            sizes = {"dp": self.rows // point.rows, "cp": point.cp, "tp": point.tp}
            program = self.on(family, self.cluster.mesh({axis: sizes[axis] for axis in family.axes}))
            self.computed[key] = _Computing.of(program) if program is not None else None
        return self.computed[key]

    def moving(self, point: Point) -> _Moving | None:
        """What becomes of parameters: their gathers, reductions and bytes."""
        key = (point.data, point.context, point.tensor, point.dp, point.cp, point.tp, point.pp, point.microbatches > 1)
        if key not in self.moved:
            family = Family(point.data, point.context, point.tensor, "none")
            whole = self.cluster.mesh({"pp": point.pp, "dp": point.dp, "cp": point.cp, "tp": point.tp})
            own = Mesh([(axis, getattr(point, axis)) for axis in family.axes], hardware=self.cluster.hardware)
            object.__setattr__(own, "whole", whole)
            program = self.on(family, own, rows=False)
            if program is not None:
                program = _in_pieces(program, own)
                program = replace(program, microbatches=2 if point.microbatches > 1 else 1)
                program = overlap(program, strategies=family.strategies(own))
            self.moved[key] = None if program is None else _Moving.of(program)
        return self.moved[key]

    def stages(self, point: Point) -> Stages | None:
        """The stages of a point's pipeline, cut where it balances; whatever the schedule."""
        moves, own = self.moving(point), self.computing(point)
        if moves is None or own is None:
            return None
        key = (id(moves), id(own), point.pp, point.stages_per_rank)
        if key not in self.staged:
            self.staged[key] = self._stages(point, moves, own)
        return self.staged[key]

    def _stages(self, point: Point, moves: _Moving, own: _Computing) -> Stages | None:
        program, costs = moves.program, _Merged(own.costs, moves)
        num = point.pp * point.stages_per_rank
        if num > len(program.calls):
            return None
        seconds = seconds_of_calls(program, costs)
        key = (num, tuple(f"{each / sum(seconds):.4e}" for each in seconds))
        if key not in self.cuts:
            self.cuts[key] = boundaries(program, best_cut(seconds, num))
        known: dict[tuple[object, ...], StageCost] = {}
        each = []
        for number, stage in enumerate(self.cuts[key]):
            # In the middle of a model, stages that run the same blocks are alike.
            kind = (tuple(program.calls[n].region for n in stage.calls), number == 0, number == num - 1)
            if kind not in known:
                known[kind] = stage_cost(program, stage, costs)
            each.append(known[kind])
        ranks = [each[rank :: point.pp] for rank in range(point.pp)]

        def by_rank(name: str) -> tuple[float, ...]:
            return tuple(sum(getattr(cost, name) for cost in stages) for stages in ranks)

        return Stages(
            forward_s=by_rank("forward_s"),
            backward_s=by_rank("backward_s"),
            input_s=by_rank("input_s"),
            weight_s=by_rank("weight_s"),
            once_s=max(map(sum, zip(by_rank("unshard_s"), by_rank("reduce_s"), strict=True))),
            optimizer_s=max(by_rank("update_s")),
            send_s=self._send_seconds(point, each),
            static_bytes=tuple(map(sum, zip(by_rank("static_bytes"), by_rank("held_bytes"), strict=True))),
            saved_bytes=by_rank("saved_bytes"),
            working_bytes=tuple(max(max(c.forward_working_bytes, c.backward_working_bytes) for c in r) for r in ranks),
        )

    def alone_seconds(self, point: Point) -> float | None:
        """A step without a pipeline, gathers and reductions beside the compute."""
        moves, own = self.moving(point), self.computing(point)
        if moves is None or own is None:
            return None
        times = {}
        for name, time in own.times.items():
            other = moves.times[name]
            times[name] = replace(time, once=other.once, gather=other.gather, again=other.again, reduce=other.reduce)
        program = moves.program
        calls = [times[call.region] for call in program.calls]
        seconds = step_seconds(
            calls, microbatches=point.microbatches, prefetch=True, at_end=False, training=program.training
        )
        return seconds + moves.update_s

    def reduced_bytes(self, point: Point) -> float:
        """What a step of one microbatch, without a pipeline, holds less than `stages` says: a block's gradients are
        reduced when its backward is through, so that only one block's wait unreduced.
        """
        moves = self.moving(point)
        if moves is None or point.microbatches > 1 or point.pp > 1:
            return 0.0
        waiting = {name: each.unreduced_bytes for name, each in moves.parameters.items()}
        largest = max(sum(waiting[name] for name in dict.fromkeys(call.slots)) for call in moves.program.calls)
        return sum(waiting.values()) - largest

    def contexts(self, point: Point) -> tuple[str, ...]:
        """The ways to split the sequence, the fastest first, as they are without tensor parallelism."""
        found = []
        for context in CONTEXTS:
            own = self.computing(replace(point, context=context, tensor="", tp=1, rematerialize="none"))
            if own is not None:
                seconds = (own.times[c.region].forward_s + own.times[c.region].backward_s for c in self.traced.calls)
                found.append((sum(seconds), context))
        return tuple(context for _, context in sorted(found))

    def _send_seconds(self, point: Point, costs: Sequence[StageCost]) -> float:
        if point.pp == 1:
            return 0.0
        link: Link = self.cluster.mesh({"pp": point.pp, "rest": self.cluster.num_devices // point.pp}).link("pp")
        size = max(cost.forward_bytes for cost in costs)
        return link.latency_s + size / (link.wire_bandwidth_bytes_per_s or link.bandwidth_bytes_per_s)


CONTEXTS = ("ring", "ulysses", "allgather_kv")


@dataclass(frozen=True, slots=True)
class _Computing:
    """The calls of one lowering: with the activations that they hold, and as steps without a pipeline take them."""

    costs: CallCosts
    times: Mapping[str, CallTime]

    @staticmethod
    def of(program: Program) -> _Computing:
        return _Computing(CallCosts(program), {region.name: call_time(program, region) for region in program.regions})


@dataclass(frozen=True, slots=True)
class _Moving:
    """What a lowering does with parameters; update_s: of the optimizer, where one rank has all of them."""

    program: Program
    moves: Mapping[str, CallMoves]
    parameters: Mapping[str, ParameterCost]
    times: Mapping[str, CallTime]
    update_s: float

    @staticmethod
    def of(program: Program) -> _Moving:
        moves = {region.name: moves_of_call(program, region) for region in program.regions}
        times = {region.name: transfer_times(program, region) for region in program.regions}
        return _Moving(program, moves, parameter_costs(program), times, update_seconds(program))


def _in_pieces(program: Program, mesh: Mesh) -> Program:
    """The program with parameters that the first axis stores in pieces cut along a dim that its size divides: the first
    that does; whole where none is.
    """
    assert program.placement is not None
    variables = {variable.name: variable for variable in program.variables}

    def cut(name: str, layout: ParameterLayout) -> ParameterLayout:
        if not isinstance(layout.stored[0], Shard):
            return layout
        shape = variables[name].seen.shape
        others = [
            math.prod(
                mesh.sizes[a] for a, each in enumerate(layout.stored) if a and isinstance(each, Shard) and each.dim == d
            )
            for d in range(len(shape))
        ]
        dims = [d for d, size in enumerate(shape) if size % (others[d] * mesh.sizes[0]) == 0]
        if layout.stored[0].dim in dims:
            return layout
        piece = Shard(dims[0]) if dims else REPLICATE
        held = piece if isinstance(layout.held[0], Shard) else layout.held[0]
        compute = piece if isinstance(layout.compute[0], Shard) else layout.compute[0]
        return replace(
            layout,
            stored=(piece, *layout.stored[1:]),
            held=(held, *layout.held[1:]),
            compute=(compute, *layout.compute[1:]),
        )

    parameters = {name: cut(name, layout) for name, layout in program.placement.parameters.items()}
    return replace(program, placement=replace(program.placement, parameters=parameters))


Split = tuple[int, tuple[int, ...], int, bool]
"""A dim that axes split: its size, the axes, stripes, and whether it is a parameter's."""


def _splits(program: Program) -> Iterator[Split]:
    def of(shape: Sequence[int], sharding: Sharding, is_parameter: bool) -> Iterator[Split]:
        split = [(axis, each) for axis, each in enumerate(sharding) if isinstance(each, Shard)]
        for dim in {each.dim for _, each in split}:
            own = [(axis, each) for axis, each in split if each.dim == dim]
            stripes = math.prod(2 if each.zigzag else 1 for _, each in own)
            yield shape[dim], tuple(axis for axis, _ in own), stripes, is_parameter

    assert program.placement is not None
    for region in program.regions:
        for name, strategy in region.strategies.items():
            call, _ = region.ops[name]
            for specs, layouts in ((call.operands, strategy.operands), (call.results, strategy.results)):
                for spec, layout in zip(specs, layouts, strict=True):
                    if spec is not None and layout is not None:
                        yield from of(spec.shape, layout, False)
    for variable in program.variables:
        if (found := program.placement.parameters.get(variable.name)) is not None:
            for sharding in (found.stored, found.compute, found.gradient):
                yield from of(variable.seen.shape, sharding, True)


class _Merged(CallCosts):
    """The computing of one lowering with the parameters of another."""

    def __init__(self, own: CallCosts, moving: _Moving) -> None:
        self.__dict__.update(own.__dict__)
        self._calls = {name: _merged(own[name], moving.moves[name]) for name in own}
        self.parameters = dict(moving.parameters)
        calls = moving.program.calls
        self.static_of_call = [sum(self.parameters[name].static_bytes for name in call.slots) for call in calls]
        self.stages = {}


def _merged(own: CallCost, moves: CallMoves) -> CallCost:
    return replace(
        own,
        forward_s=max(own.forward_s, moves.gather_s),
        backward_s=max(own.backward_s, moves.again_s),
        first_s=min(own.forward_s, moves.gather_s),
        last_s=min(own.backward_s, moves.again_s),
        gather_s=moves.gather_s,
        again_s=moves.again_s,
        unshard_s=moves.unshard_s,
        reduce_s=moves.reduce_s,
        forward_gathered=moves.forward_gathered,
        backward_gathered=moves.backward_gathered,
    )
