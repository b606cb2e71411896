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

from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.operators.rotary_write import cache_write as plain_cache_write
from autopar.operators.rotary_write import cache_write_ as plain_cache_write_
from autopar.operators.rotary_write import rotary_write as plain_write
from autopar.operators.rotary_write import rotary_write_ as plain_write_
from autopar.operators.scaled_dot_product import rows_whole
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.decode_attention import FP8, INT4, INT8, PLAIN
from autopar.runtime.kernels.launch import launch
from autopar.runtime.kernels.rotary import _rounded
from autopar.runtime.kernels.rows import computes, power_of_2

_KINDS = {"": PLAIN, "int8": INT8, "fp8": FP8, "int4": INT4}
HALVES, NEIGHBOURS = tl.constexpr(0), tl.constexpr(1)
"""Which elements of a row are rotated as a pair: (i, i + turn), or (2i, 2i + 1)."""
_TO_WHOLE: tl.constexpr = tl.constexpr(12582912.0)
"""1.5 · 2^23: added to a float32 below 2^22 and taken away, it rounds to the nearest whole number, halves to even."""


@triton.jit(do_not_specialize=["H", "G", "S", "T", "start"])
def rotary_write_kernel(
    q, k, v, cos, sin, at, out, keys, values, key_scales, value_scales,
    q_b, q_h, q_s, k_b, k_g, k_s, v_b, v_g, v_s, out_b, out_h, out_s, cos_b, cos_s, sin_b, sin_s,
    keys_b, keys_g, keys_t, values_b, values_g, values_t, ks_b, ks_g, ks_t, vs_b, vs_g, vs_t,
    H, G, S, T, start, half, turn, first, second, tiny,
    HALF: tl.constexpr, VALUE_HALF: tl.constexpr, STORAGE: tl.constexpr, PAIRS: tl.constexpr, TABLES: tl.constexpr,
    WIDE: tl.constexpr,
):  # fmt: skip
    """start: the position at which caches begin. half: of a head. turn: half of what is rotated of it; 0: nothing is,
    and without queries (H = 0) keys are written as they are. first, second: elements of the halves of a value's row.
    tiny: the least scale. PAIRS: HALVES or NEIGHBOURS. TABLES: whether they are `turn` wide, not twice that. WIDE:
    whether products are of float32 where q and k are of a half type.
    """
    program = tl.program_id(0)
    head = program % (H + 2 * G)
    position = program // (H + 2 * G) % S
    batch = (program // (H + 2 * G) // S).to(tl.int64)
    columns = tl.arange(0, HALF)
    inside = columns < half
    tables = (cos + batch * cos_b + position * cos_s, sin + batch * sin_b + position * sin_s)
    place = tl.load(at + position) - start
    is_here = (place >= 0) & (place < T)
    # What several branches would name alike has to be of one type: each names its own.
    if head < H:
        q_row = q + batch * q_b + head.to(tl.int64) * q_h + position * q_s
        q_begin = _rotated(q_row, *tables, columns, inside, turn, PAIRS, TABLES, WIDE)
        q_end = _rotated(q_row, *tables, half + columns, inside, turn, PAIRS, TABLES, WIDE)
        out_row = out + batch * out_b + head.to(tl.int64) * out_h + position * out_s
        tl.store(out_row + columns, q_begin.to(out.dtype.element_ty), mask=inside)
        tl.store(out_row + half + columns, q_end.to(out.dtype.element_ty), mask=inside)
    elif head < H + G:
        k_head = (head - H).to(tl.int64)
        k_row = k + batch * k_b + k_head * k_g + position * k_s
        k_begin = _rotated(k_row, *tables, columns, inside, turn, PAIRS, TABLES, WIDE)
        k_end = _rotated(k_row, *tables, half + columns, inside, turn, PAIRS, TABLES, WIDE)
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
def _rotated(x, cos, sin, columns, inside, turn, PAIRS: tl.constexpr, TABLES: tl.constexpr, WIDE: tl.constexpr):
    """These columns of one row in float32: the first 2 · turn rotated and rounded as its type is, others as they are,
    zeros behind the head.
    """
    dtype = x.dtype.element_ty
    own = tl.load(x + columns, mask=inside, other=0.0).to(tl.float32)
    turned = inside & (columns < 2 * turn)
    if PAIRS == NEIGHBOURS:
        is_first = columns % 2 == 0
        pair = columns // 2
        partner_at = tl.where(is_first, columns + 1, columns - 1)
    else:
        is_first = columns < turn
        pair = tl.where(is_first, columns, columns - turn)
        partner_at = tl.where(is_first, columns + turn, columns - turn)
    partner = tl.load(x + partner_at, mask=turned, other=0.0).to(tl.float32)
    table_at = pair if TABLES else columns
    along = own * tl.load(cos + table_at, mask=turned, other=0.0).to(tl.float32)
    across = partner * tl.load(sin + table_at, mask=turned, other=0.0).to(tl.float32)
    if not WIDE:
        along = _rounded(along, dtype)
        across = _rounded(across, dtype)
    y = along + tl.where(is_first, -across, across)
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
    interleaved: bool = False, half_tables: bool = False, in_float32: bool = False,
) -> list[Tensor]:  # fmt: skip
    """`autopar::rotary_write`; what the kernel does not have (float64, odd heads) goes to the reference."""
    turn = Turn(q, cos, sin, interleaved, half_tables, in_float32)
    if not _fits(k, v, keys, values, key_scales, value_scales, storage, turn):
        said = {"interleaved": interleaved, "half_tables": half_tables, "in_float32": in_float32}
        return plain_write(q, k, v, cos, sin, keys, values, at, key_scales, value_scales, storage=storage, **said)
    caches = [x.clone() for x in (keys, values, key_scales, value_scales) if x is not None]
    return [_launch(k, v, at, caches, storage, turn), *caches]


