"""The program, from capture to the last lowering.

    program  ::= phase mesh? input* parameter* buffer* region* call* output*
    region   ::= name "(" port* ")" "->" port*  graph          one piece of the model, written once
    call     ::= region "@" path "(" value* ")"                one use of it, with its own parameters
    value    ::= "%" input-name | call-index "." result-index  what flows between calls
    port     ::= name ":" type                                 type ::= dtype "[" size* "]"
    phase    ::= captured | outlined | differentiated | annotated | placed | lowered

Graphs inside regions are `torch.fx.Graph`s. Their placeholders come in the order parameters and buffers
(`Region.slots`),
inputs, then, once differentiated, the dropout seed and the gradients of the differentiable outputs (`Region.tangents`).
A differentiated graph returns the region's outputs, the gradients of its trainable slots, and the gradients of its
differentiable inputs. A pass copies a graph before it changes it; `node.meta["val"]` holds the shape and dtype of every
value.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

import torch
from torch import fx

from autopar.ir.batching import Batching
from autopar.ir.nodes import format_target
from autopar.ir.op_call import name_of
from autopar.ir.placement import Overlap, Placement, PlacementResult, SharedParameter
from autopar.ir.region import Call, Region
from autopar.ir.stages import Pipeline, Share
from autopar.ir.tensor_type import TensorType
from autopar.ir.told import Carried, Told
from autopar.ir.values import Port, ValueRef, Variable
from autopar.machine.mesh import Mesh

Mode = Literal["none", "selective", "full"]
"""What the backward of a repeated block computes again: nothing, all but products and attention, everything."""
MODES: tuple[Mode, ...] = get_args(Mode)


Branch = tuple[bool, str]
"""Which way a branch goes, and the model's line."""
BRANCH = "autopar_branch"
"""The output that says which branch is the first that goes another way."""
Phase = Literal["captured", "outlined", "differentiated", "annotated", "placed", "lowered"]


@dataclass(frozen=True, slots=True)
class Folded:
    """A long row of blocks that do the same, of which a captured program has two periods, by their modules' paths.

    before, like: of the first period and of the second. left_out: of those that follow; a block of theirs does what the
    one at its place in `like` does, on its own parameters, and what moves on from `before` to `like` moves on with it.
    inputs: for each of those periods the program's inputs (states) that are its own, by the names of those of `like`.
    outputs: the program's outputs of this row, by name: how many periods behind `like` they come from.
    """

    before: tuple[str, ...]
    like: tuple[str, ...]
    left_out: tuple[tuple[str, ...], ...]
    inputs: tuple[Mapping[str, str], ...] = ()
    outputs: Mapping[str, int] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class AttentionSite:
    """An attention that was found: in which module, whether as a call of SDPA or written out, what it is (`causal,
    window 4096`), and whether it is one operator now; `why` not.
    """

    module: str
    form: str
    what: str
    fused: bool
    why: str = ""

    @property
    def place(self) -> str:
        return self.module or "the model"


