"""Attention of a few queries to many keys, as a token needs it: keys are cut among programs (Dao et al., 2023,
"Flash-Decoding"), heads that read the same keys share one load of them, keys and values may be codes (`base/codes.py`).

    q [B, H, S, D] ── rows of one key head: group · S ──┐
                                                        ├─ decode_kernel, of each cut of the keys ─► acc, m, total
    k, v [B, G, T, D|E]  or  codes with scales [B, G, T, 1] ─┘
    acc, m, total of all cuts, sinks ── merge_kernel ─► out, lse

One program has the rows of one key head (at most `MAX_ROWS`) and every `cuts`-th block of the keys that any of them may
see: so cuts have as much to do where a cache is half empty, padded on its left, or read through a window. Codes are
operands of the products as they are (each is a number of the queries' type), and scales factors of scores and of
probabilities. Merging goes through cuts in their order: results are the same at each launch.

Shape suffixes: B batch, H query heads, G key heads, S queries, T keys, D head size, E head size of the values.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from autopar.runtime.kernels.masks import ALL_EDGES, BOOL_BIAS, LN_2, LOG2_E, change, key_range, masked

PLAIN: tl.constexpr = tl.constexpr(0)
INT8: tl.constexpr = tl.constexpr(1)
FP8: tl.constexpr = tl.constexpr(2)
INT4: tl.constexpr = tl.constexpr(3)
FP8_FACTOR: tl.constexpr = tl.constexpr(256.0)
"""e4m3 read as float16, bit by bit, is 2^-8 of the number: the exponents' biases are 7 and 15."""


