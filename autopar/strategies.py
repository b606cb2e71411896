"""Named strategies: constraint sets, one per mesh axis, for the one compiler.

A constraint says how inputs lie on the axis, what parameters may do on it, and which collectives activations may use.
The solver does the rest: `tensor` does not know Megatron's columns and rows, it only says that the batch stays whole,
that every weight matrix is split, and that activations may be summed but never gathered; columns then rows is what is
left.

Where rows of a batch meet rows in a product (CLIP compares every text with every image), a rank needs all rows of one
operand. No strategy gathers activations for that: the operator `whole` makes the pieces terms of a sum, which
`all_reduce` takes. So the loss under `ddp` and `zero3` is that of the whole batch, not of each rank's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal

from autopar.errors import AutoparError
from autopar.mesh import Mesh
from autopar.sharding import Partial, Placement, Replicate, Shard

ParameterMode = Literal["replicate", "shard", "gather"]
"""What an axis does to a parameter: nothing; `shard` it for good (operators work on the piece); store a piece and
`gather` the whole for use."""

ANY_COLLECTIVE = frozenset({"slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"})


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """What one axis may do.

    inputs: `batch` splits dim 0 of every input, `replicate` none, `free` leaves it to the solver.
    parameters: the modes allowed. required: `gather` stores every parameter in pieces that can be; `shard_matrices`
    splits every weight matrix (outside the repeated blocks along its first dim, the vocabulary). collectives: what
    activations and their gradients may use. regather: gather `all` parameters again for the backward, as the literature
    counts, or only those `needed`. reduces_whole: gradients are summed over the axis as whole parameters, as the
    literature counts, even where an earlier, smaller sum would do (a position table of which only the first rows were
    used).
    """

    name: str
    shards: str
    communicates: str
    source: str
    inputs: Literal["batch", "replicate", "free"] = "free"
    parameters: frozenset[ParameterMode] = frozenset({"replicate", "shard", "gather"})
    required: Literal["none", "gather", "shard_matrices"] = "none"
    collectives: frozenset[str] = ANY_COLLECTIVE
    regather: Literal["all", "needed"] = "needed"
    reduces_whole: bool = False


AUTO = AxisStrategy(
    "auto",
    "whatever the solver finds cheapest",
    "whatever that needs",
    "autopar: integer program over every operator's shardings",
)
DDP = AxisStrategy(
    "ddp",
    "the batch",
    "backward: all-reduce of gradients, 2Ψ",
    "Li et al., PyTorch Distributed, 2006.15704",
    inputs="batch",
    parameters=frozenset({"replicate"}),
    collectives=frozenset({"slice", "all_reduce"}),
    reduces_whole=True,
)
ZERO3 = AxisStrategy(
    "zero3",
    "the batch, parameters, gradients, optimizer states",
    "forward and backward: all-gather of parameters; backward: reduce-scatter of gradients, 3Ψ",
    "Rajbhandari et al., ZeRO, 1910.02054; Zhao et al., FSDP, 2304.11277",
    inputs="batch",
    parameters=frozenset({"replicate", "gather"}),
    required="gather",
    collectives=frozenset({"slice", "all_reduce"}),
    regather="all",
    reduces_whole=True,
)
TENSOR = AxisStrategy(
    "tensor",
    "weight matrices by columns and rows, attention by heads, embedding and head by vocabulary",
    "two all-reduces of the hidden state a layer forward, two backward",
    "Shoeybi et al., Megatron-LM, 1909.08053",
    inputs="replicate",
    parameters=frozenset({"replicate", "shard"}),
    required="shard_matrices",
    collectives=frozenset({"all_reduce"}),
)

STRATEGIES: Mapping[str, AxisStrategy] = {
    "auto": AUTO, "ddp": DDP, "zero3": ZERO3, "fsdp": ZERO3, "tensor": TENSOR,
}  # fmt: skip
TENSOR_AXES = frozenset({"tp", "tensor", "model", "mp"})

Strategy = str | AxisStrategy | Mapping[str, "str | AxisStrategy"]


def resolve(strategy: Strategy, mesh: Mesh) -> tuple[AxisStrategy, ...]:
    """One `AxisStrategy` per mesh axis.

    A single name serves every axis, with one exception: on a mesh that has an axis called tp, `tensor` serves that axis
    and the others are `ddp`. In a mapping, axes that are not named are `auto`.

    Raises:
        AutoparError: an unknown name, or an axis that the mesh does not have.
    """
    if isinstance(strategy, Mapping):
        if unknown := [axis for axis in strategy if axis not in mesh.axis_names]:
            raise AutoparError(
                f"the strategy names axis {unknown[0]!r}, which the mesh does not have",
                values=f"mesh: {mesh}",
                remedy=f"use {', '.join(mesh.axis_names)}",
            )
        return tuple(_lookup(strategy.get(axis, "auto")) for axis in mesh.axis_names)
    found = _lookup(strategy)
    named = [axis for axis in mesh.axis_names if axis in TENSOR_AXES]
    if found is TENSOR and named:
        return tuple(TENSOR if axis in named else DDP for axis in mesh.axis_names)
    return (found,) * len(mesh.axis_names)


def _lookup(strategy: str | AxisStrategy) -> AxisStrategy:
    if isinstance(strategy, AxisStrategy):
        return strategy
    if strategy not in STRATEGIES:
        raise AutoparError(
            f"unknown strategy {strategy!r}",
            values=f"known: {', '.join(STRATEGIES)}",
            remedy='write one of these, or a mapping such as {"dp": "zero3", "tp": "tensor"}',
        )
    return STRATEGIES[strategy]


def parse(text: str) -> Strategy:
    """The command line's form: `zero3`, or `dp=zero3,tp=tensor`."""
    if "=" not in text:
        return text
    pairs = [item.split("=", 1) for item in text.split(",") if item]
    if any(len(pair) != 2 for pair in pairs):
        raise AutoparError(f"{text!r} is not a strategy", remedy="write NAME or axis=NAME,axis=NAME")
    return {axis.strip(): name.strip() for axis, name in pairs}


