"""The gradients of attention to keys and values: one program holds a block of keys of one key head and walks the
queries that see them, of all query heads that read it, so that the sum over these is taken here.

All is transposed, keys as rows: with p = exp2(x - log2_sum) and ds = p * (v g^T - delta), dv = p g, dk = scale * ds q
(FlashAttention-2, arXiv 2307.08691).
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from autopar.runtime.kernels.masks import (
    DOCUMENT_GRAIN,
    FLOAT_BIAS,
    NO_BIAS,
    add_bias,
    change,
    document_range,
    heads_of,
    hide,
    hold_rows,
    is_kept,
    load_head_rows,
    products,
    query_range,
    row_keys,
    rows_of,
    run_start,
)


@triton.jit
def _walk_queries(
    dk, dv, k, v, q, g, log2_sum, delta, q_stride, g_stride,
    bias, bias_stride, key_seen, key_valid, own_documents, documents, dropout_state, dropout_rows, threshold,
    kept_factor, head, block_start, full_start, full_end, block_end, num_queries, query_begin, keys,
    multiplier, cap, left, right, prefix,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_M: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, EVEN_QUERIES: tl.constexpr,
    CHUNK: tl.constexpr, TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """dk (unscaled) and dv with what the queries block_start .. block_end of a run add.

    q and g: of `heads_of`. bias, log2_sum, delta, dropout_rows, documents point to the run's first query. Blocks from
    full_start to full_end see all of the keys. Queries beyond the run are read as zeros, their log2_sum as +inf: they
    add nothing.
    """
    RAW: tl.constexpr = not SOFTCAP and BIAS != FLOAT_BIAS
    offsets = tl.arange(0, BLOCK_M)
    for start in tl.range(block_start, block_end, BLOCK_M):
        rows = start + offsets
        inside = rows < num_queries
        q_tile = load_head_rows(q, head, q_stride, start, num_queries, D, BLOCK_M, BLOCK_D, EVEN_QUERIES, TMA)
        x = products(k, key_seen, q_tile, q, q_stride, start, num_queries, D, CHUNK, EVEN_QUERIES, PRECISION)
        x, bent = change(x, multiplier, cap, SOFTCAP, RAW)
        if BIAS != NO_BIAS:
            pointers = (bias + tl.cast(start, tl.int64) * bias_stride)[:, None] + (offsets * bias_stride)[None, :]
            x = add_bias(x, pointers, key_seen[:, None] & inside[None, :], BIAS)
        if KEYS:
            x = tl.where(key_valid[:, None], x, float("-inf"))
        if DOCUMENTS:
            others = tl.load(documents + rows, mask=inside, other=0)
            x = tl.where(own_documents[:, None] == others[None, :], x, float("-inf"))
        if LEFT or RIGHT:
            # One loop, not one for each kind of block: their addresses together would not fit the registers; nor, with
            # many rows, would scores that a branch hands on.
            if (TMA and BLOCK_M >= 64) or (start < full_start) | (start >= full_end):
                x = hide(
                    x, (query_begin + rows)[None, :], keys[:, None], 0, left, right, prefix, LEFT, RIGHT, PREFIX, False
                )
        factor = multiplier if RAW else 1.0
        if not EVEN_QUERIES:
            sum_tile = tl.load(log2_sum + rows, mask=inside, other=float("inf"))
        else:
            sum_tile = tl.load(log2_sum + rows)
        p = tl.exp2(x * factor - sum_tile[None, :])
        g_tile = load_head_rows(g, head, g_stride, start, num_queries, E, BLOCK_M, BLOCK_E, EVEN_QUERIES, TMA)
        received = products(v, key_seen, g_tile, g, g_stride, start, num_queries, E, CHUNK, EVEN_QUERIES, PRECISION)
        p_kept = p
        if DROPOUT:
            drop_keys = row_keys(dropout_state, tl.load(dropout_rows + rows, mask=inside, other=0).to(tl.uint64))
            kept = is_kept(drop_keys[None, :], keys[:, None], threshold)
            p_kept = tl.where(kept, p * kept_factor, 0.0)
            received = tl.where(kept, received * kept_factor, 0.0)
        dv = tl.dot(p_kept.to(g_tile.dtype), g_tile, dv, input_precision=PRECISION)
        # Not before: with many rows it would take the registers that the products need.
        if not EVEN_QUERIES:
            delta_tile = tl.load(delta + rows, mask=inside, other=0.0)
        else:
            delta_tile = tl.load(delta + rows)
        ds = p * (received - delta_tile[None, :])
        if SOFTCAP:
            ds = ds * (1.0 - bent * bent)
        dk = tl.dot(ds.to(q_tile.dtype), q_tile, dk, input_precision=PRECISION)
    return dk, dv


@triton.jit(
    do_not_specialize=[
        "H", "G", "S", "T", "group", "first", "left", "right", "prefix", "threshold", "query_starts", "key_starts",
    ]
)  # fmt: skip
def attention_dkv_kernel(
    q, k, v, g, bias, keys, extents, documents, key_documents, query_spans, dropout_state, dropout_rows, log2_sum,
    delta, dk, dv, query_starts, key_starts,
    q_b, q_h, q_s, k_b, k_g, k_t, v_b, v_g, v_t, g_b, g_h, g_s, bias_b, bias_h, bias_s, bias_t,
    H, G, S, T, group, first, left, right, prefix, multiplier, cap, scale, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    QUERY_RUNS: tl.constexpr, KEY_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, EVEN_QUERIES: tl.constexpr,
    PRECISION: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """dk[B, G, T, D] and dv[B, G, T, E] (laid out [B, T, G, D]) of one block of keys."""
    tl.static_assert(not TMA or QUERY_RUNS == 1, "descriptors are of one run of queries")
    num_queries = S // QUERY_RUNS
    num_keys = T // KEY_RUNS
    blocks = tl.cdiv(num_keys, BLOCK_N)
    program = tl.program_id(0)
    block = program % (blocks * KEY_RUNS)
    kv_head = program // (blocks * KEY_RUNS) % G
    batch = (program // (blocks * KEY_RUNS) // G).to(tl.int64)
    run = block // blocks
    column = block % blocks * BLOCK_N
    key_begin = run_start(key_starts, run, KEY_RUNS)
    columns = column + tl.arange(0, BLOCK_N)
    key_seen = columns < num_keys
    positions = key_begin + columns
    first_key = key_begin + column
    last_key = key_begin + tl.minimum(column + BLOCK_N, num_keys) - 1
    local_columns = (run * num_keys + columns).to(tl.int64)
    first_head = tl.maximum(kv_head * group - first, 0)
    end_head = tl.minimum((kv_head + 1) * group - first, H)
    kv_head = kv_head.to(tl.int64)

    run_base = (run * num_keys).to(tl.int64)
    k_rows = rows_of(k + batch * k_b + kv_head * k_g + run_base * k_t, k_t, num_keys, D, BLOCK_N, BLOCK_D, TMA)
    v_rows = rows_of(v + batch * v_b + kv_head * v_g + run_base * v_t, v_t, num_keys, E, BLOCK_N, BLOCK_E, TMA)
    k_tile = hold_rows(k_rows, k_t, column, num_keys, D, BLOCK_N, BLOCK_D, CHUNK, TMA)
    v_tile = hold_rows(v_rows, v_t, column, num_keys, E, BLOCK_N, BLOCK_E, CHUNK, TMA)
    acc_k = tl.zeros([BLOCK_N, BLOCK_D], tl.float32)
    acc_v = tl.zeros([BLOCK_N, BLOCK_E], tl.float32)
    key_valid = key_seen
    if KEYS:
        key_valid = tl.load(keys + batch * T + local_columns, mask=key_seen, other=0) != 0
        extent = extents + (batch * KEY_RUNS + run) * 2
        if (column >= tl.load(extent + 1)) | (column + BLOCK_N <= tl.load(extent)):
            end_head = first_head
    own_documents = columns
    run_spans = query_spans
    span_blocks = tl.cdiv(num_keys, DOCUMENT_GRAIN)
    if DOCUMENTS:
        own_documents = tl.load(key_documents + batch * T + local_columns, mask=key_seen, other=0)
        run_spans = query_spans + (batch * KEY_RUNS + run) * span_blocks * QUERY_RUNS * 2
    drop = 0
    if DROPOUT:
        drop = tl.load(dropout_state).to(tl.uint64)

    q_heads = heads_of(q + batch * q_b, q_h, q_s, H, num_queries, D, BLOCK_M, BLOCK_D, TMA)
    g_heads = heads_of(g + batch * g_b, g_h, g_s, H, num_queries, E, BLOCK_M, BLOCK_E, TMA)
    for head32 in range(first_head, end_head):
        head = tl.cast(head32, tl.int64)
        for query_run in range(QUERY_RUNS):
            query_begin = run_start(query_starts, query_run, QUERY_RUNS)
            query_base = tl.cast(query_run * num_queries, tl.int64)
            q_rows = q_heads if TMA else q_heads + head * q_h + query_base * q_s
            g_rows = g_heads if TMA else g_heads + head * g_h + query_base * g_s
            place = (batch * H + head) * S + query_base
            start, full_start, full_end, end = query_range(
                first_key, last_key, query_begin, num_queries, left, right, prefix, LEFT, RIGHT, PREFIX, BLOCK_M
            )
            run_documents = documents
            if DOCUMENTS:
                run_documents = documents + batch * S + query_base
                low, high = document_range(
                    run_spans, column // DOCUMENT_GRAIN, span_blocks, query_run, num_queries, QUERY_RUNS, BLOCK_N
                )
                start = tl.maximum(start, low // BLOCK_M * BLOCK_M)
                end = tl.minimum(end, high)
            run_bias = bias
            if BIAS != NO_BIAS:
                run_bias = bias + batch * bias_b + head * bias_h + query_base * bias_s + local_columns * bias_t
            acc_k, acc_v = _walk_queries(
                acc_k, acc_v, k_tile, v_tile, q_rows, g_rows, log2_sum + place, delta + place, q_s, g_s,
                run_bias, bias_s, key_seen, key_valid, own_documents, run_documents, drop, dropout_rows + place,
                threshold, kept_factor, head32, start, full_start, full_end, end, num_queries, query_begin, positions,
                multiplier, cap, left, right, prefix,
                D, E, BLOCK_D, BLOCK_E, BLOCK_M, SOFTCAP, BIAS, KEYS, DOCUMENTS, DROPOUT,
                LEFT, RIGHT, PREFIX, EVEN_QUERIES, CHUNK, TMA, PRECISION,
            )  # fmt: skip

    rows_k = ((batch * T + local_columns) * G + kv_head)[:, None]
    columns_k = tl.arange(0, BLOCK_D)
    mask_k = key_seen[:, None] & (columns_k < D)[None, :]
    tl.store(dk + rows_k * D + columns_k[None, :], (acc_k * scale).to(dk.dtype.element_ty), mask=mask_k)
    columns_v = tl.arange(0, BLOCK_E)
    mask_v = key_seen[:, None] & (columns_v < E)[None, :]
    tl.store(dv + rows_k * E + columns_v[None, :], acc_v.to(dv.dtype.element_ty), mask=mask_v)
