"""What one axis may do: the constraint sets behind the names, one `AxisStrategy` each.

`autopar.strategies` gives them to the axes of a mesh; `autopar.strategies.context` has those that split the sequence.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

ParameterMode = Literal["replicate", "shard", "gather", "keep"]
"""What an axis does to a parameter: nothing; `shard` it for good (operators work on the piece); store a piece and
`gather` the whole for each use; store a piece, gather the whole once a step and `keep` it until the step's last
backward."""

ANY_COLLECTIVE = frozenset({"slice", "all_gather", "all_reduce", "reduce_scatter", "all_to_all"})
ANY_MODE: frozenset[ParameterMode] = frozenset({"replicate", "shard", "gather", "keep"})


@dataclass(frozen=True, slots=True)
class AxisStrategy:
    """What one axis may do.

    inputs: `batch` splits the rows of every input (dim 0), `sequence` any dim but that, `replicate` none, `free`
    leaves it to the solver.
    parameters: the modes allowed. required: `gather` and `keep` store every parameter in pieces that can be;
    `shard_matrices` splits every weight matrix (outside the repeated blocks along its first dim, the vocabulary).
    collectives: what activations and their gradients may use; inside_blocks: those of them that the repeated blocks may
    use (None: all). regather: gather `all` parameters again for the backward,
    as the literature counts, or only those `needed`. reduces_whole: gradients are summed over the axis as whole
    parameters, as the literature counts, even where an earlier, smaller sum would do (a position table of which only
    the first rows were used). reduces: gradients as soon as a region's backward has made them (`at_once`), or all when
    the backward is through (`at_end`). hidden: `split` cuts what flows between repeated blocks along the sequence.
    grid: two axes of this strategy split different dims of a matrix. attention: what the axis does to attention:
    `heads`, `queries` (keys whole), `ring` (both in pieces, the keys travel), `keys` (those of a cache, its length in
    pieces; what each gives is merged) or whatever is cheapest (`free`);
    around_attention: what its operands and results may use where `inside_blocks` would not let them. sequence: the axis
    splits sequences, also of rows that join batch and sequence, whose batch earlier axes have cut. zigzag: so, and
    zigzag where that serves an operator. experts: of mixtures, each rank has some `whole`, or some to which tokens that
    the axis splits are sent (`exchange`), or a part of the `widths` of all that divide, or whatever is cheapest
    (`free`). The parameters of experts that are exchanged lie so for good, whatever `parameters` says of others.
    slices: what is stored whole may be used in pieces; else what is used in pieces is stored so.
    """

    name: str
    shards: str
    communicates: str
    source: str
    inputs: Literal["batch", "sequence", "replicate", "free"] = "free"
    parameters: frozenset[ParameterMode] = ANY_MODE
    required: Literal["none", "gather", "keep", "shard_matrices"] = "none"
    collectives: frozenset[str] = ANY_COLLECTIVE
    inside_blocks: frozenset[str] | None = None
    regather: Literal["all", "needed"] = "needed"
    reduces_whole: bool = False
    reduces: Literal["at_once", "at_end"] = "at_once"
    hidden: Literal["free", "split"] = "free"
    grid: bool = False
    attention: Literal["free", "heads", "queries", "ring", "keys"] = "free"
    around_attention: frozenset[str] = frozenset()
    sequence: bool = False
    zigzag: bool = False
    experts: Literal["free", "whole", "exchange", "widths"] = "free"
    slices: bool = True

    @property
    def leaves_storage(self) -> bool:
        """Whether the solver decides where parameters lie, and so whatever else the strategy does not ask for."""
        return self.required == "none" and "shard" in self.parameters


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
ZERO2 = replace(
    DDP,
    name="zero2",
    shards="the batch, gradients, optimizer states (and parameters between steps)",
    communicates="forward: all-gather of parameters, once a step; backward: reduce-scatter of gradients, 2Ψ",
    source="Rajbhandari et al., ZeRO, 1910.02054",
    parameters=frozenset({"replicate", "keep"}),
    required="keep",
)
ZERO1 = replace(
    ZERO2,
    name="zero1",
    shards="the batch, optimizer states (and parameters between steps)",
    communicates="forward: all-gather of parameters, once a step; after the backward: reduce-scatter of gradients, 2Ψ",
    reduces="at_end",
)
ZERO3 = replace(
    DDP,
    name="zero3",
    shards="the batch, parameters, gradients, optimizer states",
    communicates="forward and backward: all-gather of parameters; backward: reduce-scatter of gradients, 3Ψ",
    source="Rajbhandari et al., ZeRO, 1910.02054; Zhao et al., FSDP, 2304.11277",
    parameters=frozenset({"replicate", "gather"}),
    required="gather",
    regather="all",
)
ZERO3_KEEP = replace(
    ZERO2,
    name="zero3+keep",
    communicates="forward: all-gather of parameters, kept for the backward; backward: reduce-scatter of gradients, 2Ψ",
    source="Zhao et al., FSDP (reshard_after_forward=False), 2304.11277",
)
HSDP_ACROSS = replace(DDP, name="hsdp:across")
HSDP_INSIDE = replace(
    ZERO3,
    name="hsdp:inside",
    shards="zero3 over the last axis, replicas over the others",
    communicates="over the last axis 3Ψ; over the others all-reduce of its 1/n of the gradients, 2Ψ/n",
    source="Zhao et al., FSDP (hybrid sharding), 2304.11277; ZeRO++ (hpZ), 2306.10209",
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
    experts="widths",
)
TENSOR_SEQUENCE = replace(
    TENSOR,
    name="tensor+sequence",
    shards="as tensor; what flows between blocks, norms and dropout by sequence",
    communicates="each all-reduce of tensor becomes a reduce-scatter and an all-gather: the same bytes",
    source="Korthikanti et al., Megatron sequence parallelism, 2205.05198",
    collectives=ANY_COLLECTIVE - {"all_to_all"},
    inside_blocks=frozenset({"slice", "all_gather", "reduce_scatter"}),
    hidden="split",
)
TENSOR_2D = replace(
    TENSOR,
    name="tensor2d",
    shards="both dims of every weight matrix, each over one of two axes",
    communicates="sums of activations over one axis or the other at every product",
    source="Pope et al., weight-stationary 2D, 2211.05102; Wang et al., Colossal-AI 2D, 2104.05343",
    collectives=ANY_COLLECTIVE,
    grid=True,
    experts="free",
)
EXPERT_SUM = AxisStrategy(
    "expert+sum",
    "experts of mixtures, some a rank; what else tensor splits, where that is cheaper; tokens stay whole",
    "a layer of experts: an all-reduce of the hidden state forward, of its gradient and the router's backward",
    "Lepikhin et al., GShard, 2006.16668 (experts over devices); sums instead of all-to-all, as Megatron-LM's TP × EP",
    inputs="replicate",
    parameters=frozenset({"replicate", "shard"}),
    collectives=frozenset({"all_reduce"}),
    experts="whole",
)


def _exchanging(data: AxisStrategy, name: str) -> AxisStrategy:
    """A strategy that splits the batch, and sends tokens to the ranks of their experts over the same axis."""
    return replace(
        data,
        name=name,
        shards=f"as {data.name}; experts of mixtures, some a rank",
        communicates=f"as {data.name}, Ψ without experts; a layer of experts: all-to-all of tokens there and back, "
        "backward again with gradients",
        source="Lepikhin et al., GShard, 2006.16668; Rajbhandari et al., DeepSpeed-MoE, 2201.05596",
        experts="exchange",
    )


EXPERT = _exchanging(DDP, "expert")
ZERO1_EXPERT = _exchanging(ZERO1, "zero1+expert")
ZERO2_EXPERT = _exchanging(ZERO2, "zero2+expert")
ZERO3_EXPERT = _exchanging(ZERO3, "zero3+expert")
