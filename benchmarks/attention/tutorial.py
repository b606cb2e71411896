"""A plain FlashAttention-2 forward in Triton, in the form that Triton's tutorial on fused attention teaches.

One program a block of queries and head; blocks of keys in a pipelined loop, exponentials in base 2, and of a causal
mask only the blocks on the diagonal compare positions (Dao, FlashAttention-2, 2307.08691). No tensor descriptors, no
warp specialization, forward only: what anyone has after an afternoon, as a yardstick. Lengths must be multiples of the
blocks.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

CONFIGS = [
    {"BLOCK_M": block_m, "BLOCK_N": block_n, "num_warps": warps, "num_stages": stages}
    for block_m, block_n, warps, stages in (
        (64, 64, 4, 3), (128, 32, 4, 3), (128, 64, 4, 3), (128, 64, 8, 3), (128, 128, 8, 2), (128, 128, 8, 3),
    )
]  # fmt: skip


@triton.jit
def _blocks(
    acc, row_sum, row_max, q, k_at, v_at, k_step, v_step, queries, start, stop, scale,
    MASKED: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """The online softmax over the keys start .. stop."""
    columns = tl.arange(0, BLOCK_N)
    for first in tl.range(start, stop, BLOCK_N):
        k = tl.load(k_at + first * k_step)
        x = tl.dot(q, k) * scale
        if MASKED:
            x = tl.where(queries[:, None] >= (first + columns)[None, :], x, float("-inf"))
        new_max = tl.maximum(row_max, tl.max(x, 1))
        p = tl.exp2(x - new_max[:, None])
        correction = tl.exp2(row_max - new_max)
        row_sum = row_sum * correction + tl.sum(p, 1)
        v = tl.load(v_at + first * v_step)
        acc = tl.dot(p.to(v.dtype), v, acc * correction[:, None])
        row_max = new_max
    return acc, row_sum, row_max


@triton.jit
def tutorial_kernel(
    q_ptr, k_ptr, v_ptr, out_ptr, q_batch, q_head, q_row, k_batch, k_head, k_row, v_batch, v_head, v_row,
    out_batch, out_head, out_row, num_heads, length, scale,
    CAUSAL: tl.constexpr, HEAD_DIM: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_M queries of one head; scale: that of the products times log2(e)."""
    batch, head = (tl.program_id(1) // num_heads).to(tl.int64), (tl.program_id(1) % num_heads).to(tl.int64)
    queries = tl.program_id(0) * BLOCK_M + tl.arange(0, BLOCK_M)
    columns, dims = tl.arange(0, BLOCK_N), tl.arange(0, HEAD_DIM)
    q = tl.load(q_ptr + batch * q_batch + head * q_head + queries[:, None] * q_row + dims[None, :])
    k_at = k_ptr + batch * k_batch + head * k_head + columns[None, :] * k_row + dims[:, None]
    v_at = v_ptr + batch * v_batch + head * v_head + columns[:, None] * v_row + dims[None, :]
    acc = tl.zeros([BLOCK_M, HEAD_DIM], dtype=tl.float32)
    row_sum = tl.zeros([BLOCK_M], dtype=tl.float32)
    row_max = tl.full([BLOCK_M], float("-inf"), dtype=tl.float32)
    whole = (tl.program_id(0) * BLOCK_M // BLOCK_N) * BLOCK_N if CAUSAL else length
    acc, row_sum, row_max = _blocks(
        acc, row_sum, row_max, q, k_at, v_at, k_row, v_row, queries, 0, whole, scale, False, BLOCK_N
    )
    if CAUSAL:
        stop = tl.minimum((tl.program_id(0) + 1) * BLOCK_M, length)
        acc, row_sum, row_max = _blocks(
            acc, row_sum, row_max, q, k_at, v_at, k_row, v_row, queries, whole, stop, scale, True, BLOCK_N
        )
    out_at = out_ptr + batch * out_batch + head * out_head + queries[:, None] * out_row + dims[None, :]
    tl.store(out_at, (acc / row_sum[:, None]).to(out_ptr.dtype.element_ty))


def tutorial_attention(q: Tensor, k: Tensor, v: Tensor, causal: bool, config: dict[str, int]) -> Tensor:
    """out, like q[B, H, S, D]; k and v of the same shape.

    Raises ValueError for lengths that are no multiple of the blocks.
    """
    batch, heads, length, head_dim = q.shape
    if length % config["BLOCK_M"] or length % config["BLOCK_N"] or config["BLOCK_M"] % config["BLOCK_N"]:
        raise ValueError(f"{length} queries and keys are no multiple of the blocks {config}")
    out = torch.empty_like(q)
    scale = head_dim**-0.5 * 1.4426950408889634
    tutorial_kernel[(length // config["BLOCK_M"], batch * heads)](
        q, k, v, out, *q.stride()[:3], *k.stride()[:3], *v.stride()[:3], *out.stride()[:3], heads, length, scale,
        CAUSAL=causal, HEAD_DIM=head_dim, **config,
    )  # fmt: skip
    return out


def fastest_config(q: Tensor, k: Tensor, v: Tensor, causal: bool) -> dict[str, int]:
    """The fastest of CONFIGS that run for these tensors; the first that fits where Triton only interprets."""
    fitting = [config for config in CONFIGS if q.shape[2] % config["BLOCK_M"] == 0]
    if q.device.type != "cuda":
        return {"BLOCK_M": 16, "BLOCK_N": 16}
    timed: list[tuple[float, dict[str, int]]] = []
    for config in fitting:
        try:
            timed.append((triton.testing.do_bench(lambda c=config: tutorial_attention(q, k, v, causal, c)), config))
        except triton.runtime.errors.OutOfResources:
            continue
    if not timed:
        raise ValueError(f"none of the configurations runs for {tuple(q.shape)}")
    return min(timed, key=lambda each: each[0])[1]
