"""emit: write the program as one Python file that a person can read, and that the runtime runs.

Requires: phase `lowered`.
Ensures: text with, per distinct region, `gather`, `forward`, `backward` and `reduce` functions, then `split_inputs`,
    `forward` and `backward` over the calls; for a pipeline, tables of its stages and schedule, and the functions of
    each kind of stage in their place (contract: autopar/interface.py). Deterministic. Each value's global shape,
    what splits it (`f32[8/dp, 64/tp]`) and what is still to be summed (`+tp`) stand in a comment.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace

from autopar.ir.interface import ProgramInterface, TensorInterface
from autopar.ir.interface_text import starred
from autopar.ir.placement import ParameterLayout
from autopar.ir.program import Program
from autopar.ir.reach import reached_by
from autopar.ir.sharding import Sharding, local_shape, redistribution_steps, replicated
from autopar.ir.tensor_type import TensorType, dtype_name
from autopar.ir.uneven import block_shape, is_uneven
from autopar.ir.values import ValueRef, Variable, gradient_key
from autopar.machine.mesh import Mesh
from autopar.passes.emission.backward import StepWriter
from autopar.passes.emission.exchanged import exchanged_experts
from autopar.passes.emission.functions import Places, region_functions
from autopar.passes.emission.literals import escaped
from autopar.passes.emission.parameters import Names, unshard_function
from autopar.passes.emission.sizes import sizes_of
from autopar.passes.emission.stage_interface import pipeline_interface
from autopar.passes.emission.stage_table import banner, kind_heading, stage_table
from autopar.passes.emission.stages import stage_kinds
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.names import describe


def emit(program: Program, *, strategies: Sequence[AxisStrategy], title: str = "model") -> str:
    """The generated program's text."""
    return emit_with_places(program, strategies=strategies, title=title)[0]


def emit_with_places(
    program: Program, *, strategies: Sequence[AxisStrategy], title: str = "model"
) -> tuple[str, Places]:
    """The generated program's text, and where in it each value is made."""
    places: Places = {}
    sizes = sizes_of(program)
    names = replace(Names.of(program), known_sizes=sizes)
    sections = [[_header(program, strategies, title), *([sizes.text] if sizes.values else [])]]
    kinds = stage_kinds(program) if program.pipeline is not None else []
    sections += [[stage_table(program, kinds)]] if kinds else []
    for region in program.regions:
        count = program.num_calls(region.name)
        times = f", called {count} times" if count > 1 else ""
        heading = banner(f"{region.name}: {region.module or 'the model around its blocks'}{times}")
        functions = region_functions(names, region, places)
        if kinds and (unshard := unshard_function(names, region)) is not None:
            functions.append(unshard)
        sections.append(_under(heading, functions))
    writer = StepWriter(names)
    texts = () if program.batching is None else (program.batching.weight, program.batching.of_batch)
    step = [text.rstrip() for text in texts if text]
    step.append(writer.split_inputs())
    if not kinds:
        step.append(writer.forward())
        head = "def backward(comm, state, held, saved, grads, sums, last):"
        refuses = f"{head}\n    raise RuntimeError('planned for inference')"
        step.append(writer.backward(root_outputs(program)) if program.training else refuses)
    sections.append(_under(banner("the step: every rank runs these on its own part"), step))
    for kind in kinds:
        sections.append(_under(kind_heading(kind), [function.text(kind.name) for function in kind.functions]))
    return "\n\n\n".join("\n\n".join(section) for section in sections) + "\n", places


def _under(heading: str, functions: Sequence[str]) -> list[str]:
    """Functions that belong together, the first of them under a heading."""
    return [f"{heading}\n{functions[0]}", *functions[1:]]


def root_outputs(program: Program) -> list[ValueRef]:
    """The outputs whose gradients `backward` takes, in order."""
    return [ref for ref in program.outputs if _is_root(program, ref)]


def _is_root(program: Program, ref: ValueRef) -> bool:
    return ref in program.roots


