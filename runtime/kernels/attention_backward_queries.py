"""The gradient of attention to queries: one program holds a block of queries and walks the keys they see.

With p = exp2(x - log2_sum): ds = p * (g v^T - delta), dq = scale * ds k (FlashAttention-2, arXiv 2307.08691).
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from autopar.runtime.kernels.masks import (
    ALL_EDGES,
    DOCUMENT_GRAIN,
    FLOAT_BIAS,
    NO_BIAS,
    NO_EDGES,
    SOME_EDGES,
    change,
    document_range,
    hold_rows,
    is_kept,
    key_range,
    load_rows,
    masked,
    products,
    query_block,
    row_keys,
    rows_of,
    run_start,
    valid_range,
)


@triton.jit
def _walk_keys(
    dq, q, g, log2_sum, delta, k, v, k_stride, v_stride,
    bias, bias_stride, query_seen, keys, own_documents, documents, drop_keys, threshold, kept_factor,
    block_start, full_start, full_end, block_end, num_keys, queries, key_begin,
    multiplier, cap, left, right, prefix,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, EDGES: tl.constexpr,
    CHUNK: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dq (unscaled) and what the keys block_start .. block_end of a run add; arguments as in the forward's loop."""
    RAW: tl.constexpr = not SOFTCAP and BIAS != FLOAT_BIAS
    INSIDE: tl.constexpr = EDGES == NO_EDGES
    offsets = tl.arange(0, BLOCK_N)
    for start in tl.range(block_start, block_end, BLOCK_N):
        columns = start + offsets
        k_tile = load_rows(k, k_stride, start, num_keys, D, BLOCK_N, BLOCK_D, INSIDE, TMA)
        x = products(q, query_seen, k_tile, k, k_stride, start, num_keys, D, CHUNK, INSIDE, PRECISION)
        x, bent = change(x, multiplier, cap, SOFTCAP, RAW)
        x = masked(
            x, bias, bias_stride, query_seen, keys, own_documents, documents,
            start, full_start, full_end, num_keys, queries, key_begin,
            left, right, prefix, BIAS, KEYS, DOCUMENTS, LEFT, RIGHT, PREFIX, EDGES, BLOCK_N,
        )  # fmt: skip
        factor = multiplier if RAW else 1.0
        p = tl.exp2(x * factor - log2_sum[:, None])
        v_tile = load_rows(v, v_stride, start, num_keys, E, BLOCK_N, BLOCK_E, INSIDE, TMA)
        received = products(g, query_seen, v_tile, v, v_stride, start, num_keys, E, CHUNK, INSIDE, PRECISION)
        if DROPOUT:
            kept = is_kept(drop_keys[:, None], (key_begin + columns)[None, :], threshold)
            received = tl.where(kept, received * kept_factor, 0.0)
        ds = p * (received - delta[:, None])
        if SOFTCAP:
            ds = ds * (1.0 - bent * bent)
        dq = tl.dot(ds.to(k_tile.dtype), k_tile, dq, input_precision=PRECISION)
    return dq