def rotary_write_(
    q: Tensor, k: Tensor, v: Tensor, cos: Tensor, sin: Tensor, keys: Tensor, values: Tensor, at: Tensor,
    key_scales: Tensor | None = None, value_scales: Tensor | None = None, *, storage: str = "",
    interleaved: bool = False, half_tables: bool = False, in_float32: bool = False,
) -> Tensor:  # fmt: skip
    """`autopar::rotary_write_`: the same, in the caches that are given."""
    turn = Turn(q, cos, sin, interleaved, half_tables, in_float32)
    if not _fits(k, v, keys, values, key_scales, value_scales, storage, turn):
        said = {"interleaved": interleaved, "half_tables": half_tables, "in_float32": in_float32}
        return plain_write_(q, k, v, cos, sin, keys, values, at, key_scales, value_scales, storage=storage, **said)
    caches = [x for x in (keys, values, key_scales, value_scales) if x is not None]
    return _launch(k, v, at, caches, storage, turn)


def cache_write(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, *, storage: str = "", start: int | None = None,
) -> list[Tensor]:  # fmt: skip
    """`autopar::cache_write`."""
    if not _fits(k, v, keys, values, key_scales, value_scales, storage):
        return plain_cache_write(k, v, keys, values, at, key_scales, value_scales, storage=storage, start=start)
    caches = [x.clone() for x in (keys, values, key_scales, value_scales) if x is not None]
    _launch(k, v, at, caches, storage, start=start)
    return caches


def cache_write_(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, at: Tensor, key_scales: Tensor | None = None,
    value_scales: Tensor | None = None, *, storage: str = "", start: int | None = None,
) -> None:  # fmt: skip
    """`autopar::cache_write_`: the same, in the caches that are given."""
    if not _fits(k, v, keys, values, key_scales, value_scales, storage):
        return plain_cache_write_(k, v, keys, values, at, key_scales, value_scales, storage=storage, start=start)
    _launch(k, v, at, [x for x in (keys, values, key_scales, value_scales) if x is not None], storage, start=start)
    return None


@dataclass(frozen=True, slots=True)
class Turn:
    """Queries, and how they and keys are rotated."""

    q: Tensor
    cos: Tensor
    sin: Tensor
    interleaved: bool = False
    half_tables: bool = False
    in_float32: bool = False

    @property
    def pairs(self) -> int:
        """How many of a head are rotated."""
        return self.cos.shape[-1] if self.half_tables else self.cos.shape[-1] // 2

    def fits(self, dtype: torch.dtype) -> bool:
        """Whether the kernel has it, of keys of this type."""
        types = (dtype, torch.float32) if self.in_float32 else (dtype,)
        is_even = self.half_tables or self.cos.shape[-1] % 2 == 0
        return is_even and self.q.dtype == dtype and self.cos.dtype == self.sin.dtype and self.cos.dtype in types


def _fits(
    k: Tensor, v: Tensor, keys: Tensor, values: Tensor, key_scales: Tensor | None, value_scales: Tensor | None,
    storage: str, turn: Turn | None = None,
) -> bool:  # fmt: skip
    stored = STORAGES[storage].dtype if storage else k.dtype
    scales = [x for x in (key_scales, value_scales) if x is not None]
    return (
        computes((k,))
        and all(x.dtype == k.dtype for x in (v, *scales))
        and (turn is None or turn.fits(k.dtype))
        and keys.dtype == values.dtype == stored
        and len(scales) == (2 if storage else 0)
        and k.shape[-1] % 2 == 0
        and (storage != "int4" or v.shape[-1] % 2 == 0)
        and all(x.stride(-1) == 1 or x.shape[-1] == 1 for x in (keys, values))
        and k.numel() > 0
    )


