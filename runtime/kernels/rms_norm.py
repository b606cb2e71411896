"""RMSNorm forward and backward in Triton: every row is read once, and what is between stays in registers.

The operation: Zhang and Sennrich, "Root Mean Square Layer Normalization" (2019). With n = x * rstd,
rstd = 1 / sqrt(mean(x^2) + eps), s = w + offset:
    y = n * s        dx = rstd * (g * s - n * mean(g * s * n))        dw = sum over rows of g * n
all in float32, whatever the dtype of x. The backward reads g and x once: a program goes over many rows and keeps their
sum for dw, one row of a small float32 table, which is added up at the end in a fixed order (so results do not change
from run to run). Rows too wide for that (more than 8192) are read twice for dx, and dw has a kernel of its own.

The PyTorch reference is autopar/operators/rms_norm.py.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.operators.rms_norm import result_dtype
from autopar.operators.rms_norm import rms_norm as reference
from autopar.operators.rms_norm import rms_norm_backward as reference_backward
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.rows import as_rows, computes, launch, num_programs, num_warps, power_of_2, tiles

TILE = 4096
"""Elements of a tile: several narrow rows (a head's queries), or one row of usual width."""
MAX_FORWARD_COLUMNS = 16384
MAX_BACKWARD_COLUMNS = 8192
WIDE_COLUMNS = 4096
"""The chunk in which rows wider than those are read."""
WEIGHT_ROWS, WEIGHT_COLUMNS = 32, 128


@triton.jit
def rms_norm_forward_kernel(
    x_ptr, w_ptr, y_ptr, rstd_ptr, x_stride, num_rows, num_columns, eps,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr, SINGLE: tl.constexpr,
):  # fmt: skip
    """y and rstd of ROWS rows. SINGLE: a row fits into COLUMNS and is read once."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    columns = tl.arange(0, COLUMNS)
    row_mask = rows < num_rows
    x_rows = x_ptr + rows[:, None] * x_stride
    y_rows = y_ptr + rows[:, None] * num_columns
    if SINGLE:
        mask = row_mask[:, None] & (columns < num_columns)[None, :]
        x = tl.load(x_rows + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = 1.0 / tl.sqrt(tl.sum(x * x, 1) / num_columns + eps)
        y = _scaled(x, rstd, w_ptr, columns, num_columns, x_ptr.dtype.element_ty, OFFSET, ROUND_FIRST, HAS_WEIGHT)
        tl.store(y_rows + columns[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    else:
        squares = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
        for start in range(0, num_columns, COLUMNS):
            mask = row_mask[:, None] & (start + columns < num_columns)[None, :]
            x = tl.load(x_rows + (start + columns)[None, :], mask=mask, other=0.0).to(tl.float32)
            squares += x * x
        rstd = 1.0 / tl.sqrt(tl.sum(squares, 1) / num_columns + eps)
        for start in range(0, num_columns, COLUMNS):
            at = start + columns
            mask = row_mask[:, None] & (at < num_columns)[None, :]
            x = tl.load(x_rows + at[None, :], mask=mask, other=0.0).to(tl.float32)
            y = _scaled(x, rstd, w_ptr, at, num_columns, x_ptr.dtype.element_ty, OFFSET, ROUND_FIRST, HAS_WEIGHT)
            tl.store(y_rows + at[None, :], y.to(y_ptr.dtype.element_ty), mask=mask)
    tl.store(rstd_ptr + rows, rstd, mask=row_mask)


@triton.jit
def _scaled(
    x, rstd, w_ptr, columns, num_columns, x_dtype: tl.constexpr,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, HAS_WEIGHT: tl.constexpr,
):  # fmt: skip
    """x * rstd * (w + OFFSET); ROUND_FIRST: the normalized x is rounded to its dtype before the weight."""
    y = x * rstd[:, None]
    if ROUND_FIRST:
        y = y.to(x_dtype).to(tl.float32)
    if HAS_WEIGHT:
        w = tl.load(w_ptr + columns, mask=columns < num_columns, other=0.0).to(tl.float32) + OFFSET
        y = y * w[None, :]
    return y


@triton.jit
def rms_norm_backward_kernel(
    g_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, dw_ptr, g_stride, x_stride, num_rows, num_columns,
    OFFSET: tl.constexpr, ROUND_FIRST: tl.constexpr, HAS_WEIGHT: tl.constexpr,
    ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of every row, and dw_ptr[program]: the sum for dw over the rows that this program has."""
    columns = tl.arange(0, COLUMNS)
    column_mask = columns < num_columns
    total = tl.zeros([COLUMNS], dtype=tl.float32)
    scale = tl.zeros([COLUMNS], dtype=tl.float32)
    if HAS_WEIGHT:
        scale = tl.load(w_ptr + columns, mask=column_mask, other=0.0).to(tl.float32) + OFFSET
    for block in range(tl.program_id(0), tl.cdiv(num_rows, ROWS), tl.num_programs(0)):
        rows = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        row_mask = rows < num_rows
        mask = row_mask[:, None] & column_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + rows[:, None] * g_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        rstd = tl.load(rstd_ptr + rows, mask=row_mask, other=0.0)
        normal = x * rstd[:, None]
        if HAS_WEIGHT:
            if ROUND_FIRST:
                total += tl.sum(g * normal.to(x_ptr.dtype.element_ty).to(tl.float32), 0)
            else:
                total += tl.sum(g * normal, 0)
            g = g * scale[None, :]
        mean = tl.sum(g * normal, 1) / num_columns
        dx = rstd[:, None] * (g - normal * mean[:, None])
        tl.store(dx_ptr + rows[:, None] * num_columns + columns[None, :], dx.to(dx_ptr.dtype.element_ty), mask=mask)
    if HAS_WEIGHT:
        tl.store(dw_ptr + tl.program_id(0) * num_columns + columns, total, mask=column_mask)


@triton.jit
def rms_norm_wide_input_kernel(
    g_ptr, x_ptr, w_ptr, rstd_ptr, dx_ptr, g_stride, x_stride, num_columns,
    OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dx of one row that is read twice, in chunks of COLUMNS."""
    row = tl.program_id(0).to(tl.int64)
    columns = tl.arange(0, COLUMNS)
    rstd = tl.load(rstd_ptr + row)
    products = tl.zeros([COLUMNS], dtype=tl.float32)
    for start in range(0, num_columns, COLUMNS):
        at = start + columns
        x, g = _chunk(g_ptr, x_ptr, w_ptr, row * g_stride, row * x_stride, at, num_columns, OFFSET, HAS_WEIGHT)
        products += g * x
    mean = tl.sum(products, 0) * rstd / num_columns
    for start in range(0, num_columns, COLUMNS):
        at = start + columns
        x, g = _chunk(g_ptr, x_ptr, w_ptr, row * g_stride, row * x_stride, at, num_columns, OFFSET, HAS_WEIGHT)
        dx = rstd * (g - x * rstd * mean)
        tl.store(dx_ptr + row * num_columns + at, dx.to(dx_ptr.dtype.element_ty), mask=at < num_columns)


@triton.jit
def _chunk(
    g_ptr, x_ptr, w_ptr, g_row, x_row, at, num_columns, OFFSET: tl.constexpr, HAS_WEIGHT: tl.constexpr
):  # fmt: skip
    """x, and g times the scale, at these columns of one row."""
    mask = at < num_columns
    x = tl.load(x_ptr + x_row + at, mask=mask, other=0.0).to(tl.float32)
    g = tl.load(g_ptr + g_row + at, mask=mask, other=0.0).to(tl.float32)
    if HAS_WEIGHT:
        g = g * (tl.load(w_ptr + at, mask=mask, other=0.0).to(tl.float32) + OFFSET)
    return x, g


@triton.jit
def rms_norm_wide_weight_kernel(
    g_ptr, x_ptr, rstd_ptr, dw_ptr, g_stride, x_stride, num_rows, num_columns,
    ROUND_FIRST: tl.constexpr, ROWS: tl.constexpr, COLUMNS: tl.constexpr,
):  # fmt: skip
    """dw_ptr[program_id(1)]: the sum for dw, at COLUMNS columns, over every num_programs(1)-th block of rows."""
    columns = tl.program_id(0) * COLUMNS + tl.arange(0, COLUMNS)
    column_mask = columns < num_columns
    total = tl.zeros([ROWS, COLUMNS], dtype=tl.float32)
    for block in range(tl.program_id(1), tl.cdiv(num_rows, ROWS), tl.num_programs(1)):
        rows = (block * ROWS + tl.arange(0, ROWS)).to(tl.int64)
        mask = (rows < num_rows)[:, None] & column_mask[None, :]
        x = tl.load(x_ptr + rows[:, None] * x_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        g = tl.load(g_ptr + rows[:, None] * g_stride + columns[None, :], mask=mask, other=0.0).to(tl.float32)
        normal = x * tl.load(rstd_ptr + rows, mask=rows < num_rows, other=0.0)[:, None]
        if ROUND_FIRST:
            normal = normal.to(x_ptr.dtype.element_ty).to(tl.float32)
        total += g * normal
    tl.store(dw_ptr + tl.program_id(1) * num_columns + columns, tl.sum(total, 0), mask=column_mask)


def rms_norm(
    x: Tensor, w: Tensor | None, eps: float, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """`autopar::rms_norm` (x[..., N], w[N] -> y[..., N], rstd[...]); float64 goes to the reference."""
    if not computes((x, w)) or not x.numel():
        return reference(x, w, eps, offset=offset, round_first=round_first)
    rows = as_rows(x)
    num_rows, num_columns = rows.shape
    y = torch.empty(x.shape, dtype=result_dtype(x.dtype, w, round_first), device=x.device)
    rstd = torch.empty(x.shape[:-1], dtype=torch.float32, device=x.device)
    options = forward_options(num_columns)
    launch(
        rms_norm_forward_kernel, (tiles(num_rows, options["ROWS"]),), x.device,
        rows, _weight(w, rows), y, rstd, rows.stride(0), num_rows, num_columns, eps,
        OFFSET=offset, ROUND_FIRST=round_first, HAS_WEIGHT=w is not None, **options,
    )  # fmt: skip
    return y, rstd


def rms_norm_backward(
    g: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """`autopar::rms_norm_backward`: (dx[..., N], dw[N]); float64 goes to the reference."""
    if not computes((g, x, w)) or not x.numel():
        return reference_backward(g, x, w, rstd, offset=offset, round_first=round_first)
    g_rows, x_rows, rstd = as_rows(g), as_rows(x), rstd.contiguous()
    dx = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    if x.shape[-1] <= MAX_BACKWARD_COLUMNS:
        partial = _backward(g_rows, x_rows, w, rstd, dx, offset, round_first)
    else:
        partial = _wide_backward(g_rows, x_rows, w, rstd, dx, offset, round_first)
    dw = x.new_empty((0,)) if w is None else partial.sum(0).to(w.dtype)
    return dx, dw


def forward_options(num_columns: int) -> dict[str, int | bool]:
    """The tile of the forward for rows of this width."""
    if num_columns > MAX_FORWARD_COLUMNS:
        return {"ROWS": 1, "COLUMNS": WIDE_COLUMNS, "SINGLE": False, "num_warps": num_warps(WIDE_COLUMNS)}
    tile = _tile(num_columns)
    return {**tile, "SINGLE": True, "num_warps": num_warps(tile["ROWS"] * tile["COLUMNS"])}


def backward_options(num_columns: int) -> dict[str, int]:
    """The tile of the backward for rows of this width, at most MAX_BACKWARD_COLUMNS."""
    tile = _tile(num_columns)
    return {**tile, "num_warps": num_warps(tile["ROWS"] * tile["COLUMNS"], most=16)}


def _tile(num_columns: int) -> dict[str, int]:
    columns = power_of_2(num_columns)
    return {"ROWS": max(1, TILE // columns) if columns <= TILE // 2 else 1, "COLUMNS": columns}


def _backward(
    g: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, dx: Tensor, offset: float, round_first: bool
) -> Tensor:
    num_rows, num_columns = x.shape
    options = backward_options(num_columns)
    programs = min(num_programs(x), tiles(num_rows, options["ROWS"]))
    partial = torch.empty((programs, num_columns if w is not None else 0), dtype=torch.float32, device=x.device)
    launch(
        rms_norm_backward_kernel, (programs,), x.device,
        g, x, _weight(w, x), rstd, dx, partial, g.stride(0), x.stride(0), num_rows, num_columns,
        OFFSET=offset, ROUND_FIRST=round_first, HAS_WEIGHT=w is not None, **options,
    )  # fmt: skip
    return partial


def _wide_backward(
    g: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, dx: Tensor, offset: float, round_first: bool
) -> Tensor:
    num_rows, num_columns = x.shape
    launch(
        rms_norm_wide_input_kernel, (num_rows,), x.device,
        g, x, _weight(w, x), rstd, dx, g.stride(0), x.stride(0), num_columns,
        OFFSET=offset, HAS_WEIGHT=w is not None, COLUMNS=WIDE_COLUMNS, num_warps=num_warps(WIDE_COLUMNS),
    )  # fmt: skip
    if w is None:
        return x.new_empty((0,))
    blocks = tiles(num_columns, WEIGHT_COLUMNS)
    splits = min(tiles(num_programs(x), blocks), tiles(num_rows, WEIGHT_ROWS))
    partial = torch.empty((splits, num_columns), dtype=torch.float32, device=x.device)
    launch(
        rms_norm_wide_weight_kernel, (blocks, splits), x.device,
        g, x, rstd, partial, g.stride(0), x.stride(0), num_rows, num_columns,
        ROUND_FIRST=round_first, ROWS=WEIGHT_ROWS, COLUMNS=WEIGHT_COLUMNS, num_warps=4,
    )  # fmt: skip
    return partial


def _weight(w: Tensor | None, x: Tensor) -> Tensor:
    """The weight as the kernel reads it; x in its place where there is none, and it is not read."""
    return x if w is None else w.contiguous()


def compile_specs() -> tuple[CompileSpec, ...]:
    """For compilation ahead of time: heads, a usual width, the widest of one read, and chunks; Llama's form."""
    specs = []
    for dtype in ("bf16", "fp32"):
        for columns in (128, 4096, MAX_FORWARD_COLUMNS, 2 * MAX_FORWARD_COLUMNS):
            specs.append(_spec(rms_norm_forward_kernel, dtype, columns, forward_options(columns)))
        for columns in (128, 4096, MAX_BACKWARD_COLUMNS):
            specs.append(_spec(rms_norm_backward_kernel, dtype, columns, backward_options(columns)))
        wide = {"COLUMNS": WIDE_COLUMNS, "num_warps": num_warps(WIDE_COLUMNS)}
        specs.append(_spec(rms_norm_wide_input_kernel, dtype, MAX_FORWARD_COLUMNS, wide))
        tile = {"ROWS": WEIGHT_ROWS, "COLUMNS": WEIGHT_COLUMNS, "num_warps": 4}
        specs.append(_spec(rms_norm_wide_weight_kernel, dtype, MAX_FORWARD_COLUMNS, tile))
    return tuple(specs)


def _spec(kernel: Any, dtype: str, columns: int, options: Mapping[str, int | bool]) -> CompileSpec:
    pointers = dict.fromkeys(("x_ptr", "w_ptr", "y_ptr", "g_ptr", "dx_ptr"), f"*{dtype}")
    sizes = dict.fromkeys(("x_stride", "g_stride", "num_rows", "num_columns"), "i32")
    types = {**pointers, "rstd_ptr": "*fp32", "dw_ptr": "*fp32", **sizes, "eps": "fp32"}
    values = {"OFFSET": 0.0, "ROUND_FIRST": True, "HAS_WEIGHT": True, **options}
    names = kernel.arg_names
    return CompileSpec(
        name=f"{kernel.__name__.removesuffix('_kernel')} {columns}",
        kernel=kernel,
        signature={name: types[name] for name in names if name in types},
        constexprs={name: values[name] for name in names if name in values},
        num_warps=options["num_warps"],
        num_stages=3,
        aligned=tuple(name for name in names if name in types and name not in ("num_rows", "eps")),
    )
