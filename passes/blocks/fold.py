"""Long rows of blocks that do the same: two periods of them stay in the graph, the others are left out and counted.

    a b  a b  a b … a b   →   a b  a b  (62 times more)

A row may be folded where every block reads what the one a period before it reads: the same values, or those that blocks
as far before it made. Then a left out period is one like the second that stays, and `unfolded` puts its calls back once
the graph has been cut into calls (`passes/outline.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from torch import fx

from autopar.ir.nodes import ROW
from autopar.ir.program import Folded
from autopar.passes.blocks.marks import AGAIN_ONE

LONGEST_PERIOD = 8
KEPT = 2
"""Periods that stay in the graph: comparing them tells what moves along with a block, and what does not."""


@dataclass(frozen=True, slots=True)
class _Seen:
    """What is to be the same in two blocks: the traced block, its arguments, and which results somebody reads."""

    key: object
    arguments: tuple[object, ...]
    reach: int
    used: frozenset[object]


def fold(repeats: Sequence[fx.Node], may_fold: Callable[[fx.Node], bool]) -> tuple[Folded, ...]:
    """Take the left out periods out of a graph; say of what stays like them which row it is of (`ROW`): a model may run
    the same blocks several times.

    Args:
        repeats: calls of blocks, in order: (arguments, key, path).
    """
    number = {node: place for place, node in enumerate(repeats)}
    seen = [_seen(node, number) if may_fold(node) else None for node in repeats]
    found: list[Folded] = []
    start = 0
    while start < len(repeats):
        period, periods = max(
            ((p, _periods(seen, repeats, number, start, p)) for p in range(1, LONGEST_PERIOD + 1)),
            key=lambda each: each[0] * (each[1] - KEPT),
        )
        if periods <= KEPT:
            start += 1
            continue
        end = start + period * periods
        for node in repeats[start + period : start + KEPT * period]:
            node.meta[ROW] = len(found)
        found.append(_taken_out(repeats[start:end], period))
        start = end
    return tuple(found)


def _seen(node: fx.Node, number: dict[fx.Node, int]) -> _Seen:
    arguments: list[object] = []
    reach = 0
    for argument in node.args[0]:  # type: ignore[union-attr]
        assert isinstance(argument, fx.Node), f"{node} is given {argument}"
        maker, index = argument.args[:2] if argument.target is operator.getitem else (argument, 0)
        if isinstance(maker, fx.Node) and maker in number:
            distance = number[node] - number[maker]
            reach = max(reach, distance)
            arguments.append((distance, index))
        else:
            arguments.append(argument)
    return _Seen(node.args[1], tuple(arguments), reach, frozenset(_results(node)))


def _results(node: fx.Node) -> dict[object, fx.Node]:
    """The tensors of a block that somebody reads, by number."""
    if node.target is AGAIN_ONE:
        return {0: node} if node.users else {}
    return {pick.args[1]: pick for pick in node.users if pick.users}


def _periods(
    seen: Sequence[_Seen | None], repeats: Sequence[fx.Node], number: dict[fx.Node, int], start: int, period: int
) -> int:
    """How many periods follow one another from `start` on."""
    place = start
    while place < len(seen):
        one = seen[place]
        if one is None or one.reach > period or (place >= start + period and one != seen[place - period]):
            break
        place += 1
    count = (place - start) // period
    # Only the last period is read by others than the blocks that come next.
    for place in range(start, start + period * (count - 1)):
        for result in _results(repeats[place]).values():
            if any(not place < number.get(user, -1) <= place + period for user in result.users):
                return (place - start) // period + 1
    return count


def _taken_out(row: Sequence[fx.Node], period: int) -> Folded:
    like, last = row[period : KEPT * period], row[-period:]
    for kept, gone in zip(like, last, strict=True):
        results = _results(kept)
        for index, result in _results(gone).items():
            result.replace_all_uses_with(results[index])
    paths = [str(node.args[2]) for node in row]
    for node in reversed(row[KEPT * period :]):
        for user in list(node.users):
            node.graph.erase_node(user)
        node.graph.erase_node(node)
    starts = range(0, len(row), period)
    before, same, *others = (tuple(paths[start : start + period]) for start in starts)
    return Folded(before, same, tuple(others))
