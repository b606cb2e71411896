"""Long rows of blocks that do the same: two periods of them stay in the graph, the others are left out and counted.

    a b  a b  a b … a b   →   a b  a b  (62 times more)

A row may be folded where every block reads what the one a period before it reads: the same values, those that blocks
as far before it made, or, of a cache, layers of its own. Then a left out period is one like the second that stays, and
`unfolded` puts its calls back once the graph has been cut into calls (`passes/outline.py`).
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Container, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

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


class Called(Protocol):
    """Of a block that is called: how many of its arguments are no states, and which of its results are some."""

    @property
    def plain(self) -> int: ...
    @property
    def made_states(self) -> Container[object]: ...


@dataclass(frozen=True, slots=True)
class Row:
    """What was left out, and which results of the graph, by their places, are those of blocks of this row: of the block
    so many periods behind the one that the graph has.
    """

    folded: Folded
    results: Mapping[int, int]


def fold(
    repeats: Sequence[fx.Node], block_of: Callable[[fx.Node], Called | None], inputs: Mapping[fx.Node, str]
) -> tuple[Row, ...]:
    """Take the left out periods out of a graph; say of what stays like them which row it is of (`ROW`): a model may run
    the same blocks several times.

    Args:
        repeats: calls of blocks, in order: (arguments, key, path). block_of: the block of a call; None for those that
            may not be folded. inputs: the names of the placeholders of the batch.
    """
    number = {node: place for place, node in enumerate(repeats)}
    blocks = [block_of(node) for node in repeats]
    seen = [
        None if block is None else _seen(node, number, block, inputs)
        for node, block in zip(repeats, blocks, strict=True)
    ]
    found: list[Row] = []
    start = 0
    while start < len(repeats):
        period, periods = max(
            ((p, _periods(seen, repeats, number, blocks, start, p)) for p in range(1, LONGEST_PERIOD + 1)),
            key=lambda each: each[0] * (each[1] - KEPT),
        )
        if periods <= KEPT:
            start += 1
            continue
        end = start + period * periods
        for node in repeats[start + period : start + KEPT * period]:
            node.meta[ROW] = len(found)
        found.append(_taken_out(repeats[start:end], period, inputs))
        start = end
    return tuple(found)


def _seen(node: fx.Node, number: dict[fx.Node, int], block: Called, inputs: Container[fx.Node]) -> _Seen:
    arguments: list[object] = []
    reach = 0
    for place, argument in enumerate(node.args[0]):  # type: ignore[arg-type]
        if place >= block.plain and argument in inputs:
            arguments.append("state")
            continue
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
    seen: Sequence[_Seen | None],
    repeats: Sequence[fx.Node],
    number: dict[fx.Node, int],
    blocks: Sequence[Called | None],
    start: int,
    period: int,
) -> int:
    """How many periods follow one another from `start` on."""
    place = start
    while place < len(seen):
        one = seen[place]
        if one is None or one.reach > period or (place >= start + period and one != seen[place - period]):
            break
        place += 1
    count = (place - start) // period
    # Only the last period is read by others than the blocks that come next, but for states, which the graph returns.
    for place in range(start, start + period * (count - 1)):
        block = blocks[place]
        for index, result in _results(repeats[place]).items():
            returned = block is not None and index in block.made_states
            readers = [user for user in result.users if not (returned and user.op == "output")]
            if any(not place < number.get(user, -1) <= place + period for user in readers):
                return (place - start) // period + 1
    return count


def _taken_out(row: Sequence[fx.Node], period: int, inputs: Mapping[fx.Node, str]) -> Row:
    like = row[period : KEPT * period]
    output = next(node for node in reversed(row[0].graph.nodes) if node.op == "output")
    returned: Any = output.args[0]
    places: dict[fx.Node, list[int]] = {}
    for place, node in enumerate(returned):
        if isinstance(node, fx.Node):
            places.setdefault(node, []).append(place)
    results: dict[int, int] = {}
    renamed: list[dict[str, str]] = []
    for again in range(len(row) // period - 1):
        names: dict[str, str] = {}
        for kept, one in zip(like, row[(again + 1) * period :], strict=False):
            results.update((place, again) for each in _results(one).values() for place in places.get(each, ()))
            for mine, other in zip(kept.args[0], one.args[0], strict=True):  # type: ignore[arg-type]
                if mine is not other and mine in inputs and other in inputs:
                    names[inputs[mine]] = inputs[other]
        renamed.append(names)
    for kept, gone in zip(like, row[-period:], strict=True):
        own = _results(kept)
        for index, result in _results(gone).items():
            result.replace_all_uses_with(own[index], delete_user_cb=lambda user: user is not output)
    paths = [str(node.args[2]) for node in row]
    stand_in = {
        each: _results(kept)[index]
        for again in range(period, len(row), period)
        for kept, one in zip(like, row[again:], strict=False)
        for index, each in _results(one).items()
    }
    output.args = (tuple(stand_in.get(node, node) for node in returned),)
    for node in reversed(row[KEPT * period :]):
        for user in list(node.users):
            node.graph.erase_node(user)
        node.graph.erase_node(node)
    starts = range(0, len(row), period)
    before, same, *others = (tuple(paths[start : start + period]) for start in starts)
    return Row(Folded(before, same, tuple(others), tuple(renamed[1:])), results)