def interface_of(program: Program) -> ProgramInterface:
    """The border of the generated program."""
    assert program.mesh is not None and program.placement is not None
    placement = program.placement
    whole = replicated(len(program.mesh.axis_names))

    def tensor(
        name: str, type_: TensorType, sharding: Sharding, differentiable: bool, aliases: tuple[str, ...] = ()
    ) -> TensorInterface:
        return TensorInterface(
            name, type_.shape, str(type_.dtype).removeprefix("torch."), sharding, differentiable, aliases
        )

    used = {name for call in program.calls for name in call.slots}
    reached = reached_by(program)
    num_inputs, num_outputs = (len(each) // program.together for each in (program.inputs, program.outputs))
    parameters: list[TensorInterface] = []
    buffers: list[TensorInterface] = []
    alike = {_kind(x): placement.parameters[x.name] for x in program.variables if x.name in placement.parameters}
    for variable in program.variables:
        # What this program does not use lies as the same of other layers does: another program may use them all.
        layout = placement.parameters.get(variable.name, alike.get(_kind(variable)))
        stored = layout.stored if layout else whole
        type_ = TensorType(variable.type.shape, variable.stored_dtype)
        uneven = layout is not None and is_uneven(variable, layout, program.mesh.sizes)
        trained = (
            variable.trainable and variable.name in used
        )  # what forward does not use gets no gradient, as in eager
        item = tensor(variable.name, type_, stored, trained, variable.aliases)
        if uneven and layout is not None:
            item = replace(item, block=block_shape(variable, layout, program.mesh.sizes))
        if trained and program.training:
            places = {place % num_outputs for place in reached.get(variable.name, ())}
            item = replace(item, reached_by=tuple(sorted(places)))
            item = replace(item, summed_over=_summed_over(layout, program.mesh) if layout else "")
        (parameters if variable.is_parameter else buffers).append(item)
    outputs = tuple(
        replace(
            _trimmed(
                tensor(name, program.port(ref).type, placement.values[(ref.call, ref.index)], _is_root(program, ref)),
                program.port(ref).logical,
                program.mesh.sizes,
            ),
            depends=program.port(ref).differentiable,
        )
        for name, ref in zip(program.output_names, program.outputs, strict=True)
    )
    inputs = tuple(tensor(p.name, p.type, placement.inputs.get(p.name, whole), False) for p in program.inputs)
    inputs = tuple(_wanted(entry, reached.get(gradient_key(entry.name)), num_outputs) for entry in inputs)
    beside = program.inputs[num_inputs].name.removeprefix(inputs[0].name) if program.together > 1 else ""
    if program.batching is not None:
        pairs = zip(outputs, program.batching.outputs, strict=True)
        outputs = tuple(replace(output, batch_dim=how.batch_dim, combine=how.combine) for output, how in pairs)
        inputs = tuple(replace(each, batch_dim=program.batching.inputs[each.name]) for each in inputs)
    inputs, outputs = inputs[:num_inputs], outputs[:num_outputs]
    updates = tuple(
        tensor(name, program.port(ref).type, placement.values[(ref.call, ref.index)], False)
        for name, ref in program.updates
    )
    if program.batching is not None and program.batching.updates:
        updates = tuple(replace(each, combine=program.batching.updates[each.name].combine) for each in updates)
    dropout = any(region.uses_dropout for region in program.regions)
    sizes = tuple(program.mesh.sizes)
    return ProgramInterface(
        program.mesh.axis_names, sizes, tuple(parameters), tuple(buffers), inputs, outputs, dropout,
        program.microbatches * program.together, updates, pipeline_interface(program), program.by_value,
        program.granted, experts=exchanged_experts(program), beside=beside, branches=program.branches,
        told=() if program.told is None else program.told.words, carried=program.carried,
    )  # fmt: skip


def _kind(variable: Variable) -> tuple[object, ...]:
    return starred(variable.name), variable.type, variable.stored_dtype, variable.trainable, variable.is_parameter


def _wanted(entry: TensorInterface, places: Iterable[int] | None, num_outputs: int) -> TensorInterface:
    """An input whose gradient the backward returns. places: of the outputs whose gradients come to it."""
    if places is None:
        return entry
    reached_by = tuple(sorted({place % num_outputs for place in places}))
    return replace(entry, differentiable=True, reached_by=reached_by)


def _summed_over(layout: ParameterLayout, mesh: Mesh) -> str:
    """The axis over which a gradient is summed last, if its parameter lies whole on it; "" without one."""
    steps = redistribution_steps(layout.gradient, layout.stored, mesh.sizes) or ()
    if not steps or steps[-1].kind != "all_reduce":
        return ""
    return mesh.axis_names[steps[-1].axis]


def _trimmed(output: TensorInterface, logical: tuple[int, ...] | None, sizes: Sequence[int]) -> TensorInterface:
    """An output in the user's shape, where the program's has padding."""
    if logical is None or logical == output.shape:
        return output
    return replace(output, shape=logical, block=local_shape(output.shape, output.sharding, sizes))


def _header(program: Program, strategies: Sequence[AxisStrategy], title: str) -> str:
    assert program.mesh is not None
    mesh = program.mesh.whole if program.pipeline is not None and program.mesh.whole is not None else program.mesh
    axes = ", ".join(f"{name}={size}" for name, size in zip(mesh.axis_names, mesh.sizes, strict=True))
    calls = ", ".join(f"{r.name} × {program.num_calls(r.name)}" for r in program.regions)
    dtypes = ", ".join(sorted({dtype_name(v.type.dtype) for v in program.variables if v.is_parameter}))
    strategy = describe(strategies, program.mesh)
    about = escaped(f"{title} on mesh {axes}; strategy {strategy}; regions {calls}; parameters {dtypes}.")
    return f'''"""{about}

Written by autopar. Every rank runs this file on its own part of every tensor. `comm` moves tensors over a mesh axis;
`p` holds a region's parameters as its operators need them, `state` the stored ones, `held` those gathered once a step.
A comment gives each value's global shape, the axis that splits each dim, and +axis where the ranks still hold terms of
a sum. You may edit this file and run it: autopar.compile(model, mesh, program="this_file.py").
"""

import torch
import torch.nn.functional as F

from autopar import operators as ops

aten = torch.ops.aten{_attention_order(program)}'''


def _attention_order(program: Program) -> str:
    """Which of PyTorch's kernels plain attention goes to first, where that was measured and is not what torch does."""
    assert program.mesh is not None
    if program.mesh.hardware.plain_attention != "cudnn":
        return ""
    if not any(
        call.name.startswith("autopar.attention") for region in program.regions for call, _ in region.ops.values()
    ):
        return ""
    return '\nATTENTION = "cudnn"  # before flash attention, where attention is plain: measured to be faster there'
