"""`autopar.Plan`: the record of a plan with its verbs, each of which lives in the room that does the work."""

from __future__ import annotations

from dataclasses import dataclass, fields
from pathlib import Path
from typing import Any, Literal, Self, overload

from torch import nn

from autopar.api.exporting import export
from autopar.api.proof import Proof, verify
from autopar.base import perfetto
from autopar.base.errors import AutoparError
from autopar.base.files import MIB, read_text
from autopar.planner.inputs import Batch, by_name
from autopar.planner.plan import json
from autopar.planner.plan.record import PlanRecord
from autopar.planner.with_loss import Loss, with_loss
from autopar.runtime.checker.program import check_types
from autopar.strategies.pipelining import trace
from autopar.strategies.request import Progress
from autopar.views import charts, engines, picture
from autopar.views.explain.breakdown import Breakdown
from autopar.views.explain.explain import explain
from autopar.views.explain.explanation import Explanation
from autopar.views.holds import Holding, RankContents, contents_of, holding_of
from autopar.views.report import report
from autopar.views.text import plan_text


@dataclass(frozen=True, slots=True)
class Plan(PlanRecord):
    """Every decision, with its predicted cost (`PlanRecord`), and what can be asked of it."""

    @classmethod
    def of(cls, record: PlanRecord) -> Self:
        """The record with its verbs."""
        return cls(**{field.name: getattr(record, field.name) for field in fields(record)})

    def verify(self, **options: Any) -> Proof:
        """Prove the generated program equal to the model (see `autopar.api.proof.verify`)."""
        return verify(self, **options)

    def check(self, program: str | Path | None = None, *, types_only: bool = False) -> None:
        """Type every statement of the generated program, or of an edited one in this file (docs/checker.md).

        The program's text runs in this process, on tensors without data: it is code, also that of a plan from a file.

        types_only: only how its values lie, not that outputs and gradients are those that were planned.

        Raises:
            AutoparError: the first statement that is not right, with its line and what is known of its operands; the
                outputs and gradients of other values.
        """
        if program is None and not self.source:
            raise AutoparError("this plan has no program's text", remedy="name the file of the program")
        text = self.source
        if program is not None:
            text = read_text(program, "program", most_bytes=64 * MIB, remedy="name the file of a generated program")
        check_types(text, self.interface, str(program or "<program>"), identity=not types_only)

    def export(
        self,
        to: str,
        *,
        model: nn.Module | None = None,
        name: str = "MODEL",
        weights: str | Path | None = None,
        folder: str | Path | None = None,
        progress: Progress | None = None,
    ) -> engines.Exported:
        """The plan for another engine, as text: `transformers-tp-plan` (the arguments of its `DistributedConfig`, as
        JSON), `vllm`, `sglang` (a command), `tensorrt-llm` (a YAML file). With weights, a folder that it loads; or of
        `autopar`, a file of weights for each rank, cut as the plan stores them, which `compiled.load(folder)` reads.

        model: what the plan was made for; only a loaded plan needs it, for `transformers-tp-plan`, and for weights that
        are codes. name: of the weights that are served, a path or a hub's name. weights: a folder of safetensors (or
        one file, a step that was saved, a folder of torch.distributed.checkpoint). folder: that is made of them. They
        are read part by part. progress: told what is written next, its number, how many there are.

        Raises:
            AutoparError: an unknown engine; what it cannot do, by axis or parameter; weights that are damaged or others
                than the plan's; a folder that is there already.
        """
        return export(self, to, model, name, None, weights, folder, progress)

    @overload
    def explain(  # type: ignore[overload-overlap]
        self,
        name: Literal["cost"],
        *,
        model: nn.Module | None = ...,
        example_inputs: Batch | None = ...,
        loss: Loss | None = ...,
    ) -> Breakdown: ...

    @overload
    def explain(
        self,
        name: str,
        *,
        model: nn.Module | None = ...,
        example_inputs: Batch | None = ...,
        loss: Loss | None = ...,
        max_alternatives: int = ...,
        time_limit_s: float = ...,
        progress: Progress | None = ...,
    ) -> Explanation: ...

    def explain(
        self,
        name: str,
        *,
        model: nn.Module | None = None,
        example_inputs: Batch | None = None,
        loss: Loss | None = None,
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
            model, example_inputs, loss: what the plan was made for; only a loaded plan needs them.
            max_alternatives: how many to keep, best first. time_limit_s: what is not begun by then is left.
            progress: called before each alternative with its name, its number from 0, and how many there are.

        Raises:
            AutoparError: an unknown name, a pattern of several classes or attentions, a loaded plan without a model.
        """
        batch = None if model is None or example_inputs is None else by_name(model, example_inputs)
        model = None if model is None else with_loss(model, loss, batch)
        return explain(
            self, name, model=model, example_inputs=batch, max_alternatives=max_alternatives,
            time_limit_s=time_limit_s, progress=progress,
        )  # fmt: skip

    def trace(self, path: str | Path) -> Path:
        """Write the predicted step as a trace for Perfetto (ui.perfetto.dev): what every rank computes, sends, holds.

        Raises:
            AutoparError: a plan saved by a version that kept no timeline.
        """
        spans, curves = (self.views.spans, self.views.memory) if self.views is not None else ((), ())
        if self.pipeline is None:
            events = perfetto.events_of(perfetto.predicted(spans, curves[0] if curves else None, self.mesh.num_devices))
            return perfetto.write(path, events)
        notes = trace.notes_of(self.mesh, self.pipeline.axis, curves, self.interface.together)
        return trace.write(path, {"predicted": self.pipeline.timeline}, notes)

    def holds(self, name: str | None = None, *, rank: int | None = None) -> Holding | RankContents:
        """Which rank holds which part of a tensor (a parameter, buffer, input or output), or all that one rank holds.

        `print` draws boxes; `.ranges(rank)` gives indices.

        Raises:
            AutoparError: a name that nothing has, a rank that the mesh lacks, neither or both.
        """
        if name is not None and rank is None:
            return holding_of(self, name)
        if rank is not None and name is None:
            return contents_of(self, rank)
        raise AutoparError("holds takes a name or a rank", remedy="plan.holds(name).ranges(rank) gives one rank's part")

    def report(self, path: str | Path, **options: Any) -> Path:
        """Write everything about the plan as one offline HTML file (see `autopar.views.report.report`)."""
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
        if detail == "timeline":
            return charts.draw_timeline(self, path)
        if detail == "memory":
            return charts.draw_memory(self, path)
        return picture.visualize(self, path, detail=detail, phase=phase, region=region)

    def save(self, path: str | Path) -> None:
        """Write the plan as JSON with a checksum."""
        json.save(self, path)

    def to_json(self) -> str:
        """What `save` writes."""
        return json.to_text(self)

    @staticmethod
    def load(path: str | Path) -> Plan:
        """Read a plan. Nothing in the file is run.

        Raises:
            AutoparError: no such file, or one that is damaged or of another format.
        """
        return Plan.of(json.load(path))

    @staticmethod
    def from_json(text: str, *, where: str = "plan") -> Plan:
        """The inverse of `to_json`."""
        return Plan.of(json.from_text(text, where=where))

    def __str__(self) -> str:
        return plan_text(self)
