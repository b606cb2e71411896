"""Rounds of a loop that a trace has spelled out: operators that come again and again, each round fed by the one before.

    a = sum(x); x1 = x / a; b = sum(x1); x2 = x1 / b; …, twenty times   →   sum and div of one round, twenty times each

As the layers that repeat are one region, so operators that repeat within a region do alike: they have one decision.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from torch import fx

from autopar.ir.graphs import operands_of, source_of
from autopar.ir.region import Options, Region

LEAST_ROUNDS = 4
"""Fewer are no loop: three projections of attention look like one."""
LONGEST = 512
"""Operators of a round that are looked for."""


def rounds_of(region: Region, options: Mapping[str, Options]) -> dict[str, str]:
    """Of operators in later rounds of a loop, the one of the first round that does the same: by names of nodes.

    Rounds have the same operators in the same order, with the same options (the same object), and read the same
    parameters and inputs; each reads something of the round before.
    """
    nodes = [node for node in region.graph.nodes if node.name in region.ops]
    if len(nodes) < 2 * LEAST_ROUNDS:
        return {}
    place = {node: number for number, node in enumerate(nodes)}
    reads = [[source_of(operand)[0] for operand in operands_of(node)] for node in nodes]
    known: dict[object, int] = {}
    keys = (
        (id(options[node.name]), *(each.name for each in own if each.op == "placeholder"))
        for node, own in zip(nodes, reads, strict=True)
    )
    kinds = np.array([known.setdefault(key, len(known)) for key in keys])
    free = np.ones(len(nodes), dtype=bool)
    found: dict[str, str] = {}
    for _, length, start, end in sorted(stretches(kinds), key=lambda each: (-each[0], each[1], each[2])):
        if not free[start:end].all() or not _is_chain(start, length, end, place, reads):
            continue
        free[start:end] = False
        for number in range(start + length, end):
            found[nodes[number].name] = nodes[start + (number - start) % length].name
    return found


def stretches(kinds: np.ndarray) -> list[tuple[int, int, int, int]]:
    """Where kinds come again after so many: how many operators that saves, the length of a round, start, end."""
    found = []
    for length in range(1, min(LONGEST, len(kinds) // LEAST_ROUNDS) + 1):
        same = np.concatenate([[False], kinds[length:] == kinds[:-length], [False]])
        edges = np.flatnonzero(same[1:] != same[:-1])
        for start, end in zip(edges[::2].tolist(), edges[1::2].tolist(), strict=True):
            if end - start >= (LEAST_ROUNDS - 1) * length:
                found.append((end - start, length, start, end + length))
    return found


def _is_chain(
    start: int, length: int, end: int, place: Mapping[fx.Node, int], reads: Sequence[Sequence[fx.Node]]
) -> bool:
    """Whether every whole round reads something of the one before."""
    count = (end - start) // length
    fed = np.zeros(count, dtype=bool)
    fed[0] = True
    for number in range(start + length, start + count * length):
        here = (number - start) // length
        sources = (place.get(source, -1) - start for source in reads[number])
        fed[here] |= any(source >= 0 and source // length == here - 1 for source in sources)
    return bool(fed.all())
