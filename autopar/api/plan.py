"""A plan: every decision the compiler made for one model, mesh and batch, with its predicted cost; plain data, saved as
JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from autopar.collectives import Collective
from autopar.context_strategies import Spread
from autopar.decisions import Decisions
from autopar.errors import AutoparError
from autopar.estimate import Cost
from autopar.interface import ProgramInterface
from autopar.ir import AttentionSite
from autopar.mesh import Mesh
from autopar.pipeline import Pass, PassTime
from autopar.pipelining.spec import AXIS, PipelineSpec
from autopar.pipelining.summary import PipelineSummary
from autopar.strategies import AxisStrategy, Pin, describe
from autopar.views.data import Views

if TYPE_CHECKING:
    from autopar.breakdown import Breakdown
    from autopar.explanation import Explanation
    from autopar.ir import Mode, Program
    from autopar.pipeline import Progress
    from autopar.proof import Proof
    from autopar.views.holds import Holding, RankContents

FORMAT = 3


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

    overlap_price: what a second of gathers and reductions beside the compute counts in the objective.
    """

    nodes: int
    choices: int
    edges: int
    objective_s: float
    bound_s: float
    gap: float
    memory_price_s_per_byte: float
    overlap_price: float = 1.0


@dataclass(frozen=True, slots=True)
class ModelSpec:
    """How the command line built the model and its batch: what `autopar.models.catalogue.load` is given.

    batch: (sequences, tokens), None for the default; layers: None for the configuration's.
    """

    spec: str
    tiny: bool = False
    batch: tuple[int, int] | None = None
    layers: int | None = None