@triton.jit(
    do_not_specialize=[
        "B", "H", "S", "T", "READ", "group", "first", "left", "right", "prefix", "query_start", "key_start",
    ]
)  # fmt: skip
def decode_kernel(
    q, k, v, key_scales, value_scales, bias, keys, pages, sinks, acc_out, m_out, total_out, out, lse,
    q_b, q_h, q_s, k_b, k_g, k_t, v_b, v_g, v_t, ks_b, ks_g, ks_t, vs_b, vs_g, vs_t,
    bias_b, bias_h, bias_s, bias_t, keys_b, pages_b,
    B, H, S, T, READ, group, first, left, right, prefix, query_start, key_start, multiplier, cap,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_N: tl.constexpr, CUTS: tl.constexpr, SCAN: tl.constexpr, PAGE: tl.constexpr,
    STORAGE: tl.constexpr, SOFTCAP: tl.constexpr, BIAS: tl.constexpr, SHARED_BIAS: tl.constexpr, KEYS: tl.constexpr,
    SINKS: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc[CUTS, B, H, S, E], m and total[CUTS, B, H, S]: the unscaled output of a cut, the largest score (in units of
    log2) and the sum of exp2(score - m). Of one cut out[B, S, H, E] and lse[B, H, S] themselves.

    D, E: of what is stored: of INT4 half a row, whose low nibbles are the first half of the head. READ: key heads that
    are read. SCAN: so many elements of a mask are looked at at a time. PAGE: keys of a page of which `pages` has the
    places; 0: they lie side by side. SHARED_BIAS: all heads have the same.
    """
    rows_all = group * S
    row_blocks = tl.cdiv(rows_all, ROWS)
    program = tl.program_id(0)
    cut = program % CUTS
    row_block = program // CUTS % row_blocks
    kv_head = first // group + program // (CUTS * row_blocks) % READ
    batch = (program // (CUTS * row_blocks) // READ).to(tl.int64)

    numbers = row_block * ROWS + tl.arange(0, ROWS)
    heads = kv_head * group - first + numbers // S
    queries = numbers % S
    row_seen = (numbers < rows_all) & (heads >= 0) & (heads < H)
    heads = tl.where(row_seen, heads, 0)
    positions = query_start + queries
    kv_head = kv_head.to(tl.int64)
    q_rows = q + batch * q_b + heads.to(tl.int64) * q_h + queries.to(tl.int64) * q_s
    bias_rows = bias + batch * bias_b + heads.to(tl.int64) * bias_h + queries.to(tl.int64) * bias_s
    row_keys = keys + batch * keys_b

    d_columns = tl.arange(0, BLOCK_D)
    e_columns = tl.arange(0, BLOCK_E)
    q_mask = row_seen[:, None] & (d_columns < D)[None, :]
    q_tile = tl.load(q_rows[:, None] + d_columns[None, :], mask=q_mask, other=0.0)
    acc = tl.zeros([ROWS, BLOCK_E], tl.float32)
    if STORAGE == INT4:
        q_high = tl.load(q_rows[:, None] + D + d_columns[None, :], mask=q_mask, other=0.0)
        acc_high = tl.zeros([ROWS, BLOCK_E], tl.float32)
    m = tl.full([ROWS], float("-inf"), tl.float32)
    total = tl.zeros([ROWS], tl.float32)

    low, high = _visible(bias + batch * bias_b, bias_s, bias_t, row_keys, S, T, BIAS, SHARED_BIAS, KEYS, SCAN, BLOCK_N)
    if LEFT or RIGHT:
        # What is seen through the prefix alone begins at 0: keys between it and the window are masked.
        prefix_end, start, _full_start, _full_end, end = key_range(
            query_start, query_start + S - 1, key_start, T, left, right, prefix, LEFT, RIGHT, PREFIX, BLOCK_N
        )
        low = tl.maximum(low, tl.where(prefix_end > 0, 0, start)) if PREFIX else tl.maximum(low, start)
        high = tl.minimum(high, end)

    # Steps from `cut` on: Triton pipelines no loop that begins at what another loop found.
    for step in tl.range(cut, tl.cdiv(high - low, BLOCK_N), CUTS):
        block = low + step * BLOCK_N
        columns = block + tl.arange(0, BLOCK_N)
        inside = columns < T
        if PAGE:
            places = tl.load(pages + batch * pages_b + columns // PAGE, mask=inside, other=0).to(tl.int64)
            k_at = places * k_b + (columns % PAGE).to(tl.int64) * k_t
            v_at = places * v_b + (columns % PAGE).to(tl.int64) * v_t
            ks_at = places * ks_b + (columns % PAGE).to(tl.int64) * ks_t
            vs_at = places * vs_b + (columns % PAGE).to(tl.int64) * vs_t
        else:
            k_at = batch * k_b + columns.to(tl.int64) * k_t
            v_at = batch * v_b + columns.to(tl.int64) * v_t
            ks_at = batch * ks_b + columns.to(tl.int64) * ks_t
            vs_at = batch * vs_b + columns.to(tl.int64) * vs_t
        k_mask = inside[:, None] & (d_columns < D)[None, :]
        k_tile = tl.load((k + kv_head * k_g + k_at)[:, None] + d_columns[None, :], mask=k_mask, other=0)
        if STORAGE == INT4:
            x = tl.dot(q_tile, tl.trans(_nibbles(k_tile & 15, k_mask, q_tile.dtype)), input_precision=PRECISION)
            x = tl.dot(q_high, tl.trans(_nibbles(k_tile >> 4, k_mask, q_tile.dtype)), x, input_precision=PRECISION)
        else:
            x = tl.dot(q_tile, tl.trans(_numbers(k_tile, q_tile.dtype, STORAGE)), input_precision=PRECISION)
        if STORAGE != PLAIN:
            k_scale = tl.load(key_scales + kv_head * ks_g + ks_at, mask=inside, other=0.0).to(tl.float32)
            x = x * (k_scale * FP8_FACTOR if STORAGE == FP8 else k_scale)[None, :]
        x, _bent = change(x, multiplier, cap, SOFTCAP, False)
        x = masked(
            x, bias_rows, bias_t, row_seen, row_keys, queries, keys, block, 0, 0, T, positions, key_start,
            left, right, prefix, BIAS, KEYS, False, LEFT, RIGHT, PREFIX, ALL_EDGES, BLOCK_N,
        )  # fmt: skip
        m_new = tl.maximum(m, tl.max(x, 1))
        shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        m = m_new

        v_mask = inside[:, None] & (e_columns < E)[None, :]
        v_tile = tl.load((v + kv_head * v_g + v_at)[:, None] + e_columns[None, :], mask=v_mask, other=0)
        if STORAGE == PLAIN:
            acc = tl.dot(p.to(v_tile.dtype), v_tile, acc * alpha[:, None], input_precision=PRECISION)
        else:
            # Scales of a block are taken relative to its largest, so that half precision does not lose small ones.
            v_scale = tl.load(value_scales + kv_head * vs_g + vs_at, mask=inside, other=0.0).to(tl.float32)
            largest = tl.max(v_scale, 0)
            p = (p * (v_scale / tl.where(largest > 0.0, largest, 1.0))[None, :]).to(q_tile.dtype)
            factor = largest * FP8_FACTOR if STORAGE == FP8 else largest
            if STORAGE == INT4:
                below = tl.dot(p, _nibbles(v_tile & 15, v_mask, q_tile.dtype), input_precision=PRECISION)
                above = tl.dot(p, _nibbles(v_tile >> 4, v_mask, q_tile.dtype), input_precision=PRECISION)
                acc_high = acc_high * alpha[:, None] + above * factor
            else:
                below = tl.dot(p, _numbers(v_tile, q_tile.dtype, STORAGE), input_precision=PRECISION)
            acc = acc * alpha[:, None] + below * factor

    WIDTH: tl.constexpr = 2 * E if STORAGE == INT4 else E
    row = ((cut * B + batch) * H + heads) * S + queries
    acc_mask = row_seen[:, None] & (e_columns < E)[None, :]
    if CUTS == 1:
        shift = tl.where(m == float("-inf"), 0.0, m)
        if SINKS:
            sink = tl.load(sinks + heads, mask=row_seen, other=0.0).to(tl.float32) * LOG2_E
            top = tl.maximum(m, sink)
            shift = tl.where(top == float("-inf"), 0.0, top)
            total = total * tl.exp2(m - shift) + tl.exp2(sink - shift)
        denominator = tl.where(total == 0.0, 1.0, total)
        factor = tl.exp2(m - shift) / denominator
        log_sum = tl.where(total == 0.0, float("-inf"), (shift + tl.log2(denominator)) * LN_2)
        tl.store(lse + row, log_sum, mask=row_seen)
        out_at = out + (((batch * S + queries) * H + heads) * WIDTH)[:, None] + e_columns[None, :]
        tl.store(out_at, (acc * factor[:, None]).to(out.dtype.element_ty), mask=acc_mask)
        if STORAGE == INT4:
            tl.store(out_at + E, (acc_high * factor[:, None]).to(out.dtype.element_ty), mask=acc_mask)
    else:
        tl.store(m_out + row, m, mask=row_seen)
        tl.store(total_out + row, total, mask=row_seen)
        acc_at = acc_out + (row * WIDTH)[:, None] + e_columns[None, :]
        tl.store(acc_at, acc, mask=acc_mask)
        if STORAGE == INT4:
            tl.store(acc_at + E, acc_high, mask=acc_mask)


@triton.jit
def _numbers(tile, dtype: tl.constexpr, STORAGE: tl.constexpr):
    """Stored numbers in the type of the queries; of FP8 1 / FP8_FACTOR of them."""
    if STORAGE == FP8:
        wide = tile.to(tl.int16)
        return (((wide & 128) << 8) | ((wide & 127) << 7)).to(tl.float16, bitcast=True).to(dtype)
    else:
        return tile.to(dtype)


@triton.jit
def _nibbles(codes, mask, dtype: tl.constexpr):
    """Codes of four bits, of which 8 is zero; zeros where nothing was loaded."""
    return tl.where(mask, codes.to(tl.int8) - 8, 0).to(dtype)


@triton.jit
def _visible(
    bias, bias_s, bias_t, keys, S, T,
    BIAS: tl.constexpr, SHARED_BIAS: tl.constexpr, KEYS: tl.constexpr, SCAN: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """[low, high): keys outside are hidden by masks from all queries of a row of the batch; low is a multiple of BLOCK.

    bias, keys: of this row; a bias is looked at where it is a mask that all heads share.
    """
    LOOKS: tl.constexpr = BIAS == BOOL_BIAS and SHARED_BIAS
    low = 0
    high = T
    if KEYS or LOOKS:
        least = tl.full([SCAN], 0, tl.int32) + T
        most = tl.zeros([SCAN], tl.int32)
        for start in range(0, T, SCAN):
            columns = start + tl.arange(0, SCAN)
            seen = columns < T
            if KEYS:
                seen = seen & (tl.load(keys + columns, mask=columns < T, other=0) != 0)
            if LOOKS:
                shown = tl.zeros([SCAN], tl.int1)
                for query in range(S):
                    place = bias + query * bias_s + columns.to(tl.int64) * bias_t
                    shown = shown | (tl.load(place, mask=columns < T, other=0) != 0)
                seen = seen & shown
            least = tl.minimum(least, tl.where(seen, columns, T))
            most = tl.maximum(most, tl.where(seen, columns + 1, 0))
        low = tl.min(least, 0) // BLOCK * BLOCK
        high = tl.max(most, 0)
    return low, high


@triton.jit(do_not_specialize=["ROWS_ALL", "H", "S"])
def merge_kernel(
    acc_in, m_in, total_in, sinks, out, lse, ROWS_ALL, H, S,
    E: tl.constexpr, BLOCK_E: tl.constexpr, CUTS: tl.constexpr, SINKS: tl.constexpr,
):  # fmt: skip
    """out[B, S, H, E] and lse[B, H, S] of one row (of ROWS_ALL = B · H · S), of all its cuts, and its head's sink."""
    row = tl.program_id(0).to(tl.int64)
    query = row % S
    head = row // S % H
    batch = row // S // H
    top = tl.load(m_in + row)
    for cut in range(1, CUTS):
        top = tl.maximum(top, tl.load(m_in + cut * ROWS_ALL + row))
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        top = tl.maximum(top, sink)
    shift = tl.where(top == float("-inf"), 0.0, top)
    columns = tl.arange(0, BLOCK_E)
    acc = tl.zeros([BLOCK_E], tl.float32)
    total = tl.exp2(sink - shift) if SINKS else 0.0
    for cut in range(CUTS):
        place = cut * ROWS_ALL + row
        weight = tl.exp2(tl.load(m_in + place) - shift)
        total += weight * tl.load(total_in + place)
        acc += weight * tl.load(acc_in + place * E + columns, mask=columns < E, other=0.0)
    denominator = tl.where(total == 0.0, 1.0, total)
    tl.store(lse + row, tl.where(total == 0.0, float("-inf"), (shift + tl.log2(denominator)) * LN_2))
    found = (acc / denominator).to(out.dtype.element_ty)
    tl.store(out + ((batch * S + query) * H + head) * E + columns, found, mask=columns < E)
