"""The sweep of message passing (`messages`), compiled for graphs of thousands of small matrices.

Most edges share their matrix with others (8,000 edges of a convolution have some 800), so each distinct one is kept
once, as each of an edge's ends reads it, its columns padded with infinity to whole groups of LANES:

    e, f: [[0 1 2]     from u   0 1 2 ∞     from v   0 3 ∞ ∞
           [3 4 5]]             3 4 5 ∞              1 4 ∞ ∞
                                                     2 5 ∞ ∞

A group of columns goes through all rows in registers. Indices are unsigned: numba lets signed ones count from the end,
which takes longer than the sums. Sums are taken in the order in which `messages` writes them: bounds are the same bits.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from autopar.solver.compiled import Flat, compiled
from autopar.solver.problem import FloatArray, IntArray

LANES = 4
Unsigned = NDArray[np.uint64]
_U = np.uint64


class Sides(NamedTuple):
    """The graph in unsigned numbers. End 2 e of edge e is at its u, end 2 e + 1 at its v.

    ends[p]: what `Flat.near[p]` is of the node whose it is; classes of an end's choices are at `classes[at]`, its
    messages at `into`, `rows` of them; `plain`: each of its choices is its own class, in order. Its matrix, a row a
    class of its own and `stride` columns, is at `cell` of `cells`.
    """

    base: Unsigned
    first: Unsigned
    ahead: Unsigned
    ends: Unsigned
    at: Unsigned
    classes: Unsigned
    into: Unsigned
    rows: Unsigned
    plain: NDArray[np.bool_]
    stride: Unsigned
    cell: Unsigned
    cells: FloatArray


def sides(flat: Flat, cells: FloatArray) -> Sides:
    """Of a graph whose edges have these cells."""
    rows, columns = flat.into_v - flat.into_u, flat.width
    counts = np.diff(flat.base)
    owner = np.repeat(np.arange(len(counts)), np.diff(flat.first))
    ends = 2 * flat.near + (flat.u[flat.near] != owner)
    num_u = int(counts[flat.u].sum())
    plain = np.empty(2 * len(rows), dtype=np.bool_)
    plain[::2] = _is_plain(flat.u_class, flat.u_at, rows)
    plain[1::2] = _is_plain(flat.v_class, flat.v_at, columns)
    stride, cell, padded = _padded(cells, flat.cell, rows, columns)
    return Sides(
        flat.base.astype(_U), flat.first.astype(_U), flat.ahead.astype(_U), ends.astype(_U),
        _interleaved(flat.u_at, flat.v_at + num_u).astype(_U), np.concatenate([flat.u_class, flat.v_class]).astype(_U),
        _interleaved(flat.into_u, flat.into_v).astype(_U), _interleaved(rows, columns).astype(_U), plain,
        stride.astype(_U), cell.astype(_U), padded,
    )  # fmt: skip


def _interleaved(of_u: IntArray, of_v: IntArray) -> IntArray:
    both: IntArray = np.column_stack([of_u, of_v]).ravel()
    return both


def _is_plain(classes: IntArray, at: IntArray, num: IntArray) -> NDArray[np.bool_]:
    """Of each edge's end, whether choice i is of class i, and there are no other classes."""
    if not len(at):
        return np.zeros(0, dtype=bool)
    lengths = np.diff([*at, len(classes)])
    own = classes == np.arange(len(classes)) - np.repeat(at, lengths)
    plain: NDArray[np.bool_] = np.logical_and.reduceat(own, at) & (lengths == num)
    return plain


