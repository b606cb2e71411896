"""Attention backward (FlashAttention-2, arXiv 2307.08691, algorithm 2): probabilities are made again from the scores
and the log-sum-exp. One kernel walks keys and makes dq, one walks queries and makes dk and dv, so that each gradient is
written by one program, in one order, without atomics: deterministic, at the price of making the scores twice.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions
from autopar.operators.scaled_dot_product import rows_whole
from autopar.runtime.kernels.attention_backward_bias import attention_dbias_kernel
from autopar.runtime.kernels.attention_backward_keys import attention_dkv_kernel
from autopar.runtime.kernels.attention_backward_queries import attention_dq_kernel
from autopar.runtime.kernels.attention_configs import choose
from autopar.runtime.kernels.attention_launch import launch_attention
from autopar.runtime.kernels.attention_problem import AttentionProblem, heads_inside, strides
from autopar.runtime.kernels.launch import ceil_div, launch, next_block
from autopar.runtime.kernels.masks import LOG2_E


def attention_backward(
    g: Tensor, q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, out: Tensor, lse: Tensor, *, options: AttentionOptions, bias_grad: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """(dq, dk, dv) of `autopar.operators.attention_backward`, each laid out [B, S, H, D]; bias_grad: and dbias.

    out, lse: of all keys, where k and v are a block of them.

    Raises AutoparError for what `attention_problem.supports` names.
    """
    problem = AttentionProblem.build(q, k, v, bias, keys, sinks, seed, options)
    g = rows_whole(g.to(q.dtype))
    delta, log2_sum = _prepare(g, out, lse)
    # dk and dv of heads that no query reads are zeros that the kernel writes: the loop over their readers is empty.
    dq, dk, dv = (heads_inside((*x.shape,), x) for x in (q, k, v))
    arguments = {
        **problem.arguments, **problem.switches, "g": g, **strides("g", "bhs", g), "delta": delta,
        "log2_sum": log2_sum, "dq": dq, "dk": dk, "dv": dv,
        "query_spans": problem.query_spans(),
    }  # fmt: skip
    launch_attention("dq", attention_dq_kernel, problem, arguments, *problem.rows, g)
    launch_attention("dkv", attention_dkv_kernel, problem, arguments, *problem.rows, g)
    if not bias_grad:
        return dq, dk, dv
    assert bias is not None
    return dq, dk, dv, _bias_grad(problem, arguments, bias)


def _bias_grad(problem: AttentionProblem, arguments: dict[str, Any], bias: Tensor) -> Tensor:
    config = choose("dbias", problem, *problem.rows)
    dbias = torch.empty(bias.shape, dtype=bias.dtype, device=bias.device)
    whole = (problem.batch, problem.heads, problem.queries, problem.keys)
    shared = [size == 1 and full != 1 for size, full in zip(bias.shape, whole, strict=True)]
    query_blocks = problem.query_blocks(config.block_m)
    key_blocks = problem.key_blocks(config.block_n)
    counts = (problem.batch, problem.heads, query_blocks, key_blocks)
    programs = 1
    for count, is_shared in zip(counts, shared, strict=True):
        programs *= 1 if is_shared else count
    if 0 in whole:
        return dbias.zero_()
    names = ("SHARED_B", "SHARED_H", "SHARED_S", "SHARED_T")
    arguments = {
        **arguments, **config.switches(), **dict(zip(names, shared, strict=True)), "dbias": dbias, "B": problem.batch,
        **strides("dbias", "bhst", dbias),
    }  # fmt: skip
    launch(attention_dbias_kernel, programs, bias.device, arguments, **config.options())
    return dbias


def _prepare(g: Tensor, out: Tensor, lse: Tensor) -> tuple[Tensor, Tensor]:
    """Per query <g, out>, and the log-sum-exp in units of log2: +inf where nothing is seen, so that exp2 gives 0."""
    batch, heads, queries, size = g.shape
    out = rows_whole(out)
    delta = torch.empty((batch, heads, queries), dtype=torch.float32, device=g.device)
    log2_sum = torch.empty_like(delta)
    block_m, block_e = 32, next_block(size)
    arguments = {
        "g": g, "out": out, "lse": lse.contiguous(), "delta": delta, "log2_sum": log2_sum, "H": heads, "S": queries,
        **strides("g", "bhs", g), **strides("o", "bhs", out), "E": size, "BLOCK_M": block_m, "BLOCK_E": block_e,
    }  # fmt: skip
    launch(attention_prepare_kernel, batch * heads * ceil_div(queries, block_m), g.device, arguments)
    return delta, log2_sum


@triton.jit(do_not_specialize=["H", "S"])
def attention_prepare_kernel(
    g, out, lse, delta, log2_sum, g_b, g_h, g_s, o_b, o_h, o_s, H, S,
    E: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_E: tl.constexpr,
):  # fmt: skip
    """delta = sum(g * out) over the head, and lse / ln 2."""
    blocks = tl.cdiv(S, BLOCK_M)
    program = tl.program_id(0)
    rows = program % blocks * BLOCK_M + tl.arange(0, BLOCK_M).to(tl.int64)
    head = (program // blocks % H).to(tl.int64)
    batch = (program // blocks // H).to(tl.int64)
    columns = tl.arange(0, BLOCK_E)
    inside = rows < S
    mask = inside[:, None] & (columns < E)[None, :]
    g_tile = tl.load(g + batch * g_b + head * g_h + (rows * g_s)[:, None] + columns[None, :], mask=mask, other=0.0)
    o_tile = tl.load(out + batch * o_b + head * o_h + (rows * o_s)[:, None] + columns[None, :], mask=mask, other=0.0)
    places = (batch * H + head) * S + rows
    tl.store(delta + places, tl.sum(g_tile.to(tl.float32) * o_tile.to(tl.float32), 1), mask=inside)
    total = tl.load(lse + places, mask=inside, other=0.0)
    tl.store(log2_sum + places, tl.where(total == float("-inf"), float("inf"), total * LOG2_E), mask=inside)
