"""Context parallelism: strategies that split the sequence, and what they do where it has to meet, in attention.

Outside attention every operator works on its part of the sequence, so nothing is sent. Inside:

    ulysses        by heads: q, k, v and the result change between sequence and heads, an all-to-all each
    allgather_kv   by queries: keys and values are gathered, their gradients scattered
    ring           by both: keys and values travel from rank to rank while each rank works on those it has

In generation a token is one position, and what is long is the cache:

    split_kv       by keys: each rank keeps a piece of the cache's length, attends to it, and what all give is merged;
                   the tokens of a prompt may be split outside attention, where queries, keys and values are gathered
    helix          so, and the same ranks split the products behind attention as `tensor` does

Parameters lie on these axes as memory and time want them: whole, or in pieces that are gathered for use; gradients are
summed over the axis as under `ddp`.
"""

from __future__ import annotations

import itertools
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.strategies.axis import ANY_COLLECTIVE, AUTO, DDP, TENSOR, TENSOR_SEQUENCE, AxisStrategy

ULYSSES = AxisStrategy(
    "ulysses",
    "the sequence; inside attention the heads",
    "four all-to-alls of the hidden state a layer forward, four backward; gradients as ddp",
    "Jacobs et al., DeepSpeed-Ulysses, 2309.14509",
    inputs="sequence",
    parameters=frozenset({"replicate", "gather", "keep"}),
    collectives=ANY_COLLECTIVE,
    inside_blocks=frozenset({"slice"}),
    reduces_whole=True,
    hidden="split",
    sequence=True,
    attention="heads",
    around_attention=frozenset({"slice", "all_to_all"}),
)
ALLGATHER_KV = replace(
    ULYSSES,
    name="allgather_kv",
    shards="the sequence; inside attention the queries",
    communicates="forward: all-gather of keys and values; backward: reduce-scatter of theirs; gradients as ddp",
    source="Llama Team, The Llama 3 Herd of Models, section 3.3.2, 2407.21783",
    attention="queries",
    zigzag=True,
    around_attention=frozenset({"slice", "all_gather", "reduce_scatter"}),
)
RING = replace(
    ULYSSES,
    name="ring",
    shards="the sequence; inside attention the queries, and the keys in turn",
    communicates="keys and values travel round the ring, forward and backward, theirs too; gradients as ddp",
    source="Liu et al., Ring Attention, 2310.01889; Brandon et al., Striped Attention, 2311.09431",
    attention="ring",
    zigzag=True,
    around_attention=frozenset({"slice"}),
)
SPLIT_KV = AxisStrategy(
    "split_kv",
    "keys and values of a cache, along its length; the tokens of a prompt",
    "each token and layer: a maximum and a sum, or a gather, of what attention to each piece gives; of a prompt: "
    "queries, keys and values gathered, what attention gives scattered",
    "Dao et al., Flash-Decoding, 2023; Bhatia et al., Helix Parallelism, 2507.07120 (KV parallelism)",
    inputs="replicate",
    parameters=frozenset({"replicate", "gather", "keep"}),
    inside_blocks=frozenset({"slice"}),
    attention="keys",
    around_attention=frozenset({"slice", "all_reduce", "all_gather", "reduce_scatter"}),
)
HELIX = replace(
    SPLIT_KV,
    name="helix",
    shards="keys and values of a cache, along its length; over the same ranks what else tensor splits, where that is "
    "cheaper: products behind attention by columns and rows, experts by width",
    communicates="as split_kv; each layer an all-reduce of the hidden state behind products that are split",
    source="Bhatia et al., Helix Parallelism, 2507.07120",
    parameters=frozenset({"replicate", "shard"}),
    inside_blocks=frozenset({"slice", "all_reduce"}),
    experts="widths",
    slices=False,
)
CONTEXT = (ULYSSES, ALLGATHER_KV, RING, SPLIT_KV, HELIX)
WHOLE = tuple(
    replace(
        each,
        name=f"{each.name}:whole",
        shards="nothing: the axis does not divide this sequence",
        communicates="gradients as ddp",
        inputs="replicate",
        hidden="free",
        sequence=False,
        attention="free",
        zigzag=False,
        around_attention=frozenset({"slice"}),
    )
    for each in (ULYSSES, ALLGATHER_KV, RING)
)
"""What the ones that split the sequence are where they do not divide it; parameters lie where they did."""
USP_ROW = (
    "cp0=ring,cp1=ulysses",
    "the sequence over both; inside attention the heads over the second, a ring over the first",
    "ulysses inside each group, a ring of its heads' keys and values across",
    "Fang and Zhao, USP, 2405.07719",
)

