"""Decisions that were made, for another batch or another part of the model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from torch import nn

from autopar import pipeline
from autopar.api.plan import Plan
from autopar.api.planning import dressed
from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.planner.assembly import redo
from autopar.strategies.names import Strategy
from autopar.strategies.pipelining.spec import AXIS, PipelineSpec
from autopar.strategies.request import Attempt


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
    )  # fmt: skip
    return dressed(redo(plan, request, tuple(plan.passes or pipeline.DEFAULT)))


def same_stages(plan: Plan, strategy: Strategy) -> Strategy:
    """What was asked, with the stages where the first plan cut them: parameters stay on their ranks."""
    if plan.decisions.pipeline is None:
        return strategy
    found = plan.decisions.pipeline
    first = [min(set(stage.calls) - set(stage.recomputed)) for stage in found.stages]
    own = plan.asked is not None and plan.asked.is_file
    asked = plan.asked if own and plan.asked is not None else PipelineSpec(found.schedule.name)
    cut, ranks = tuple(first[1:]), found.schedule.rank_of
    spec = replace(asked, stages_per_rank=found.stages_per_rank, cut=cut, rank_of=ranks)
    others = zip(plan.stage_mesh.axis_names, plan.strategies, strict=True)
    return {AXIS: spec, **{axis: each for axis, each in others if axis in plan.mesh.axis_names}}


def unused_as_stored(plan: Plan, first: Plan) -> Plan:
    """Parameters that a later program does not use (adapters that are off) lie as the first plan has them."""
    assert plan.program is not None
    used = {name for call in plan.program.calls for name in call.slots}
    stored = {parameter.name: parameter for parameter in first.interface.parameters}
    parameters = [
        each if each.name in used or each.name not in stored
        else replace(each, sharding=stored[each.name].sharding, block=stored[each.name].block)
        for each in plan.interface.parameters
    ]  # fmt: skip
    return replace(plan, interface=replace(plan.interface, parameters=tuple(parameters)))
