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

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import fx

from autopar.ir_text import format_program
from autopar.ir_text import format_target as format_target
from autopar.sharding import Sharding, Step
from autopar.tensor_type import TensorType as TensorType

if TYPE_CHECKING:
    from autopar.mesh import Mesh
    from autopar.pipelining.actions import Schedule
    from autopar.rules.notation import Rule
    from autopar.rules.registry import OpCall
    from autopar.rules.strategies import Choice

Mode = Literal["none", "selective", "full"]
"""What the backward of a repeated block computes again: nothing, all but products and attention, everything."""
MODES: tuple[Mode, ...] = get_args(Mode)

Combine = Literal["concat", "mean", "sum", "weighted", "same"]

Phase = Literal["captured", "outlined", "differentiated", "annotated", "placed", "lowered"]


@dataclass(frozen=True, slots=True)
class Port:
    """A named value that enters or leaves a region or the program.

    differentiable: a gradient flows here. logical: the user's shape, where `type` has padding at the end of a dim.
    """

    name: str
    type: TensorType
    differentiable: bool = False
    logical: tuple[int, ...] | None = None

    def __str__(self) -> str:
        return f"{self.name}: {self.type}{' ∂' if self.differentiable else ''}"


@dataclass(frozen=True, slots=True)
class Slot:
    """A parameter or buffer of a region, by its name inside the region's module (`q_proj.weight`)."""

    name: str
    type: TensorType
    trainable: bool
    is_parameter: bool

    def __str__(self) -> str:
        return f"{self.name}: {self.type}"


@dataclass(frozen=True, slots=True)
class ValueRef:
    """What a call reads: the program's input `name`, or result `index` of call `call`."""

    call: int = -1
    index: int = 0
    name: str = ""

    def __str__(self) -> str:
        return f"%{self.name}" if self.call < 0 else f"{self.call}.{self.index}"


@dataclass(frozen=True, slots=True)
class NodeStrategy:
    """What each axis does with one operator, and the shardings that follow (one per tensor operand and result)."""

    choices: tuple[Choice, ...]
    operands: tuple[Sharding, ...]
    results: tuple[Sharding | None, ...]


@dataclass(frozen=True, slots=True)
class Options:
    """Every strategy an operator may take, and the seconds it computes under each, on one rank."""

    strategies: tuple[NodeStrategy, ...]
    seconds: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class LoweredFunction:
    """One phase of a region on local tensors: `forward`, `backward`, or one of its halves.

    graph: placeholders are `comm`, `p` (the gathered parameters by slot name), then `inputs`; collectives are method
    calls on `comm`. Every node's meta holds `type` (global), `sharding` and `origin` where it is one tensor. The graph
    returns `results` values, then those saved: by a forward for the backward, by the input half for the weight half.
    """

    graph: fx.Graph
    inputs: tuple[str, ...]
    num_results: int
    saved: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Move:
    """One tensor of a bucket: a slot of the region, and its part in each step of the bucket."""

    slot: int
    steps: tuple[Step, ...]


@dataclass(frozen=True, slots=True)
class Bucket:
    """Tensors of one dtype that travel together through the same steps, as one collective each.

    chain: (kind, axis number) of each step; empty for what needs no collective. keep: after how many steps the result
    is kept for the rest of the optimizer step. owned: nobody else reads the tensors, they may be reduced in place.
    """

    chain: tuple[tuple[str, int], ...]
    moves: tuple[Move, ...]
    keep: int = 0
    owned: bool = False


