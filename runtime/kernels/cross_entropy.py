"""The two passes of a cross entropy over the logits in Triton: a sum of exponentials, and the gradient.

Softmax cross entropy whose maximum, sum and label are taken apart can be split along the vocabulary (Shoeybi et al.,
"Megatron-LM", 2019, section 3). Each kernel reads the logits once; nothing of their size is made but the gradient:
    sum_exp = sum over v of exp(x_v - m)        dx_v = g (exp(x_v - lse) - [v = target])
in float32, whatever the dtype of x. PyTorch's own operators write a float32 copy of the logits in between.

The PyTorch references are `autopar.operators.sum_exp` and `cross_entropy_grad`.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.operators import basic as reference
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.rows import as_rows, computes, launch, num_warps, power_of_2, tiles

MAX_COLUMNS = 4096
"""Columns of a tile. A row of a vocabulary has many such; a sum goes through them one after the other."""


@triton.jit
def sum_exp_kernel(x_ptr, m_ptr, out_ptr, x_stride, num_columns, COLUMNS: tl.constexpr):
    """The sum of exp(x - m) over one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    m = tl.load(m_ptr + row).to(tl.float32)
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, num_columns, COLUMNS):
        at = start + columns
        x = tl.load(x_ptr + row * x_stride + at, mask=at < num_columns, other=0.0).to(tl.float32)
        total += tl.where(at < num_columns, tl.exp(x - m), 0.0)
    tl.store(out_ptr + row, tl.sum(total, 0))


@triton.jit
def cross_entropy_grad_kernel(
    g_ptr, x_ptr, target_ptr, lse_ptr, dx_ptr, x_stride, num_columns, start, COLUMNS: tl.constexpr
):  # fmt: skip
    """g (exp(x - lse) - onehot(target - start)) at COLUMNS columns of one row."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.program_id(1) * COLUMNS + tl.arange(0, COLUMNS)
    mask = columns < num_columns
    g = tl.load(g_ptr + row).to(tl.float32)
    lse = tl.load(lse_ptr + row)
    label = tl.load(target_ptr + row) - start
    x = tl.load(x_ptr + row * x_stride + columns, mask=mask, other=0.0).to(tl.float32)
    dx = tl.exp(x - lse) * g
    dx = tl.where(columns == label, dx - g, dx)
    tl.store(dx_ptr + row * num_columns + columns, dx.to(dx_ptr.dtype.element_ty), mask=mask)


def sum_exp(x: Tensor, m: Tensor) -> Tensor:
    """`autopar::sum_exp` (x[..., V], m[...] -> float32 [...]); float64 goes to the reference."""
    if not computes((x, m)) or not x.numel():
        return reference.sum_exp(x, m)
    rows = as_rows(x)
    out = torch.empty(m.shape, dtype=torch.float32, device=x.device)
    launch(
        sum_exp_kernel,
        (rows.shape[0],),
        x.device,
        rows,
        m.contiguous(),
        out,
        rows.stride(0),
        rows.shape[1],
        **tile_options(rows.shape[1]),
    )
    return out


def cross_entropy_grad(
    g: Tensor, x: Tensor, target: Tensor, lse: Tensor, start: int = 0, ignore_index: int = -100
) -> Tensor:
    """`autopar::cross_entropy_grad` (x[..., V], the others [...] -> like x); float64 goes to the reference."""
    if not computes((g, x)) or lse.dtype != torch.float32 or not x.numel():
        return reference.cross_entropy_grad(g, x, target, lse, start, ignore_index)
    rows, g = as_rows(x), reference.row_gradients(g, target, ignore_index)
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    options = tile_options(rows.shape[1])
    launch(
        cross_entropy_grad_kernel, (rows.shape[0], tiles(rows.shape[1], options["COLUMNS"])), x.device,
        g.contiguous(), rows, target.contiguous(), lse.contiguous(), dx, rows.stride(0), rows.shape[1], start,
        **options,
    )  # fmt: skip
    return dx


def tile_options(num_columns: int) -> dict[str, int]:
    """The tile for rows of this width."""
    columns = min(MAX_COLUMNS, power_of_2(num_columns))
    return {"COLUMNS": columns, "num_warps": num_warps(columns)}


def compile_specs() -> tuple[CompileSpec, ...]:
    """For compilation ahead of time: a vocabulary's rows."""
    kernels = (sum_exp_kernel, cross_entropy_grad_kernel)
    return tuple(_spec(kernel, dtype) for dtype in ("bf16", "fp32") for kernel in kernels)


def _spec(kernel: Any, dtype: str) -> CompileSpec:
    types = {"x_ptr": f"*{dtype}", "dx_ptr": f"*{dtype}", "m_ptr": f"*{dtype}", "target_ptr": "*i64"}
    types |= dict.fromkeys(("g_ptr", "lse_ptr", "out_ptr"), "*fp32")
    types |= dict.fromkeys(("x_stride", "num_columns", "start"), "i32")
    options = tile_options(128_256)
    names = [name for name in kernel.arg_names if name in types]
    return CompileSpec(
        name=kernel.__name__.removesuffix("_kernel"),
        kernel=kernel,
        signature={name: types[name] for name in names},
        constexprs={"COLUMNS": options["COLUMNS"]},
        num_warps=options["num_warps"],
        num_stages=3,
        aligned=tuple(names),
    )
