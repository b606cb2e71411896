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

from autopar.solver.problem import BoolArray, Edge, FloatArray, IntArray

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


@compiled
def sweep(flat: Flat, costs: FloatArray, cells: FloatArray, values: FloatArray, forward: bool) -> float:
    """One pass of message passing over all nodes (autopar.solver.messages); returns the lower bound."""
    count, total = len(flat.base) - 1, 0.0
    room = 1
    for s in range(count):
        room = max(room, flat.base[s + 1] - flat.base[s])
    beta = np.empty(room)
    given = np.empty(room)
    for step in range(count):
        s = step if forward else count - 1 - step
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        low, middle, high = flat.first[s], flat.ahead[s], flat.first[s + 1]
        for i in range(k):
            beta[i] = costs[start + i]
        for position in range(low, high):
            e = flat.near[position]
            if flat.u[e] == s:
                at, into = flat.u_at[e], flat.into_u[e]
                for i in range(k):
                    beta[i] += values[into + flat.u_class[at + i]]
            else:
                at, into = flat.v_at[e], flat.into_v[e]
                for i in range(k):
                    beta[i] += values[into + flat.v_class[at + i]]
        least = np.inf
        for i in range(k):
            least = float(beta[i]) if beta[i] < least else least
        total += least
        share = 1.0 / max(1, middle - low, high - middle)
        for i in range(k):
            beta[i] = (beta[i] - least) * share
        for position in range(middle if forward else low, high if forward else middle):
            e = flat.near[position]
            width, cell = flat.width[e], flat.cell[e]
            rows = flat.into_v[e] - flat.into_u[e]
            if flat.u[e] == s:
                at, into, out = flat.u_at[e], flat.into_u[e], flat.into_v[e]
                for a in range(rows):
                    given[a] = np.inf
                for i in range(k):
                    a = flat.u_class[at + i]
                    given[a] = beta[i] if beta[i] < given[a] else given[a]
                for b in range(width):
                    values[out + b] = np.inf
                for a in range(rows):
                    g, row = given[a] - values[into + a], cell + a * width
                    for b in range(width):
                        values[out + b] = (
                            cells[row + b] + g if cells[row + b] + g < values[out + b] else values[out + b]
                        )
                size = width
            else:
                at, into, out = flat.v_at[e], flat.into_v[e], flat.into_u[e]
                for b in range(width):
                    given[b] = np.inf
                for i in range(k):
                    b = flat.v_class[at + i]
                    given[b] = beta[i] if beta[i] < given[b] else given[b]
                for b in range(width):
                    given[b] -= values[into + b]
                for a in range(rows):
                    best, row = np.inf, cell + a * width
                    for b in range(width):
                        best = cells[row + b] + given[b] if cells[row + b] + given[b] < best else best
                    values[out + a] = best
                size = rows
            shift = np.inf
            for b in range(size):
                shift = float(values[out + b]) if values[out + b] < shift else shift
            total += shift
            for b in range(size):
                values[out + b] -= shift
    return total


@compiled
def decode(
    flat: Flat, costs: FloatArray, cells: FloatArray, values: FloatArray, forward: bool, choice: IntArray
) -> bool:
    """A choice per node, each the best given the choices behind it and the messages from ahead. False: the choices
    behind leave one nothing; it has its first then.
    """
    allowed = True
    count = len(flat.base) - 1
    room = 1
    for s in range(count):
        room = max(room, flat.base[s + 1] - flat.base[s])
    local = np.empty(room)
    for step in range(count):
        s = step if forward else count - 1 - step
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        for i in range(k):
            local[i] = costs[start + i]
        for position in range(flat.first[s], flat.first[s + 1]):
            e = flat.near[position]
            ahead = (position >= flat.ahead[s]) == forward
            if flat.u[e] == s:
                at, into, there = flat.u_at[e], flat.into_u[e], flat.v[e]
                if ahead:
                    for i in range(k):
                        local[i] += values[into + flat.u_class[at + i]]
                else:
                    b = flat.v_class[flat.v_at[e] + choice[there]]
                    for i in range(k):
                        local[i] += cells[flat.cell[e] + flat.u_class[at + i] * flat.width[e] + b]
            else:
                at, into, there = flat.v_at[e], flat.into_v[e], flat.u[e]
                if ahead:
                    for i in range(k):
                        local[i] += values[into + flat.v_class[at + i]]
                else:
                    row = flat.cell[e] + flat.u_class[flat.u_at[e] + choice[there]] * flat.width[e]
                    for i in range(k):
                        local[i] += cells[row + flat.v_class[at + i]]
        best = 0
        for i in range(1, k):
            if local[i] < local[best]:
                best = i
        choice[s] = best
        allowed = allowed and local[best] < np.inf
    return allowed