def describe(strategies: Sequence[AxisStrategy], mesh: Mesh) -> str:
    """`zero3`, or `dp=zero3, tp=tensor`."""
    names = [strategy.name for strategy in strategies]
    if len(set(names)) == 1:
        return names[0]
    return ", ".join(f"{axis}={name}" for axis, name in zip(mesh.axis_names, names, strict=True))


@dataclass(frozen=True, slots=True)
class Pin:
    """A user's constraint: tensors whose name matches `pattern` have these placements on these axes."""

    pattern: str
    placements: tuple[tuple[str, Placement], ...]

    def matches(self, name: str) -> bool:
        return fnmatchcase(name, self.pattern)


def pin(pattern: str, **placements: Any) -> Pin:
    """Pin the placement of parameters, inputs or outputs by name.

    Args:
        pattern: a fully qualified name with shell wildcards: `model.layers.*.mlp.down_proj.weight`, `input_ids`,
        `logits`.
        placements: axis name to `Shard(dim)` or `Replicate()`, autopar's or torch.distributed.tensor's.

    Raises:
        AutoparError: something that is no placement.
    """
    if not placements:
        raise AutoparError(f"pin({pattern!r}) says nothing", remedy="name an axis: pin(pattern, tp=Shard(0))")
    return Pin(pattern, tuple((axis, to_placement(value)) for axis, value in placements.items()))


def to_placement(value: Any) -> Placement:
    """autopar's placement for autopar's or torch's own (duck-typed: this module imports no torch)."""
    if isinstance(value, (Replicate, Shard, Partial)):
        return value
    kind = type(value).__name__
    if kind == "Replicate":
        return Replicate()
    if kind == "Shard":
        return Shard(int(value.dim))
    if kind == "_StridedShard":
        return Shard(int(value.dim), int(value.split_factor))
    raise AutoparError(f"{value!r} is not a placement that can be pinned", remedy="use Shard(dim) or Replicate()")
