"""The gradient of attention to a float bias: that of the scores, summed where the bias has one element for many.

One program holds a block of the bias, and walks all batch rows, heads, queries and keys that share it: without atomics,
in one order. The scores are made once more for it, since biases that learn are mostly small against the scores.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

import triton
import triton.language as tl

from autopar.runtime.kernels.masks import FLOAT_BIAS, add_bias, change, hide, is_kept, load_rows, row_keys, run_start


@triton.jit(
    do_not_specialize=[
        "B", "H", "S", "T", "group", "first", "left", "right", "prefix", "threshold", "query_starts", "key_starts",
    ]
)  # fmt: skip
def attention_dbias_kernel(
    q, k, v, g, bias, keys, documents, key_documents, dropout_state, dropout_rows, log2_sum, delta, dbias,
    query_starts, key_starts,
    q_b, q_h, q_s, k_b, k_g, k_t, v_b, v_g, v_t, g_b, g_h, g_s, bias_b, bias_h, bias_s, bias_t,
    dbias_b, dbias_h, dbias_s, dbias_t,
    B, H, S, T, group, first, left, right, prefix, multiplier, cap, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    QUERY_RUNS: tl.constexpr, KEY_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, PRECISION: tl.constexpr,
    SHARED_B: tl.constexpr, SHARED_H: tl.constexpr, SHARED_S: tl.constexpr, SHARED_T: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One block of dbias, in the shape of the bias; SHARED_*: the dims of which it has one element."""
    num_queries = S // QUERY_RUNS
    num_keys = T // KEY_RUNS
    query_blocks = tl.cdiv(num_queries, BLOCK_M)
    key_blocks = tl.cdiv(num_keys, BLOCK_N)
    program = tl.program_id(0)
    first_n, end_n = 0, key_blocks * KEY_RUNS
    if not SHARED_T:
        first_n = program % end_n
        program = program // end_n
        end_n = first_n + 1
    first_m, end_m = 0, query_blocks * QUERY_RUNS
    if not SHARED_S:
        first_m = program % end_m
        program = program // end_m
        end_m = first_m + 1
    first_h, end_h = 0, H
    if not SHARED_H:
        first_h = program % H
        program = program // H
        end_h = first_h + 1
    first_b, end_b = 0, B
    if not SHARED_B:
        first_b = program
        end_b = first_b + 1

    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for m in range(first_m, end_m):
        run = m // query_blocks
        row = m % query_blocks * BLOCK_M
        rows = row + tl.arange(0, BLOCK_M)
        row_seen = rows < num_queries
        query_begin = run_start(query_starts, run, QUERY_RUNS)
        query_base = tl.cast(run * num_queries, tl.int64)
        for n in range(first_n, end_n):
            key_run = n // key_blocks
            column = n % key_blocks * BLOCK_N
            columns = column + tl.arange(0, BLOCK_N)
            column_seen = columns < num_keys
            key_begin = run_start(key_starts, key_run, KEY_RUNS)
            key_base = tl.cast(key_run * num_keys, tl.int64)
            seen = row_seen[:, None] & column_seen[None, :]
            for head32 in range(first_h, end_h):
                head = tl.cast(head32, tl.int64)
                kv_head = tl.cast((first + head32) // group, tl.int64)
                for batch32 in range(first_b, end_b):
                    batch = tl.cast(batch32, tl.int64)
                    place = (batch * H + head) * S + query_base
                    q_rows = q + batch * q_b + head * q_h + query_base * q_s
                    g_rows = g + batch * g_b + head * g_h + query_base * g_s
                    k_rows = k + batch * k_b + kv_head * k_g + key_base * k_t
                    v_rows = v + batch * v_b + kv_head * v_g + key_base * v_t
                    q_tile = load_rows(q_rows, q_s, row, num_queries, D, BLOCK_M, BLOCK_D, False, False)
                    k_tile = load_rows(k_rows, k_t, column, num_keys, D, BLOCK_N, BLOCK_D, False, False)
                    x = tl.dot(q_tile, tl.trans(k_tile), input_precision=PRECISION)
                    x, _ = change(x, multiplier, cap, SOFTCAP, False)
                    origin = bias + batch * bias_b + head * bias_h + query_base * bias_s + key_base * bias_t
                    pointers = origin + (rows.to(tl.int64) * bias_s)[:, None] + (columns.to(tl.int64) * bias_t)[None, :]
                    x = add_bias(x, pointers, seen, FLOAT_BIAS)
                    x = hide(
                        x, (query_begin + rows)[:, None], (key_begin + columns)[None, :],
                        0, left, right, prefix, LEFT, RIGHT, PREFIX, False,
                    )  # fmt: skip
                    visible = seen
                    if KEYS:
                        valid = tl.load(keys + batch * T + key_base + columns, mask=column_seen, other=0) != 0
                        visible = visible & valid[None, :]
                    if DOCUMENTS:
                        own = tl.load(documents + batch * S + query_base + rows, mask=row_seen, other=0)
                        others = tl.load(key_documents + batch * T + key_base + columns, mask=column_seen, other=0)
                        visible = visible & (own[:, None] == others[None, :])
                    x = tl.where(visible, x, float("-inf"))
                    total = tl.load(log2_sum + place + rows, mask=row_seen, other=float("inf"))
                    p = tl.exp2(x - total[:, None])
                    g_tile = load_rows(g_rows, g_s, row, num_queries, E, BLOCK_M, BLOCK_E, False, False)
                    v_tile = load_rows(v_rows, v_t, column, num_keys, E, BLOCK_N, BLOCK_E, False, False)
                    received = tl.dot(g_tile, tl.trans(v_tile), input_precision=PRECISION)
                    if DROPOUT:
                        drop_rows = tl.load(dropout_rows + place + rows, mask=row_seen, other=0).to(tl.uint64)
                        drop_keys = row_keys(tl.load(dropout_state).to(tl.uint64), drop_rows)
                        kept = is_kept(drop_keys[:, None], (key_begin + columns)[None, :], threshold)
                        received = tl.where(kept, received * kept_factor, 0.0)
                    acc += p * (received - tl.load(delta + place + rows, mask=row_seen, other=0.0)[:, None])

    row = tl.cast(first_m // query_blocks * num_queries + first_m % query_blocks * BLOCK_M, tl.int64)
    column = tl.cast(first_n // key_blocks * num_keys + first_n % key_blocks * BLOCK_N, tl.int64)
    rows = first_m % query_blocks * BLOCK_M + tl.arange(0, BLOCK_M)
    columns = first_n % key_blocks * BLOCK_N + tl.arange(0, BLOCK_N)
    row_inside = rows < num_queries
    column_inside = columns < num_keys
    if SHARED_S:
        acc = tl.broadcast_to(tl.sum(acc, 0)[None, :], [BLOCK_M, BLOCK_N])
        row_inside = rows == 0
    if SHARED_T:
        acc = tl.broadcast_to(tl.sum(acc, 1)[:, None], [BLOCK_M, BLOCK_N])
        column_inside = columns == 0
    origin = dbias + tl.cast(first_b, tl.int64) * dbias_b + tl.cast(first_h, tl.int64) * dbias_h
    row_places = (row + tl.arange(0, BLOCK_M)) * dbias_s
    column_places = (column + tl.arange(0, BLOCK_N)) * dbias_t
    mask = row_inside[:, None] & column_inside[None, :]
    tl.store(origin + row_places[:, None] + column_places[None, :], acc.to(dbias.dtype.element_ty), mask=mask)
