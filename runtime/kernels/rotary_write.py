"""A token's rotary embedding and its place in the cache in one launch, for CUDA: q, k and v are read once, q' and the
token's rows of the caches written once, as codes where these hold codes.

One program has one head of one position: of queries, of keys, or of values. Every number is rounded where the operators
of torch round it (`operators/rotary.py`, `base/codes.py`), so that results are the same to the bit, but for products of
float32, which torch may add without rounding.

The PyTorch reference is autopar/operators/rotary_write.py.
"""

# Kernels are traced: what Python's types say of blocks is not so.
# pyright: reportArgumentType=false, reportAssignmentType=false, reportGeneralTypeIssues=false

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.rotary_write import rotary_write as plain_write
from autopar.operators.rotary_write import rotary_write_ as plain_write_
from autopar.operators.scaled_dot_product import rows_whole
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.decode_attention import FP8, INT4, INT8, PLAIN
from autopar.runtime.kernels.launch import launch
from autopar.runtime.kernels.rotary import _rounded
from autopar.runtime.kernels.rows import computes, power_of_2

_KINDS = {"": PLAIN, "int8": INT8, "fp8": FP8, "int4": INT4}
_TO_WHOLE: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 · 2^23: added to a float32 below 2^22 and taken away, it rounds to the nearest whole number, halves to even."""


@triton.jit(do_not_specialize=["H", "G", "S", "T"])
def rotary_write_kernel(
    q, k, v, cos, sin, at, out, keys, values, key_scales, value_scales,
    q_b, q_h, q_s, k_b, k_g, k_s, v_b, v_g, v_s, out_b, out_h, out_s, cos_b, cos_s, sin_b, sin_s,
    keys_b, keys_g, keys_t, values_b, values_g, values_t, ks_b, ks_g, ks_t, vs_b, vs_g, vs_t,
    H, G, S, T, half, turn, first, second, tiny,
    HALF: tl.constexpr, VALUE_HALF: tl.constexpr, STORAGE: tl.constexpr,
):  # fmt: skip
    """half: of a head. turn: half of what is rotated of it. first, second: elements of the halves of a value's row.
    tiny: the least scale.
    """
    program = tl.program_id(0)
    head = program % (H + 2 * G)
    position = program // (H + 2 * G) % S
    batch = (program // (H + 2 * G) // S).to(tl.int64)
    columns = tl.arange(0, HALF)
    inside = columns < half
    tables = (cos + batch * cos_b + position * cos_s, sin + batch * sin_b + position * sin_s)
    place = tl.load(at + position)
    is_here = (place >= 0) & (place < T)
    # What several branches would name alike has to be of one type: each names its own.
    if head < H:
        q_row = q + batch * q_b + head.to(tl.int64) * q_h + position * q_s
        q_begin = _rotated(q_row, *tables, columns, inside, turn)
        q_end = _rotated(q_row, *tables, half + columns, inside, turn)
        out_row = out + batch * out_b + head.to(tl.int64) * out_h + position * out_s
        tl.store(out_row + columns, q_begin.to(out.dtype.element_ty), mask=inside)
        tl.store(out_row + half + columns, q_end.to(out.dtype.element_ty), mask=inside)
    elif head < H + G:
        k_head = (head - H).to(tl.int64)
        k_row = k + batch * k_b + k_head * k_g + position * k_s
        k_begin = _rotated(k_row, *tables, columns, inside, turn)
        k_end = _rotated(k_row, *tables, half + columns, inside, turn)
        key_row = keys + batch * keys_b + k_head * keys_g + place * keys_t
        key_scale = key_scales + batch * ks_b + k_head * ks_g + place * ks_t
        mask = inside & is_here
        _put(key_row, key_scale, k_begin, k_end, half, mask, mask, is_here, tiny, columns, STORAGE)
    else:
        v_head = (head - H - G).to(tl.int64)
        value_columns = tl.arange(0, VALUE_HALF)
        value = v + batch * v_b + v_head * v_g + position * v_s
        v_begin = tl.load(value + value_columns, mask=value_columns < first, other=0.0).to(tl.float32)
        v_end = tl.load(value + first + value_columns, mask=value_columns < second, other=0.0).to(tl.float32)
        value_row = values + batch * values_b + v_head * values_g + place * values_t
        value_scale = value_scales + batch * vs_b + v_head * vs_g + place * vs_t
        a_mask = (value_columns < first) & is_here
        b_mask = (value_columns < second) & is_here
        _put(value_row, value_scale, v_begin, v_end, first, a_mask, b_mask, is_here, tiny, value_columns, STORAGE)


@triton.jit
def _rotated(x, cos, sin, columns, inside, turn):
    """These columns of one row in float32: the first 2 · turn rotated and rounded as its type is, others as they are,
    zeros behind the head.
    """
    dtype = x.dtype.element_ty
    own = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    turned = inside & (columns < 2 * turn)
    is_first = columns < turn
    partner = tl.load(x + tl.where(is_first, columns + turn, columns - turn), mask=turned, other=0.0).to(tl.float32)
    along = tl.load(cos + columns, mask=turned, other=0.0).to(tl.float32)
    across = tl.load(sin + columns, mask=turned, other=0.0).to(tl.float32)
    product = _rounded(partner * across, dtype)
    y = _rounded(own * along, dtype) + tl.where(is_first, -product, product)
    return tl.where(turned, _rounded(y, dtype), own)


@triton.jit
def _put(row, scale_at, a, b, half, a_mask, b_mask, is_here, tiny, columns, STORAGE: tl.constexpr):
    """Write the halves of a row, or its codes and their scale, as `Storage.encode` makes them."""
    if STORAGE == PLAIN:
        tl.store(row + columns, a.to(row.dtype.element_ty), mask=a_mask)
        tl.store(row + half + columns, b.to(row.dtype.element_ty), mask=b_mask)
    else:
        LARGEST: tl.constexpr = 127.0 if STORAGE == INT8 else 448.0 if STORAGE == FP8 else 7.0
        most = tl.div_rn(tl.maximum(tl.max(tl.abs(a), 0), tl.max(tl.abs(b), 0)), LARGEST)
        scale = tl.maximum(most, tiny).to(scale_at.dtype.element_ty)
        tl.store(scale_at, scale, mask=is_here)
        a = _step(a, scale.to(tl.float32), LARGEST)
        b = _step(b, scale.to(tl.float32), LARGEST)
        if STORAGE == INT4:
            low = (_whole(a) + 8).to(tl.uint8)
            high = (_whole(b) + 8).to(tl.uint8)
            tl.store(row + columns, low | (high << 4), mask=a_mask)
        elif STORAGE == INT8:
            tl.store(row + columns, _whole(a).to(tl.int8), mask=a_mask)
            tl.store(row + half + columns, _whole(b).to(tl.int8), mask=b_mask)
        else:
            tl.store(row + columns, _e4m3(a), mask=a_mask)
            tl.store(row + half + columns, _e4m3(b), mask=b_mask)


@triton.jit
def _step(x, scale, LARGEST: tl.constexpr):
    return tl.minimum(tl.maximum(tl.div_rn(x, tl.zeros_like(x) + scale), -LARGEST), LARGEST)


@triton.jit
def _whole(x):
    """The nearest whole number, halves to even."""
    return ((x + _TO_WHOLE) - _TO_WHOLE).to(tl.int32)


@triton.jit
def _e4m3(x):
    """The byte of the nearest e4m3 number, halves to even, of at most 448: before 8.9 devices do not convert to it."""
    size = tl.abs(x)
    bits = size.to(tl.int32, bitcast=True)
    normal = ((bits + 0x7FFFF + ((bits >> 20) & 1)) >> 20) - (120 << 3)
    code = tl.where(size < 0.015625, _whole(size * 512.0), normal)
    sign = (x.to(tl.int32, bitcast=True) >> 24) & 128
    return (code | sign).to(tl.uint8)


def rotary_write(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, *, storage: str = "",
) -> list[Tensor]:  # fmt: skip
    """`autopar::rotary_write`; what the kernel does not have (float64, odd heads) goes to the reference."""
    if not _fits(q, k, v, cos, sin, keys, values, key_scales, value_scales, storage):
        return plain_write(q, k, v, cos, sin, keys, values, at, key_scales, value_scales, storage=storage)
    caches = [x.clone() for x in (keys, values, key_scales, value_scales) if x is not None]
    return [_launch(q, k, v, cos, sin, at, caches, storage), *caches]


def rotary_write_(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, *, storage: str = "",
) -> Tensor:  # fmt: skip
    """`autopar::rotary_write_`: the same, in the caches that are given."""
    if not _fits(q, k, v, cos, sin, keys, values, key_scales, value_scales, storage):
        return plain_write_(q, k, v, cos, sin, keys, values, at, key_scales, value_scales, storage=storage)
    caches = [x for x in (keys, values, key_scales, value_scales) if x is not None]
    return _launch(q, k, v, cos, sin, at, caches, storage)


def _fits(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor,
    key_scales: Tensor | None, value_scales: Tensor | None, storage: str,
) -> bool:  # fmt: skip
    stored = STORAGES[storage].dtype if storage else q.dtype
    scales = [x for x in (key_scales, value_scales) if x is not None]
    return (
        computes((q,))
        and all(x.dtype == q.dtype for x in (k, v, cos, sin, *scales))
        and keys.dtype == values.dtype == stored
        and len(scales) == (2 if storage else 0)
        and q.shape[-1] % 2 == 0
        and cos.shape[-1] % 2 == 0
        and (storage != "int4" or v.shape[-1] % 2 == 0)
        and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (keys, values))
        and q.numel() > 0
    )


def _launch(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, at: Tensor, caches: list[Tensor], storage: str
) -> Tensor:  # fmt: skip
    out = torch.empty_like(q)
    target = out if out.stride(-1) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    q, k, v, cos, sin = (rows_whole(x) for x in (q, k, v, cos, sin))
    batch, heads, positions, size = q.shape
    keys, values, *scales = caches
    key_scales, value_scales = scales or (q, q)
    value_size = v.shape[-1]
    first = (value_size + 1) // 2
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "at": at, "out": target, "keys": keys, "values": values,
        "key_scales": key_scales, "value_scales": value_scales,
        **_strides("q", "bhs", q), **_strides("k", "bgs", k), **_strides("v", "bgs", v),
        **_strides("out", "bhs", target), **_table("cos", cos), **_table("sin", sin),
        **_strides("keys", "bgt", keys), **_strides("values", "bgt", values),
        **_strides("ks", "bgt", key_scales), **_strides("vs", "bgt", value_scales),
        "H": heads, "G": k.shape[1], "S": positions, "T": keys.shape[2], "half": size // 2, "turn": cos.shape[-1] // 2,
        "first": first, "second": value_size - first, "tiny": torch.finfo(q.dtype).tiny,
        "HALF": power_of_2(size // 2), "VALUE_HALF": power_of_2(first), "STORAGE": int(_KINDS[storage].value),
    }  # fmt: skip
    programs = batch * positions * (heads + 2 * k.shape[1])
    launch(rotary_write_kernel, programs, q.device, arguments, num_warps=1)
    return out if target is out else out.copy_(target)


def _strides(name: str, dims: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{dim}": x.stride(i) for i, dim in enumerate(dims)}


def _table(name: str, x: Tensor) -> dict[str, int]:
    """Of a table [B|1, S, R]: 0 where all rows of the batch share it."""
    return {f"{name}_b": 0 if x.shape[0] == 1 else x.stride(0), f"{name}_s": x.stride(1)}


def compile_specs() -> tuple[CompileSpec, ...]:
    """For compilation ahead of time: every storage at a usual head size."""
    return tuple(_spec(dtype, storage) for dtype in ("bf16", "fp32") for storage in _KINDS)


def _spec(dtype: str, storage: str) -> CompileSpec:
    kernel = rotary_write_kernel
    constexprs = {"HALF": 64, "VALUE_HALF": 64, "STORAGE": int(_KINDS[storage].value)}
    stored = {"": f"*{dtype}", "int8": "*i8", "fp8": "*u8", "int4": "*u8"}[storage]
    tensors = ("q", "k", "v", "cos", "sin", "out", "key_scales", "value_scales")
    types = {**dict.fromkeys(tensors, f"*{dtype}"), "keys": stored, "values": stored, "at": "*i64", "tiny": "fp32"}
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    aligned = tuple(name for name, kind in signature.items() if kind[0] == "*")
    return CompileSpec(f"rotary_write {storage or 'plain'}", kernel, signature, constexprs, 1, 3, aligned)