@dataclass(frozen=True, slots=True)
class Plan:
    """Every decision, with its predicted cost.

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
    output_leaves: tuple[int | None, ...]
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
    def gap(self) -> float:
        """Relative optimality gap of the placement, certified by the solver's bound."""
        return self.solved.gap

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

    def verify(self, **options: Any) -> Proof:
        """Prove the generated program equal to the model (see `autopar.proof.verify`)."""
        from autopar.proof import verify

        return verify(self, **options)

    @overload
    def explain(  # type: ignore[overload-overlap]
        self, name: Literal["cost"], *, model: nn.Module | None = ..., example_inputs: Mapping[str, Any] | None = ...
    ) -> Breakdown: ...

    @overload
    def explain(
        self,
        name: str,
        *,
        model: nn.Module | None = ...,
        example_inputs: Mapping[str, Any] | None = ...,
        max_alternatives: int = ...,
        time_limit_s: float = ...,
        progress: Progress | None = ...,
    ) -> Explanation: ...

    def explain(
        self,
        name: str,
        *,
        model: nn.Module | None = None,
        example_inputs: Mapping[str, Any] | None = None,
        max_alternatives: int = 8,
        time_limit_s: float = 120.0,
        progress: Progress | None = None,
    ) -> Explanation | Breakdown:
        """Why a parameter, an input, an output or an operator's result lies as it does, or what each axis does to an
        attention, and what else would cost.

        Every other sharding is pinned in turn and the whole placement solved again, seconds each for a large model.
        `explain("cost")` says instead what the predicted step is made of: operators by class, collectives by purpose,
        what is hidden, waited and updated, and the memory (unless something is called so).

        Args:
            name: a fully qualified name, an alias, a pattern that matches one class of parameters
                (`model.layers.*.mlp.down_proj.weight`), a value of the generated program (`layer.linear_3`), or a
                module that holds one attention (`model.layers.0.self_attn`).
            model, example_inputs: what the plan was made for; only a loaded plan needs them.
            max_alternatives: how many to keep, best first. time_limit_s: what is not begun by then is left.
            progress: called before each alternative with its name, its number from 0, and how many there are.

        Raises:
            AutoparError: an unknown name, a pattern of several classes or attentions, a loaded plan without a model.
        """
        from autopar.explain import explain

        return explain(
            self, name, model=model, example_inputs=example_inputs, max_alternatives=max_alternatives,
            time_limit_s=time_limit_s, progress=progress,
        )  # fmt: skip

    def trace(self, path: str | Path) -> Path:
        """Write the predicted step as a trace for Perfetto (ui.perfetto.dev): what every rank computes, sends, holds.

        Raises:
            AutoparError: a plan saved by a version that kept no timeline.
        """
        from autopar.pipelining import trace as pipelining
        from autopar.views import trace

        views = self.views or Views((), (), ())
        if self.pipeline is None:
            return trace.write(path, trace.events_of(trace.predicted(views, self.mesh.num_devices)))
        notes = pipelining.notes_of(self.mesh, self.pipeline.axis, views.memory)
        return pipelining.write(path, {"predicted": self.pipeline.timeline}, notes)

    def holds(self, name: str | None = None, *, rank: int | None = None) -> Holding | RankContents:
        """Which rank holds which part of a tensor (a parameter, buffer, input or output), or all that one rank holds.

        `print` draws boxes; `.ranges(rank)` gives indices.

        Raises:
            AutoparError: a name that nothing has, a rank that the mesh lacks, neither or both.
        """
        from autopar.views.holds import contents_of, holding_of

        if name is not None and rank is None:
            return holding_of(self, name)
        if rank is not None and name is None:
            return contents_of(self, rank)
        raise AutoparError("holds takes a name or a rank", remedy="plan.holds(name).ranges(rank) gives one rank's part")

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write everything about the plan as one offline HTML file (see `autopar.views.report.report`)."""
        from autopar.views.report import report

        return report(self, path, **options)

    def visualize(
        self, path: str | Path, *, detail: str = "overview", phase: str = "both", region: str | None = None
    ) -> Path:
        """Draw the plan; the suffix chooses the format (svg, png, pdf, gv). Loaded plans draw, too.

        Args:
            detail: `overview`; `region` or `operator`, of `region` alone where it is named; or `timeline` and `memory`,
                the predicted step over time and what a rank holds.
            phase: both, forward, backward.

        Raises:
            AutoparError: an unknown format, detail, phase or region; a plan that was saved by an older version.
        """
        from autopar.views import charts, picture

        if detail == "timeline":
            return charts.draw_timeline(self, path)
        if detail == "memory":
            return charts.draw_memory(self, path)
        return picture.visualize(self, path, detail=detail, phase=phase, region=region)

    def with_source(self, source: str) -> Plan:
        """The same plan, running an edited program."""
        return replace(self, source=source, source_is_edited=source != self.source)

    def without_model(self) -> Plan:
        """The plain data alone: what is saved and sent to other ranks."""
        return replace(self, model=None, inputs=None, program=None, traced=None, passes=())

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON with a checksum."""
        Path(path).write_text(self.to_json())

    def to_json(self) -> str:
        from autopar.plan_data import to_data

        body = to_data(self)
        return json.dumps({"format": FORMAT, "sha256": _digest(body), "plan": body}, indent=1)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Nothing in the file is run.

        Raises:
            AutoparError: no such file, or one that is damaged or of another format.
        """
        try:
            text = Path(path).read_text()
        except OSError as error:
            raise AutoparError(
                f"cannot read the plan {path}", values=str(error), remedy="save one with plan.save(path)"
            ) from error
        return Plan.from_json(text, where=str(path))

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> Plan:
        """The inverse of `to_json`."""
        from autopar.plan_data import from_data

        try:
            whole = json.loads(text)
            body = whole["plan"]
            if whole["format"] != FORMAT:
                raise AutoparError(
                    f"{where} has plan format {whole['format']}", remedy=f"this version reads format {FORMAT}"
                )
            if whole["sha256"] != _digest(body):
                raise ValueError("checksum does not match")
            return from_data(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AutoparError(
                f"{where} is damaged", values=str(error), remedy="make the plan again and save it"
            ) from error

    def __str__(self) -> str:
        from autopar.report import plan_text

        return plan_text(self)


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()
