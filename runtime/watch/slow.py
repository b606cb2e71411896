"""Who is slow: a rank for which the others wait a little in every step. Said by how long each waited for others.

The slow rank finds what it needs already there, and waits least. Ranks are compared where the plan has them do the
same: those of other stages of a pipeline wait for each other anyway.
"""

from __future__ import annotations

from collections.abc import Sequence
from statistics import median
from typing import NamedTuple

SHARE = 0.2
"""Of the time, which others waited longer than a rank: less is usual among machines that are alike."""


class Waited(NamedTuple):
    """Of one rank, since the last time: seconds in all, seconds in which it waited for others, and for what most."""

    all_s: float
    waited_s: float
    most: str


def slow_one(found: Sequence[Waited], peers: Sequence[Sequence[int]], steps: int) -> str | None:
    """The rank for which others waited most, in words, or None. found: of each rank. peers: ranks that do the same."""
    worst: tuple[float, int, Waited] | None = None
    for ranks in peers:
        for rank in ranks:
            others = [found[each] for each in ranks if each != rank]
            if not others or found[rank].all_s <= 0:
                continue
            usual_s = median(each.waited_s for each in others)
            share = (usual_s - found[rank].waited_s) / found[rank].all_s
            if share > SHARE and (worst is None or share > worst[0]):
                worst = share, rank, max(others, key=lambda each: each.waited_s)
    if worst is None:
        return None
    share, rank, most = worst
    return (
        f"rank {rank} is slow: in the last {steps} steps the others waited {share:.0%} of the time longer than it did, "
        f"most of all at {most.most}. Look at its data loading, and at what else its machine does"
    )