_ORDER = ("ring", "queries", "heads")
"""In which mesh axes must do these to attention: what changes dims or gathers must be the innermost part of the
sequence."""


def is_context_axis(axis: str) -> bool:
    """Whether an axis is by its name for the sequence: cp, sp, context, or one of several (cp0, cp_x)."""
    return re.fullmatch(r"(cp|sp|context)(_?(\d+|[xyz]))?", axis) is not None


def splits_sequence(strategy: AxisStrategy) -> bool:
    """Whether a strategy splits the sequence of a batch."""
    return strategy.attention not in ("free", "keys")


def splits_of(strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the axes do to values; how parameters are kept where they split the batch excludes nothing."""
    return tuple("" if each.inputs == "batch" and not splits_sequence(each) else each.name for each in strategies)


def family_of(strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the axes do to values, and to experts; strategies that differ in how parameters are kept have the same."""
    return (*splits_of(strategies), *(each.experts for each in strategies))


def keeping_of(strategy: AxisStrategy) -> tuple[object, ...]:
    """How an axis keeps parameters, and when it gathers and reduces them."""
    return (
        strategy.parameters, strategy.required, strategy.regather, strategy.reduces_whole, strategy.reduces,
        strategy.slices,
    )  # fmt: skip


def of_rows(strategies: Sequence[AxisStrategy]) -> tuple[AxisStrategy, ...]:
    """The same, with the batch split where the sequence is."""
    return tuple(DDP if splits_sequence(each) else each for each in strategies)


def outside_attention(strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the axes do to values outside of attention: those that split the sequence do the same there."""
    return tuple(
        "sequence" if each.inputs == "sequence" else name for each, name in zip(strategies, splits_of(strategies))
    )


def but_for_attention(strategies: Sequence[AxisStrategy]) -> tuple[str, ...]:
    """What the axes do but for attention, also to parameters: strategies that differ in it alone have the same."""
    return tuple("sequence" if each.inputs == "sequence" else each.name for each in strategies)


def of_cache(strategies: Sequence[AxisStrategy]) -> tuple[AxisStrategy, ...]:
    """What strategies are for a program with a cache: those that split the sequence of a batch split its length."""
    return tuple(SPLIT_KV if splits_sequence(each) else each for each in strategies)


class SequenceDoesNotDivide(AutoparError):
    """A sequence that an axis is to split, and does not divide."""


def of_whole_sequence(strategies: Sequence[AxisStrategy]) -> tuple[AxisStrategy, ...]:
    """What strategies are for a sequence that they do not divide: it is whole on their axes, and parameters lie where
    they did.
    """
    whole = {each.name: each for each in WHOLE}
    return tuple(TENSOR if each is TENSOR_SEQUENCE else whole.get(f"{each.name}:whole", each) for each in strategies)


def ways_of_cache(strategies: Sequence[AxisStrategy], mesh: Mesh) -> int:
    """In how many pieces strategies cut the length of a cache, or may: its length is a multiple of that. An axis that
    is `auto` counts where it is for the sequence by its name.
    """
    named = zip(mesh.axes, of_cache(strategies), strict=True)
    return math.prod(
        size for (axis, size), each in named if each.attention == "keys" or (each is AUTO and is_context_axis(axis))
    )


@dataclass(frozen=True, slots=True)
class Spread:
    """What a program is prepared for, so that strategies which split the sequence find what they need.

    heads: how many ranks share the heads of attention, where some share them on its account alone; else 1. moves:
    whether attention's operands are moved for its sake. sequence: axes that split the sequence; zigzag: those that may
    deal it zigzag. parts: axes that take heads of those that later axes leave, and in how many parts these cut them.
    padded: whether vocabularies have rows added for the last axis that may split them. pieces: in how
    many the length of a cache is cut.
    """

    heads: int = 1
    moves: bool = False
    sequence: tuple[str, ...] = ()
    zigzag: tuple[str, ...] = ()
    parts: tuple[tuple[str, int], ...] = ()
    padded: bool = True
    pieces: int = 1

    @staticmethod
    def of(strategies: Sequence[AxisStrategy], mesh: Mesh) -> Spread:
        """What these strategies need."""
        named = [(axis, size, each) for (axis, size), each in zip(mesh.axes, strategies, strict=True) if size > 1]
        heads = math.prod(size for _, size, each in named if each.attention == "heads")
        tensor = math.prod(size for _, size, each in named if each.required == "shard_matrices")
        behind = {
            axis: math.prod(size for _, size, later in named[place + 1 :] if later.required == "shard_matrices")
            for place, (axis, _, each) in enumerate(named)
            if each.attention == "heads"
        }
        return Spread(
            heads * tensor if heads > 1 else 1,
            any(each.around_attention - {"slice"} for _, _, each in named),
            tuple(axis for axis, _, each in named if each.sequence),
            tuple(axis for axis, _, each in named if each.zigzag),
            tuple((axis, count) for axis, count in behind.items() if count > 1),
            pieces=math.prod(size for _, size, each in named if each.attention == "keys"),
        )


def check_order(chosen: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """Whether axes that split the sequence can be carried out in this order of the mesh.

    Raises:
        AutoparError: two rings, or ring behind ulysses or allgather_kv, or allgather_kv behind ulysses, or any of them
            behind an axis that splits what flows between blocks.
    """
    _check_tensor_axes(chosen, mesh)
    own = [(mesh.axis_names[i], each) for i, each in enumerate(chosen) if splits_sequence(each) and mesh.sizes[i] > 1]
    rings = [axis for axis, each in own if each.attention == "ring"]
    if len(rings) > 1:
        raise AutoparError(
            f"{rings[0]} and {rings[1]} cannot both be rings: keys travel over one axis",
            values=f"mesh: {mesh}",
            remedy=f'use one axis for both, or {{"{rings[0]}": "ring", "{rings[1]}": "ulysses"}}',
        )
    ranked = sorted(own, key=lambda pair: _ORDER.index(pair[1].attention))
    if ranked != own:
        given, wanted = (", ".join(f"{axis}={each.name}" for axis, each in pairs) for pairs in (own, ranked))
        names = [each.name for _, each in ranked]
        raise AutoparError(
            f"{names[0]} must come before {names[-1]} in the mesh",
            values=f"mesh: {mesh}; {given}",
            remedy=f"order the axes as in {wanted}, or swap the two strategies",
        )


def _check_tensor_axes(chosen: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """What `tensor+sequence` makes whole along the sequence must be the innermost part of it."""
    named = [(mesh.axis_names[i], each) for i, each in enumerate(chosen) if mesh.sizes[i] > 1]
    for (axis, tensor), (other, each) in itertools.combinations(named, 2):
        if splits_sequence(each) and tensor.required == "shard_matrices" and tensor.hidden == "split":
            raise AutoparError(
                f"{tensor.name} on {axis} must come behind {each.name} on {other}, which splits the sequence first",
                values=f"mesh: {mesh}",
                remedy=f"put {other} before {axis} in the mesh, or use tensor",
            )
