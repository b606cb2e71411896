"""Compiled loops over a `Flat` graph that make choices: rounding of messages, moves of nodes and of forests."""

from __future__ import annotations

import numpy as np

from autopar.solver.compiled import Flat, add_costs, add_message, compiled, inlined, least_by_class, most_choices
from autopar.solver.problem import BoolArray, FloatArray, IntArray


@compiled
def decode(
    flat: Flat, costs: FloatArray, cells: FloatArray, values: FloatArray, forward: bool, choice: IntArray
) -> bool:
    """A choice per node, each the best given the choices behind it and the messages from ahead. False: the choices
    behind leave one nothing; it has its first then.
    """
    allowed = True
    count = len(flat.base) - 1
    room = most_choices(flat)
    local = np.empty(room)
    for step in range(count):
        s = step if forward else count - 1 - step
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        for i in range(k):
            local[i] = costs[start + i]
        for position in range(flat.first[s], flat.first[s + 1]):
            e = flat.near[position]
            ahead = (position >= flat.ahead[s]) == forward
            # `add_message` and `add_costs`, written out: most of the time of a round is spent here.
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


@inlined
def mark_classes(alive: BoolArray, classes: IntArray, has: BoolArray) -> None:
    """has[c]: whether a choice of class c is alive."""
    has[:] = False
    for i in range(len(alive)):
        if alive[i]:
            has[classes[i]] = True


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
    room = most_choices(flat)
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
            if position >= flat.ahead[s]:
                add_message(flat, values, s, flat.near[position], local)
            else:
                add_costs(flat, cells, s, flat.near[position], choice, local)
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
                        serves[:width] = False
                        mark_classes(alive[flat.base[t] : flat.base[t + 1]], flat.u_class[flat.u_at[e] :], has[:rows])
                        for a in range(rows):
                            if has[a]:
                                for b in range(width):
                                    serves[b] = serves[b] or cells[cell + a * width + b] < np.inf
                        at = flat.v_at[e]
                    else:
                        serves[:rows] = False
                        mark_classes(alive[flat.base[t] : flat.base[t + 1]], flat.v_class[flat.v_at[e] :], has[:width])
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
def single_moves(flat: Flat, costs: FloatArray, cells: FloatArray, choice: IntArray, passes: int) -> None:
    """Move one node at a time to its best choice (in place) until none gains, or for so many passes."""
    count = len(flat.base) - 1
    room = most_choices(flat)
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
                add_costs(flat, cells, s, flat.near[position], choice, local)
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
        u, v = flat.u[e], flat.v[e]
        if inside[u] and not inside[v]:
            add_costs(flat, cells, u, e, choice, local[flat.base[u] :])
        elif inside[v] and not inside[u]:
            add_costs(flat, cells, v, e, choice, local[flat.base[v] :])
    for position in range(taken - 1, -1, -1):
        s = sequence[position]
        e = above[s]
        if e < 0:
            continue
        rows, width, cell = flat.into_v[e] - flat.into_u[e], flat.width[e], flat.cell[e]
        below, passed = np.empty(rows), np.full(width, np.inf)
        k = flat.base[s + 1] - flat.base[s]
        if flat.u[e] == s:
            least_by_class(local[flat.base[s] :], flat.u_class[flat.u_at[e] : flat.u_at[e] + k], below)
            for a in range(rows):
                for b in range(width):
                    c = cells[cell + a * width + b] + below[a]
                    passed[b] = c if c < passed[b] else passed[b]
            r = flat.v[e]
            for j in range(flat.base[r + 1] - flat.base[r]):
                local[flat.base[r] + j] += passed[flat.v_class[flat.v_at[e] + j]]
        else:
            least_by_class(local[flat.base[s] :], flat.v_class[flat.v_at[e] : flat.v_at[e] + k], passed)
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
        e = int(above[s])
        start, k = flat.base[s], flat.base[s + 1] - flat.base[s]
        if e >= 0:
            add_costs(flat, cells, s, e, choice, local[start:])
        best = 0
        for i in range(1, k):
            if local[start + i] < local[start + best]:
                best = i
        choice[s] = best