@compiled
def decode_consistently(
    flat: Flat,
    costs: FloatArray,
    cells: FloatArray,
    values: FloatArray,
    forbids: BoolArray,
    choice: IntArray,
    tries: int,
) -> bool:
    """`improve.round_consistently`, with so many tries a node. `forbids`: the edges that have infinite cells."""
    count = len(flat.base) - 1
    room = 1
    for s in range(count):
        room = max(room, flat.base[s + 1] - flat.base[s])
    local = np.empty(room)
    has = np.empty(room, dtype=np.bool_)
    serves = np.empty(room, dtype=np.bool_)
    alive = np.ones(len(costs), dtype=np.bool_)
    trail = np.empty(len(costs), dtype=np.int64)
    gone = 0
    queue = np.empty(count, dtype=np.int64)
    queued = np.zeros(count, dtype=np.bool_)
    for s in range(count):
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        for i in range(k):
            local[i] = costs[start + i] if alive[start + i] else np.inf
        for position in range(flat.first[s], flat.first[s + 1]):
            e = flat.near[position]
            if flat.u[e] == s:
                if position >= flat.ahead[s]:
                    for i in range(k):
                        local[i] += values[flat.into_u[e] + flat.u_class[flat.u_at[e] + i]]
                else:
                    b = flat.v_class[flat.v_at[e] + choice[flat.v[e]]]
                    for i in range(k):
                        local[i] += cells[flat.cell[e] + flat.u_class[flat.u_at[e] + i] * flat.width[e] + b]
            elif position >= flat.ahead[s]:
                for i in range(k):
                    local[i] += values[flat.into_v[e] + flat.v_class[flat.v_at[e] + i]]
            else:
                row = flat.cell[e] + flat.u_class[flat.u_at[e] + choice[flat.u[e]]] * flat.width[e]
                for i in range(k):
                    local[i] += cells[row + flat.v_class[flat.v_at[e] + i]]
        found = False
        for _ in range(tries):
            best = 0
            for i in range(1, k):
                if local[i] < local[best]:
                    best = i
            if not local[best] < np.inf:
                return False
            before = gone
            for i in range(k):
                if i != best and alive[start + i]:
                    alive[start + i] = False
                    trail[gone] = start + i
                    gone += 1
            head, waiting = 0, 1
            queue[0] = s
            queued[s] = True
            found = True
            while waiting and found:
                t = queue[head]
                head = (head + 1) % count
                waiting -= 1
                queued[t] = False
                for position in range(flat.first[t], flat.first[t + 1]):
                    e = flat.near[position]
                    if not forbids[e]:
                        continue
                    r = flat.v[e] if flat.u[e] == t else flat.u[e]
                    rows, width, cell = flat.into_v[e] - flat.into_u[e], flat.width[e], flat.cell[e]
                    if flat.u[e] == t:
                        has[:rows] = False
                        serves[:width] = False
                        for i in range(flat.base[t + 1] - flat.base[t]):
                            if alive[flat.base[t] + i]:
                                has[flat.u_class[flat.u_at[e] + i]] = True
                        for a in range(rows):
                            if has[a]:
                                for b in range(width):
                                    serves[b] = serves[b] or cells[cell + a * width + b] < np.inf
                        at = flat.v_at[e]
                    else:
                        has[:width] = False
                        serves[:rows] = False
                        for j in range(flat.base[t + 1] - flat.base[t]):
                            if alive[flat.base[t] + j]:
                                has[flat.v_class[flat.v_at[e] + j]] = True
                        for a in range(rows):
                            for b in range(width):
                                serves[a] = serves[a] or (has[b] and cells[cell + a * width + b] < np.inf)
                        at = flat.u_at[e]
                    left, changed = False, False
                    for j in range(flat.base[r + 1] - flat.base[r]):
                        if alive[flat.base[r] + j]:
                            if serves[flat.u_class[at + j] if flat.u[e] == r else flat.v_class[at + j]]:
                                left = True
                            else:
                                changed = True
                                alive[flat.base[r] + j] = False
                                trail[gone] = flat.base[r] + j
                                gone += 1
                    found = found and left
                    if changed and not queued[r]:
                        queued[r] = True
                        queue[(head + waiting) % count] = r
                        waiting += 1
            if found:
                choice[s] = best
                break
            while gone > before:
                gone -= 1
                alive[trail[gone]] = True
            queued[:] = False
            local[best] = np.inf
        if not found:
            return False
    return True


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
            e = flat.near[position]
            if flat.u[e] == s:
                for i in range(end - start):
                    shares[start + i] += values[flat.into_u[e] + flat.u_class[flat.u_at[e] + i]]
            else:
                for i in range(end - start):
                    shares[start + i] += values[flat.into_v[e] + flat.v_class[flat.v_at[e] + i]]
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
        mine, theirs = np.full(rows, np.inf), np.full(width, np.inf)
        for i in range(flat.base[u + 1] - flat.base[u]):
            a = flat.u_class[flat.u_at[e] + i]
            mine[a] = (
                shares[flat.base[u] + i] - values[flat.into_u[e] + a]
                if shares[flat.base[u] + i] - values[flat.into_u[e] + a] < mine[a]
                else mine[a]
            )
        for j in range(flat.base[v + 1] - flat.base[v]):
            b = flat.v_class[flat.v_at[e] + j]
            theirs[b] = (
                shares[flat.base[v] + j] - values[flat.into_v[e] + b]
                if shares[flat.base[v] + j] - values[flat.into_v[e] + b] < theirs[b]
                else theirs[b]
            )
        from_v, from_u = np.full(rows, np.inf), np.full(width, np.inf)
        least = np.inf
        for a in range(rows):
            for b in range(width):
                c = cells[cell + a * width + b]
                from_v[a] = c + theirs[b] if c + theirs[b] < from_v[a] else from_v[a]
                from_u[b] = c + mine[a] if c + mine[a] < from_u[b] else from_u[b]
            least = mine[a] + from_v[a] if mine[a] + from_v[a] < least else least
        total += least
        for i in range(flat.base[u + 1] - flat.base[u]):
            a = flat.u_class[flat.u_at[e] + i]
            grown[flat.base[u] + i] += shares[flat.base[u] + i] - values[flat.into_u[e] + a] + from_v[a] - least
        for j in range(flat.base[v + 1] - flat.base[v]):
            b = flat.v_class[flat.v_at[e] + j]
            grown[flat.base[v] + j] += shares[flat.base[v] + j] - values[flat.into_v[e] + b] + from_u[b] - least
    return total


