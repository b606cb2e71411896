"""Blend a cheap choice that does not fit with a dear one that does.

Where two choices differ, the differing nodes fall into connected components of the graph. Each component can be
switched by itself, and its cost and bytes do not depend on the others: what is left is a knapsack, solved greedily.
"""

from __future__ import annotations

import numpy as np

from autopar.solver.memory import Memory, binned
from autopar.solver.oracle import Evaluator
from autopar.solver.problem import FloatArray, IntArray

MAX_SWITCHES = 400


def blend(evaluator: Evaluator, memory: Memory, limit: float, cheap: IntArray, fitting: IntArray) -> IntArray | None:
    """A choice that fits, between the two; None where switching everything does not fit either.

    Switches components of `cheap` to `fitting` by least cost per byte of excess removed, then back where there is room.
    """
    component = _components(evaluator, cheap, fitting)
    count = int(component.max()) + 1
    if count == 0:
        return None
    costs = _switch_costs(evaluator, cheap, fitting, component, count)
    profiles = _switch_profiles(memory, cheap, fitting, component, count)
    switched = np.zeros(count, dtype=bool)
    now = memory.profile(cheap)
    for _ in range(min(count, MAX_SWITCHES)):
        excess = np.maximum(0.0, now - limit).sum()
        if excess <= 0:
            break
        removed = excess - np.maximum(0.0, now + profiles - limit).sum(axis=1)
        useful = ~switched & (removed > 0)
        if not useful.any():
            return None
        rate = np.where(useful, np.where(costs > 0, costs / np.where(useful, removed, 1.0), costs), np.inf)
        best = int(np.argmin(rate))
        switched[best] = True
        now = now + profiles[best]
    for index in np.argsort(-costs, kind="stable"):
        back = now - profiles[index]
        if switched[index] and costs[index] > 0 and (back <= limit).all():
            switched[index], now = False, back
        elif not switched[index] and costs[index] < 0 and (now + profiles[index] <= limit).all():
            switched[index], now = True, now + profiles[index]
    chosen = (component >= 0) & switched[component]
    return np.where(chosen, fitting, cheap) if (now <= limit).all() else None


def _components(evaluator: Evaluator, first: IntArray, second: IntArray) -> IntArray:
    """The component of each node, numbered by its lowest node; -1 where the choices agree."""
    differ = first != second
    parent = np.arange(len(first))

    def root(v: int) -> int:
        while parent[v] != v:
            parent[v] = parent[parent[v]]
            v = int(parent[v])
        return v

    both = differ[evaluator.u] & differ[evaluator.v]
    for u, v in zip(evaluator.u[both].tolist(), evaluator.v[both].tolist(), strict=True):
        a, b = root(u), root(v)
        parent[max(a, b)] = min(a, b)
    component = np.full(len(first), -1, dtype=np.int64)
    nodes = np.flatnonzero(differ)
    if len(nodes):
        roots = np.array([root(int(v)) for v in nodes])
        component[nodes] = np.searchsorted(np.unique(roots), roots)
    return component


def _switch_costs(evaluator: Evaluator, old: IntArray, new: IntArray, component: IntArray, count: int) -> FloatArray:
    """What switching each component costs. An edge has its ends in one component, or one end where nothing changes."""
    differ = component >= 0
    node_delta = evaluator.node_costs(new) - evaluator.node_costs(old)
    costs = binned(component[differ], node_delta[differ], count)
    side = np.maximum(component[evaluator.u], component[evaluator.v])
    touched = side >= 0
    edge_delta = (evaluator.edge_costs(new) - evaluator.edge_costs(old))[touched]
    return costs + binned(side[touched], edge_delta, count)


def _switch_profiles(memory: Memory, old: IntArray, new: IntArray, component: IntArray, count: int) -> FloatArray:
    profiles = np.zeros((count, memory.num_points + 1))
    of_usage = component[memory.node]
    touched = np.flatnonzero(of_usage >= 0)
    delta = memory.bytes[memory.base + new[memory.node]] - memory.bytes[memory.base + old[memory.node]]
    np.add.at(profiles, (of_usage[touched], memory.start[touched]), delta[touched])
    np.add.at(profiles, (of_usage[touched], memory.end[touched]), -delta[touched])
    return np.cumsum(profiles, axis=1)[:, : memory.num_points]
