"""A plan: every decision the compiler made for one model, mesh and batch, with its predicted cost; plain data, saved as
JSON.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Self

import torch
from torch import nn

from autopar.cost.collectives import Collective
from autopar.cost.estimate import Cost
from autopar.ir.interface import ProgramInterface
from autopar.ir.program import AttentionSite, Mode, Program
from autopar.machine.mesh import Mesh
from autopar.pipeline import Pass, PassTime
from autopar.planner.plan.decisions import Decisions
from autopar.planner.plan.drawn import Views
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import Spread
from autopar.strategies.names import Pin, describe
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec
from autopar.strategies.pipelining.summary import PipelineSummary


@dataclass(frozen=True, slots=True)
class RegionSummary:
    """A region in the plan's table: its module path, how often it is called, how many operators each phase has,
    and the bytes that one rank keeps of one call for its backward.
    """

    name: str
    module: str
    calls: int
    forward_operators: int
    backward_operators: int
    saved_bytes: int


@dataclass(frozen=True, slots=True)
class Solved:
    """What the solver said: size of the problem, objective, proven bound, relative gap, price of memory.

    overlap_price: what a second of gathers and reductions beside the compute counts in the objective. hides_exchanges:
    whether exchanges count less what may run beside them.
    """

    nodes: int
    choices: int
    edges: int
    objective_s: float
    bound_s: float
    gap: float
    memory_price_s_per_byte: float
    overlap_price: float = 1.0
    hides_exchanges: bool = False


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How the command line built the model and its batch: what `autopar.cli.models.catalogue.load` is given.

    batch: (sequences, tokens), None for the default; layers: None for the configuration's.
    """

    spec: str
    tiny: bool = False
    batch: tuple[int, int] | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class PlanRecord:
    """Every decision, with its predicted cost. `autopar.Plan` is this with its verbs, and dressed: with its program's
    text, its views and the words about its attention.

    cost: predicted seconds and bytes of one rank and step. collectives: rows of what moves. source: the generated
    program. model, inputs, program, passes: what it was made from, where it was made in this process; a loaded plan has
    none.
    source_is_edited: `source` was given by the user. from_cache: its decisions were made before. model_spec: of a plan
    that the command line made. strategies: one for each axis of `stage_mesh`; asked, pipeline: of the axis `pp`, where
    the mesh has one: what was asked, and the stages and the schedule that came of it. attention: what was found of it.
    context: (axis, where, what it does to attention), of axes that split sequences. spread: what the
    program was prepared for, where that is more than the strategies need. views: what pictures show of the program;
    plans saved by older versions have none.
    """

    title: str
    mesh: Mesh
    strategies: tuple[AxisStrategy, ...]
    interface: ProgramInterface
    source: str
    cost: Cost
    collectives: tuple[Collective, ...]
    regions: tuple[RegionSummary, ...]
    solved: Solved
    decisions: Decisions
    output_spec: str
    output_leaves: tuple[int | str | None, ...]
    times: tuple[PassTime, ...] = ()
    pins: tuple[Pin, ...] = ()
    memory_limit_bytes: float | None = None
    notes: tuple[str, ...] = ()
    precision: torch.dtype | None = None
    training: bool = True
    rematerialize: Mode = "none"
    spread: Spread | None = None
    model: nn.Module | None = None
    inputs: Mapping[str, Any] | None = None
    program: Program | None = None
    passes: tuple[Pass, ...] = ()
    source_is_edited: bool = False
    from_cache: bool = False
    traced: Program | None = None
    model_spec: ModelSpec | None = None
    asked: PipelineSpec | None = None
    pipeline: PipelineSummary | None = None
    attention: tuple[AttentionSite, ...] = ()
    context: tuple[tuple[str, str, str], ...] = ()
    views: Views | None = None

    @property
    def stage_mesh(self) -> Mesh:
        """The mesh that every tensor lies on: of one stage, where there is a pipeline, else the whole."""
        return self.mesh if self.asked is None else self.mesh.without(AXIS)

    @property
    def drawn(self) -> Views:
        """What pictures show, which plans have that the api made, but for files of old versions."""
        assert self.views is not None
        return self.views

    @property
    def gap(self) -> float:
        """Relative optimality gap of the placement, certified by the solver's bound."""
        return self.solved.gap

    @property
    def roots(self) -> tuple[str, ...] | None:
        """The outputs whose gradients the backward takes; None without one."""
        return tuple(each.name for each in self.interface.outputs if each.differentiable) if self.training else None

    @property
    def wanted(self) -> frozenset[str]:
        """The inputs whose gradients the backward returns."""
        return frozenset(each.name for each in self.interface.wanted)

    @property
    def strategy(self) -> str:
        return describe(self.strategies, self.stage_mesh, self.asked)

    @property
    def planning_s(self) -> float:
        """Wall seconds of all passes."""
        return sum(time.wall_s for time in self.times)

    def bytes_by_axis(self) -> dict[str, float]:
        """Bytes one rank sends a step, by mesh axis."""
        totals = dict.fromkeys(self.mesh.axis_names, 0.0)
        for row in self.collectives:
            totals[row.axis] += row.bytes_sent
        return totals

    def with_source(self, source: str) -> Self:
        """The same plan, running an edited program."""
        return replace(self, source=source, source_is_edited=source != self.source)

    def without_model(self) -> Self:
        """The plain data alone: what is saved and sent to other ranks."""
        return replace(self, model=None, inputs=None, program=None, traced=None, passes=())
