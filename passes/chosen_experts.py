"""Loops over experts that work on the rows which chose them: one operator each.

    for e in range(E):                                    index[T, K], weights[T, K]
        k, rows = torch.where(index.t() == e)         →   y = experts(x, index, weights, stack(w1), stack(w2), …)
        y.index_add_(0, rows, expert[e](x[rows]) * weights[rows, k, None])

Read where rows that a mask chooses are still marked as such (`chosen.py`): every round takes rows, makes of them what
`expert_products.py` reads, and adds it where they come from. Rounds in a row of one form, with other parameters, are
one operator: so an expert multiplies the rows that chose it, where all rows would be multiplied by all experts, and an
axis may send tokens to experts. What a router drops is an expert that there is none of.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from autopar.ir.nodes import drop_dead
from autopar.operators.experts import experts  # noqa: F401 (the operator that this writes)
from autopar.passes.chosen_operators import CHOSEN, SPREAD
from autopar.passes.expert_masks import Masks, choices_of, covers, is_never
from autopar.passes.expert_products import (
    Expert,
    experts_of,
    is_cast,
    parameters_of,
    product_of,
    read_expert,
    stripped,
)
from autopar.passes.indices import Builder
from autopar.passes.said import Said, shape_of

_aten = torch.ops.aten
_WHERE = (_aten.where.self, _aten.where.ScalarOther, _aten.where.ScalarSelf)
_ZEROS = (_aten.zeros.default, _aten.zeros_like.default, _aten.new_zeros.default)
LEAST_ROUNDS = 2


@dataclass(frozen=True, slots=True)
class _Weight:
    """A number for each row, in the shape of a mask: a value, or of its dims behind the mask's one element. dtype: as
    which rows are taken times it.
    """

    source: fx.Node
    column: tuple[int, int] | None
    dtype: torch.dtype

    def value(self, build: Builder) -> fx.Node:
        return self.source if self.column is None else build(_aten.select.int, self.source, *self.column)


@dataclass(frozen=True, slots=True)
class _Round:
    """One round. node: what it leaves, from `before`. x: of which it takes rows, [tokens, …, D]. mask: of them, with
    `others` among its dims that x has not. inward: whether rows are weighed before the expert sees them. assigned:
    whether what was there before is gone, not added to.
    """

    node: fx.Node
    before: fx.Node
    x: fx.Node
    mask: fx.Node
    others: tuple[int, ...]
    expert: Expert
    weight: _Weight | None
    inward: bool
    assigned: bool = False

    @property
    def form(self) -> tuple[Any, ...]:
        """What rounds have in common that are one operator."""
        weight = None if self.weight is None else (self.weight.dtype, self.inward)
        return self.expert.form, self.others, shape_of(self.mask), weight, self.assigned


def simplify_expert_loops(graph: fx.Graph, origins: dict[str, str]) -> None:
    """Rounds of one form, one after the other, become an operator."""
    if not any(node.target is SPREAD for node in graph.nodes):
        return
    _drop_impossible(graph)
    said = Said()
    rounds = {found.node: found for node in graph.nodes if (found := _round_of(node, said)) is not None}
    for chain in reversed(_chains(rounds, said)):  # what a chain begins with is still what it was
        _write(graph, origins, chain, said)
    drop_dead(graph)


def _chains(rounds: dict[fx.Node, _Round], said: Said) -> list[list[_Round]]:
    """Rounds that follow each other, nothing else reading what one leaves, by form."""
    found: list[list[_Round]] = []
    for each in rounds.values():
        last = found[-1][-1] if found else None
        if last is not None and each.before is last.node and each.form == last.form and said(each.x) == said(last.x):
            if all(user is each.node or _leads_to(user, each.node) for user in last.node.users):
                found[-1].append(each)
                continue
        found.append([each])
    return [chain for chain in found if len(chain) >= LEAST_ROUNDS]


def _leads_to(node: Any, last: Any, steps: int = 12) -> bool:
    """Whether what reads a node is a round, and nothing else."""
    return node is last or (
        steps > 0 and bool(node.users) and all(_leads_to(user, last, steps - 1) for user in node.users)
    )


# ------------------------------------------------------------------------------------------------------------ a round


def _round_of(node: Any, said: Said) -> _Round | None:
    """The round that ends in a node: `before + where(mask, f(rows), 0)`."""
    if node.target is _aten.add.Tensor and len(node.args) == 2 and not node.kwargs:
        for before, more in (node.args, node.args[::-1]):
            if isinstance(before, fx.Node) and isinstance(more, fx.Node) and (found := _added(more)) is not None:
                return _read(node, before, *found, said)
    if node.target is not _aten.where.self:
        return None
    place, written, before = node.args
    found = _spread(stripped(written))
    if found is None or not _marks(place, *found[1:]):
        return None
    rows, mask, others = found
    more = _beside_own(rows, before, mask, others)
    if more is not None:
        return _read(node, before, more, mask, others, said)
    assigned = None if others else _read(node, before, rows, mask, others, said)
    return None if assigned is None else replace(assigned, assigned=True)


def _spread(node: Any) -> tuple[fx.Node, fx.Node, tuple[int, ...]] | None:
    """Of rows that are back where they come from: what they are, the mask, and the dims of it that are summed."""
    return (*node.args, ()) if node.target is SPREAD else _added(node)


def _added(more: Any) -> tuple[fx.Node, fx.Node, tuple[int, ...]] | None:
    """Of `where(mask, SPREAD(rows), 0)`, summed over dims of the mask: the rows, the mask and these dims."""
    more, dims = stripped(more), ()
    if more.target is _aten.sum.dim_IntList and len(more.args) == 2 and not more.kwargs:
        source: Any = more.args[0]
        dims = tuple(dim % len(shape_of(source)) for dim in more.args[1])
        more = source
    if more.target not in _WHERE or more.args[2] != 0:
        return None
    rows: Any = more.args[1]
    if not isinstance(rows, fx.Node) or rows.target is not SPREAD:
        return None
    spread: Any = rows
    return spread.args[0], spread.args[1], dims


def _marks(place: Any, mask: Any, others: tuple[int, ...]) -> bool:
    """Whether a value says where a mask is set, at any of the others."""
    place = stripped(place, views=True)
    if not others:
        return place is stripped(mask, views=True)
    if place.target not in (_aten.ne.Scalar, _aten.not_equal.Scalar) or place.args[1] != 0:
        return False
    counts: Any = stripped(place.args[0])
    if counts.target is not _aten.sum.dim_IntList or len(counts.args) != 2:
        return False
    return counts.args[0] is mask and tuple(dim % len(shape_of(mask)) for dim in counts.args[1]) == others


def _beside_own(rows: Any, before: Any, mask: Any, others: tuple[int, ...]) -> fx.Node | None:
    """Of rows that are written back with more added to them, what is added."""
    value = stripped(rows)
    if value.target is not _aten.add.Tensor or len(value.args) != 2 or value.kwargs:
        return None
    for own, more in (value.args, value.args[::-1]):
        if isinstance(own, fx.Node) and isinstance(more, fx.Node):
            if _taken(own, mask, shape_of(value)[0], others) is before:
                return more
    return None


def _read(node: Any, before: Any, rows: Any, mask: Any, others: tuple[int, ...], said: Said) -> _Round | None:
    """others: dims of the mask over which what comes of rows is summed."""
    dtype, number = node.meta["val"].dtype, shape_of(rows)[0]
    rows = stripped(rows, views=True)
    if is_cast(rows):  # back from the dtype of weights
        rows = stripped(rows.args[0], views=True)
    weight = None
    if (times := _times_weight(rows, mask, number)) is not None:
        rows, weight = times
    expert = read_expert(product_of(rows), lambda each: _is_of_rows(each, number), said)
    if expert is None:
        return None
    source, inward = expert.x, False
    if weight is None and (times := _times_weight(source, mask, number)) is not None:
        (source, weight), inward = times, True
    taken = _taken(source, mask, number, others)
    if taken is None or {taken.meta["val"].dtype, expert.x.meta["val"].dtype} != {dtype}:
        return None
    return _Round(node, before, taken, mask, others, expert, weight, inward)


def _times_weight(rows: Any, mask: Any, number: int) -> tuple[fx.Node, _Weight] | None:
    """Of rows [S, D] times a number each: the rows, and the numbers."""
    if rows.target is not _aten.mul.Tensor:
        return None
    for one, other in (rows.args, rows.args[::-1]):
        if not isinstance(other, fx.Node) or not isinstance(one, fx.Node) or shape_of(other)[-1:] != (1,):
            continue
        dtype, taken, column = other.meta["val"].dtype, stripped(other, views=True), None
        while is_cast(taken):
            taken = stripped(taken.args[0], views=True)
        if taken.target is _aten.select.int and taken.args[1] != 0:
            column = taken.args[1] % len(shape_of(taken.args[0])) + len(shape_of(mask)) - 1, taken.args[2]
            taken = stripped(taken.args[0])
        if taken.target is not CHOSEN or taken.args[2:] != (0, number):
            continue
        source: Any = taken.args[0]
        behind = [size for dim, size in enumerate(shape_of(source)) if column is None or dim != column[0]]
        if math.prod(behind) == math.prod(shape_of(mask)):
            return stripped(one, views=True), _Weight(source, column, dtype)
    return None


def _is_of_rows(node: Any, number: int) -> bool:
    """Whether a value is made of rows of which there are so many."""
    waiting, seen = [node], {node}
    while waiting:
        last = waiting.pop()
        if last.target is CHOSEN and last.args[3] == number:
            return True
        more = [each for each in last.all_input_nodes if each not in seen]
        seen.update(more)
        waiting += more
    return False


def _taken(rows: Any, mask: Any, number: int, others: tuple[int, ...]) -> fx.Node | None:
    """Of what rows are taken: [tokens, …, D], whose dims are the mask's but for the others, and D."""
    rows = stripped(rows, views=True)
    if rows.target is not CHOSEN or rows.args[3] != number or shape_of(rows.args[1]) != shape_of(mask):
        return None
    x, _, at, _ = rows.args
    dims: list[int | None] = [*(None,) * at, *range(len(shape_of(mask)))]
    behind = len(shape_of(x)) - len(dims)
    if behind != 1 or any(size != 1 for size in shape_of(x)[:at]):
        return None
    wanted = [dim for dim in range(len(shape_of(mask))) if dim not in others]
    node: Any = x
    while dims != wanted:
        if node.target is _aten.expand.default:
            sizes = zip(dims, shape_of(node.args[0]), shape_of(node), strict=False)
            if any(before != after and dim not in others for dim, before, after in sizes):
                return None
        elif node.target is _aten.unsqueeze.default:
            dim = node.args[1] % len(shape_of(node))
            if dim >= len(dims) or dims[dim] not in (None, *others):
                return None
            del dims[dim]
        else:
            return None
        node = stripped(node.args[0])
    return node if shape_of(node)[:-1] == tuple(shape_of(mask)[dim] for dim in wanted) else None


