"""Loops over nodes and edges, compiled by numba: what numpy is slow at on graphs of many small nodes.

Where numba is not installed they are plain Python, the same numbers slowly. `Flat` is a graph in arrays: choice i of
node s is at `base[s] + i`; edge e has its matrix [class of u, class of v] at `cell[e]`, its ends' classes at
`u_class[u_at[e]]` and `v_class[v_at[e]]`, its messages into u and v at `into_u[e]` and `into_v[e]`. `near` lists the
edges of each node from `first[s]` on: those to earlier nodes, then from `ahead[s]` on those to later ones.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, TypeVar, cast

import numpy as np

from autopar.solver.problem import Edge, FloatArray, IntArray

FAST = {"nnan", "nsz", "reassoc"}
"""What lets minima be taken by vectors. Infinite costs stay what they are."""

_Function = TypeVar("_Function", bound=Callable[..., Any])

try:
    from numba import njit as _njit
except ImportError:
    _njit = None


def compiled(function: _Function) -> _Function:
    """The function compiled at its first call, without Python's lock; later processes find it on disk. As it is, where
    numba is not installed.
    """
    if _njit is None:
        return function
    return cast(_Function, _njit(cache=True, nogil=True, error_model="numpy", fastmath=FAST)(function))


def exactly(function: _Function) -> _Function:
    """As `compiled`, with sums in the order in which they are written, and infinity less infinity no number."""
    return function if _njit is None else cast(_Function, _njit(cache=True, nogil=True, error_model="numpy")(function))


def inlined(function: _Function) -> _Function:
    """A piece of compiled functions, which is compiled as part of them: calls would take longer than what is done."""
    return function if _njit is None else cast(_Function, _njit(inline="always")(function))


class Flat(NamedTuple):
    """See the module."""

    base: IntArray
    u: IntArray
    v: IntArray
    width: IntArray
    cell: IntArray
    u_at: IntArray
    v_at: IntArray
    u_class: IntArray
    v_class: IntArray
    into_u: IntArray
    into_v: IntArray
    first: IntArray
    ahead: IntArray
    near: IntArray


def flatten(num_choices: Sequence[int], edges: Sequence[Edge]) -> Flat:
    """The structure of a graph whose edges join positions."""
    count = len(num_choices)
    u = np.array([e.u for e in edges], dtype=np.int64)
    v = np.array([e.v for e in edges], dtype=np.int64)
    rows = np.array([e.costs.shape[0] for e in edges], dtype=np.int64)
    width = np.array([e.costs.shape[1] for e in edges], dtype=np.int64)
    into_u = np.cumsum(rows + width) - rows - width
    ends, others = np.concatenate([u, v]), np.concatenate([v, u])
    later = others > ends
    order = np.lexsort((np.tile(np.arange(len(edges)), 2), later, ends))
    degree = np.bincount(ends, minlength=count)
    first = np.concatenate([[0], np.cumsum(degree)]).astype(np.int64)
    behind = np.bincount(ends[~later], minlength=count)
    return Flat(
        _starts(num_choices), u, v, width, _starts([e.costs.size for e in edges])[:-1],
        _starts([len(e.u_class) for e in edges])[:-1], _starts([len(e.v_class) for e in edges])[:-1],
        _joined([e.u_class for e in edges]), _joined([e.v_class for e in edges]),
        into_u, into_u + rows, first, first[:-1] + behind, np.tile(np.arange(len(edges)), 2)[order],
    )  # fmt: skip


def _starts(sizes: Sequence[int]) -> IntArray:
    return np.concatenate([[0], np.cumsum(np.array(sizes, dtype=np.int64))]).astype(np.int64)


def _joined(classes: Sequence[IntArray]) -> IntArray:
    return np.concatenate(classes).astype(np.int64) if classes else np.zeros(0, dtype=np.int64)


@inlined
def most_choices(flat: Flat) -> int:
    """Of any node."""
    most = 1
    for s in range(len(flat.base) - 1):
        most = max(most, flat.base[s + 1] - flat.base[s])
    return most


@inlined
def add_message(flat: Flat, values: FloatArray, s: int, e: int, onto: FloatArray) -> None:
    """Add edge e's message into node s to `onto`, one number a choice."""
    k = flat.base[s + 1] - flat.base[s]
    if flat.u[e] == s:
        into, at = flat.into_u[e], flat.u_at[e]
        for i in range(k):
            onto[i] += values[into + flat.u_class[at + i]]
    else:
        into, at = flat.into_v[e], flat.v_at[e]
        for i in range(k):
            onto[i] += values[into + flat.v_class[at + i]]


