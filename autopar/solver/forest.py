"""Large moves: re-choose all nodes of an induced forest at once, exactly, with the other nodes held fixed.

A forest is grown greedily in some order of the nodes; nodes that would close a cycle stay fixed. The best choice within
it is a dynamic program from the leaves to the roots. Different orders give different forests (the partition into trees
given the rest is that of the tree sampler of Hamze and de Freitas, "From fields to trees", UAI 2004).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from autopar.solver.messages import Messages, Port
from autopar.solver.problem import FloatArray


def forest_pass(messages: Messages, choice: list[int], order: Sequence[int]) -> list[int]:
    """The best choice (by position) that differs from `choice` only in the forest that `order` grows."""
    sequence, parent = _rooted(messages, _induced_forest(messages, order))
    arrived: dict[int, FloatArray] = {}
    local: dict[int, FloatArray] = {}
    for s in reversed(sequence):
        total = messages.costs[s]
        for ports in (messages.behind[s], messages.ahead[s]):
            for port in ports:
                if port.other not in parent:
                    total = total + messages.given(port, choice[port.other])
        if s in arrived:
            total = total + arrived.pop(s)
        local[s] = total
        up = parent[s]
        if up is not None:
            message = messages.through(up, total)
            arrived[up.other] = arrived[up.other] + message if up.other in arrived else message
    better = list(choice)
    for s in sequence:
        up = parent[s]
        total = local[s] if up is None else local[s] + messages.given(up, better[up.other])
        better[s] = int(total.argmin())
    return better


def _induced_forest(messages: Messages, order: Sequence[int]) -> set[int]:
    """Nodes taken in `order` wherever that closes no cycle with those taken before."""
    group: dict[int, int] = {}

    def root(v: int) -> int:
        while group[v] != v:
            group[v] = group[group[v]]
            v = group[v]
        return v

    for s in order:
        roots = [root(p.other) for p in (*messages.behind[s], *messages.ahead[s]) if p.other in group]
        if len(set(roots)) == len(roots):
            group[s] = s
            for r in roots:
                group[r] = s
    return set(group)


def _rooted(messages: Messages, inside: set[int]) -> tuple[list[int], dict[int, Port | None]]:
    """(the nodes, parents before children; the port of each towards its parent, None for a root)."""
    parent: dict[int, Port | None] = {}
    sequence: list[int] = []
    for start in sorted(inside):
        if start in parent:
            continue
        parent[start] = None
        stack = [start]
        while stack:
            s = stack.pop()
            sequence.append(s)
            for port in (*messages.behind[s], *messages.ahead[s]):
                if port.other in inside and port.other not in parent:
                    parent[port.other] = messages.reverse(port, s)
                    stack.append(port.other)
    return sequence, parent


def shuffled(count: int, seed: int) -> list[int]:
    """A fixed pseudo-random order of `count` nodes; even seeds keep long runs together, so that trees reach far."""
    generator = np.random.default_rng(seed)
    if seed % 2:
        return [int(i) for i in generator.permutation(count)]
    start = int(generator.integers(count))
    return [(start + i) % count for i in range(count)]
