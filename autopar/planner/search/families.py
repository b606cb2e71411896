"""A placement for each family of strategies, on a small mesh, and the program that it is on any other.

Operators' strategies are factors, not sizes: what was placed on one mesh is lowered again on another by putting the
other's sizes in. All families are placed with `ddp` over data; what other data strategies make of one is a rule
(`searching/layouts.py`).
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.ir.program import Mode, Program
from autopar.ir.sharding import Shard, Sharding
from autopar.machine.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.interleave import interleave
from autopar.passes.overlap import overlap
from autopar.passes.place import try_place
from autopar.passes.placement.narrow import narrowed
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.layouts import with_data_axes
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import resolve
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar.search")
_REFERENCE = {"ep": 2, "cp": 2, "tp": 2}
"""The mesh on which a family is placed, beside dp, which has a rank for each row: else other axes might split rows."""


@dataclass(frozen=True, slots=True)
class Family:
    """What decides a placement, whatever the sizes of the axes. context, tensor: "" where there is no such axis.
    exchanges: whether an axis inside of dp has experts, to which tokens go.
    """

    context: str
    tensor: str
    rematerialize: Mode
    exchanges: bool = False

    @property
    def axes(self) -> tuple[str, ...]:
        return ("dp", *["ep"] * self.exchanges, *["cp"] * bool(self.context), *["tp"] * bool(self.tensor))

    def strategies(self, mesh: Mesh) -> tuple[AxisStrategy, ...]:
        named = {"dp": "ddp", "ep": "expert", "cp": self.context, "tp": self.tensor}
        return resolve({axis: named[axis] for axis in self.axes}, mesh)


@dataclass
class Families:
    """The placements of one traced model on one cluster. rows: that were traced."""

    request: Attempt
    steps: tuple[pipeline.Pass, ...]
    traced: Program
    cluster: Cluster
    rows: int
    placed: dict[Family, Program | None] = field(default_factory=dict)
    annotated: dict[tuple[object, ...], Program] = field(default_factory=dict)
    programs: dict[Family, Program | None] = field(default_factory=dict)
    splits: dict[Family, frozenset[Split]] = field(default_factory=dict)

    def placement(self, family: Family) -> Program | None:
        """The placed program of a family; None where its strategies cannot be had."""
        if family not in self.placed:
            self.placed[family] = self._place(family)
        return self.placed[family]

    def _place(self, family: Family) -> Program | None:
        sizes = {"dp": self.rows // (_REFERENCE["ep"] if family.exchanges else 1), **_REFERENCE}
        mesh = self.cluster.mesh({axis: sizes[axis] for axis in family.axes})
        try:
            strategies = family.strategies(mesh)
            program = self._annotated(family, mesh, strategies)
            for models in self._alike(family):
                own = functools.reduce(narrowed, models, program)
                if (found := try_place(own, strategies=strategies, memory_limit_bytes=None)) is not None:
                    return found
        except AutoparError as error:
            logger.info("%s cannot be had: %s", family, error)
        return None

    def _alike(self, family: Family) -> Iterator[list[Program]]:
        """Placements that decide most of a family's, the most first, none last: recomputing leaves the rest as it is;
        what the data axis does, and tensor parallelism, they do beside the other axes too.
        """
        own = Family("", "", "none", family.exchanges)
        if family.rematerialize != "none":
            models = [replace(family, rematerialize="none")]
        else:
            models = [each for each in (own, replace(own, tensor=family.tensor)) if each != family]
        for num in (len(models), 1, 0) if len(models) > 1 else (len(models), 0) if models else (0,):
            found = [self.placement(each) for each in models[:num]]
            yield [each for each in found if each is not None]

    def _annotated(self, family: Family, mesh: Mesh, strategies: tuple[AxisStrategy, ...]) -> Program:
        request = replace(self.request, mesh=mesh, strategies=strategies, rematerialize=family.rematerialize)
        key = (family.rematerialize, mesh.axes, request.prepared)
        if key not in self.annotated:
            steps = pipeline.Phases.of(self.steps).prepare
            self.annotated[key] = pipeline.run(request, steps, program=self.traced)[0]
        return self.annotated[key]

    def lowered(self, family: Family) -> Program | None:
        """A family's program on the reference mesh, lowered."""
        if family not in self.programs:
            placed = self.placement(family)
            if placed is not None:
                program = insert_collectives(placed, halves=True)
                placed = overlap(_asked_first(program), strategies=family.strategies(placed.on_mesh))
            self.programs[family] = placed
        return self.programs[family]

    def on(self, family: Family, mesh: Mesh) -> Program | None:
        """A family's program on another mesh, exchanges beside what may run there; None where that does not divide what
        its axes split.
        """
        program = self.lowered(family)
        if program is None:
            return None
        if family not in self.splits:
            self.splits[family] = frozenset(splits_of(program))
        for size, axes, stripes in self.splits[family]:
            if size % (stripes * math.prod(mesh.sizes[axis] for axis in axes)):
                return None
        return interleave(replace(program, mesh=mesh))

    def moving(self, family: Family, mesh: Mesh, data: Mapping[str, str], microbatches: int) -> Program | None:
        """A family's program as these data axes, the first of `mesh`, store its parameters: for what it moves of them.

        data: what they do, by name. microbatches: of a step; the traced rows need not be those of one.
        """
        program = self.lowered(family)
        if program is None:
            return None
        others = {"cp": family.context, "tp": family.tensor}
        strategies = resolve({**data, **{axis: name for axis, name in others.items() if name}}, mesh)
        program = with_data_axes(program, mesh, strategies[: len(data)], exchanges=family.exchanges)
        return overlap(replace(program, microbatches=microbatches), strategies=strategies)


def _asked_first(program: Program) -> Program:
    """With the variables of each region's first call first: costs of calls look these up by name, again and again."""
    names = {name for region in program.regions for name in next(program.calls_of(region.name))[1].slots}
    return replace(program, variables=tuple(sorted(program.variables, key=lambda each: each.name not in names)))


Split = tuple[int, tuple[int, ...], int]
"""A dim that axes split: its size, the axes, and stripes."""


def splits_of(program: Program) -> Iterator[Split]:
    """Every dim of a placed program that axes split: of operators, values and parameters."""

    def of(shape: Sequence[int], sharding: Sharding) -> Iterator[Split]:
        split = [(axis, each) for axis, each in enumerate(sharding) if isinstance(each, Shard)]
        for dim in {each.dim for _, each in split}:
            own = [(axis, each) for axis, each in split if each.dim == dim]
            stripes = math.prod(2 if each.zigzag else 1 for _, each in own)
            yield shape[dim], tuple(axis for axis, _ in own), stripes

    for region in program.regions:
        for name, strategy in region.strategies.items():
            call, _ = region.ops[name]
            for specs, layouts in ((call.operands, strategy.operands), (call.results, strategy.results)):
                for spec, layout in zip(specs, layouts, strict=True):
                    if spec is not None and layout is not None:
                        yield from of(spec.shape, layout)
    regions = {region.name: region for region in program.regions}
    for (number, index), sharding in (*program.placed.values.items(), *program.placed.gradients.items()):
        if number >= 0:  # a call's result: outputs of the model may lie as no operator gives them
            yield from of(regions[program.calls[number].region].outputs[index].type.shape, sharding)
    for variable in program.variables:
        if (found := program.placed.parameters.get(variable.name)) is not None:
            for sharding in (found.stored, found.compute, found.gradient):
                yield from of(variable.seen.shape, sharding)
