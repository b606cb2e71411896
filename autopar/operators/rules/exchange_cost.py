"""How many rows an exchange of tokens with experts moves: as planned, where every choice of experts is as likely.

Shape suffixes as in `autopar.operators.experts`; n: the ranks of the axis, each with E / n experts. A token goes once
to each rank that has any of its experts, whatever their number there.
"""

from __future__ import annotations

import math

SPARE = 2.0
"""How many times the rows that are expected a rank takes at once; what is more comes in further rounds."""


def ranks_of_token(num_experts: int, chosen: int, num_ranks: int) -> float:
    """How many of n ranks have any of K different experts, on the average over all choices of K of E."""
    elsewhere = num_experts - num_experts // num_ranks
    if chosen > elsewhere:
        return float(num_ranks)
    ways = (math.comb(elsewhere, chosen), math.comb(num_experts, chosen))
    return num_ranks * (1.0 - ways[0] / ways[1])


def rows_at_once(tokens: int, num_experts: int, chosen: int, num_ranks: int) -> int:
    """The most rows that a rank gets in one round, and that it sends; but for one of each rank, where rounds do not
    divide what ranks send. tokens: of one rank.
    """
    expected = tokens * ranks_of_token(num_experts, chosen, num_ranks)
    return max(1, min(num_ranks * tokens, math.ceil(SPARE * expected)))


def rounds_of(rows: list[list[int]], at_once: int) -> int:
    """How many rounds all ranks take together. rows[i][j]: those that rank i has for rank j; the same on all ranks."""
    received = [sum(column) for column in zip(*rows, strict=True)]
    return max(1, -(-max([*map(sum, rows), *received]) // at_once))
