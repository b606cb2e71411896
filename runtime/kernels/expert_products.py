"""Products of rows with the matrices of their experts: grouped, scheduled by offsets that only the device knows.

A program has a tile of rows of one expert (`find_tile`) and of columns. Rows of tokens are read where they lie, by
their numbers: nothing is gathered before. What lies between the two products of an expert is computed on what the first
one has in registers. The gradient computes the first product again, so that nothing is kept for it, and beside it that
of the second, in one kernel:

    h = act(x A + a)                                     up_kernel
    y = w h B                                            rows_kernel, then `combine_kernel` over a token's rows
    through = g B', dh = w through, dw = <through, h>    up_grad_kernel, with w h and dproduct = act'(x A + a) dh
    dx = dproduct A'                                     rows_kernel, then `combine_kernel`
    dA = x' dproduct, dB = (w h)' g                      columns_kernel: sums over the rows of a group, one program a
                                                         tile, so no atomics; da: bias_grad_kernel
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

import triton
import triton.language as tl

from autopar.runtime.kernels.expert_activations import activated, slopes
from autopar.runtime.kernels.expert_rows import find_tile, group, place_of_program


@triton.jit
def _product(
    acc, a_rows, w_ptr, w_columns, w_stride_k, column_mask, K,
    BLOCK_K: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """acc[M, N] + a[M, K] @ w[K, N]. a_rows[M, 1]: pointers to rows whose elements are neighbours; w_columns[1, N]:
    offsets of columns.
    """
    ks = tl.arange(0, BLOCK_K)
    for k in range(0, K, BLOCK_K):
        a = a_rows + (k + ks)[None, :]
        w = w_ptr + w_columns + (k + ks)[:, None] * w_stride_k
        if EVEN_K:
            a_tile = tl.load(a)
            w_tile = tl.load(w) if EVEN_N else tl.load(w, mask=column_mask, other=0.0)
        else:
            k_mask = k + ks < K
            a_tile = tl.load(a, mask=k_mask[None, :], other=0.0)
            w_tile = tl.load(w, mask=k_mask[:, None] & column_mask, other=0.0)
        acc = tl.dot(a_tile, w_tile, acc, input_precision=PRECISION)
    return acc


@triton.jit
def _gate_and_up(
    x_rows, w_ptr, bias_ptr, tile_n, w_stride_n, w_stride_k, width, K,
    GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """The first product at BLOCK_N columns of gate and of up, biases added; up is gate where there is none."""
    columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    mask = columns < width
    if GATED and INTERLEAVED:  # one product, whose columns alternate
        both = tile_n * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
        both_mask = both < 2 * width
        acc = tl.zeros([BLOCK_M, 2 * BLOCK_N], tl.float32)
        acc = _product(
            acc, x_rows, w_ptr, both[None, :] * w_stride_n, w_stride_k, both_mask[None, :], K, BLOCK_K,
            EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias_ptr + both, mask=both_mask, other=0.0).to(tl.float32)[None, :]
        gate, up = tl.split(tl.reshape(acc, [BLOCK_M, BLOCK_N, 2]))
        return gate, up
    else:
        gate = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        at = columns[None, :] * w_stride_n
        if GATED:
            up = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
            ks = tl.arange(0, BLOCK_K)
            up_ptr = w_ptr + width * w_stride_n
            for k in range(0, K, BLOCK_K):
                k_mask = k + ks < K
                w_mask = k_mask[:, None] & mask[None, :]
                offsets = at + (k + ks)[:, None] * w_stride_k
                if EVEN_K and EVEN_N:
                    x_tile = tl.load(x_rows + (k + ks)[None, :])
                    gate_tile = tl.load(w_ptr + offsets)
                    up_tile = tl.load(up_ptr + offsets)
                else:
                    x_tile = tl.load(x_rows + (k + ks)[None, :], mask=k_mask[None, :], other=0.0)
                    gate_tile = tl.load(w_ptr + offsets, mask=w_mask, other=0.0)
                    up_tile = tl.load(up_ptr + offsets, mask=w_mask, other=0.0)
                gate = tl.dot(x_tile, gate_tile, gate, input_precision=PRECISION)
                up = tl.dot(x_tile, up_tile, up, input_precision=PRECISION)
            if HAS_BIAS:
                gate += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
                up += tl.load(bias_ptr + width + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
            return gate, up
        else:
            gate = _product(gate, x_rows, w_ptr, at, w_stride_k, mask[None, :], K, BLOCK_K, EVEN_K, EVEN_N, PRECISION)
            if HAS_BIAS:
                gate += tl.load(bias_ptr + columns, mask=mask, other=0.0).to(tl.float32)[None, :]
            return gate, gate


@triton.jit
def up_kernel(
    x_ptr, w_ptr, bias_ptr, order_ptr, offsets_ptr, h_ptr,
    x_stride, w_stride_e, w_stride_n, w_stride_k, num_choices, num_experts, num_m, num_n, width, K, lo, hi,
    TEXT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """h[W, F] of the window's rows: the first product of their tokens, activated."""
    tile_m, tile_n = place_of_program(num_m, num_n, GROUP_M)
    expert, first, end = find_tile(offsets_ptr, tile_m, num_experts, lo, hi, BLOCK_M, BLOCK_E)
    if expert < num_experts:
        rows = first + tl.arange(0, BLOCK_M)
        mask = rows < end
        tokens = tl.load(order_ptr + rows, mask=mask, other=0) // num_choices
        x_rows = x_ptr + tokens.to(tl.int64)[:, None] * x_stride
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        parts = width if not GATED else 2 * width
        gate, up = _gate_and_up(
            x_rows, w_ptr + expert.to(tl.int64) * w_stride_e, bias_ptr + expert * parts, tile_n, w_stride_n,
            w_stride_k, width, K, GATED, INTERLEAVED, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip
        h = activated(gate, up, TEXT)
        at = (rows - lo).to(tl.int64)[:, None] * width + columns[None, :]
        tl.store(h_ptr + at, h.to(h_ptr.dtype.element_ty), mask=mask[:, None] & (columns < width)[None, :])


@triton.jit
def up_grad_kernel(
    x_ptr, g_ptr, w_ptr, second_ptr, bias_ptr, weights_ptr, order_ptr, offsets_ptr, hw_ptr, dproduct_ptr, parts_ptr,
    x_stride, g_stride, w_stride_e, w_stride_n, w_stride_k, second_stride_e, second_stride_n, second_stride_k,
    num_choices, num_experts, num_m, num_n, width, K, lo, hi,
    TEXT: tl.constexpr, GATED: tl.constexpr, INTERLEAVED: tl.constexpr, HAS_BIAS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """Of the window's rows: hw[W, F], what they make times their weight; dproduct[W, G F], the gradient to the first
    product, in its columns' order; parts[W, num_n], what these columns add to the gradient to the weight.
    """
    tile_m, tile_n = place_of_program(num_m, num_n, GROUP_M)
    expert, first, end = find_tile(offsets_ptr, tile_m, num_experts, lo, hi, BLOCK_M, BLOCK_E)
    if expert < num_experts:
        rows = first + tl.arange(0, BLOCK_M)
        mask = rows < end
        places = tl.load(order_ptr + rows, mask=mask, other=0)
        tokens = (places // num_choices).to(tl.int64)
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < width
        parts = width if not GATED else 2 * width
        gate, up = _gate_and_up(
            x_ptr + tokens[:, None] * x_stride, w_ptr + expert.to(tl.int64) * w_stride_e, bias_ptr + expert * parts,
            tile_n, w_stride_n, w_stride_k, width, K, GATED, INTERLEAVED, HAS_BIAS, BLOCK_M, BLOCK_N, BLOCK_K, EVEN_K,
            EVEN_N, PRECISION,
        )  # fmt: skip
        through = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        through = _product(
            through, g_ptr + tokens[:, None] * g_stride, second_ptr + expert.to(tl.int64) * second_stride_e,
            columns[None, :] * second_stride_n, second_stride_k, column_mask[None, :], K, BLOCK_K,
            EVEN_K, EVEN_N, PRECISION,
        )  # fmt: skip
        weight = tl.load(weights_ptr + places, mask=mask, other=0.0).to(tl.float32)[:, None]
        h, slope_gate, slope_up = slopes(gate, up, TEXT)
        at = (rows - lo).to(tl.int64)
        both = mask[:, None] & column_mask[None, :]
        share = tl.sum(tl.where(both, through * h, 0.0), 1)
        tl.store(parts_ptr + at * num_n + tile_n, share, mask=mask)
        tl.store(hw_ptr + at[:, None] * width + columns[None, :], (h * weight).to(hw_ptr.dtype.element_ty), mask=both)
        dh = through * weight
        dtype: tl.constexpr = dproduct_ptr.dtype.element_ty
        if GATED and INTERLEAVED:
            alternating = tl.reshape(tl.join(slope_gate * dh, slope_up * dh), [BLOCK_M, 2 * BLOCK_N])
            every = tile_n * (2 * BLOCK_N) + tl.arange(0, 2 * BLOCK_N)
            to = dproduct_ptr + at[:, None] * parts + every[None, :]
            tl.store(to, alternating.to(dtype), mask=mask[:, None] & (every < parts)[None, :])
        else:
            to = dproduct_ptr + at[:, None] * parts + columns[None, :]
            tl.store(to, (slope_gate * dh).to(dtype), mask=both)
            if GATED:
                tl.store(to + width, (slope_up * dh).to(dtype), mask=both)


@triton.jit
def rows_kernel(
    a_ptr, w_ptr, bias_ptr, weights_ptr, order_ptr, offsets_ptr, out_ptr,
    a_stride, w_stride_e, w_stride_n, w_stride_k, num_choices, num_experts, num_m, num_n, N, K, lo, hi,
    GATHER: tl.constexpr, HAS_BIAS: tl.constexpr, WEIGHTED: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_E: tl.constexpr,
    GROUP_M: tl.constexpr, EVEN_K: tl.constexpr, EVEN_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """out[W, N] of the window's rows: a @ w of their experts, plus bias, or times the rows' weights.

    GATHER: a has rows of tokens, else of the window.
    """
    tile_m, tile_n = place_of_program(num_m, num_n, GROUP_M)
    expert, first, end = find_tile(offsets_ptr, tile_m, num_experts, lo, hi, BLOCK_M, BLOCK_E)
    if expert < num_experts:
        rows = first + tl.arange(0, BLOCK_M)
        mask = rows < end
        own = tl.where(mask, rows, first) - lo
        if GATHER:
            own = tl.load(order_ptr + rows, mask=mask, other=0) // num_choices
        columns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        column_mask = columns < N
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        acc = _product(
            acc, a_ptr + own.to(tl.int64)[:, None] * a_stride, w_ptr + expert.to(tl.int64) * w_stride_e,
            columns[None, :] * w_stride_n, w_stride_k, column_mask[None, :], K, BLOCK_K, EVEN_K, EVEN_N,
            PRECISION,
        )  # fmt: skip
        if HAS_BIAS:
            acc += tl.load(bias_ptr + expert * N + columns, mask=column_mask, other=0.0).to(tl.float32)[None, :]
        if WEIGHTED:
            places = tl.load(order_ptr + rows, mask=mask, other=0)
            acc *= tl.load(weights_ptr + places, mask=mask, other=0.0).to(tl.float32)[:, None]
        at = (rows - lo).to(tl.int64)[:, None] * N + columns[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=mask[:, None] & column_mask[None, :])


@triton.jit
def columns_kernel(
    a_ptr, b_ptr, order_ptr, offsets_ptr, out_ptr, a_stride, b_stride, num_choices, num_experts, num_m, num_n, M, N,
    lo, hi,
    GATHER_A: tl.constexpr, GATHER_B: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr,
    PRECISION: tl.constexpr,
):  # fmt: skip
    """out[E, M, N]: of each expert the sum over its rows of a[M] times b[N]. Zeros where it has none; added to what is
    there where an earlier window had some. GATHER_A, GATHER_B: that one has rows of tokens, else of the window.
    """
    expert = tl.program_id(1)
    start, end, goes_on = group(offsets_ptr, expert, lo, hi)
    begins = tl.load(offsets_ptr + expert)
    is_last_window = hi >= tl.load(offsets_ptr + num_experts)
    if (start < end) | ((begins >= lo) & ((begins < hi) | is_last_window)):
        tile_m, tile_n = place_of_program(num_m, num_n, GROUP_M)
        ms = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
        ns = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
        ks = tl.arange(0, BLOCK_K)
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for k in range(start, end, BLOCK_K):
            rows = k + ks
            mask = rows < end
            a_rows = rows - lo
            b_rows = rows - lo
            if GATHER_A or GATHER_B:
                tokens = tl.load(order_ptr + rows, mask=mask, other=0) // num_choices
                if GATHER_A:
                    a_rows = tokens
                if GATHER_B:
                    b_rows = tokens
            a = a_ptr + a_rows.to(tl.int64)[:, None] * a_stride + ms[None, :]
            b = b_ptr + b_rows.to(tl.int64)[:, None] * b_stride + ns[None, :]
            a_tile = tl.load(a, mask=mask[:, None] & (ms < M)[None, :], other=0.0)
            b_tile = tl.load(b, mask=mask[:, None] & (ns < N)[None, :], other=0.0)
            acc = tl.dot(tl.trans(a_tile), b_tile, acc, input_precision=PRECISION)
        out = out_ptr + expert.to(tl.int64) * M * N + ms.to(tl.int64)[:, None] * N + ns[None, :]
        out_mask = (ms < M)[:, None] & (ns < N)[None, :]
        if goes_on:
            acc += tl.load(out, mask=out_mask, other=0.0).to(tl.float32)
        tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=out_mask)


@triton.jit
def bias_grad_kernel(
    dproduct_ptr, offsets_ptr, out_ptr, num_experts, N, lo, hi, BLOCK_K: tl.constexpr, BLOCK_N: tl.constexpr
):
    """out[E, N]: of each expert the sum of its rows of dproduct[W, N], as `columns_kernel`."""
    expert = tl.program_id(1)
    start, end, goes_on = group(offsets_ptr, expert, lo, hi)
    begins = tl.load(offsets_ptr + expert)
    is_last_window = hi >= tl.load(offsets_ptr + num_experts)
    if (start < end) | ((begins >= lo) & ((begins < hi) | is_last_window)):
        ns = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
        total = tl.zeros([BLOCK_N], tl.float32)
        for k in range(start, end, BLOCK_K):
            rows = k + tl.arange(0, BLOCK_K)
            at = dproduct_ptr + (rows - lo).to(tl.int64)[:, None] * N + ns[None, :]
            total += tl.sum(tl.load(at, mask=(rows < end)[:, None] & (ns < N)[None, :], other=0.0).to(tl.float32), 0)
        out = out_ptr + expert * N + ns
        if goes_on:
            total += tl.load(out, mask=ns < N, other=0.0).to(tl.float32)
        tl.store(out, total.to(out_ptr.dtype.element_ty), mask=ns < N)
