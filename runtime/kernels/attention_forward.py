"""Attention forward: online softmax over blocks of keys (FlashAttention, arXiv 2205.14135; loop order, split of blocks
into seen whole and seen in part, and exp2 of FlashAttention-2, 2307.08691; tensor descriptors
on Hopper as in FlashAttention-3, 2407.08608). Not its warp specialization: Triton 3.6's (`tl.range(…,
warp_specialize=True)`) gives wrong numbers here on an H100 (results/first-light-2026-11-26.md).

One program holds BLOCK_M queries of one head and walks the keys they see. Per query it keeps the running maximum m and
sum total of exp2(x - m), x the scores times log2(e), and the unscaled output. Key heads are read in place, by as many
query heads as share them. No atomics: results are the same at each launch of one configuration.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions
from autopar.runtime.kernels.attention_launch import launch_attention
from autopar.runtime.kernels.attention_problem import AttentionProblem, heads_inside
from autopar.runtime.kernels.masks import (
    ALL_EDGES,
    DOCUMENT_GRAIN,
    FLOAT_BIAS,
    LN_2,
    LOG2_E,
    NO_BIAS,
    NO_EDGES,
    SOME_EDGES,
    change,
    document_range,
    is_kept,
    key_range,
    load_rows,
    masked,
    query_block,
    row_keys,
    rows_of,
    run_start,
    valid_range,
)


def attention_forward(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, keys: Tensor | None = None,
    sinks: Tensor | None = None, seed: Tensor | None = None, *, options: AttentionOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out[B, H, S, E] laid out [B, S, H, E], lse[B, H, S] float32) of `autopar.operators.attention`.

    Raises AutoparError for what `attention_problem.supports` names.
    """
    problem = AttentionProblem.build(q, k, v, bias, keys, sinks, seed, options)
    out = heads_inside((*q.shape[:3], v.shape[-1]), q)
    lse = torch.empty(q.shape[:3], dtype=torch.float32, device=q.device)
    arguments = {**problem.arguments, **problem.switches, "out": out, "lse": lse}
    launch_attention("forward", attention_forward_kernel, problem, arguments, *problem.rows)
    return out, lse


