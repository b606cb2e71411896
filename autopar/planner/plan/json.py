"""A plan's file: JSON-ready data with a checksum, and back.

Loading one never runs code and opens no other file: what it names (a model, a hardware profile, a schedule) stays a
name. Its size, its types (`schema`) and whether its parts fit each other (`consistent`) are checked first; why that is
done by hand, `base/typed.py` says.
"""

from __future__ import annotations

import base64
import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from autopar.base import files, typed
from autopar.base.errors import AutoparError
from autopar.cost.collectives import Collective
from autopar.cost.estimate import Cost, Memory
from autopar.ir.interface import (
    ExpertsInterface,
    PipelineInterface,
    ProgramInterface,
    StageInterface,
    TensorInterface,
)
from autopar.ir.meaning import Meaning
from autopar.ir.program import AttentionSite
from autopar.ir.sharding import format_sharding, parse_sharding
from autopar.ir.told import Carried
from autopar.machine import hardware_data
from autopar.machine.mesh import Mesh
from autopar.pipeline import PassTime
from autopar.planner.plan import consistent, packed
from autopar.planner.plan import decisions as deciding
from autopar.planner.plan.record import ModelSpec, PlanRecord, RegionSummary, Solved
from autopar.planner.plan.schema import PlanFile
from autopar.strategies.context import Spread
from autopar.strategies.names import Pin, by_name
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec
from autopar.strategies.pipelining.summary import PipelineSummary

FORMAT = 3
MOST_BYTES = 256 * files.MIB
"""Of a plan's file: that of a model of 405 billion parameters on 8,192 devices has a few."""


def save(plan: PlanRecord, path: str | Path) -> None:
    """Write the plan's text."""
    Path(path).write_text(to_text(plan), encoding="utf-8")


def load(path: str | Path) -> PlanRecord:
    """Read a plan's file.

    Raises:
        AutoparError: no such file, or one that is damaged or of another format.
    """
    text = files.read_text(
        path, "plan", most_bytes=MOST_BYTES, remedy="`autopar plan MODEL --save FILE` or Plan.save writes one"
    )
    return from_text(text, where=str(path))


def is_of_phases(path: str | Path) -> bool:
    """Whether a file begins as one with several plans, for `generate()`; what cannot be read does not."""
    try:
        begin = files.read_bytes(path, "plan", most_bytes=2 * MOST_BYTES, remedy="")[:200]
    except AutoparError:
        return False
    return re.match(rb'\s*\{\s*"(generation|phases)"\s*:', begin) is not None


def to_text(plan: PlanRecord) -> str:
    """The plan as JSON with its format and checksum."""
    body = to_data(plan)
    return json.dumps({"format": FORMAT, "sha256": _digest(body), "plan": body}, indent=1)


def from_text(text: str, *, where: str = "plan") -> PlanRecord:
    """The inverse of `to_text`.

    Raises:
        AutoparError: text that is damaged or of another format; `where` it is from.
    """
    whole: Any = None
    if text.lstrip().startswith("{"):
        try:
            whole = files.parse_json(text, "plan", where=where, remedy="")
            if _is_plan(whole) and whole["format"] == FORMAT:
                return _checked(whole["plan"], whole.get("sha256"))
        except (AutoparError, ValueError, KeyError, IndexError, TypeError, AttributeError, ArithmeticError) as error:
            why = f"{error.what} {error.values or ''}".strip() if isinstance(error, AutoparError) else str(error)
            remedy = "make the plan again and save it"
            raise AutoparError(f"{where} is damaged", values=why[:300], remedy=remedy) from error
    if isinstance(whole, dict) and "phases" in whole:
        raise AutoparError(
            f"{where} is a plan for generate(): two plans, of a prompt and of a token",
            remedy="read it with autopar.GenerationPlan.load; on the command line say which of them: --of decode",
        )
    if not _is_plan(whole):
        raise AutoparError(
            f"{where} is no plan of autopar",
            remedy="name a file that `autopar plan MODEL --save FILE` or Plan.save wrote",
        )
    raise AutoparError(
        f"{where} has plan format {str(whole['format'])[:40]}", remedy=f"this version reads format {FORMAT}"
    )


def _is_plan(whole: Any) -> bool:
    return isinstance(whole, dict) and "format" in whole and "plan" in whole


def _checked(body: Any, digest: Any) -> PlanRecord:
    if digest != _digest(body):
        raise ValueError("checksum does not match")
    typed.check(PlanFile, body, "plan")
    plan = from_data(body)
    consistent.check(plan)
    return plan


def _digest(body: Any) -> str:
    return hashlib.sha256(json.dumps(body, sort_keys=True).encode()).hexdigest()


def to_data(plan: PlanRecord) -> dict[str, Any]:
    """JSON-ready; `from_data` is the inverse."""
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
            "host_s": plan.cost.host_s,
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
        **({"taken": taken} if (taken := [number for number, pin in enumerate(plan.pins) if pin.taken]) else {}),
        **({"views": packed.pack(plan.views)} if plan.views else {}),
    }


