"""How kernels cut the experts of a mixture into tiles and turns (runtime/kernels/experts.py), which prices know, too.

A place is a token's choice. Shape suffixes as in `autopar.operators.experts`.
"""

from __future__ import annotations

import math
from functools import lru_cache

FEW_PLACES = 1024
"""So many places kernels always take at once."""
ROW_TILES = (16, 32, 64, 128)
"""Rows of a tile; an expert's rows on the average choose among them."""


def window_rows(tokens: int, chosen: int) -> int:
    """How many rows, a place each, kernels take at once: two a token. So what they hold does not grow with how many of
    its experts are here; more take turns, and an expert's rows stay together but where a turn ends.
    """
    return min(tokens * chosen, max(2 * tokens, FEW_PLACES))


def rows_of_tile(rows: float) -> int:
    """The rows of a tile for experts that have so many on the average."""
    return next((each for each in ROW_TILES if rows <= each), ROW_TILES[-1])


@lru_cache(maxsize=4096)
def computed_rows(rows: float, tile: int) -> float:
    """The rows of the whole tiles of an expert that has any, and so many on the average of random choices: the sum over
    k of the chance that there are more than k tiles, by a normal distribution of the variance of Poisson's; of many
    tiles, the last one of which is full by half, rows + (tile - 1) / 2.
    """
    if rows >= 8 * tile:
        return rows + (tile - 1) / 2
    chances = (math.erfc((k * tile + 0.5 - rows) / math.sqrt(2 * rows)) / 2 for k in range(1, 16))
    return tile * (1.0 + sum(chances))
