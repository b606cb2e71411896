"""How unevenly a router spreads tokens over the ranks of an axis, from what was counted."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from autopar.base.errors import AutoparError


def expert_imbalance(loads: Any, ranks: int) -> float:
    """The mean over steps of the tokens of the busiest rank, for each that a rank gets on the average; 1 where all get
    the same. For `expert_imbalance` of `autopar.plan`, `compile` and `search`.

    Args:
        loads: how many tokens chose each expert, [steps, experts] or [experts]: a tensor or lists, of one layer or of
            several, one after the other. Steps without any tokens count for nothing.
        ranks: of the axis over which tokens go to their experts; rank r has the experts r · E / ranks and on.

    Raises:
        AutoparError: ranks that do not divide the experts, negative numbers, rows of several lengths, or no tokens.
    """
    rows = loads.tolist() if hasattr(loads, "tolist") else [*loads]
    rows = rows if rows and isinstance(rows[0], Sequence) else [rows]
    experts = len(rows[0])
    if ranks < 1 or experts == 0 or experts % ranks or any(len(row) != experts for row in rows):
        raise AutoparError(
            f"loads of {'/'.join(sorted({str(len(row)) for row in rows}))} experts over {ranks} ranks",
            remedy="give a number for each expert of every step, and ranks that divide them",
        )
    if not all(0 <= each < math.inf for row in rows for each in row) or not any(map(sum, rows)):
        raise AutoparError("loads count tokens: none is negative, and not all are 0", remedy="count choices of experts")
    each = experts // ranks
    shares = [
        max(sum(row[start : start + each]) for start in range(0, experts, each)) * ranks / sum(row)
        for row in rows
        if sum(row)
    ]
    return math.fsum(shares) / len(shares)


def summed_loads(layer: str, loads: Any, experts: int) -> list[float]:
    """The tokens of each expert of a layer over all steps. loads: [experts] or [steps, experts], a tensor or lists.

    Raises:
        AutoparError: other sizes, negative numbers or none.
    """
    rows = loads.tolist() if hasattr(loads, "tolist") else [*loads]
    rows = rows if rows and isinstance(rows[0], Sequence) else [rows]
    if any(len(row) != experts for row in rows) or not all(0 <= each < math.inf for row in rows for each in row):
        raise AutoparError(
            f"loads of {layer} are no counts of tokens for each of {experts} experts",
            values="/".join(sorted({str(len(row)) for row in rows})) + " numbers a step",
            remedy="give [experts] or [steps, experts], none negative",
        )
    return [float(sum(column)) for column in zip(*rows, strict=True)]
