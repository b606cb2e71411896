"""A placement for each family of strategies, on a small mesh, and the program that it is on any other.

Operators' strategies are factors, not sizes: what was placed on one mesh is lowered again on another by putting the
other's sizes in.
"""

from __future__ import annotations

import functools
import logging
import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from autopar import pipeline
from autopar.errors import AutoparError
from autopar.ir import Mode, ParameterLayout, Program
from autopar.mesh import Mesh
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.overlap import overlap
from autopar.passes.place import try_place
from autopar.passes.placement.narrow import narrowed
from autopar.searching.cluster import Cluster
from autopar.sharding import REPLICATE, Shard, Sharding
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


@dataclass
class Families:
    """The placements of one traced model on one cluster."""

    request: pipeline.Request
    steps: tuple[pipeline.Pass, ...]
    traced: Program
    cluster: Cluster
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
        mesh = self.cluster.mesh({axis: _REFERENCE[axis] for axis in family.axes})
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
        """Placements that decide most of a family's, the most first, none last: recomputing leaves the rest as it is,
        storing parameters in pieces all operators; what the data axis does, and tensor parallelism, they do beside the
        other axes too.
        """
        own = Family("ddp", "", "", "none")
        if family.rematerialize != "none":
            models = [replace(family, rematerialize="none")]
        elif family.data != "ddp":
            models = [replace(family, data="ddp")]
        else:
            models = [each for each in (own, replace(own, tensor=family.tensor)) if each != family]
        for num in (len(models), 1, 0) if len(models) > 1 else (len(models), 0) if models else (0,):
            found = [self.placement(each) for each in models[:num]]
            yield [each for each in found if each is not None]

    def _annotated(self, family: Family, mesh: Mesh, strategies: tuple[AxisStrategy, ...]) -> Program:
        request = replace(self.request, mesh=mesh, strategies=strategies, rematerialize=family.rematerialize)
        key = (family.rematerialize, mesh.axes, request.prepared)
        if key not in self.annotated:
            names = [step.name for step in self.steps]
            steps = self.steps[names.index("rematerialize") : names.index("place")]
            self.annotated[key] = pipeline.run(request, steps, program=self.traced)[0]
        return self.annotated[key]

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
                continue  # `in_pieces` looks for another dim
            counted = [axis for axis in axes if rows or axis != 0]
            if size % (stripes * math.prod(mesh.sizes[axis] for axis in counted)):
                return None
        return replace(program, mesh=mesh)


def in_pieces(program: Program, mesh: Mesh) -> Program:
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

    parameters = dict(program.placement.parameters)
    known: dict[tuple[str, int], ParameterLayout] = {}
    for call in program.calls:
        for slot, name in enumerate(call.slots):
            if (layout := program.placement.parameters.get(name)) is not None:
                # What calls of a region have in one slot is alike, and lies alike.
                key = (call.region, slot)
                known[key] = parameters[name] = known.get(key) or cut(name, layout)
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
    regions = {region.name: region for region in program.regions}
    for (number, index), sharding in (*program.placement.values.items(), *program.placement.gradients.items()):
        if number >= 0:  # a call's result: outputs of the model may lie as no operator gives them
            yield from of(regions[program.calls[number].region].outputs[index].type.shape, sharding, False)
    for variable in program.variables:
        if (found := program.placement.parameters.get(variable.name)) is not None:
            for sharding in (found.stored, found.compute, found.gradient):
                yield from of(variable.seen.shape, sharding, True)
