"""What stands above the functions of a pipelined program: its stages, what travels between them, and the schedule."""

from __future__ import annotations

import math
import textwrap
from collections.abc import Sequence

from autopar.base.text import format_bytes
from autopar.ir.program import Program
from autopar.ir.schedule import COMPUTE, Schedule
from autopar.ir.sharding import local_shape
from autopar.ir.stages import Pipeline
from autopar.ir.values import ValueRef
from autopar.passes.emission.literals import plain, quoted
from autopar.passes.emission.segments import numbers_of
from autopar.passes.emission.stages import StageKind

WIDTH = 118
_NO_BREAK = "\N{NO-BREAK SPACE}"
MOST_RANKS, MOST_MICROBATCHES = 8, 16
"""Schedules up to these sizes are written out."""


def stage_table(program: Program, kinds: Sequence[StageKind]) -> str:
    """`STAGES`, with a comment on each, and `SCHEDULE`."""
    pipeline = program.pipeline
    assert pipeline is not None
    lines = [
        f"# {'=' * 100}",
        f"# the pipeline: {len(pipeline.stages)} stages over {pipeline.axis}, for each its kind and its blocks",
        "STAGES = (",
    ]
    for number in range(len(pipeline.stages)):
        kind = next(kind for kind in kinds if number in kind.ranges)
        ranges = ", ".join(f'"{name}": {_range(blocks)}' for name, blocks in kind.ranges[number].items())
        lines += _stage_comment(program, pipeline, number)
        lines.append(f'    ("{kind.name}", {{{ranges}}}),')
    return "\n".join([*lines, ")", *_schedule_lines(pipeline.schedule, pipeline.axis)])


def kind_heading(kind: StageKind) -> str:
    """The comment above the functions of a kind of stage."""
    stages = ", ".join(map(str, kind.ranges))
    return banner(f"{kind.name}: stage{'s' if len(kind.ranges) > 1 else ''} {stages}")


def banner(text: str) -> str:
    """A line that a reader sees from afar, above the functions that it stands for."""
    return f"# {'=' * 8} {plain(text)} {'=' * 40}"


def _stage_comment(program: Program, pipeline: Pipeline, number: int) -> list[str]:
    stage = pipeline.stages[number]
    own = [call for call in stage.calls if call not in stage.recomputed]
    text = f"stage {number} on {pipeline.axis} rank {pipeline.schedule.rank_of[number]}: {_modules(program, own)}"
    if stage.recomputed:
        text += f"; again: {_modules(program, stage.recomputed)}"
    if stage.sends:
        text += f"; sends {', '.join(_value(program, ref) for ref in stage.sends)}"
    return _wrapped(text, "    # ")


def _wrapped(text: str, indent: str) -> list[str]:
    lines = textwrap.wrap(text, WIDTH, initial_indent=indent, subsequent_indent=f"{indent}  ", break_on_hyphens=False)
    return [line.replace(_NO_BREAK, " ") for line in lines]


def _modules(program: Program, calls: Sequence[int]) -> str:
    """What calls run: `prologue, model.layers.0 … 7`."""
    runs: list[list[int]] = []
    for call in calls:
        if runs and numbers_of([program.calls[each] for each in (*runs[-1], call)]) is not None:
            runs[-1].append(call)
        else:
            runs.append([call])
    found: list[str] = []
    for run in runs:
        first, last = program.calls[run[0]], program.calls[run[-1]]
        found.append(first.path or first.region)
        if len(run) > 1:
            found[-1] += f" … {last.path.rpartition('.')[2]}"
    return plain(", ".join(found))


def _value(program: Program, ref: ValueRef) -> str:
    """`hidden f32[8/dp, 16, 64] (4.00 KiB)`: global shape, what splits it, bytes that a rank sends."""
    assert program.placement is not None and program.mesh is not None
    port, sharding = program.port(ref), program.placement.values[(ref.call, ref.index)]
    text = port.type.text(sharding, program.mesh.axis_names)
    num_bytes = math.prod(local_shape(port.type.shape, sharding, program.mesh.sizes)) * port.type.dtype.itemsize
    return plain(f"{port.name} {text} ({format_bytes(num_bytes)})").replace(" ", _NO_BREAK)


def _schedule_lines(schedule: Schedule, axis: str) -> list[str]:
    lines = [f"\nSCHEDULE = {quoted(schedule.name)}"]
    if schedule.num_ranks > MOST_RANKS or schedule.num_microbatches > MOST_MICROBATCHES:
        return lines
    lines.append("# what each rank computes, in order: stage, F(orward), B(ackward) or its halves I and W, microbatch")
    for rank, actions in enumerate(schedule.order):
        shown = [str(action) for action in actions if any(leaf.kind in COMPUTE for leaf in action.leaves)]
        lines += _wrapped(f"{axis} rank {rank}: {' '.join(shown)}", "# ")
    return lines


def _range(blocks: range) -> str:
    return f"range({blocks.start}, {blocks.stop})"
