"""Which rows belong to which expert, as the device finds it: places sorted by experts, tiles of groups, sums of tokens.

A place is a token's choice, number t K + k of [T, K]; a row is a place in the order of experts, those that chose none
here behind all others. `offsets[E + 1]`: where an expert's rows begin. Nothing of this is known on the host: grids are
for the worst case, and a program finds its expert, or that it has nothing to do.

Buffers hold the rows from `lo` to `hi` alone, a window: more rows than that take turns, so that memory has a bound
whatever the router does. What follows is meant of the part of a group that is in the window.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def sort_places_kernel(
    indices_ptr, order_ptr, rows_ptr, offsets_ptr, num_places, num_experts, start,
    PLACES: tl.constexpr, CHUNK: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """All places at once, where they are few: order[row] = place, rows[place] = row, offsets. A row is the number of
    places that come before, so equal experts keep the order of places. One program.
    """
    places = tl.arange(0, PLACES)
    inside = places < num_places
    experts = tl.load(indices_ptr + places, mask=inside, other=0).to(tl.int32) - start
    experts = tl.where((experts < 0) | (experts >= num_experts), num_experts, experts)
    numbers = tl.arange(0, BLOCK_E)
    rows = tl.zeros([PLACES], tl.int32)
    before = tl.zeros([BLOCK_E], tl.int32)
    for first in range(0, num_places, CHUNK):
        others = first + tl.arange(0, CHUNK)
        is_there = others < num_places
        theirs = tl.load(indices_ptr + others, mask=is_there, other=0).to(tl.int32) - start
        theirs = tl.where((theirs < 0) | (theirs >= num_experts), num_experts, theirs)
        theirs = tl.where(is_there, theirs, num_experts + 1)
        is_less = theirs[None, :] < experts[:, None]
        is_earlier = (theirs[None, :] == experts[:, None]) & (others[None, :] < places[:, None])
        rows += tl.sum((is_less | is_earlier).to(tl.int32), 1)
        before += tl.sum((theirs[None, :] < numbers[:, None]).to(tl.int32), 1)
    tl.store(order_ptr + rows, places, mask=inside)
    tl.store(rows_ptr + places, rows, mask=inside)
    tl.store(offsets_ptr + numbers, before, mask=numbers <= num_experts)


@triton.jit
def group(offsets_ptr, expert, lo, hi):
    """The rows of an expert: from, to, and whether an earlier window had some of them."""
    start = tl.load(offsets_ptr + expert)
    end = tl.load(offsets_ptr + expert + 1)
    return tl.minimum(tl.maximum(start, lo), hi), tl.minimum(tl.maximum(end, lo), hi), start < lo


@triton.jit
def find_tile(offsets_ptr, tile, num_experts, lo, hi, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr):
    """The tile's expert (num_experts or more: there are not so many tiles), its first row, and the end of its group.

    Groups have tiles of their own, one after the other: sum over e of ceil(n_e / BLOCK_M).
    """
    numbers = tl.arange(0, BLOCK_E)
    is_one = numbers < num_experts
    starts = tl.load(offsets_ptr + numbers, mask=is_one, other=0)
    ends = tl.load(offsets_ptr + numbers + 1, mask=is_one, other=0)
    starts = tl.minimum(tl.maximum(starts, lo), hi)
    ends = tl.minimum(tl.maximum(ends, lo), hi)
    tiles = tl.where(is_one, (ends - starts + BLOCK_M - 1) // BLOCK_M, 0)
    last = tl.cumsum(tiles, 0)
    is_before = last <= tile
    expert = tl.sum(is_before.to(tl.int32), 0)
    within = tile - tl.sum(tl.where(is_before, tiles, 0), 0)
    at = tl.minimum(expert, num_experts - 1)
    start, end, _ = group(offsets_ptr, at, lo, hi)
    return expert, start + within * BLOCK_M, end


@triton.jit
def place_of_program(num_m, num_n, GROUP_M: tl.constexpr):
    """(m, n) of a program: GROUP_M tiles of rows share columns before the next columns, so that both stay in L2."""
    pid = tl.program_id(0)
    in_group = GROUP_M * num_n
    first = pid // in_group * GROUP_M
    size = tl.minimum(num_m - first, GROUP_M)
    return first + pid % in_group % size, pid % in_group // size


@triton.jit
def combine_kernel(
    y_ptr, rows_ptr, offsets_ptr, sums_ptr, out_ptr, num_choices, num_columns, num_experts, lo, hi,
    FIRST: tl.constexpr, LAST: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """out[t] = sum over k of the token's rows of y, in float32, window after window, in each in the order of k. Between
    the FIRST and the LAST window sums are kept in sums[T, D].
    """
    token = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    mask = columns < num_columns
    end = tl.minimum(tl.load(offsets_ptr + num_experts), hi)
    total = tl.zeros([BLOCK_D], tl.float32)
    if not FIRST:
        total = tl.load(sums_ptr + token * num_columns + columns, mask=mask, other=0.0)
    for k in range(num_choices):
        row = tl.load(rows_ptr + token * num_choices + k)
        if (row >= lo) & (row < end):
            y_row = y_ptr + (row - lo).to(tl.int64) * num_columns
            total += tl.load(y_row + columns, mask=mask, other=0.0).to(tl.float32)
    if LAST:
        tl.store(out_ptr + token * num_columns + columns, total.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(sums_ptr + token * num_columns + columns, total, mask=mask)


@triton.jit
def weights_grad_kernel(
    parts_ptr, rows_ptr, offsets_ptr, dweights_ptr, num_places, num_parts, num_experts, lo, hi,
    FIRST: tl.constexpr, BLOCK_P: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """dweights[place] = sum of parts[row], one of each tile of columns; 0 where the place's expert is none here."""
    places = tl.program_id(0) * BLOCK_P + tl.arange(0, BLOCK_P)
    inside = places < num_places
    rows = tl.load(rows_ptr + places, mask=inside, other=0)
    end = tl.load(offsets_ptr + num_experts)
    mine = inside & (rows >= lo) & (rows < tl.minimum(end, hi))
    parts = tl.arange(0, PARTS)
    at = (rows - lo).to(tl.int64)[:, None] * num_parts + parts[None, :]
    values = tl.load(parts_ptr + at, mask=mine[:, None] & (parts < num_parts)[None, :], other=0.0)
    if FIRST:
        mine = mine | (inside & (rows >= end))
    tl.store(dweights_ptr + places, tl.sum(values, 1).to(dweights_ptr.dtype.element_ty), mask=mine)