@compiled
def single_moves(flat: Flat, costs: FloatArray, cells: FloatArray, choice: IntArray, passes: int) -> None:
    """Move one node at a time to its best choice (in place) until none gains, or for so many passes."""
    count = len(flat.base) - 1
    room = 1
    for s in range(count):
        room = max(room, flat.base[s + 1] - flat.base[s])
    local = np.empty(room)
    waiting = np.ones(count, dtype=np.bool_)
    for _ in range(passes):
        idle = True
        for s in range(count):
            if not waiting[s]:
                continue
            waiting[s] = False
            start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
            for i in range(k):
                local[i] = costs[start + i]
            for position in range(flat.first[s], flat.first[s + 1]):
                e = flat.near[position]
                if flat.u[e] == s:
                    b = flat.v_class[flat.v_at[e] + choice[flat.v[e]]]
                    for i in range(k):
                        local[i] += cells[flat.cell[e] + flat.u_class[flat.u_at[e] + i] * flat.width[e] + b]
                else:
                    row = flat.cell[e] + flat.u_class[flat.u_at[e] + choice[flat.u[e]]] * flat.width[e]
                    for i in range(k):
                        local[i] += cells[row + flat.v_class[flat.v_at[e] + i]]
            best = 0
            for i in range(1, k):
                if local[i] < local[best]:
                    best = i
            now = local[choice[s]]
            if best != choice[s] and local[best] < now - 1e-12 * abs(now):
                choice[s] = best
                idle = False
                for position in range(flat.first[s], flat.first[s + 1]):
                    e = flat.near[position]
                    waiting[flat.v[e] if flat.u[e] == s else flat.u[e]] = True
        if idle:
            return


@compiled
def energy(flat: Flat, costs: FloatArray, cells: FloatArray, choice: IntArray) -> float:
    """The cost of a choice."""
    total = 0.0
    for s in range(len(flat.base) - 1):
        total += float(costs[flat.base[s] + choice[s]])
    for e in range(len(flat.u)):
        a, b = flat.u_class[flat.u_at[e] + choice[flat.u[e]]], flat.v_class[flat.v_at[e] + choice[flat.v[e]]]
        total += float(cells[flat.cell[e] + a * flat.width[e] + b])
    return total