def _drop_impossible(graph: fx.Graph) -> None:
    """A round of an expert that no router can say, for which there is nothing in the model."""
    for node in list(graph.nodes):
        if node.target is not _aten.add.Tensor or len(node.args) != 2:
            continue
        before, more = node.args
        if isinstance(more, fx.Node) and more.target is _aten.sum.dim_IntList:
            more = more.args[0]
        if isinstance(more, fx.Node) and more.target in _WHERE and not isinstance(more.args[1], fx.Node):
            if isinstance(more.args[1], float) and math.isnan(more.args[1]):
                if is_never(stripped(more.args[0], views=True)):
                    node.replace_all_uses_with(before)


# ------------------------------------------------------------------------------------------------------- the operator


def _write(graph: fx.Graph, origins: dict[str, str], chain: Sequence[_Round], said: Said) -> None:
    first, last = chain[0], chain[-1]
    build = Builder(graph, last.node, origins)
    masks = Masks(build, said, [each.mask for each in chain], first.others)
    chosen = choices_of(masks)
    start = stripped(first.before)
    if first.assigned:  # one expert a row, and no row that had something else before
        once = not chosen.every and shape_of(chosen.indices)[1] == 1
        if not once or not (start.target in _ZEROS or covers(chosen.indices, len(chain))):
            return
    width = shape_of(first.x)[-1]
    x = first.x if len(shape_of(first.x)) == 2 else build(_aten.reshape.default, first.x, [-1, width])
    if first.weight is None:
        weights = build(_aten.new_ones.default, x, list(shape_of(chosen.indices)))
    else:
        weights = chosen.of([each.weight.value(build) for each in chain if each.weight is not None])
        if weights.meta["val"].dtype != first.weight.dtype:
            weights = build(_aten.to.dtype, weights, first.weight.dtype)
    parameters = parameters_of(build, [each.expert for each in chain], lambda parts: masks.together(parts))
    made = (weighed_inward if first.inward else experts_of)(build, x, chosen.indices, weights, parameters, first.expert)
    if shape_of(made) != shape_of(last.node):
        made = build(_aten.reshape.default, made, list(shape_of(last.node)))
    if start.target not in _ZEROS and not first.assigned:
        made = build(_aten.add.Tensor, first.before, made)
    last.node.replace_all_uses_with(made)


def weighed_inward(build: Builder, x: Any, indices: Any, weights: fx.Node, parameters: Any, expert: Expert) -> fx.Node:
    """Experts that are given tokens times weights: rows [T K, D], one choice each."""
    (tokens, num), width = shape_of(indices), shape_of(x)[-1]
    wide = build(_aten.unsqueeze.default, x, 1) if num > 1 else x
    column = build(_aten.unsqueeze.default, weights, -1) if num > 1 else weights
    rows = build(_aten.mul.Tensor, wide, column)
    if rows.meta["val"].dtype != x.meta["val"].dtype:
        rows = build(_aten.to.dtype, rows, x.meta["val"].dtype)
    if num > 1:
        rows = build(_aten.reshape.default, rows, [tokens * num, width])
        indices = build(_aten.reshape.default, indices, [tokens * num, 1])
    ones = build(_aten.new_ones.default, rows, [tokens * num, 1])
    made = experts_of(build, rows, indices, ones, parameters, expert)
    if num == 1:
        return made
    return build(_aten.sum.dim_IntList, build(_aten.reshape.default, made, [tokens, num, width]), [1])
