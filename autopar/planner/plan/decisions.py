"""The decisions of a placement as plain data, and back onto a program that was traced again."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any

from autopar.base.errors import AutoparError
from autopar.ir.choices import Choice, shardings
from autopar.ir.placement import Overlap, ParameterLayout, Placement
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Placed
from autopar.ir.sharding import Sharding, format_sharding, parse_sharding
from autopar.ir.stages import Pipeline, Stage
from autopar.ir.values import ValueRef
from autopar.strategies.pipelining.summary import schedule_from


@dataclass(frozen=True, slots=True)
class Decisions:
    """One choice per axis for every operator of every region, and the layouts of all that lives outside regions."""

    operators: Mapping[str, Mapping[str, tuple[Choice, ...]]]
    placement: Placement
    relays: Mapping[str, Mapping[str, Sharding]]
    overlap: Overlap | None = None
    pipeline: Pipeline | None = None

    @staticmethod
    def of(program: Program) -> Decisions:
        """The decisions of a placed program, or of a lowered one; of one that two microbatches go through together,
        those of one of them.
        """
        if program.single is not None:
            return replace(Decisions.of(program.single), overlap=program.overlap, pipeline=_stages(program))
        chosen = {r.name: {name: s.choices for name, s in r.strategies.items()} for r in program.regions}
        relays = {r.name: dict(r.relays) for r in program.regions}
        return Decisions(chosen, program.placed, relays, program.overlap, _stages(program))

    def apply(self, program: Program) -> Program:
        """An annotated program with these decisions written into it, as `place` would.

        Raises:
            AutoparError: the program is not the one that was planned (another model, shape or version).
        """
        made = {(n, i) for n, call in enumerate(program.calls) for i in range(len(program.region(call.region).outputs))}
        if self.placement.values.keys() != made:
            raise _other_program("the calls of its regions")
        given = {name for call in program.calls for name in call.slots}
        parameters = {variable.name for variable in program.variables if variable.is_parameter}
        if unknown := given & parameters - self.placement.parameters.keys():
            raise _other_program(min(unknown))
        regions = {}
        for region in program.regions:
            known = self.operators.get(region.name, {})
            if set(known) != set(region.ops):
                raise _other_program(region.name)
            strategies: dict[str, NodeStrategy] = {}
            for name, (_, rule) in region.ops.items():
                try:
                    placed = shardings(rule, known[name], program.on_mesh.sizes)
                except (StopIteration, KeyError, IndexError):
                    placed = None
                if placed is None:
                    raise _other_program(f"{region.name}.{name}")
                strategies[name] = NodeStrategy(known[name], *placed)
            regions[region.name] = replace(region, placed=Placed(strategies, self.relays.get(region.name, {})))
        return program.with_regions(
            regions, phase="placed", placement=self.placement, overlap=self.overlap, pipeline=self.pipeline
        )


def _stages(program: Program) -> Pipeline | None:
    return None if program.pipeline is None else replace(program.pipeline, considered=())


def _other_program(where: str) -> AutoparError:
    return AutoparError(
        "the plan was made for another program",
        where=where,
        values="its operators or their sizes differ",
        remedy="make the plan again for this model, batch and mesh (and loss=, where it was planned with one)",
    )


def to_data(decisions: Decisions, axes: tuple[str, ...]) -> dict[str, Any]:
    """JSON-ready."""
    placement = decisions.placement

    def text(sharding: Sharding) -> str:
        return format_sharding(sharding, axes)

    return {
        "operators": {
            region: {name: [_choice_data(choice) for choice in choices] for name, choices in nodes.items()}
            for region, nodes in decisions.operators.items()
        },
        "relays": {region: {name: text(s) for name, s in found.items()} for region, found in decisions.relays.items()},
        "parameters": {
            name: [text(p.stored), text(p.held), text(p.compute), text(p.gradient)]
            for name, p in placement.parameters.items()
        },
        "overlap": asdict(decisions.overlap) if decisions.overlap else None,
        "pipeline": _pipeline_data(decisions.pipeline) if decisions.pipeline else None,
        "inputs": {name: text(sharding) for name, sharding in placement.inputs.items()},
        "values": [[*key, text(sharding)] for key, sharding in placement.values.items()],
        "gradients": [[*key, text(sharding)] for key, sharding in placement.gradients.items()],
    }


def _choice_data(choice: Choice) -> list[Any]:
    return [choice.kind, choice.factor, choice.outer, choice.group, *([True] if choice.zigzag else [])]


def from_data(data: Mapping[str, Any], axes: tuple[str, ...]) -> Decisions:
    """The inverse of `to_data`."""

    def sharding(text: str) -> Sharding:
        return parse_sharding(text, axes)

    operators = {
        region: {name: tuple(Choice(*item) for item in choices) for name, choices in nodes.items()}
        for region, nodes in data["operators"].items()
    }
    placement = Placement(
        {name: ParameterLayout(*map(sharding, texts)) for name, texts in data["parameters"].items()},
        {name: sharding(text) for name, text in data["inputs"].items()},
        {(call, index): sharding(text) for call, index, text in data["values"]},
        {(call, index): sharding(text) for call, index, text in data["gradients"]},
    )
    relays = {
        region: {name: sharding(text) for name, text in found.items()} for region, found in data["relays"].items()
    }
    overlap = Overlap(**data["overlap"]) if data["overlap"] else None
    pipeline = _pipeline_from(data["pipeline"]) if data.get("pipeline") else None
    return Decisions(operators, placement, relays, overlap, pipeline)


def _pipeline_data(pipeline: Pipeline) -> dict[str, Any]:
    schedule = pipeline.schedule
    return {
        "axis": pipeline.axis,
        "keeps_outputs": pipeline.keeps_outputs,
        "schedule": schedule.name,
        "microbatches": schedule.num_microbatches,
        "rank_of": list(schedule.rank_of),
        "order": [",".join(map(str, actions)) for actions in schedule.order],
        "stages": [
            {
                "calls": list(stage.calls),
                "again": list(stage.recomputed),
                "receives": [[ref.call, ref.index] for ref in stage.receives],
                "sends": [[ref.call, ref.index] for ref in stage.sends],
            }
            for stage in pipeline.stages
        ],
    }


def _pipeline_from(data: Mapping[str, Any]) -> Pipeline:
    def refs(pairs: list[list[int]]) -> tuple[ValueRef, ...]:
        return tuple(ValueRef(call, index) for call, index in pairs)

    stages = tuple(
        Stage(tuple(row["calls"]), tuple(row["again"]), refs(row["receives"]), refs(row["sends"]))
        for row in data["stages"]
    )
    return Pipeline(data["axis"], stages, schedule_from(data), keeps_outputs=bool(data["keeps_outputs"]))