def _launch(
    k: Tensor, v: Tensor, at: Tensor, caches: list[Tensor], storage: str, turn: Turn | None = None,
    start: int | None = None,
) -> Tensor:  # fmt: skip
    """One program for each head of queries, keys and values; queries as they are rotated, where there are some."""
    k, v = rows_whole(k), rows_whole(v)
    q, cos, sin = (k, k[:, 0], k[:, 0]) if turn is None else map(rows_whole, (turn.q, turn.cos, turn.sin))
    out = k if turn is None else torch.empty_like(turn.q)
    target = out if out.stride(-1) == 1 else torch.empty(q.shape, dtype=q.dtype, device=q.device)
    batch, kv_heads, positions, size = k.shape
    heads = 0 if turn is None else q.shape[1]
    keys, values, *scales = caches
    key_scales, value_scales = scales or (k, k)
    value_size = v.shape[-1]
    first = (value_size + 1) // 2
    pairs = NEIGHBOURS if turn is not None and turn.interleaved else HALVES
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "cos": cos, "sin": sin, "at": at, "out": target, "keys": keys, "values": values,
        "key_scales": key_scales, "value_scales": value_scales,
        **_strides("q", "bhs", q), **_strides("k", "bgs", k), **_strides("v", "bgs", v),
        **_strides("out", "bhs", target), **_table("cos", cos), **_table("sin", sin),
        **_strides("keys", "bgt", keys), **_strides("values", "bgt", values),
        **_strides("ks", "bgt", key_scales), **_strides("vs", "bgt", value_scales),
        "H": heads, "G": kv_heads, "S": positions, "T": keys.shape[2], "start": start or 0, "half": size // 2,
        "turn": 0 if turn is None else turn.pairs, "first": first, "second": value_size - first,
        "tiny": torch.finfo(k.dtype).tiny, "HALF": power_of_2(size // 2), "VALUE_HALF": power_of_2(first),
        "STORAGE": int(_KINDS[storage].value), "PAIRS": int(pairs.value),
        "TABLES": turn is not None and turn.half_tables, "WIDE": turn is not None and turn.in_float32,
    }  # fmt: skip
    programs = batch * positions * (heads + 2 * kv_heads)
    launch(rotary_write_kernel, programs, k.device, arguments, num_warps=1)
    return out if target is out else out.copy_(target)


def _strides(name: str, dims: str, x: Tensor) -> dict[str, int]:
    return {f"{name}_{dim}": x.stride(i) for i, dim in enumerate(dims)}


def _table(name: str, x: Tensor) -> dict[str, int]:
    """Of a table [B|1, S, R]: 0 where all rows of the batch share it."""
    return {f"{name}_b": 0 if x.shape[0] == 1 else x.stride(0), f"{name}_s": x.stride(1)}


def compile_specs() -> tuple[CompileSpec, ...]:
    """For compilation ahead of time: every storage at a usual head size, and every way in which rows are rotated."""
    stored = tuple(_spec(dtype, storage) for dtype in ("bf16", "fp32") for storage in _KINDS)
    ways = (
        _spec("bf16", "", PAIRS=NEIGHBOURS, TABLES=True), _spec("bf16", "", TABLES=True),
        _spec("bf16", "", table="fp32", WIDE=True), _spec("bf16", "", PAIRS=NEIGHBOURS, WIDE=True),
    )  # fmt: skip
    return (*stored, *ways)


def _spec(dtype: str, storage: str, table: str = "", **ways: Any) -> CompileSpec:
    kernel = rotary_write_kernel
    said = {"PAIRS": HALVES, "TABLES": False, "WIDE": False, **ways}
    pairs, *flags = (int(getattr(value, "value", value)) for value in said.values())
    constexprs = {"HALF": 64, "VALUE_HALF": 64, "STORAGE": int(_KINDS[storage].value)}
    constexprs |= {"PAIRS": pairs, "TABLES": bool(flags[0]), "WIDE": bool(flags[1])}
    stored = {"": f"*{dtype}", "int8": "*i8", "fp8": "*u8", "int4": "*u8"}[storage]
    tensors = ("q", "k", "v", "cos", "sin", "out", "key_scales", "value_scales")
    types = {**dict.fromkeys(tensors, f"*{dtype}"), "keys": stored, "values": stored, "at": "*i64", "tiny": "fp32"}
    types |= dict.fromkeys(("cos", "sin"), f"*{table or dtype}")
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    aligned = tuple(name for name, kind in signature.items() if kind[0] == "*")
    told = [
        *(["neighbours"] if pairs else []),
        *(["half tables"] if flags[0] else []),
        *(["float32"] if flags[1] else []),
    ]
    name = " ".join(["rotary_write", storage or "plain", *told])
    return CompileSpec(name, kernel, signature, constexprs, 1, 3, aligned)