def from_data(body: Mapping[str, Any]) -> PlanRecord:
    """The inverse of `to_data`, of data with the types of `PlanFile`.

    Raises:
        AutoparError, KeyError, ValueError, TypeError: the data is damaged.
    """
    mesh = Mesh([(name, size) for name, size in body["mesh"]], hardware=hardware_data.from_data(body["hardware"]))
    asked = body["asked"]
    axes = mesh.axis_names if asked is None else mesh.without(AXIS).axis_names
    taken = frozenset(body.get("taken", ()))
    pins = tuple(
        Pin(
            pattern,
            tuple((axis, parse_sharding(f"{axis}={text}", [axis])[0]) for axis, text in placements.items()),
            number in taken,
        )
        for number, (pattern, placements) in enumerate(body["pins"])
    )
    return PlanRecord(
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
        precision=consistent.dtype_of(body["precision"]) if body["precision"] else None,
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
    sequence, zigzag, pieces = tuple(data["sequence"]), tuple(data["zigzag"]), int(data.get("pieces", 1))
    return Spread(data["heads"], data["moves"], sequence, zigzag, parts, padded, pieces)


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
    whole: dict[str, Any] = {"uses_dropout": interface.uses_dropout, "microbatches": interface.microbatches}
    if interface.by_value:
        whole["by_value"] = list(interface.by_value)
    if interface.granted:
        whole["granted"] = list(interface.granted)
    if interface.branches:
        whole["branches"] = [list(each) for each in interface.branches]
    if interface.told:
        whole["told"] = list(interface.told)
    if interface.carried:
        whole["carried"] = [each.data() for each in interface.carried]
    if interface.experts:
        whole["experts"] = [asdict(layer) for layer in interface.experts]
    if interface.beside:
        whole["beside"] = interface.beside
    pipeline = None
    if (found := interface.pipeline) is not None:
        stages = [
            {**asdict(stage), "receives": rows(stage.receives), "sends": rows(stage.sends)} for stage in found.stages
        ]
        stages = [{part: x for part, x in stage.items() if x or part != "wanted"} for stage in stages]
        order = [",".join(actions) for actions in found.order]
        pipeline = {**asdict(found), "order": order, "stages": stages}
    meaning = None if interface.meaning is None else _meaning_data(interface.meaning)
    return {"sizes": list(interface.sizes), **whole, **parts, "pipeline": pipeline, "meaning": meaning}


def _meaning_data(meaning: Meaning) -> dict[str, Any]:
    steps = b"".join(step.to_bytes(4, "little") for step in sorted(meaning.steps))
    return {
        "outputs": list(map(str, meaning.outputs)),  # numbers of 64 bits are not safe in JSON
        "updates": list(map(str, meaning.updates)),
        "gradients": {name: str(term) for name, term in meaning.gradients},
        "steps": base64.b64encode(steps).decode(),
        "scheme": str(meaning.scheme),
        "shapes": meaning.shapes,
        "roots": meaning.roots,
        "before": dict(meaning.before),
    }


def _meaning_from(data: Mapping[str, Any]) -> Meaning:
    text = base64.b64decode(data["steps"], validate=True)
    steps = frozenset(int.from_bytes(text[at : at + 4], "little") for at in range(0, len(text), 4))
    gradients = tuple(sorted((name, int(term)) for name, term in data["gradients"].items()))
    outputs, updates = (tuple(map(int, data[part])) for part in ("outputs", "updates"))
    shapes, roots = data.get("shapes"), data.get("roots")
    return Meaning(
        outputs, updates, gradients, steps, int(data["scheme"]),
        None if shapes is None else tuple(map(tuple, shapes)), None if roots is None else tuple(roots),
        tuple(sorted(data.get("before", {}).items())),
    )  # fmt: skip


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
                bool(row.get("depends", False)),
                None if row.get("reached_by") is None else tuple(row["reached_by"]),
                row.get("summed_over", ""),
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
                tuple(row["outputs"]),
                tuple(row["updates"]),
                tuple(row["parameters"]),
                tuple(row["buffers"]),
                tuple(row.get("wanted", ())),
            )
            for row in given["stages"]
        )
        order = tuple(tuple(text for text in row.split(",") if text) for row in given["order"])
        pipeline = PipelineInterface(
            given["axis"], tuple(given["axes"]), tuple(given["sizes"]), given["schedule"], order,
            tuple(given["rank_of"]), stages, bool(given["keeps_outputs"]),
        )  # fmt: skip
    meaning = None if data.get("meaning") is None else _meaning_from(data["meaning"])
    return ProgramInterface(
        axes, sizes, parameters, buffers, inputs, outputs, data["uses_dropout"], microbatches, updates, pipeline,
        tuple(data.get("by_value", ())),
        tuple(data.get("granted", ())),
        meaning,
        tuple(
            ExpertsInterface(row["where"], row["axis"], tuple(row["parameters"]), tuple(row["token_axes"]))
            for row in data.get("experts", ())
        ),
        data.get("beside", ""),
        tuple((bool(way), str(line)) for way, line in data.get("branches", ())),
        tuple(data.get("told", ())),
        tuple(Carried.of_data(each) for each in data.get("carried", ())),
    )  # fmt: skip