@dataclass(frozen=True, slots=True)
class Program:
    """The whole model: regions, the calls in order, and the border.

    inputs: `differentiable` are those whose gradients the user wants.
    roots: the outputs whose gradient the user gives. output_spec: the pytree of the model's output, output_leaves:
    for each of its leaves the output, a text or None. result: what the solver says of the placement. constants: tensors
    that the capture lifted, by buffer name. microbatches: how often a step runs the program before it reduces
    gradients; all shapes are of one microbatch. updates: for each buffer that forward changes, the value that
    replaces it, in the order of the calls; no call reads these values. share: where there will be a pipeline, what
    one rank of it holds; pipeline: its stages, once they are cut. zigzag: the axes that may split values zigzag.
    by_value: inputs whose values the program is for; of others only shapes.
    granted: what is taken for granted of values; where it is not so, outputs are NaN. branches: which way those go that
    values decide; where there are any, the last output is the number of the first that goes another way.
    carried: what forward leaves on modules, outputs behind the user's.
    told: of Python's numbers that differ from step to step; known where it was traced.
    together: how many microbatches go through the program at once, each with ports of its own; single: then the placed
    program of one of them.
    shown: masks among the inputs, by name -> how many positions of a cache they show a token on the average, where they
    show fewer than are written.
    attention: what `fuse_attention` found. folded: what a captured program leaves out; others leave nothing out.
    """

    phase: Phase
    regions: tuple[Region, ...]
    calls: tuple[Call, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[ValueRef, ...]
    output_names: tuple[str, ...]
    variables: tuple[Variable, ...]
    output_spec: Any = None
    output_leaves: tuple[int | str | None, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    training: bool = True
    roots: frozenset[ValueRef] = frozenset()
    mesh: Mesh | None = None
    placement: Placement | None = None
    result: PlacementResult | None = None
    notes: tuple[str, ...] = ()
    microbatches: int = 1
    batching: Batching | None = None
    shared: tuple[SharedParameter, ...] = ()
    overlap: Overlap | None = None
    updates: tuple[tuple[str, ValueRef], ...] = ()
    share: Share | None = None
    pipeline: Pipeline | None = None
    zigzag: frozenset[str] = frozenset()
    attention: tuple[AttentionSite, ...] = ()
    folded: tuple[Folded, ...] = ()
    by_value: tuple[str, ...] = ()
    shown: Mapping[str, float] = field(default_factory=dict)
    granted: tuple[str, ...] = ()
    branches: tuple[Branch, ...] = ()
    carried: tuple[Carried, ...] = ()
    told: Told | None = field(default=None, repr=False, compare=False)
    together: int = 1
    single: Program | None = field(default=None, repr=False, compare=False)
    _named: dict[str, Variable] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def on_mesh(self) -> Mesh:
        """The mesh, which programs have from `annotate` on."""
        assert self.mesh is not None
        return self.mesh

    @property
    def placed(self) -> Placement:
        """The placement, which programs have from `place` on."""
        assert self.placement is not None
        return self.placement

    @property
    def wanted(self) -> frozenset[str]:
        """Inputs whose gradients the user wants, by name; each comes back laid out as its input is."""
        return frozenset(port.name for port in self.inputs if port.differentiable)

    def has_gradient(self, value: ValueRef) -> bool:
        """Whether the backward makes the gradient of what a call reads."""
        if value.call < 0:
            return value.name in self.wanted
        return value.index in self.region(self.calls[value.call].region).tangents

    @property
    def states(self) -> frozenset[str]:
        """Inputs that are returned, changed, under the same name and with the same type, to be handed in again: caches.

        They lie as the program likes it, the same before and after.
        """
        types = {port.name: port.type for port in self.inputs}
        found = zip(self.output_names, self.outputs, strict=True)
        return frozenset(
            name for name, ref in found if name in types and ref.call >= 0 and self.port(ref).type == types[name]
        )

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def variable(self, name: str) -> Variable:
        if not self._named:  # asked once a parameter and operator: looked for one by one, the time grows with both
            self._named.update((name, v) for v in reversed(self.variables) for name in (*v.aliases, v.name))
        return self._named[name]

    def calls_of(self, region: str) -> Iterator[tuple[int, Call]]:
        return ((index, call) for index, call in enumerate(self.calls) if call.region == region)

    def num_calls(self, region: str) -> int:
        return sum(1 for _ in self.calls_of(region))

    def held_of(self, count: int) -> float:
        """Of `count` things that lie in different calls, how many a rank holds: all, or its part of a pipeline's, as
        long as nothing is cut.
        """
        return count if self.share is None else count / self.share.ranks

    def saved_copies(self, region: str) -> float:
        """Of how many calls a rank keeps the activations at once, of all microbatches that are under way."""
        held = self.held_of(self.num_calls(region))
        return held if self.share is None else held * self.share.in_flight

    def region_of(self, value: ValueRef) -> Region:
        """The region that makes a value."""
        return self.region(self.calls[value.call].region)

    def port(self, value: ValueRef) -> Port:
        """The port that a value leaves."""
        if value.call < 0:
            return next(port for port in self.inputs if port.name == value.name)
        return self.region(self.calls[value.call].region).outputs[value.index]

    def with_regions(self, regions: Mapping[str, Region], **changes: Any) -> Program:
        return replace(self, regions=tuple(regions.get(r.name, r) for r in self.regions), **changes)

    def __str__(self) -> str:
        return format_program(self)


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
        again = f" again {', '.join(map(str, stage.recomputed))}" if stage.recomputed else ""
        calls = ", ".join(str(call) for call in stage.calls if call not in stage.recomputed)
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


def _format_args(node: fx.Node) -> str:
    parts = [_format_arg(arg) for arg in node.args]
    parts += [f"{key}={_format_arg(arg)}" for key, arg in node.kwargs.items()]
    return ", ".join(parts)


def _format_arg(arg: Any) -> str:
    return f"[{', '.join(map(_format_arg, arg))}]" if isinstance(arg, (list, tuple)) else str(arg)


def _format_value(region: Region, node: fx.Node, axes: tuple[str, ...]) -> str:
    value = node.meta.get("val")
    source, index = node.args if "getitem" in name_of(node.target) else (node, 0)
    strategies = region.placed.strategies if region.placed else {}
    strategy = strategies.get(source.name) if isinstance(source, fx.Node) else None
    if isinstance(value, torch.Tensor):
        layout = strategy.results[index] if strategy and isinstance(index, int) else None
        if layout is not None:
            return TensorType.of(value).text(layout, axes)
        return str(TensorType.of(value))
    if isinstance(value, (list, tuple)):
        return ", ".join(str(TensorType.of(v)) if isinstance(v, torch.Tensor) else "-" for v in value)
    return "-"
