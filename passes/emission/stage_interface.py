"""The border of a pipeline's stages, as the runtime must know it."""

from __future__ import annotations

from autopar.cost.memory.boundaries import carries_gradient, inputs_wanted_of
from autopar.ir.interface import PipelineInterface, StageInterface, TensorInterface
from autopar.ir.left_out import kept_by
from autopar.ir.program import Program
from autopar.ir.stages import Stage
from autopar.ir.values import ValueRef


def pipeline_interface(program: Program) -> PipelineInterface | None:
    """The pipeline of a lowered program; None where it has none."""
    pipeline = program.pipeline
    if pipeline is None:
        return None
    assert program.mesh is not None and program.mesh.whole is not None, "a pipeline's mesh is part of a whole one"
    whole, schedule = program.mesh.whole, pipeline.schedule
    return PipelineInterface(
        pipeline.axis,
        whole.axis_names,
        tuple(whole.sizes),
        schedule.name,
        tuple(tuple(map(str, actions)) for actions in schedule.order),
        schedule.rank_of,
        tuple(_stage_interface(program, number, stage) for number, stage in enumerate(pipeline.stages)),
        pipeline.keeps_outputs,
    )


def _stage_interface(program: Program, number: int, stage: Stage) -> StageInterface:
    own = set(stage.calls) - set(stage.recomputed)
    used = {name for call in stage.calls for name in program.calls[call].slots}
    # What no call uses is kept by one stage, so that checkpoints have it; where a prompt or a token is all that runs,
    # by all of them: an encoder runs by itself, on every rank.
    assert program.pipeline is not None
    everywhere, stages = bool(program.states) and not program.training, program.pipeline.stages
    unused = {v.name for v in program.variables} - {name for call in program.calls for name in call.slots}
    used |= {name for name in unused if everywhere or kept_by(program, stages, name) == number}
    updates = tuple(name for name, ref in program.updates if ref.call in own)
    return StageInterface(
        tuple(_travelling(program, ref) for ref in stage.receives),
        tuple(_travelling(program, ref) for ref in stage.sends),
        tuple(place for place, ref in enumerate(program.outputs) if ref.call in own),
        updates,
        tuple(v.name for v in program.variables if v.is_parameter and v.name in used),
        tuple(v.name for v in program.variables if not v.is_parameter and (v.name in used or v.name in updates)),
        inputs_wanted_of(program, sorted(own)) if program.training else (),
    )


def _travelling(program: Program, ref: ValueRef) -> TensorInterface:
    assert program.placement is not None
    port, differentiable = program.port(ref), carries_gradient(program, ref)
    return TensorInterface(
        port.name,
        port.type.shape,
        str(port.type.dtype).removeprefix("torch."),
        program.placement.values[(ref.call, ref.index)],
        differentiable,
        gradient=program.placement.gradients[(ref.call, ref.index)] if differentiable else None,
    )