def _padded(
    cells: FloatArray, starts: IntArray, rows: IntArray, columns: IntArray
) -> tuple[IntArray, IntArray, FloatArray]:
    """Of each end its stride and where its matrix begins; distinct matrices, padded."""
    known: dict[tuple[bool, int, bytes], int] = {}
    parts, size = [], 0
    strides = np.zeros(2 * len(starts), dtype=np.int64)
    found = np.zeros(2 * len(starts), dtype=np.int64)
    for e, (start, m, n) in enumerate(zip(starts.tolist(), rows.tolist(), columns.tolist(), strict=True)):
        own = cells[start : start + m * n]
        data = own.tobytes()
        for turned, (height, width) in enumerate(((m, n), (n, m))):
            stride = -(-width // LANES) * LANES
            key = (bool(turned), n, data)
            if key not in known:
                matrix = own.reshape(m, n)
                part = np.full((height, stride), np.inf)
                part[:, :width] = matrix.T if turned else matrix
                parts.append(part.ravel())
                known[key], size = size, size + part.size
            strides[2 * e + turned], found[2 * e + turned] = stride, known[key]
    return strides, found, np.concatenate(parts) if parts else np.zeros(0)


@compiled
def sweep(graph: Sides, costs: FloatArray, values: FloatArray, forward: bool) -> float:
    """One pass over all nodes; returns the lower bound. values: the messages, changed in place."""
    zero, one, two, three, four = _U(0), _U(1), _U(2), _U(3), _U(4)
    base, first, ahead, ends, cells = graph.base, graph.first, graph.ahead, graph.ends, graph.cells
    count, total = _U(len(base) - 1), 0.0
    room = one
    for node in range(count):
        room = max(room, base[_U(node) + one] - base[_U(node)])
    for end in range(_U(len(graph.rows))):
        room = max(room, max(graph.rows[_U(end)], graph.stride[_U(end)]))
    beta, given, best = np.empty(room), np.empty(room), np.empty(room)
    for step in range(count):
        s = _U(step) if forward else count - one - _U(step)
        start = base[s]
        k = base[s + one] - start
        low, middle, high = first[s], ahead[s], first[s + one]
        for i in range(k):
            beta[i] = costs[start + _U(i)]
        for position in range(low, high):
            end = ends[position]
            into, at = graph.into[end], graph.at[end]
            if graph.plain[end]:
                for i in range(k):
                    beta[i] += values[into + _U(i)]
            else:
                for i in range(k):
                    beta[i] += values[into + graph.classes[at + _U(i)]]
        least = np.inf
        for i in range(k):
            least = min(beta[i], least)
        total += least
        share = 1.0 / max(1.0, max(float(middle - low), float(high - middle)))
        for i in range(k):
            beta[i] = (beta[i] - least) * share
        for position in range(middle if forward else low, high if forward else middle):
            end = ends[position]
            into, rows = graph.into[end], graph.rows[end]
            if graph.plain[end]:
                for a in range(rows):
                    given[a] = beta[a] - values[into + _U(a)]
            else:
                at = graph.at[end]
                for a in range(rows):
                    given[a] = np.inf
                for i in range(k):
                    c = graph.classes[at + _U(i)]
                    given[c] = min(beta[i], given[c])
                for a in range(rows):
                    given[a] -= values[into + _U(a)]
            stride, cell, shift = graph.stride[end], graph.cell[end], np.inf
            for group in range(stride // four):
                column = _U(group) * four
                at = cell + column
                mine = given[zero]
                m0, m1 = cells[at] + mine, cells[at + one] + mine
                m2, m3 = cells[at + two] + mine, cells[at + three] + mine
                for a in range(one, rows):
                    at = at + stride
                    mine = given[a]
                    m0 = min(cells[at] + mine, m0)
                    m1 = min(cells[at + one] + mine, m1)
                    m2 = min(cells[at + two] + mine, m2)
                    m3 = min(cells[at + three] + mine, m3)
                best[column], best[column + one], best[column + two], best[column + three] = m0, m1, m2, m3
                shift = min(shift, min(min(m0, m1), min(m2, m3)))
            total += shift
            other = end ^ one
            out = graph.into[other]
            for b in range(graph.rows[other]):
                values[out + _U(b)] = best[b] - shift
    return total