@dataclass(frozen=True, slots=True)
class Region:
    """A piece of graph that occurs once or many times.

    module: the module path with the repeated index as `*`. forward_nodes: names of the nodes that run in the forward
    phase (differentiated and later). origins: node name -> module path and source line for comments. hints: node ->
    factor (or, for placeholders, dim) -> stripe counts; zigzags: the same, of splits that may be zigzag. relays: values
    that several operators read -> the sharding in which they are moved once for all of them. transfers: the buckets of
    `gather`, `gather_for_backward` and `reduce`. lowered: `forward` and `backward`; where a pipeline wants them,
    `backward_input` and `backward_weight` too, which together do what `backward` does (autopar/passes/halves.py).
    """

    name: str
    module: str
    graph: fx.Graph
    slots: tuple[Slot, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[Port, ...]
    uses_dropout: bool = False
    tangents: tuple[int, ...] = ()
    forward_nodes: frozenset[str] = frozenset()
    origins: Mapping[str, str] = field(default_factory=dict)
    ops: Mapping[str, tuple[OpCall, Rule]] = field(default_factory=dict)
    hints: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    zigzags: Mapping[str, Mapping[str, tuple[int, ...]]] = field(default_factory=dict)
    options: Mapping[str, Options] = field(default_factory=dict)
    strategies: Mapping[str, NodeStrategy] = field(default_factory=dict)
    relays: Mapping[str, Sharding] = field(default_factory=dict)
    transfers: Mapping[str, tuple[Bucket, ...]] = field(default_factory=dict)
    lowered: Mapping[str, LoweredFunction] = field(default_factory=dict)

    @property
    def trainable_slots(self) -> tuple[Slot, ...]:
        return tuple(slot for slot in self.slots if slot.trainable)

    @property
    def phases(self) -> Mapping[str, LoweredFunction]:
        """What is lowered, each operator once: the forward, and the backward as a whole, not its halves."""
        return {name: self.lowered[name] for name in ("forward", "backward") if name in self.lowered}

    @property
    def differentiable_inputs(self) -> tuple[Port, ...]:
        return tuple(port for port in self.inputs if port.differentiable)


@dataclass(frozen=True, slots=True)
class Call:
    """One use of a region. slots: the fully qualified names that fill the region's slots, in order."""

    region: str
    path: str
    slots: tuple[str, ...]
    arguments: tuple[ValueRef, ...]


@dataclass(frozen=True, slots=True)
class Variable:
    """A parameter or buffer of the model: its canonical name, the other names it is tied to, stored and compute
    types.

    padded: the shape that operators see, where that has rows of zeros behind those of `type` (`passes/pad.py`).
    """

    name: str
    type: TensorType
    stored_dtype: torch.dtype
    trainable: bool
    is_parameter: bool
    aliases: tuple[str, ...] = ()
    padded: tuple[int, ...] | None = None

    @property
    def seen(self) -> TensorType:
        """The type that operators see."""
        return self.type if self.padded is None else TensorType(self.padded, self.type.dtype)


@dataclass(frozen=True, slots=True)
class ParameterLayout:
    """How a parameter lives: `stored` between steps, `held` from its first use in a step to the last (gathered once),
    `compute` while a region uses it (gathered for each use), `gradient` before its reduction.
    """

    stored: Sharding
    held: Sharding
    compute: Sharding
    gradient: Sharding


@dataclass(frozen=True, slots=True)
class Placement:
    """The decisions of `place`: a layout for every parameter, and a sharding for every value (and gradient) between
    calls.
    """

    parameters: Mapping[str, ParameterLayout]
    inputs: Mapping[str, Sharding]
    values: Mapping[tuple[int, int], Sharding]
    gradients: Mapping[tuple[int, int], Sharding]


@dataclass(frozen=True, slots=True)
class SharedParameter:
    """A parameter that several calls use: gathered once a phase, its gradients added before their reduction.

    gather, reduce: as of a region's slots; None where nothing is to be moved.
    """

    name: str
    gather: Bucket | None
    reduce: Bucket | None


@dataclass(frozen=True, slots=True)
class Overlap:
    """How collectives of parameters run beside the compute.

    prefetch: the next call's gathers start before this call computes, and one call's reductions run while the next one
    computes. at_end: gradients are reduced when the whole backward is through. extra_bytes: what that holds beyond the
    placement's timeline.
    """

    prefetch: bool
    at_end: bool
    extra_bytes: int


@dataclass(frozen=True, slots=True)
class OutputBatching:
    """How the outputs of microbatches become the step's: `concat` along batch_dim, `mean`, `sum`, `weighted` by
    `loss_weight`, `same`.
    """

    combine: Combine
    batch_dim: int | None = None


@dataclass(frozen=True, slots=True)
class Batching:
    """How a program depends on its batch.

    inputs: the dim along which microbatches cut each input; None: every microbatch has it whole. outputs: one for each
    of the program's, in order. weight: the text of `loss_weight(inputs)`, empty where no output is weighted. It gives a
    scalar (float64 on the CPU, else float32) and is to be run where `torch`, `F` (torch.nn.functional), `ops`
    (autopar.operators) and `aten` (torch.ops.aten) are known.
    """

    inputs: Mapping[str, int | None]
    outputs: tuple[OutputBatching, ...]
    weight: str = ""


@dataclass(frozen=True, slots=True)
class Share:
    """How much of a program one rank of a pipeline holds, as far as is known before its stages are cut: an equal part.

    ranks: of the pipeline. in_flight: of how many microbatches a rank keeps the activations at once.
    """

    ranks: int
    in_flight: int


@dataclass(frozen=True, slots=True)
class Stage:
    """One stage of a pipeline: consecutive calls.

    calls: numbers of the program's calls that it runs, in order. again: those among them that belong to an earlier
    stage, and that this one computes again for itself rather than receive their results. receives: values that come
    from the stage before; sends: those that go to the next one, some of them as they came.
    """

    calls: tuple[int, ...]
    again: tuple[int, ...] = ()
    receives: tuple[ValueRef, ...] = ()
    sends: tuple[ValueRef, ...] = ()


@dataclass(frozen=True, slots=True)
class Considered:
    """A schedule that was simulated: its stages on each rank, the seconds of a step, the share of them that ranks wait,
    the most bytes a rank holds, and whether that fits the memory limit.
    """

    schedule: str
    stages_per_rank: int
    step_s: float
    bubble: float
    peak_bytes: float
    fits: bool


@dataclass(frozen=True, slots=True)
class Pipeline:
    """The stages of a program, and what each rank of the mesh axis `axis` does when.

    `Program.mesh` is the mesh of one stage: the whole one without this axis. considered: the schedules that were tried,
    best first. keeps_outputs: a training step returns larger outputs too, such as logits, of all microbatches.
    """

    axis: str
    stages: tuple[Stage, ...]
    schedule: Schedule
    considered: tuple[Considered, ...] = ()
    keeps_outputs: bool = True

    @property
    def stages_per_rank(self) -> int:
        return len(self.stages) // self.schedule.num_ranks


@dataclass(frozen=True, slots=True)
class Folded:
    """A long row of blocks that do the same, of which a captured program has two periods, by their modules' paths.

    before, like: of the first period and of the second. left_out: of those that follow; a block of theirs does what the
    one at its place in `like` does, on its own parameters, and what moves on from `before` to `like` moves on with it.
    """

    before: tuple[str, ...]
    like: tuple[str, ...]
    left_out: tuple[tuple[str, ...], ...]


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


@dataclass(frozen=True, slots=True)
class Program:
    """The whole model: regions, the calls in order, and the border.

    roots: the outputs whose gradient the user gives. output_spec: the pytree of the model's output, output_leaves: for
    each of its leaves the output, or None. constants: tensors that the capture lifted, by buffer name. microbatches:
    how often a step runs the program before it reduces gradients; all shapes are of one microbatch. updates: for each
    buffer that forward changes, the value that replaces it, in the order of the calls; no call reads these values.
    share: where there will be a pipeline, what one rank of it holds; pipeline: its stages, once they are cut. zigzag:
    the axes that may split values zigzag. attention: what `fuse_attention` found. folded: what a captured program
    leaves out; others leave nothing out.
    """

    phase: Phase
    regions: tuple[Region, ...]
    calls: tuple[Call, ...]
    inputs: tuple[Port, ...]
    outputs: tuple[ValueRef, ...]
    output_names: tuple[str, ...]
    variables: tuple[Variable, ...]
    output_spec: Any = None
    output_leaves: tuple[int | None, ...] = ()
    constants: Mapping[str, torch.Tensor] = field(default_factory=dict)
    training: bool = True
    roots: frozenset[ValueRef] = frozenset()
    mesh: Mesh | None = None
    placement: Placement | None = None
    result: Any = None
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

    def region(self, name: str) -> Region:
        return next(region for region in self.regions if region.name == name)

    def variable(self, name: str) -> Variable:
        return next(v for v in self.variables if v.name == name or name in v.aliases)

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

    def port(self, value: ValueRef) -> Port:
        """The port that a value leaves."""
        if value.call < 0:
            return next(port for port in self.inputs if port.name == value.name)
        return self.region(self.calls[value.call].region).outputs[value.index]

    def with_regions(self, regions: Mapping[str, Region], **changes: Any) -> Program:
        return replace(self, regions=tuple(regions.get(r.name, r) for r in self.regions), **changes)

    def __str__(self) -> str:
        return format_program(self)


def map_nodes(value: Any, function: Callable[[fx.Node], Any]) -> Any:
    """`value` (arguments of a node) with every node in it replaced by what `function` gives."""
    mapper: Any = fx.map_arg
    return mapper(value, function)


def result_types(node: fx.Node) -> tuple[TensorType | None, ...]:
    """The types of a node's results (one for a plain tensor)."""
    value = node.meta.get("val")
    values = value if isinstance(value, (list, tuple)) else (value,)
    return tuple(TensorType.of(v) if isinstance(v, torch.Tensor) else None for v in values)


def copy_graph(graph: fx.Graph) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """A copy with the same node names, and the map from old nodes to new ones."""
    new = fx.Graph()
    mapping: dict[fx.Node, fx.Node] = {}
    output = new.graph_copy(graph, mapping)
    if output is not None:
        new.output(output)
    return new, mapping
