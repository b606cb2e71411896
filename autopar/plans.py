"""A plan: every decision the compiler made for one model, mesh and batch, with its predicted cost; plain data, saved as
JSON.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, overload

import torch
from torch import nn

from autopar import decisions as deciding
from autopar import hardware_data
from autopar.collectives import Collective
from autopar.context_strategies import Spread
from autopar.decisions import Decisions
from autopar.errors import AutoparError
from autopar.estimate import Cost, Memory
from autopar.interface import PipelineInterface, ProgramInterface, StageInterface, TensorInterface
from autopar.ir import AttentionSite
from autopar.mesh import Mesh
from autopar.pipeline import Pass, PassTime
from autopar.pipelining.spec import AXIS, PipelineSpec
from autopar.pipelining.summary import PipelineSummary
from autopar.sharding import format_sharding, parse_sharding
from autopar.strategies import AxisStrategy, Pin, by_name, describe
from autopar.views import packed
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
        body = _to_data(self)
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
        try:
            whole = json.loads(text)
            body = whole["plan"]
            if whole["format"] != FORMAT:
                raise AutoparError(
                    f"{where} has plan format {whole['format']}", remedy=f"this version reads format {FORMAT}"
                )
            if whole["sha256"] != _digest(body):
                raise ValueError("checksum does not match")
            return _from_data(body)
        except (ValueError, KeyError, TypeError, AttributeError) as error:
            raise AutoparError(
                f"{where} is damaged", values=str(error), remedy="make the plan again and save it"
            ) from error

    def __str__(self) -> str:
        from autopar.report import plan_text

        return plan_text(self)


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def _to_data(plan: Plan) -> dict[str, Any]:
    axes = plan.stage_mesh.axis_names
    return {
        "title": plan.title,
        "mesh": [list(item) for item in plan.mesh.axes],
        "hardware": hardware_data.to_data(plan.mesh.hardware),
        "strategies": [strategy.name for strategy in plan.strategies],
        "interface": _interface_data(plan.interface),
        "source": plan.source,
        "source_is_edited": plan.source_is_edited,
        "cost": {
            "compute_s": plan.cost.compute_s,
            "communication_s": plan.cost.communication_s,
            "waiting_s": plan.cost.waiting_s,
            "hidden_s": plan.cost.hidden_s,
            "optimizer_s": plan.cost.optimizer_s,
        },
        "memory": asdict(plan.cost.memory),
        "collectives": [asdict(row) for row in plan.collectives],
        "regions": [asdict(region) for region in plan.regions],
        "solved": asdict(plan.solved),
        "decisions": deciding.to_data(plan.decisions, axes),
        "output_spec": plan.output_spec,
        "output_leaves": list(plan.output_leaves),
        "times": [asdict(time) for time in plan.times],
        "pins": [[pin.pattern, {axis: str(placement) for axis, placement in pin.placements}] for pin in plan.pins],
        "memory_limit_bytes": plan.memory_limit_bytes,
        "notes": list(plan.notes),
        "precision": str(plan.precision).removeprefix("torch.") if plan.precision else None,
        "training": plan.training,
        "rematerialize": plan.rematerialize,
        "asked": asdict(plan.asked) if plan.asked else None,
        "pipeline": plan.pipeline.to_data() if plan.pipeline else None,
        "attention": [asdict(site) for site in plan.attention],
        **({"context": [list(row) for row in plan.context]} if plan.context else {}),
        **({"spread": asdict(plan.spread)} if plan.spread else {}),
        **({"model_spec": asdict(plan.model_spec)} if plan.model_spec else {}),
        **({"views": packed.pack(plan.views)} if plan.views else {}),
    }


def _from_data(body: Mapping[str, Any]) -> Plan:
    mesh = Mesh([(name, size) for name, size in body["mesh"]], hardware=hardware_data.from_data(body["hardware"]))
    asked = body["asked"]
    axes = mesh.axis_names if asked is None else mesh.without(AXIS).axis_names
    pins = tuple(
        Pin(pattern, tuple((axis, parse_sharding(f"{axis}={text}", [axis])[0]) for axis, text in placements.items()))
        for pattern, placements in body["pins"]
    )
    return Plan(
        body["title"],
        mesh,
        tuple(by_name(name) for name in body["strategies"]),
        _interface_from(body["interface"], axes),
        body["source"],
        Cost(memory=Memory(**body["memory"]), **body["cost"]),
        tuple(Collective(**row) for row in body["collectives"]),
        tuple(RegionSummary(**row) for row in body["regions"]),
        Solved(**body["solved"]),
        deciding.from_data(body["decisions"], axes),
        body["output_spec"],
        tuple(body["output_leaves"]),
        tuple(PassTime(**row) for row in body["times"]),
        pins,
        body["memory_limit_bytes"],
        tuple(body["notes"]),
        precision=getattr(torch, body["precision"]) if body["precision"] else None,
        training=bool(body["training"]),
        rematerialize=body["rematerialize"],
        spread=_spread_from(body.get("spread")),
        source_is_edited=body["source_is_edited"],
        model_spec=_model_spec_from(body.get("model_spec")),
        asked=PipelineSpec(**{**asked, "cut": tuple(asked["cut"]), "rank_of": tuple(asked["rank_of"])})
        if asked
        else None,
        pipeline=PipelineSummary.from_data(body["pipeline"]) if body["pipeline"] else None,
        attention=tuple(AttentionSite(**row) for row in body.get("attention", ())),
        context=tuple((axis, where, text) for axis, where, text in body.get("context", ())),
        views=packed.unpack(body["views"]) if "views" in body else None,
    )


def _spread_from(data: Mapping[str, Any] | None) -> Spread | None:
    """Optional: most plans are prepared for what their strategies need."""
    if data is None:
        return None
    parts = tuple((axis, count) for axis, count in data.get("parts", ()))
    padded = bool(data.get("padded", True))
    return Spread(data["heads"], data["moves"], tuple(data["sequence"]), tuple(data["zigzag"]), parts, padded)


def _model_spec_from(data: Mapping[str, Any] | None) -> ModelSpec | None:
    """Optional: plans that were not made by the command line, or by an older one, have none."""
    if data is None:
        return None
    return ModelSpec(**{**data, "batch": tuple(data["batch"]) if data["batch"] else None})


_PARTS = ("parameters", "buffers", "inputs", "outputs", "updates")


def _interface_data(interface: ProgramInterface) -> dict[str, Any]:
    def rows(items: Sequence[TensorInterface]) -> list[dict[str, Any]]:
        return [
            {
                **asdict(item),
                "sharding": format_sharding(item.sharding, interface.axes),
                "gradient": None if item.gradient is None else format_sharding(item.gradient, interface.axes),
            }
            for item in items
        ]

    parts = {part: rows(getattr(interface, part)) for part in _PARTS}
    whole = {"uses_dropout": interface.uses_dropout, "microbatches": interface.microbatches}
    pipeline = None
    if (found := interface.pipeline) is not None:
        stages = [
            {**asdict(stage), "receives": rows(stage.receives), "sends": rows(stage.sends)} for stage in found.stages
        ]
        order = [",".join(actions) for actions in found.order]
        pipeline = {**asdict(found), "order": order, "stages": stages}
    return {"sizes": list(interface.sizes), **whole, **parts, "pipeline": pipeline}


def _interface_from(data: Mapping[str, Any], axes: tuple[str, ...]) -> ProgramInterface:
    def items(rows: Sequence[Mapping[str, Any]]) -> tuple[TensorInterface, ...]:
        return tuple(
            TensorInterface(
                row["name"],
                tuple(row["shape"]),
                row["dtype"],
                parse_sharding(row["sharding"], axes),
                row["differentiable"],
                tuple(row["aliases"]),
                row["batch_dim"],
                row["combine"],
                tuple(row["block"]) if row["block"] is not None else None,
                None if row["gradient"] is None else parse_sharding(row["gradient"], axes),
            )
            for row in rows
        )

    parameters, buffers, inputs, outputs, updates = (items(data[part]) for part in _PARTS)
    sizes, microbatches = tuple(data["sizes"]), int(data["microbatches"])
    pipeline = None
    if (given := data["pipeline"]) is not None:
        stages = tuple(
            StageInterface(
                items(row["receives"]),
                items(row["sends"]),
                *(tuple(row[part]) for part in ("outputs", "updates", "parameters", "buffers")),
            )
            for row in given["stages"]
        )
        order = tuple(tuple(text for text in row.split(",") if text) for row in given["order"])
        pipeline = PipelineInterface(
            given["axis"], tuple(given["axes"]), tuple(given["sizes"]), given["schedule"], order,
            tuple(given["rank_of"]), stages, bool(given["keeps_outputs"]),
        )  # fmt: skip
    return ProgramInterface(
        axes, sizes, parameters, buffers, inputs, outputs, data["uses_dropout"], microbatches, updates, pipeline
    )