@triton.jit
def _attend(
    acc, m, total, q, k, v, k_stride, v_stride,
    bias, bias_stride, query_seen, keys, own_documents, documents, drop_keys, threshold,
    block_start, full_start, full_end, block_end, num_keys, queries, key_begin,
    multiplier, cap, left, right, prefix,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr, BLOCK_N: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, KEYS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr, EDGES: tl.constexpr,
    TMA: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys block_start .. block_end of a run. EDGES: whether
    none, all, or those outside full_start .. full_end are blocks that are seen in part.

    bias points to each query's first element in the run; drop_keys: of each query.
    """
    # Where scores are products times a factor, the factor is left to the exponent's multiply-add.
    RAW: tl.constexpr = not SOFTCAP and BIAS != FLOAT_BIAS
    offsets = tl.arange(0, BLOCK_N)
    for start in tl.range(block_start, block_end, BLOCK_N):
        columns = start + offsets
        k_tile = load_rows(k, k_stride, start, num_keys, D, BLOCK_N, BLOCK_D, EDGES == NO_EDGES, TMA)
        x = tl.dot(q, tl.trans(k_tile), input_precision=PRECISION)
        x, _ = change(x, multiplier, cap, SOFTCAP, RAW)
        x = masked(
            x, bias, bias_stride, query_seen, keys, own_documents, documents,
            start, full_start, full_end, num_keys, queries, key_begin,
            left, right, prefix, BIAS, KEYS, DOCUMENTS, LEFT, RIGHT, PREFIX, EDGES, BLOCK_N,
        )  # fmt: skip
        factor = multiplier if RAW else 1.0
        m_new = tl.maximum(m, tl.max(x, 1) * factor)
        shift = m_new
        if EDGES != NO_EDGES or KEYS or DOCUMENTS or BIAS != NO_BIAS:
            # A query that has seen nothing yet: exp2(-inf - 0), not exp2(-inf + inf).
            shift = tl.where(m_new == float("-inf"), 0.0, m_new)
        p = tl.exp2(x * factor - shift[:, None])
        alpha = tl.exp2(m - shift)
        total = total * alpha + tl.sum(p, 1)
        if DROPOUT:
            p = tl.where(is_kept(drop_keys[:, None], (key_begin + columns)[None, :], threshold), p, 0.0)
        v_tile = load_rows(v, v_stride, start, num_keys, E, BLOCK_N, BLOCK_E, EDGES == NO_EDGES, TMA)
        acc = acc * alpha[:, None]
        acc = tl.dot(p.to(v_tile.dtype), v_tile, acc, input_precision=PRECISION)
        m = m_new
    return acc, m, total


@triton.jit(
    do_not_specialize=[
        "H", "S", "T", "group", "first", "left", "right", "prefix", "threshold", "query_starts", "key_starts",
    ]
)  # fmt: skip
def attention_forward_kernel(
    q, k, v, bias, keys, extents, documents, key_documents, key_spans, sinks, dropout_state, dropout_rows,
    out, lse, query_starts, key_starts,
    q_b, q_h, q_s, k_b, k_g, k_t, v_b, v_g, v_t, bias_b, bias_h, bias_s, bias_t,
    H, S, T, group, first, left, right, prefix, multiplier, cap, threshold, kept_factor,
    D: tl.constexpr, E: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_E: tl.constexpr,
    QUERY_RUNS: tl.constexpr, KEY_RUNS: tl.constexpr,
    SOFTCAP: tl.constexpr, BIAS: tl.constexpr, KEYS: tl.constexpr, SINKS: tl.constexpr, DOCUMENTS: tl.constexpr,
    DROPOUT: tl.constexpr, LEFT: tl.constexpr, RIGHT: tl.constexpr, PREFIX: tl.constexpr,
    EVEN_KEYS: tl.constexpr,
    PRECISION: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """out[B, H, S, E] (laid out [B, S, H, E]) and lse[B, H, S] of one block of queries; see the module's note."""
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
    q_tile = load_rows(q_rows, q_s, row, num_queries, D, BLOCK_M, BLOCK_D, False, TMA)
    acc = tl.zeros([BLOCK_M, BLOCK_E], tl.float32)
    if SINKS:
        sink = tl.load(sinks + head).to(tl.float32) * LOG2_E
        m = tl.full([BLOCK_M], 0.0, tl.float32) + sink
        total = tl.where(m == float("-inf"), 0.0, 1.0)
    else:
        m = tl.full([BLOCK_M], float("-inf"), tl.float32)
        total = tl.zeros([BLOCK_M], tl.float32)
    drop_keys = rows
    if DROPOUT:
        drop_rows = tl.load(dropout_rows + (batch * H + head) * S + local_rows, mask=query_seen, other=0).to(tl.uint64)
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
                acc, m, total = _attend(
                    acc, m, total, q_tile, k_rows, v_rows, k_t, v_t,
                    run_bias, bias_t, query_seen, run_keys, own_documents, run_documents, drop_keys, threshold,
                    lo, full_start, full_end, hi, num_keys, queries, key_begin, multiplier, cap, left, right, prefix,
                    D, E, BLOCK_D, BLOCK_E, BLOCK_N, SOFTCAP, BIAS, KEYS, DOCUMENTS, DROPOUT,
                    LEFT, RIGHT, PREFIX, FIRST_EDGES if part == 0 else LAST_EDGES,
                    TMA, PRECISION,
                )  # fmt: skip

    denominator = tl.where(total == 0.0, 1.0, total)
    scale = 1.0 / denominator
    if DROPOUT:
        scale = scale * kept_factor
    log_sum = tl.where(total == 0.0, float("-inf"), (m + tl.log2(denominator)) * LN_2)
    tl.store(lse + (batch * H + head) * S + local_rows, log_sum, mask=query_seen)
    columns = tl.arange(0, BLOCK_E)
    pointers = out + ((batch * S + local_rows) * H + head)[:, None] * E + columns[None, :]
    mask = query_seen[:, None] & (columns < E)[None, :]
    tl.store(pointers, (acc * scale[:, None]).to(out.dtype.element_ty), mask=mask)
