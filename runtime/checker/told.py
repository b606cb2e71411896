"""What an operator on parts must be told, and how its terms combine, said a second time.

Rules say it first (`autopar/operators/rules`), and the checker reads programs by them: one that forgets that an
operator counts rows, or takes the largest term for the sum, would let every program through that was written by it. So
what goes wrong without a trace in types stands here again, by operator, without the notation of rules.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from functools import cache
from typing import Any

from autopar.ir.op_call import OpCall
from autopar.ir.sharding import Partial, Shard, Sharding, splits_of
from autopar.operators.rules.lookup import registered
from autopar.runtime.checker.ranks import Places, RankInt
from autopar.runtime.checker.types import Axes, Typed

_COUNTED: Mapping[str, Callable[[OpCall], tuple[int | None, int]]] = {
    "autopar.linear": lambda call: (1 if call.arg("valid") is not None else None, 0),
    "autopar.embedding": lambda call: (0, 0),
    "autopar.embedding_grad": lambda call: (-1, 0),
    "autopar.take_label": lambda call: (0, call.operands[0].ndim - 1),
    "autopar.put_label": lambda call: (-1, call.operands[0].ndim),
    "autopar.cross_entropy_grad": lambda call: (1, call.operands[1].ndim - 1),
    "autopar.attention_pieces": lambda call: (1, 2),
    "autopar.write_piece": lambda call: (0, call.arg("dim")),
    "autopar.cache_write": lambda call: (2 if call.arg("start") is not None else None, 2),
    "autopar.whole": lambda call: (0, call.arg("dim")),
    "autopar.moving_average": lambda call: (1, 0),
}
"""Operators whose argument `start` says at which place of the whole their part begins: of which operand (-1: of the
result; None: of none), and of which of its dims.
"""
_DRAWN = frozenset({"autopar.dropout", "autopar.random"})
"""Operators that draw by place: their argument `positions` says where the elements of operand 0 lie."""
_LARGEST = frozenset({"aten.amax", "aten.max", "autopar.pieces_top"})
"""Operators whose terms combine to their maximum; those of all others to their sum."""


def is_told(
    call: OpCall, operands: Sequence[Typed], results: Sequence[Sharding | None], said: Callable[[str], Any], axes: Axes
) -> bool:
    """Whether an operator is told where its part lies, and its terms combine as they must.

    call: the whole one. said: what the program says as an argument of this name.
    """
    name = call.name.removesuffix(".default")
    if name in _DRAWN:
        return _is_told_places(operands[0], said("positions"))
    if not _combine(name, call.name, operands, results):
        return False
    counted = _COUNTED.get(name)
    if counted is None:
        return True
    index, dim = counted(call)
    sharding = None if index is None else results[0] if index < 0 else operands[index].sharding
    split = [] if sharding is None else [axes.names[axis] for axis, _, _ in splits_of(sharding, dim)]
    start = said("start")
    return not split or (isinstance(start, RankInt) and set(start.terms) == set(split))


def _is_told_places(x: Typed, said: Any) -> bool:
    split = [splits_of(x.sharding, dim) for dim in range(len(x.shape))]
    if not isinstance(said, Places):
        return not any(split)
    return [splits_of(said.sharding, dim) for dim in range(len(said.shape))] == split


def _combine(name: str, full_name: str, operands: Sequence[Typed], results: Sequence[Sharding | None]) -> bool:
    """Of operators whose rule somebody wrote; others' were found by running them."""
    if full_name not in _written():
        return True
    wanted = Partial("max") if name in _LARGEST else Partial("sum")
    for result in results:
        for axis, placement in enumerate(result or ()):
            if isinstance(placement, Partial) and placement != wanted and _makes_terms(axis, operands):
                return False
    return True


def _makes_terms(axis: int, operands: Sequence[Typed]) -> bool:
    """Whether the axis has pieces of operands: else its terms are those that came in."""
    return any(isinstance(each.sharding[axis], Shard) for each in operands)


@cache
def _written() -> Collection[str]:
    return frozenset(registered())
