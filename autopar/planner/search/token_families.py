"""Both phases of `generate()` for one number of rows: traced once, placed once for what axes do, and the programs that
they are on other meshes.

    a batch of each phase ─ traced ─► placed on a small mesh, the second bound to the first ─► other sizes put in

A rank's rows follow from the size of the data axis that is put in, as for training (`estimates.py`): 64 traced rows
over dp=8 are what 8 rows on one rank are, to every operator, so that one trace serves batches that divide it.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from autopar import pipeline
from autopar.base.errors import AutoparError
from autopar.ir.graphs import operands_of
from autopar.ir.program import Program
from autopar.passes.insert_collectives import insert_collectives
from autopar.passes.interleave import interleave
from autopar.passes.overlap import overlap
from autopar.passes.placement.mixtures import is_experts
from autopar.planner.inputs import bind_inputs
from autopar.planner.search.cluster import Cluster
from autopar.planner.search.families import Split, splits_of
from autopar.strategies.names import Pin, resolve
from autopar.strategies.request import Attempt

logger = logging.getLogger("autopar.search")
NAMES = {"dp": "ddp", "ep": "expert", "tp": "tensor"}
REFERENCE = {"ep": 2, "tp": 2}
"""The mesh on which phases are placed, beside dp, which has a rank for each row."""
Key = tuple[tuple[str, int], ...]
"""A mesh: axes and their sizes."""
Sizes = Mapping[str, int]
"""dp, ep and tp; of dp and ep, for costs, how many parts the traced rows are in."""


@dataclass
class TokenFamilies:
    """The programs of both phases. rows: that were traced. inputs: of each phase, what forward gets.

    traced: a program for each phase; placed: by the sizes of the mesh, those of `REFERENCE`, and others where these do
    not divide what it splits; splits: what the programs split, to be divided.
    """

    model: nn.Module
    cluster: Cluster
    rows: int
    inputs: Mapping[str, Mapping[str, Any]]
    precision: torch.dtype | None = None
    traced: dict[str, Program] = field(default_factory=dict)
    placed: dict[Key, dict[str, Program] | None] = field(default_factory=dict)
    splits: dict[Key, frozenset[Split]] = field(default_factory=dict)

    @property
    def experts(self) -> int:
        """What axes divide over which tokens go to their experts; 1 where there are none."""
        first = self._trace(next(iter(self.inputs)))
        counts = [
            operands_of(node)[3].meta["val"].shape[0]
            for region in first.regions for node in region.graph.nodes if is_experts(node)
        ]  # fmt: skip
        return max(1, math.gcd(*counts))

    @property
    def num_calls(self) -> int:
        """Of both phases, the fewest."""
        return min(len(self._trace(phase).calls) for phase in self.inputs)

    def on(self, sizes: Sizes) -> dict[str, Program] | None:
        """The lowered programs on a mesh; None where the axes cannot split the model so."""
        axes = ("dp", *(axis for axis in ("ep", "tp") if sizes[axis] > 1))
        parts = sizes["dp"] * sizes["ep"]
        if self.rows % parts:
            return None
        mesh = self.cluster.mesh({axis: sizes[axis] for axis in axes})
        for reference in ({axis: REFERENCE.get(axis, 1) for axis in axes}, {axis: sizes[axis] for axis in axes}):
            key = tuple(({**reference, "dp": self.rows // reference.get("ep", 1)}).items())
            found = self._placed(key)
            if found is not None and _divides(self.splits[key], mesh.sizes):
                return {phase: interleave(replace(program, mesh=mesh)) for phase, program in found.items()}
        return None

    def _placed(self, key: Key) -> dict[str, Program] | None:
        if key not in self.placed:
            try:
                found = self._place(dict(key)) if all(size for _, size in key) else None
            except AutoparError as error:
                logger.info("%s cannot be had: %s", key, error)
                found = None
            self.placed[key] = found
            self.splits[key] = frozenset(each for program in (found or {}).values() for each in splits_of(program))
        return self.placed[key]

    def _place(self, sizes: Mapping[str, int]) -> dict[str, Program]:
        """Each phase; parameters and states lie as in those before."""
        mesh = self.cluster.mesh(dict(sizes))
        strategies = resolve({axis: NAMES[axis] for axis in sizes}, mesh)
        phases = pipeline.Phases.of(pipeline.DEFAULT)
        pins: tuple[Pin, ...] = ()
        found = {}
        for phase in self.inputs:
            request = replace(self._request(phase), mesh=mesh, strategies=strategies)
            program = self._trace(phase)
            known = {v.name for v in program.variables if v.is_parameter} | {port.name for port in program.inputs}
            request = replace(request, pins=tuple(each for each in pins if each.pattern in known))
            program, _ = pipeline.run(request, (*phases.prepare, *phases.place), program=program)
            pins += _pins(program, mesh.axis_names)
            found[phase] = overlap(insert_collectives(program), strategies=strategies)
        return found

    def _trace(self, phase: str) -> Program:
        if phase not in self.traced:
            self.traced[phase] = pipeline.run(self._request(phase), pipeline.TRACE)[0]
        return self.traced[phase]

    def _request(self, phase: str) -> Attempt:
        mesh = self.cluster.mesh({"dp": self.rows, "tp": 2})
        strategies = resolve({"dp": "ddp", "tp": "tensor"}, mesh)
        inputs = bind_inputs(self.model, (), self.inputs[phase])
        return Attempt(self.model, inputs, mesh, strategies, precision=self.precision, training=False, explain=False)


def _pins(program: Program, axes: tuple[str, ...]) -> tuple[Pin, ...]:
    """Where a placed program stores parameters and states, for the next phase."""
    layouts, kept = program.placed.parameters, {v.name for v in program.variables if v.is_parameter}
    stored = {name: layouts[name].stored for name in layouts if name in kept}
    states = {name: program.placed.inputs[name] for name in program.states if name in program.placed.inputs}
    found = {**stored, **states}
    return tuple(Pin(name, tuple(zip(axes, sharding, strict=True)), taken=True) for name, sharding in found.items())


def _divides(splits: frozenset[Split], sizes: tuple[int, ...]) -> bool:
    """Whether axes of these sizes divide all that they split."""
    return all(size % (stripes * math.prod(sizes[axis] for axis in axes)) == 0 for size, axes, stripes in splits)
