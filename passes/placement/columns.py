"""The layouts that one tensor has under each choice of a problem's node: worked out once for all who ask."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.ir.region import NodeStrategy, Options
from autopar.ir.sharding import Sharding, num_pieces, replicated


class Column:
    """each: the layout under every choice. distinct: those that differ, in the order in which they come first; number:
    which of them each is.
    """

    __slots__ = ("_pieces", "distinct", "each", "number")

    def __init__(self, each: Sequence[Sharding]) -> None:
        known: dict[Sharding, int] = {}
        self.each = tuple(each)
        self.number = np.array([known.setdefault(layout, len(known)) for layout in self.each])
        self.number.flags.writeable = False  # edges of many problems have it
        self.distinct = tuple(known)
        self._pieces: dict[tuple[int, ...], np.ndarray] = {}

    def pieces(self, sizes: tuple[int, ...]) -> np.ndarray:
        """In how many pieces each layout cuts a tensor, on axes of these sizes."""
        if sizes not in self._pieces:
            found = np.array([num_pieces(layout, sizes) for layout in self.distinct])
            self._pieces[sizes] = found[self.number]
        return self._pieces[sizes]


def operand(options: Options, position: int) -> Column:
    """What an operator reads there under each of its strategies."""
    key = ("operand", position)
    if key not in options.columns:
        options.columns[key] = Column([strategy.operands[position] for strategy in options.strategies])
    return options.columns[key]


def result(options: Options, index: int) -> Column:
    """What it gives; whole where a strategy says nothing."""
    key = ("result", index)
    if key not in options.columns:
        given = [strategy.results[index] for strategy in options.strategies]
        whole = [replicated(len(strategy.choices)) for strategy in options.strategies]
        options.columns[key] = Column([each or other for each, other in zip(given, whole, strict=True)])
    return options.columns[key]


def of_axis(options: Options, axis: int) -> Sequence[NodeStrategy]:
    """The strategies in which no other axis does anything."""
    key = ("axis", axis)
    if key not in options.columns:
        others = (
            [each for each in range(len(options.strategies[0].choices)) if each != axis] if options.strategies else []
        )
        options.columns[key] = [
            strategy for strategy in options.strategies if all(strategy.choices[a].kind == "none" for a in others)
        ]
    return options.columns[key]
