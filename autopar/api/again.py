"""Decisions that were made, for another batch or another part of the model."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

from torch import nn

from autopar import pipeline
from autopar.api.plan import Plan
from autopar.api.planning import dressed
from autopar.base.errors import AutoparError
from autopar.ir.interface import StageInterface
from autopar.ir.left_out import begins_with
from autopar.ir.program import Program
from autopar.ir.stages import Pipeline
from autopar.machine.mesh import Mesh
from autopar.planner.assembly import redo
from autopar.planner.plan.record import PlanRecord
from autopar.strategies.names import Strategy
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec, nth_of
from autopar.strategies.request import Attempt

Record = TypeVar("Record", bound=PlanRecord)


def replan(plan: Plan, model: nn.Module, inputs: Mapping[str, Any], mesh: Mesh) -> Plan:
    """A plan with its decisions on this model, traced again; nothing is solved.

    Raises:
        AutoparError: the plan is for another mesh, model or batch.
    """
    if (plan.mesh.axis_names, tuple(plan.mesh.sizes)) != (mesh.axis_names, tuple(mesh.sizes)):
        raise AutoparError("the plan is for another mesh", values=f"planned {plan.mesh}, running on {mesh}")
    request = Attempt(
        model, inputs, plan.stage_mesh, plan.strategies, plan.pins, plan.memory_limit_bytes, plan.precision,
        plan.training, microbatches=plan.interface.microbatches, pipeline=plan.asked, roots=plan.roots,
        wanted=plan.wanted,
    )  # fmt: skip
    return dressed(redo(plan, request, tuple(plan.passes or pipeline.DEFAULT)))


def same_stages(plan: PlanRecord, strategy: Strategy) -> Strategy:
    """What was asked, with the stages where the first plan cut them: parameters stay on their ranks."""
    if plan.decisions.pipeline is None:
        return strategy
    found = plan.decisions.pipeline
    assert plan.program is not None
    own = plan.asked if plan.asked is not None and (plan.asked.is_file or not found.schedule.has_backward) else None
    asked = own or PipelineSpec(found.schedule.name)
    cut, ranks = first_of_stages(plan.program, found), found.schedule.rank_of
    spec = replace(asked, stages_per_rank=found.stages_per_rank, cut=cut, rank_of=ranks)
    others = zip(plan.stage_mesh.axis_names, plan.strategies, strict=True)
    return {AXIS: spec, **{axis: each for axis, each in others if axis in plan.mesh.axis_names}}


def first_of_stages(program: Program, pipeline: Pipeline) -> tuple[str, ...]:
    """What begins each stage but the first, as a cut names it: of its calls the first that is a block of the model, or
    has parameters. What is computed of inputs alone has other calls for other batches; where steps leave out blocks, so
    has what is no block, and is named by a module.
    """
    names = [call.path or call.region for call in program.calls]
    found = []
    for stage in pipeline.stages[1:]:
        own = sorted(set(stage.calls) - set(stage.recomputed))
        number = next((n for n in own if program.calls[n].path or _has_parameters(program, n)), own[0])
        if program.told is not None and not program.calls[number].path:
            earlier = {name for call in program.calls[:number] for name in call.slots}
            if module := begins_with(program, number, earlier):
                found.append(module)
                continue
        found.append(nth_of(names[number], names[:number].count(names[number])))
    return tuple(found)


def _has_parameters(program: Program, number: int) -> bool:
    return any(program.variable(name).is_parameter for name in program.calls[number].slots)


def unused_as_stored(plan: Record, first: PlanRecord) -> Record:
    """Parameters that a later program does not use (adapters that are off) lie as the first plan has them."""
    assert plan.program is not None
    used = {name for call in plan.program.calls for name in call.slots}
    stored = {parameter.name: parameter for parameter in first.interface.parameters}
    parameters = [
        each if each.name in used or each.name not in stored
        else replace(each, sharding=stored[each.name].sharding, block=stored[each.name].block)
        for each in plan.interface.parameters
    ]  # fmt: skip
    interface = replace(plan.interface, parameters=tuple(parameters))
    if plan.interface.pipeline is not None and first.interface.pipeline is not None:
        unused = {each.name for each in parameters if each.name not in used}
        stages = _with_unused(plan.interface.pipeline.stages, first.interface.pipeline.stages, unused)
        interface = replace(interface, pipeline=replace(plan.interface.pipeline, stages=stages))
    return replace(plan, interface=interface)


def _with_unused(
    stages: Sequence[StageInterface], first: Sequence[StageInterface], unused: Collection[str]
) -> tuple[StageInterface, ...]:
    """The stages with the parameters that no call uses where those of the first plan have them."""

    def held(own: StageInterface, before: StageInterface) -> tuple[str, ...]:
        kept = [name for name in own.parameters if name not in unused]
        return (*kept, *(name for name in before.parameters if name in unused))

    return tuple(replace(own, parameters=held(own, before)) for own, before in zip(stages, first, strict=True))