@inlined
def add_costs(flat: Flat, cells: FloatArray, s: int, e: int, choice: IntArray, onto: FloatArray) -> None:
    """Add what edge e costs with the choice of its other end to `onto`, one number a choice of node s."""
    k, width = flat.base[s + 1] - flat.base[s], flat.width[e]
    if flat.u[e] == s:
        at, cell = flat.u_at[e], flat.cell[e] + flat.v_class[flat.v_at[e] + choice[flat.v[e]]]
        for i in range(k):
            onto[i] += cells[cell + flat.u_class[at + i] * width]
    else:
        at, cell = flat.v_at[e], flat.cell[e] + flat.u_class[flat.u_at[e] + choice[flat.u[e]]] * width
        for i in range(k):
            onto[i] += cells[cell + flat.v_class[at + i]]


@inlined
def least_by_class(values: FloatArray, classes: IntArray, least: FloatArray) -> None:
    """least[c] = the least of the values whose class is c."""
    for c in range(len(least)):
        least[c] = np.inf
    for i in range(len(classes)):
        c = classes[i]
        least[c] = values[i] if values[i] < least[c] else least[c]


@compiled
def excess(flat: Flat, costs: FloatArray, cells: FloatArray, values: FloatArray, grown: FloatArray) -> float:
    """The lower bound of the messages; adds to `grown` by how much it grows if a node takes a choice (messages)."""
    count, total = len(flat.base) - 1, 0.0
    shares = np.empty(len(costs))
    for s in range(count):
        start, end = flat.base[s], flat.base[s + 1]
        degree = flat.first[s + 1] - flat.first[s]
        for i in range(start, end):
            shares[i] = costs[i]
        for position in range(flat.first[s], flat.first[s + 1]):
            add_message(flat, values, s, flat.near[position], shares[start:end])
        if degree == 0:
            least = np.inf
            for i in range(start, end):
                least = costs[i] if costs[i] < least else least
            total += least
            for i in range(start, end):
                grown[i] += costs[i] - least
        else:
            for i in range(start, end):
                shares[i] /= degree
    for e in range(len(flat.u)):
        u, v, width, cell = flat.u[e], flat.v[e], flat.width[e], flat.cell[e]
        rows = flat.into_v[e] - flat.into_u[e]
        of_u, of_v = flat.base[u + 1] - flat.base[u], flat.base[v + 1] - flat.base[v]
        mine, theirs = np.empty(rows), np.empty(width)
        least_by_class(shares[flat.base[u] :], flat.u_class[flat.u_at[e] : flat.u_at[e] + of_u], mine)
        least_by_class(shares[flat.base[v] :], flat.v_class[flat.v_at[e] : flat.v_at[e] + of_v], theirs)
        for a in range(rows):
            mine[a] -= values[flat.into_u[e] + a]
        for b in range(width):
            theirs[b] -= values[flat.into_v[e] + b]
        from_v, from_u = np.full(rows, np.inf), np.full(width, np.inf)
        least = np.inf
        for a in range(rows):
            for b in range(width):
                c = cells[cell + a * width + b]
                from_v[a] = c + theirs[b] if c + theirs[b] < from_v[a] else from_v[a]
                from_u[b] = c + mine[a] if c + mine[a] < from_u[b] else from_u[b]
            least = mine[a] + from_v[a] if mine[a] + from_v[a] < least else least
        total += least
        for i in range(of_u):
            a = flat.u_class[flat.u_at[e] + i]
            grown[flat.base[u] + i] += shares[flat.base[u] + i] - values[flat.into_u[e] + a] + from_v[a] - least
        for j in range(of_v):
            b = flat.v_class[flat.v_at[e] + j]
            grown[flat.base[v] + j] += shares[flat.base[v] + j] - values[flat.into_v[e] + b] + from_u[b] - least
    return total
