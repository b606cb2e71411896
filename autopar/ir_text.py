"""The printed form of a program."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torch import fx

from autopar.tensor_type import TensorType

if TYPE_CHECKING:
    from autopar.ir import Pipeline, Program, Region


def format_program(program: Program) -> str:
    """The printed form: deterministic, names as in the generated program."""
    lines = [f"program {program.phase}" + (f" on {program.mesh}" if program.mesh else "")]
    lines += [f"  input {port}" for port in program.inputs]
    trainable = sum(v.type.num_elements for v in program.variables if v.trainable)
    lines.append(f"  parameters {sum(v.is_parameter for v in program.variables)} ({trainable} trainable elements)")
    for region in program.regions:
        lines += _format_region(program, region)
    for index, call in enumerate(program.calls):
        arguments = ", ".join(map(str, call.arguments))
        lines.append(f"  call {index}: {call.region}@{call.path or '-'}({arguments})")
    lines += [
        f"  folded: behind {row.like[-1]}, {sum(map(len, row.left_out))} blocks as {' and '.join(row.like)}"
        for row in program.folded
    ]
    outputs = ", ".join(f"{name}={ref}" for name, ref in zip(program.output_names, program.outputs, strict=True))
    lines.append(f"  return {outputs}")
    lines += [f"  update {name} = {ref}" for name, ref in program.updates]
    lines += _format_pipeline(program.pipeline) if program.pipeline else []
    return "\n".join(lines) + "\n"


def _format_pipeline(pipeline: Pipeline) -> list[str]:
    schedule = pipeline.schedule
    lines = [f"  pipeline {schedule.name} over {pipeline.axis}={schedule.num_ranks}"]
    for number, stage in enumerate(pipeline.stages):
        again = f" again {', '.join(map(str, stage.again))}" if stage.again else ""
        calls = ", ".join(str(call) for call in stage.calls if call not in stage.again)
        receives, sends = (", ".join(map(str, refs)) or "-" for refs in (stage.receives, stage.sends))
        rank = schedule.rank_of[number]
        lines.append(f"    stage {number} on {rank}: calls {calls}{again}; receives {receives}; sends {sends}")
    return lines


def _format_region(program: Program, region: Region) -> list[str]:
    lines = [f"  region {region.name} × {program.num_calls(region.name)}  # {region.module}"]
    lines += [f"    slot {slot}" for slot in region.slots]
    lines += [f"    in {port}" for port in region.inputs]
    axes = program.mesh.axis_names if program.mesh else ()
    backward_started = False
    for node in region.graph.nodes:
        if node.op == "placeholder":
            continue
        if node.op == "output":
            lines.append(f"    return {', '.join(map(str, node.args[0]))}")
            continue
        if region.forward_nodes and not backward_started and node.name not in region.forward_nodes:
            backward_started = True
            lines.append("    backward:")
        lines.append(
            f"    {node.name} = {format_target(node)}({_format_args(node)})  # {_format_value(region, node, axes)}"
        )
    return lines


def format_target(node: fx.Node) -> str:
    """`aten.mul.Tensor`, `autopar.linear`: an operator as the printed program and the solver name it."""
    target = node.target
    return (
        str(target).removesuffix(".default") if not callable(target) or hasattr(target, "_schema") else target.__name__
    )


def _format_args(node: fx.Node) -> str:
    parts = [_format_arg(arg) for arg in node.args]
    parts += [f"{key}={_format_arg(arg)}" for key, arg in node.kwargs.items()]
    return ", ".join(parts)


def _format_arg(arg: Any) -> str:
    return f"[{', '.join(map(_format_arg, arg))}]" if isinstance(arg, (list, tuple)) else str(arg)


def _format_value(region: Region, node: fx.Node, axes: tuple[str, ...]) -> str:
    value = node.meta.get("val")
    source, index = node.args if "getitem" in str(node.target) else (node, 0)
    strategy = region.strategies.get(source.name) if isinstance(source, fx.Node) else None
    if isinstance(value, torch.Tensor):
        layout = strategy.results[index] if strategy and isinstance(index, int) else None
        if layout is not None:
            return TensorType.of(value).text(layout, axes)
        return str(TensorType.of(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(str(TensorType.of(v)) if isinstance(v, torch.Tensor) else "-" for v in value)
    return "-"
