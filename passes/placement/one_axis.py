"""Whether an axis can split the sequence at all, whatever the others do: asked of the problem in which all is left to
the solver, so that a program need not be prepared, annotated and placed for strategies that cannot be had.

Of each layout what the axis does is looked at alone, and of pieces alone which dim they are of: a placement under any
strategies is then one of these, too. What strategies may choose for values between calls, and what the axis may move,
leaves some node without a choice, or it does not.

    hidden: S(1) | S(2)  ─ slice ─►  convolution: b | k | none   →   no rows of pixels for it: refused

Attention, what it reads and gives, and parameters are left out: programs that are prepared for strategies differ there.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

import numpy as np

from autopar.ir.sharding import Placement, Shard, code
from autopar.passes.placement.columns import Column
from autopar.passes.placement.context import values_of_attention
from autopar.passes.placement.gathers import blocked_operators
from autopar.passes.placement.least import Least
from autopar.passes.placement.parts import Link, kinds_of, with_gathers
from autopar.passes.placement.problem import classes_within
from autopar.strategies.axis import AxisStrategy
from autopar.strategies.context import splits_sequence


def cannot_split(least: Least, strategies: Sequence[AxisStrategy]) -> bool:
    """Whether some axis cannot split the sequence as these strategies have it, with all that they could be let off, and
    that not for attention's sake. The program may be prepared for other strategies, but none may be zigzag.

    Raises:
        AutoparError: an input that a strategy must split and cannot.
    """
    program = least.program
    if any(each.experts in ("whole", "exchange") for each in strategies):
        return False
    alive = classes_within(least.built, program, strategies, least.facts)
    gathered = frozenset(each.region for each in blocked_operators(program, strategies, least.facts))
    free = _left_out(least)
    sizes = program.on_mesh.sizes
    return any(
        least.forbids_all(alive, _cells(least.links, axis, strategies, gathered, free))
        for axis, each in enumerate(strategies)
        if splits_sequence(each) and sizes[axis] > 1
    )


def _left_out(least: Least) -> frozenset[int]:
    """Nodes of the problem of which nothing is asked: of attention, and of parameters and their gradients."""
    built, regions = least.built, least.program.regions
    near = {region.name: values_of_attention(region) for region in regions if region.module}
    if not any(near.values()):  # then strategies speak of all attention
        near = {region.name: values_of_attention(region) for region in regions}
    places = [*built.operators.items(), *built.relays.items()]
    attention = {index for (region, name), (index, _) in places if name.partition(".")[0] in near.get(region, ())}
    return frozenset(attention.union(*((slot.node, slot.gradient) for slot in built.slots.values())))


def _cells(
    links: Sequence[Link],
    axis: int,
    strategies: Sequence[AxisStrategy],
    gathered: Collection[str],
    free: Collection[int],
) -> np.ndarray:
    """0 where an axis may take a value from one layout to the other, else infinite: of all pairs of layouts, of one
    link after the other. gathered: regions in which it may gather what it splits.
    """
    kinds = {leave: each[axis] for leave, each in kinds_of(strategies).items()}
    more = with_gathers(strategies)[axis]
    known: dict[tuple[object, ...], np.ndarray] = {}
    does: dict[int, np.ndarray] = {}

    def numbers(column: Column) -> np.ndarray:
        if id(column) not in does:
            does[id(column)] = np.array([_without_stripes(layout[axis]) for layout in column.distinct])
        return does[id(column)]

    cells = []
    for link in links:
        pair = numbers(link.sources), numbers(link.targets)
        if link.leave == "attention" or link.u in free or link.v in free:
            cells.append(np.zeros(len(pair[0]) * len(pair[1])))
            continue
        allowed = kinds[link.leave] | (more if link.region in gathered else frozenset())
        allowed |= frozenset() if link.type_.is_float else {"slice"}
        key = (allowed, id(link.sources), id(link.targets))
        if key not in known:
            known[key] = np.where(may_become(pair[0][:, None], pair[1], allowed), 0.0, np.inf).ravel()
        cells.append(known[key])
    return np.concatenate(cells)


def _without_stripes(placement: Placement) -> int:
    """0: whole; d + 1: pieces of dim d; negative: terms of a sum, or of a maximum."""
    return placement.dim + 1 if isinstance(placement, Shard) else code(placement)


def may_become(have: np.ndarray, want: np.ndarray, kinds: Collection[str]) -> np.ndarray:
    """Whether moves of these kinds may take an axis from one to the other, numbered as `_without_stripes` does, in as
    many steps as it takes: arrays that go together.
    """
    terms, pieces, whole = have < 0, have > 0, have == 0
    slices, gathers, scatters = "slice" in kinds, "all_gather" in kinds, "reduce_scatter" in kinds
    sums = "all_reduce" in kinds or (scatters and gathers)
    becomes_whole = whole | (terms & sums) | (pieces & gathers)
    becomes_pieces = (becomes_whole & slices) | (terms & scatters) | (pieces & ("all_to_all" in kinds))
    found: np.ndarray = (have == want) | ((want == 0) & becomes_whole) | ((want > 0) & becomes_pieces)
    return found
