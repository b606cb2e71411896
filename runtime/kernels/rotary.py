"""Rotary position embedding in Triton, forward and backward: x is read once and written once.

The operation: Su et al., "RoFormer: Enhanced Transformer with Rotary Position Embedding" (2021), in the form that
rotates halves, as GPT-NeoX and Llama do. With x = (a, b) and cos, sin in halves too (c1, c2), (s1, s2):
    y = (a c1 - b s1, b c2 + a s2)          dx = (g1 c1 + g2 s2, g2 c2 - g1 s1)
A program has some positions of some heads: it reads their cos and sin once for all of these heads. Products are rounded
to the dtype of x before they are added, as eager PyTorch rounds them, so results are the same in half precision.

The PyTorch reference is autopar/operators/rotary.py.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.operators.rotary import rotary as reference
from autopar.operators.rotary import rotary_backward as reference_backward
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.rows import computes, launch, num_warps, power_of_2, tiles

TILE = 2048
"""Elements of half a tile: positions times heads times half the head size."""


@triton.jit
def rotary_kernel(
    x_ptr, cos_ptr, sin_ptr, y_ptr,
    x_batch, x_head, x_position, y_batch, y_head, y_position,
    cos_batch, cos_position, sin_batch, sin_position, num_heads, num_positions, half,
    BACKWARD: tl.constexpr, POSITIONS: tl.constexpr, HEADS: tl.constexpr, HALF: tl.constexpr,
):  # fmt: skip
    """POSITIONS positions of HEADS heads of one row of the batch; strides in elements, the last dim contiguous."""
    batch = tl.program_id(2).to(tl.int64)
    positions = tl.program_id(0).to(tl.int64) * POSITIONS + tl.arange(0, POSITIONS)
    heads = tl.program_id(1).to(tl.int64) * HEADS + tl.arange(0, HEADS)
    columns = tl.arange(0, HALF)
    column_mask = columns < half
    table_mask = (positions < num_positions)[:, None] & column_mask[None, :]
    cos_at = cos_ptr + batch * cos_batch + positions[:, None] * cos_position + columns[None, :]
    sin_at = sin_ptr + batch * sin_batch + positions[:, None] * sin_position + columns[None, :]
    dtype = x_ptr.dtype.element_ty
    cos_1 = tl.load(cos_at, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]
    cos_2 = tl.load(cos_at + half, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]
    sin_1 = tl.load(sin_at, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]
    sin_2 = tl.load(sin_at + half, mask=table_mask, other=0.0).to(tl.float32)[:, None, :]
    mask = table_mask[:, None, :] & (heads < num_heads)[None, :, None]
    x_at = x_ptr + batch * x_batch + positions[:, None, None] * x_position + heads[None, :, None] * x_head
    y_at = y_ptr + batch * y_batch + positions[:, None, None] * y_position + heads[None, :, None] * y_head
    x_1 = tl.load(x_at + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
    x_2 = tl.load(x_at + half + columns[None, None, :], mask=mask, other=0.0).to(tl.float32)
    if BACKWARD:
        y_1 = _rounded(x_1 * cos_1, dtype) + _rounded(x_2 * sin_2, dtype)
        y_2 = _rounded(x_2 * cos_2, dtype) - _rounded(x_1 * sin_1, dtype)
    else:
        y_1 = _rounded(x_1 * cos_1, dtype) - _rounded(x_2 * sin_1, dtype)
        y_2 = _rounded(x_2 * cos_2, dtype) + _rounded(x_1 * sin_2, dtype)
    tl.store(y_at + columns[None, None, :], y_1.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(y_at + half + columns[None, None, :], y_2.to(y_ptr.dtype.element_ty), mask=mask)


@triton.jit
def _rounded(x, dtype: tl.constexpr):
    return x.to(dtype).to(tl.float32)


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`autopar::rotary` (x[B, H, S, D], cos and sin [B|1, S, D] -> y like x); float64 goes to the reference."""
    return _rotate(x, cos, sin, backward=False) if _fits(x, cos, sin) else reference(x, cos, sin)


def rotary_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """`autopar::rotary_backward`: the gradient to x; float64 goes to the reference."""
    return _rotate(g, cos, sin, backward=True) if _fits(g, cos, sin) else reference_backward(g, cos, sin)


def _fits(x: Tensor, cos: Tensor, sin: Tensor) -> bool:
    return computes((x, cos, sin)) and x.dtype == cos.dtype == sin.dtype and x.numel() > 0


def _rotate(x: Tensor, cos: Tensor, sin: Tensor, *, backward: bool) -> Tensor:
    found = torch.empty_like(x)
    x, cos, sin = (t if t.stride(-1) == 1 else t.contiguous() for t in (x, cos, sin))
    batch, num_heads, num_positions, size = x.shape
    y = found if found.stride(-1) == 1 else torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = rotary_options(num_heads, size)
    grid = (tiles(num_positions, options["POSITIONS"]), tiles(num_heads, options["HEADS"]), batch)
    launch(
        rotary_kernel, grid, x.device,
        x, cos, sin, y, *x.stride()[:3], *y.stride()[:3],
        *_table_strides(cos), *_table_strides(sin), num_heads, num_positions, size // 2,
        BACKWARD=backward, **options,
    )  # fmt: skip
    return y if y is found else found.copy_(y)  # laid out like x, as compilers are told


def rotary_options(num_heads: int, size: int) -> dict[str, int]:
    """The tile for so many heads of this size: up to 8 heads, so that a table is read once for these."""
    half = power_of_2(size // 2)
    heads = max(1, min(8, power_of_2(num_heads), TILE // half))
    positions = max(1, TILE // (half * heads))
    return {
        "POSITIONS": positions,
        "HEADS": heads,
        "HALF": half,
        "num_warps": num_warps(2 * positions * heads * half, most=8),
    }


def _table_strides(table: Tensor) -> tuple[int, int]:
    """The strides of batch and position of a table [B|1, S, D]: 0 where all rows of the batch share it."""
    return (0 if table.shape[0] == 1 else table.stride(0)), table.stride(1)


def compile_specs() -> tuple[CompileSpec, ...]:
    """For compilation ahead of time: both directions at the usual head sizes."""
    return tuple(
        _spec(dtype, size, backward) for dtype in ("bf16", "fp32") for size in (64, 128) for backward in (False, True)
    )


def _spec(dtype: str, size: int, backward: bool) -> CompileSpec:
    names = rotary_kernel.arg_names
    options = rotary_options(32, size)
    warps = options.pop("num_warps")
    constexprs = {"BACKWARD": backward, **options}
    signature = {name: f"*{dtype}" if name.endswith("_ptr") else "i32" for name in names if name not in constexprs}
    return CompileSpec(
        name=f"rotary_{'backward' if backward else 'forward'}",
        kernel=rotary_kernel,
        signature=signature,
        constexprs=constexprs,
        num_warps=warps,
        num_stages=3,
        aligned=tuple(name for name in signature if not name.startswith("num_")),
    )
