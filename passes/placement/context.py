"""What strategies that split the sequence ask of attention, and where they may move what it reads and gives."""

from __future__ import annotations

import math
from collections.abc import Sequence

from torch import fx

from autopar.base.errors import AutoparError
from autopar.cost.context import attending_regions
from autopar.cost.fusion import hands_on
from autopar.cost.rings import ring_axis
from autopar.ir.graphs import caches_of, is_attention, operands_of
from autopar.ir.program import Program
from autopar.ir.region import NodeStrategy, Region
from autopar.machine.mesh import Mesh
from autopar.passes.placement.pieces import factor_of_pieces, is_of_pieces, require_pieces
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import SequenceDoesNotDivide


def values_of_attention(region: Region) -> frozenset[str]:
    """Names of the nodes whose values attention reads or gives, through views too."""
    near: set[fx.Node] = set()
    for node in region.graph.nodes:
        if is_of_pieces(node):
            near |= {node, operands_of(node)[0]}
        elif factor_of_pieces(node) is not None:  # what is written into a cache
            near |= set(operands_of(node)[:2] if caches_of(node) else operands_of(node)[-1:])
        elif is_attention(node):
            near |= {node, *operands_of(node)}
        elif hands_on(region, node) and any(source in near and _given(region, source) for source in operands_of(node)):
            near.add(node)
    for node in reversed(region.graph.nodes):
        if node in near and hands_on(region, node):
            near |= set(operands_of(node))
    return frozenset(node.name for node in near)


def _given(region: Region, node: fx.Node) -> bool:
    """Whether a value is attention's own, or a view of it."""
    while hands_on(region, node) and not is_attention(node):
        node = operands_of(node)[0]
    return is_attention(node)


def allowed(
    region: Region, node: fx.Node, strategies: Sequence[AxisStrategy], mesh: Mesh, attending: bool
) -> list[int] | None:
    """Which of the node's options do with each axis what its strategy asks; None where all do. A ring is asked for, or
    left to the solver.

    Args:
        attending: whether the region is one of `attending_regions`.

    Raises:
        AutoparError: none does: heads, or a sequence, that an axis does not divide.
    """
    in_pieces = factor_of_pieces(node) is not None
    if not is_attention(node) and not in_pieces:
        return None
    asked = [
        (axis, each.attention)
        for axis, each in enumerate(strategies)
        if mesh.sizes[axis] > 1 and each.attention != "free" and (each.attention == "keys") == in_pieces
    ]
    options = region.options[node.name].strategies
    if not asked or not (attending or in_pieces):
        kept = [i for i, option in enumerate(options) if not _is_unasked_ring(option, strategies)]
        return kept if len(kept) < len(options) else None
    kept = []
    for number, (axis, _) in enumerate(asked):
        kept = [
            i
            for i, option in enumerate(options)
            if all(_does(node, option, *each) for each in asked[: number + 1])
            and not _is_unasked_ring(option, strategies)
        ]
        if not kept:
            raise _cannot(region, node, strategies[axis], axis, mesh)
    return kept


def _is_unasked_ring(option: NodeStrategy, strategies: Sequence[AxisStrategy]) -> bool:
    axis = ring_axis(option.choices)
    if axis is None:
        return False
    strategy = strategies[axis]
    return strategy.attention != "ring" and not (strategy.attention == "free" and strategy.leaves_storage)


def _does(node: fx.Node, option: NodeStrategy, axis: int, asked: str) -> bool:
    choice = option.choices[axis]
    if asked == "keys":
        return choice.kind == "factor" and choice.factor == factor_of_pieces(node)
    if asked == "ring":
        return choice.kind == "ring"
    return choice.kind == "factor" and choice.factor == ("h" if asked == "heads" else "s")


def _cannot(region: Region, node: fx.Node, strategy: AxisStrategy, axis: int, mesh: Mesh) -> AutoparError:
    _, rule = region.ops[node.name]
    name, size, sizes = mesh.axis_names[axis], mesh.sizes[axis], rule.sizes
    origin = region.origins.get(node.name, "") or region.module
    if strategy.attention == "keys":
        return AutoparError(
            f"the length of a cache cannot split over {name}={size}",
            where=origin,
            values=f"{sizes[factor_of_pieces(node) or 't']} places; {_others(mesh, axis)}",
            remedy=f"use a smaller {name}, or max_cache_len= with a multiple of the ranks that share it",
        )
    if strategy.attention == "heads":
        heads = math.prod(sizes[factor] for factor in ("h", "r") if factor in sizes)
        fits = math.gcd(heads, size)
        smaller = f"use {name}={fits}, or " if fits > 1 else "use "
        return AutoparError(
            f"attention: {heads} heads cannot split over {name}={size}",
            where=origin,
            values=f"ulysses gives each rank some of the heads; {_others(mesh, axis)}",
            remedy=f"{smaller}strategy ring or allgather_kv, which split the sequence alone",
        )
    divides = sizes["s"] % size == 0 and (strategy.attention != "ring" or sizes["t"] % size == 0)
    return (AutoparError if divides else SequenceDoesNotDivide)(
        f"attention cannot split {sizes['s']} queries and {sizes['t']} keys over {name}={size} as {strategy.name} does",
        where=origin,
        values=_others(mesh, axis),
        remedy=f"use a sequence length that is a multiple of {size}, or strategy ulysses, which splits heads",
    )


def _others(mesh: Mesh, axis: int) -> str:
    rest = [f"{name}={size}" for i, (name, size) in enumerate(mesh.axes) if i != axis and size > 1]
    return f"other axes: {', '.join(rest)}" if rest else f"mesh: {mesh}"


def longer(length: int, strategies: Sequence[AxisStrategy], mesh: Mesh) -> int:
    """The least sequence length from `length` on that all axes which split it divide together."""
    ways = math.prod(
        size for each, size in zip(strategies, mesh.sizes, strict=True) if each.hidden == "split" and size > 1
    )
    return -(-length // ways) * ways


def require_attention(program: Program, strategies: Sequence[AxisStrategy], mesh: Mesh) -> None:
    """Whether strategies that say what attention does find any.

    Raises:
        AutoparError: there is no attention that was recognized; with what was found instead. Or, of strategies that
            split caches, there is none.
    """
    require_pieces(program, strategies, mesh)
    named = zip(strategies, mesh.sizes, strict=True)
    asked = [each.name for each, size in named if each.attention not in ("free", "keys") and size > 1]
    if not asked or attending_regions(program):
        return
    missed = dict.fromkeys(f"{site.place}: {site.why}" for site in program.attention if not site.fused)
    raise AutoparError(
        f"{asked[0]} splits attention, and there is none that is recognized",
        values="; ".join([*missed][:3]) or "the model has none",
        remedy="use another strategy for that axis, such as ddp, zero3 or auto",
    )