@compiled
def forest_move(flat: Flat, costs: FloatArray, cells: FloatArray, choice: IntArray, order: IntArray) -> None:
    """Re-choose, in place and exactly, all nodes of the forest that grows in this order (autopar.solver.forest)."""
    count = len(flat.base) - 1
    inside = np.zeros(count, dtype=np.bool_)
    group = np.arange(count)
    seen_by = np.full(count, -1)
    for s in order:
        closes = False
        for position in range(flat.first[s], flat.first[s + 1]):
            e = flat.near[position]
            r = flat.v[e] if flat.u[e] == s else flat.u[e]
            if inside[r]:
                while group[r] != r:
                    group[r] = group[group[r]]
                    r = group[r]
                closes = closes or seen_by[r] == s
                seen_by[r] = s
        if not closes:
            inside[s] = True
            for position in range(flat.first[s], flat.first[s + 1]):
                e = flat.near[position]
                r = flat.v[e] if flat.u[e] == s else flat.u[e]
                if inside[r] and r != s:
                    while group[r] != r:
                        r = group[r]
                    group[r] = s
    sequence = np.empty(count, dtype=np.int64)
    stack = np.empty(count, dtype=np.int64)
    above = np.full(count, -2)
    taken = 0
    for start in range(count):
        if not inside[start] or above[start] != -2:
            continue
        above[start] = -1
        stack[0] = start
        depth = 1
        while depth:
            depth -= 1
            s = stack[depth]
            sequence[taken] = s
            taken += 1
            for position in range(flat.first[s], flat.first[s + 1]):
                e = flat.near[position]
                r = flat.v[e] if flat.u[e] == s else flat.u[e]
                if inside[r] and above[r] == -2:
                    above[r] = e
                    stack[depth] = r
                    depth += 1
    local = costs.copy()
    for e in range(len(flat.u)):
        u, v, width, cell = flat.u[e], flat.v[e], flat.width[e], flat.cell[e]
        if inside[u] and not inside[v]:
            b = flat.v_class[flat.v_at[e] + choice[v]]
            for i in range(flat.base[u + 1] - flat.base[u]):
                local[flat.base[u] + i] += cells[cell + flat.u_class[flat.u_at[e] + i] * width + b]
        elif inside[v] and not inside[u]:
            row = cell + flat.u_class[flat.u_at[e] + choice[u]] * width
            for i in range(flat.base[v + 1] - flat.base[v]):
                local[flat.base[v] + i] += cells[row + flat.v_class[flat.v_at[e] + i]]
    for position in range(taken - 1, -1, -1):
        s = sequence[position]
        e = above[s]
        if e < 0:
            continue
        rows, width, cell = flat.into_v[e] - flat.into_u[e], flat.width[e], flat.cell[e]
        below, passed = np.full(rows, np.inf), np.full(width, np.inf)
        if flat.u[e] == s:
            for i in range(flat.base[s + 1] - flat.base[s]):
                a = flat.u_class[flat.u_at[e] + i]
                below[a] = local[flat.base[s] + i] if local[flat.base[s] + i] < below[a] else below[a]
            for a in range(rows):
                for b in range(width):
                    c = cells[cell + a * width + b] + below[a]
                    passed[b] = c if c < passed[b] else passed[b]
            r = flat.v[e]
            for j in range(flat.base[r + 1] - flat.base[r]):
                local[flat.base[r] + j] += passed[flat.v_class[flat.v_at[e] + j]]
        else:
            for j in range(flat.base[s + 1] - flat.base[s]):
                b = flat.v_class[flat.v_at[e] + j]
                passed[b] = local[flat.base[s] + j] if local[flat.base[s] + j] < passed[b] else passed[b]
            r = flat.u[e]
            for a in range(rows):
                best = np.inf
                for b in range(width):
                    c = cells[cell + a * width + b] + passed[b]
                    best = c if c < best else best
                below[a] = best
            for i in range(flat.base[r + 1] - flat.base[r]):
                local[flat.base[r] + i] += below[flat.u_class[flat.u_at[e] + i]]
    for position in range(taken):
        s = sequence[position]
        e = above[s]
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        if e >= 0 and flat.u[e] == s:
            b = flat.v_class[flat.v_at[e] + choice[flat.v[e]]]
            for i in range(k):
                local[start + i] += cells[flat.cell[e] + flat.u_class[flat.u_at[e] + i] * flat.width[e] + b]
        elif e >= 0:
            row = flat.cell[e] + flat.u_class[flat.u_at[e] + choice[flat.u[e]]] * flat.width[e]
            for i in range(k):
                local[start + i] += cells[row + flat.v_class[flat.v_at[e] + i]]
        best = 0
        for i in range(1, k):
            if local[start + i] < local[start + best]:
                best = i
        choice[s] = best