@triton.jit(
    do_not_specialize=[
        "H", "S", "T", "group", "first", "left", "right", "prefix", "threshold", "query_starts", "key_starts",
    ]
)  # fmt: skip
def attention_dq_kernel(
    q, k, v, g, bias, keys, extents, documents, key_documents, key_spans, dropout_state, dropout_rows, log2_sum,
    delta, dq, query_starts, key_starts,
    q_b, q_h, q_s, k_b, k_g, k_t, v_b, v_g, v_t, g_b, g_h, g_s, bias_b, bias_h, bias_s, bias_t,
    H, S, T, group, first, left, right, prefix, multiplier, cap, scale, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    QUERY_RUNS: tl.constexpr, KEY_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
    EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dq[B, H, S, D] (laid out [B, S, H, D]) of one block of queries."""
    FIRST_EDGES: tl.constexpr = ALL_EDGES if LEFT else NO_EDGES
    LAST_EDGES: tl.constexpr = SOME_EDGES if LEFT else ALL_EDGES
    num_queries = S // QUERY_RUNS
    num_keys = T // KEY_RUNS
    batch, head, run, row = query_block(H, num_queries, QUERY_RUNS, RIGHT, BLOCK_M)
    query_begin = run_start(query_starts, run, QUERY_RUNS)
    rows = row + tl.arange(0, BLOCK_M)
    query_seen = rows < num_queries
    queries = query_begin + rows
    first_query = query_begin + row
    last_query = query_begin + tl.minimum(row + BLOCK_M, num_queries) - 1
    local_rows = (run * num_queries + rows).to(tl.int64)
    kv_head = ((first + head) // group).to(tl.int64)
    head = head.to(tl.int64)

    run_base = (run * num_queries).to(tl.int64)
    q_rows = rows_of(q + batch * q_b + head * q_h + run_base * q_s, q_s, num_queries, D, BLOCK_M, BLOCK_D, TMA)
    g_rows = rows_of(g + batch * g_b + head * g_h + run_base * g_s, g_s, num_queries, E, BLOCK_M, BLOCK_E, TMA)
    q_tile = hold_rows(q_rows, q_s, row, num_queries, D, BLOCK_M, BLOCK_D, CHUNK, TMA)
    g_tile = hold_rows(g_rows, g_s, row, num_queries, E, BLOCK_M, BLOCK_E, CHUNK, TMA)
    places = (batch * H + head) * S + local_rows
    sum_tile = tl.load(log2_sum + places, mask=query_seen, other=float("inf"))
    delta_tile = tl.load(delta + places, mask=query_seen, other=0.0)
    acc = tl.zeros([BLOCK_M, BLOCK_D], tl.float32)
    drop_keys = rows
    if DROPOUT:
        drop_rows = tl.load(dropout_rows + places, mask=query_seen, other=0).to(tl.uint64)
        drop_keys = row_keys(tl.load(dropout_state).to(tl.uint64), drop_rows)

    own_documents = rows
    run_spans = key_spans
    span_blocks = tl.cdiv(num_queries, DOCUMENT_GRAIN)
    if DOCUMENTS:
        own_documents = tl.load(documents + batch * S + local_rows, mask=query_seen, other=0)
        run_spans = key_spans + (batch * QUERY_RUNS + run) * span_blocks * KEY_RUNS * 2

    for key_run in range(KEY_RUNS):
        key_begin = run_start(key_starts, key_run, KEY_RUNS)
        key_base = tl.cast(key_run * num_keys, tl.int64)
        k_rows = rows_of(k + batch * k_b + kv_head * k_g + key_base * k_t, k_t, num_keys, D, BLOCK_N, BLOCK_D, TMA)
        v_rows = rows_of(v + batch * v_b + kv_head * v_g + key_base * v_t, v_t, num_keys, E, BLOCK_N, BLOCK_E, TMA)
        prefix_end, start, full_start, full_end, end = key_range(
            first_query, last_query, key_begin, num_keys, left, right, prefix, LEFT, RIGHT, PREFIX, BLOCK_N
        )
        run_keys = keys
        if KEYS:
            run_keys = keys + batch * T + key_base
            extent = extents + (batch * KEY_RUNS + key_run) * 2
            start, full_start, full_end, end = valid_range(
                tl.load(extent), tl.load(extent + 1), start, full_start, full_end, end, BLOCK_N
            )
        run_documents = key_documents
        if DOCUMENTS:
            run_documents = key_documents + batch * T + key_base
            low, high = document_range(
                run_spans, row // DOCUMENT_GRAIN, span_blocks, key_run, num_keys, KEY_RUNS, BLOCK_M
            )
            start, full_start, full_end, end = valid_range(low, high, start, full_start, full_end, end, BLOCK_N)
        run_bias = bias
        if BIAS != NO_BIAS:
            run_bias = bias + batch * bias_b + head * bias_h + local_rows * bias_s + key_base * bias_t
        for part in tl.static_range(2):
            # With a left limit: what is seen through the prefix alone, then the window in one loop, since each kind of
            # block in a loop of its own takes registers of its own. Without: what all see, then the right edge.
            if LEFT:
                lo = 0 if part == 0 else start
                hi = prefix_end if part == 0 else end
            else:
                lo = full_start if part == 0 else full_end
                hi = full_end if part == 0 else end
            if (PREFIX or part == 1) if LEFT else (part == 0 or RIGHT or not EVEN_KEYS):
                acc = _walk_keys(
                    acc, q_tile, g_tile, sum_tile, delta_tile, k_rows, v_rows, k_t, v_t,
                    run_bias, bias_t, query_seen, run_keys, own_documents, run_documents, drop_keys, threshold,
                    kept_factor, lo, full_start, full_end, hi, num_keys, queries, key_begin,
                    multiplier, cap, left, right, prefix,
                    D, E, BLOCK_D, BLOCK_E, BLOCK_N, SOFTCAP, BIAS, KEYS, DOCUMENTS, DROPOUT,
                    LEFT, RIGHT, PREFIX, FIRST_EDGES if part == 0 else LAST_EDGES,
                    CHUNK, TMA, PRECISION,
                )  # fmt: skip

    columns = tl.arange(0, BLOCK_D)
    pointers = dq + ((batch * S + local_rows) * H + head)[:, None] * D + columns[None, :]
    tl.store(pointers, (acc * scale).to(dq.dtype.element_ty), mask=query_seen[:, None] & (columns < D)[None, :])
