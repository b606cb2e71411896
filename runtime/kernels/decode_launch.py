"""Launching attention of a few queries (`decode_attention.py`): what it takes, how keys are cut, block sizes.

Shape suffixes: B batch, H query heads, G key heads, S queries, T keys, D head size, E head size of the values.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import STORAGES
from autopar.base.errors import AutoparError
from autopar.cost.local_work import FEW_QUERIES
from autopar.operators.attention_options import AttentionOptions
from autopar.operators.key_heads import KeyHeads
from autopar.operators.scaled_dot_product import rows_whole
from autopar.runtime.kernels import decode_attention as kernels
from autopar.runtime.kernels.attention_problem import (
    DTYPES,
    MAX_HEAD_SIZE,
    bias_arguments,
    bias_kind,
    factors,
    heads_inside,
    precision,
    strides,
)
from autopar.runtime.kernels.compile_spec import CompileSpec
from autopar.runtime.kernels.launch import capability, ceil_div, is_interpreted, launch, next_block

MAX_ROWS = 64
"""Rows of one program: more heads that read one key head (`group · S`) are several programs."""
_KINDS = {"": kernels.PLAIN, "int8": kernels.INT8, "fp8": kernels.FP8, "int4": kernels.INT4}


@dataclass(frozen=True, slots=True)
class DecodeConfig:
    """block_n: keys of a step. programs: of one multiprocessor that cuts are to fill. max_registers: of a thread."""

    block_n: int
    num_warps: int = 4
    num_stages: int = 3
    programs: int = 2
    max_registers: int = 255

    def options(self) -> dict[str, int]:
        return {"num_warps": self.num_warps, "num_stages": self.num_stages, "maxnreg": self.max_registers}


@dataclass(frozen=True, slots=True)
class Codes:
    """How keys and values are stored. storage: a name of `base/codes.py`; scales: [B, G, T, 1]."""

    storage: str
    key_scales: Tensor
    value_scales: Tensor


def unfit(
    q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions, codes: Codes | None = None
) -> str | None:  # fmt: skip
    """Why these kernels cannot compute this call; None where they can."""
    queries, keys = q.shape[2], k.shape[2]
    storage = codes.storage if codes else ""
    kind = STORAGES[storage] if storage else None
    stored, per_byte = (kind.dtype, kind.per_byte) if kind else (q.dtype, 1)
    if q.dtype not in DTYPES:
        return f"{q.dtype} is none of float16, bfloat16, float32"
    if not k.dtype == v.dtype == stored:
        return f"keys and values are {k.dtype} and {v.dtype}, not {stored}"
    if q.numel() == 0 or queries > FEW_QUERIES:
        return f"{queries} queries are not from 1 to {FEW_QUERIES}"
    if keys == 0:
        return "there are no keys"
    if max(q.shape[-1], v.shape[-1] * per_byte) > MAX_HEAD_SIZE or v.shape[-1] == 0:
        return f"head sizes of {q.shape[-1]} and {v.shape[-1] * per_byte} are not from 1 to {MAX_HEAD_SIZE}"
    if k.shape[-1] * per_byte != q.shape[-1]:
        return f"keys of {k.shape[-1] * per_byte} elements are not the queries' {q.shape[-1]}"
    if codes is not None and not codes.key_scales.shape[-1] == codes.value_scales.shape[-1] == 1:
        return "scales are not one of a head and token"
    if not (options.scale > 0 and math.isfinite(options.scale)):
        return f"the scale {options.scale} is not positive"
    if options.softcap < 0 or not math.isfinite(options.softcap):
        return f"the softcap {options.softcap} is negative"
    if options.dropout_p or options.documents is not None:
        return "dropout and documents are not of a few queries"
    if max(len(options.query_starts), len(options.key_starts)) > 1:
        return "queries and keys are several runs"
    if q.device.type == "cuda" and capability(q.device) < 80:
        return f"compute capability {capability(q.device) / 10} is below 8.0"
    starts = (*options.query_starts, *options.key_starts, options.prefix)
    if max(starts) + max(queries, keys) + max(options.left or 0, options.right or 0) >= 2**31:
        return "positions do not fit into 32 bits"
    return None


def decode_attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None = None, keys: Tensor | None = None,
    sinks: Tensor | None = None, *, options: AttentionOptions, codes: Codes | None = None, pages: Tensor | None = None,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """(out[B, H, S, E] laid out [B, S, H, E], lse[B, H, S] float32) of `autopar.operators.attention`.

    codes: how k and v, [B, G, T, D] and [B, G, T, E] (int4: of half of them), are stored.
    pages: int32[B, n], the pages that hold a row's keys, in order; k, v and scales are then [pages, G, P, …] of pages
    of P positions each, and T is n · P.

    Raises:
        AutoparError: what `unfit` names.
        ValueError: heads that do not fit together.
    """
    storage = codes.storage if codes else ""
    scales = (codes.key_scales, codes.value_scales) if codes else ()
    reason = unfit(q, k, v, options, codes)
    if reason:
        raise AutoparError("The kernels for a few queries cannot compute this call", values=reason,
                           remedy="Call autopar.operators.attention, which takes any")  # fmt: skip
    q, k, v = rows_whole(q), rows_whole(k), rows_whole(v)
    batch, heads, queries, _ = q.shape
    num_keys = k.shape[2] if pages is None else pages.shape[1] * k.shape[2]
    read = KeyHeads.read(heads, k.shape[1], options.group, options.first)
    group = options.group or max(heads // max(k.shape[1], 1), 1)
    rows = min(MAX_ROWS, next_block(group * queries))
    rich = options.softcap > 0 or bias is not None or pages is not None
    config = choose(q, rows, storage, rich)
    base = batch * len(read.counts) * ceil_div(group * queries, rows)
    cuts = num_cuts(base, num_keys, config, q.device)
    value_size = v.shape[-1] * (2 if storage == "int4" else 1)
    out = heads_inside((batch, heads, queries, value_size), q)
    lse = torch.empty((batch, heads, queries), dtype=torch.float32, device=q.device)
    acc, m, total = out, lse, lse
    if cuts > 1:
        acc = torch.empty((cuts, batch, heads, queries, value_size), dtype=torch.float32, device=q.device)
        m, total = (torch.empty(acc.shape[:4], dtype=torch.float32, device=q.device) for _ in range(2))
    key_scales, value_scales = scales or (q, q)
    arguments: dict[str, Any] = {
        "q": q, "k": k, "v": v, "key_scales": key_scales, "value_scales": value_scales,
        "keys": q if keys is None else rows_whole(keys).view(torch.uint8), "pages": q if pages is None else pages,
        "sinks": q if sinks is None else sinks.contiguous(), "out": out, "lse": lse, "acc_out": acc,
        "m_out": m, "total_out": total, "B": batch, "H": heads, "S": queries, "T": num_keys,
        "READ": len(read.counts), "group": group, "first": options.first, "left": options.left or 0,
        "right": options.right or 0, "prefix": options.prefix, "query_start": _start(options.query_starts),
        "key_start": _start(options.key_starts), "keys_b": 0 if keys is None else keys.stride(0),
        "pages_b": 0 if pages is None else pages.stride(0),
        **strides("q", "bhs", q), **strides("k", "bgt", k), **strides("v", "bgt", v),
        **_scale_strides("ks", scales[:1]), **_scale_strides("vs", scales[1:]),
        **factors(options), **bias_arguments(bias, q, num_keys),
    }  # fmt: skip
    switches = {
        "D": k.shape[-1], "E": v.shape[-1], "BLOCK_D": next_block(k.shape[-1]), "BLOCK_E": next_block(v.shape[-1]),
        "ROWS": rows, "BLOCK_N": config.block_n, "CUTS": cuts, "SCAN": min(SCAN, next_block(num_keys)),
        "PAGE": 0 if pages is None else k.shape[2], "STORAGE": int(_KINDS[storage].value), "BIAS": bias_kind(bias),
        "SHARED_BIAS": bias is not None and bias.shape[1] == 1, "SOFTCAP": options.softcap > 0,
        "KEYS": keys is not None, "SINKS": sinks is not None, "LEFT": options.left is not None,
        "RIGHT": options.right is not None, "PREFIX": not options.sees_all and options.prefix > 0,
        "PRECISION": precision(q.dtype),
    }  # fmt: skip
    launch(kernels.decode_kernel, base * cuts, q.device, {**arguments, **switches}, **config.options())
    if cuts == 1:
        return out, lse
    merging = {
        "acc_in": acc, "m_in": m, "total_in": total, "sinks": arguments["sinks"], "out": out, "lse": lse,
        "ROWS_ALL": batch * heads * queries, "H": heads, "S": queries, "E": value_size,
        "BLOCK_E": next_block(value_size), "CUTS": cuts, "SINKS": sinks is not None,
    }  # fmt: skip
    launch(kernels.merge_kernel, batch * heads * queries, q.device, merging, num_warps=1)
    return out, lse


def choose(q: Tensor, rows: int, storage: str, rich: bool) -> DecodeConfig:
    """Block sizes of this call."""
    if is_interpreted(kernels.decode_kernel):
        return INTERPRETED
    return default_config(q.dtype, next_block(q.shape[-1]), rows, storage, rich)


def default_config(dtype: torch.dtype, width: int, rows: int, storage: str, rich: bool) -> DecodeConfig:
    """By registers, not yet by time: the largest blocks that spill nothing at head sizes 64 and 128 by Triton 3.7.1.

    width: the head size, rounded up to a power of two. rich: scores are changed one by one, or keys lie in pages.
    """
    if dtype == torch.float32:
        return DecodeConfig(16, num_warps=8, num_stages=1)
    if rows * width > 4096:
        return DecodeConfig(16 if storage else 32)
    return DecodeConfig(32 if width > 128 or (storage and rich and width > 64) else 64)


INTERPRETED = DecodeConfig(16)
INTERPRETED_CUTS = 3


def num_cuts(programs: int, num_keys: int, config: DecodeConfig, device: torch.device) -> int:
    """Into how many parts the keys of each of `programs` are cut: so many that all multiprocessors have work; a power
    of two, so that few kernels are compiled. On the CPU `INTERPRETED_CUTS`.
    """
    blocks = ceil_div(num_keys, config.block_n)
    if device.type != "cuda":
        return min(INTERPRETED_CUTS, blocks)
    wanted = ceil_div(config.programs * _multiprocessors(device.index or torch.cuda.current_device()), programs)
    return min(1 << (wanted - 1).bit_length(), MAX_CUTS, 1 << (blocks - 1).bit_length())


SCAN = 1024
"""Elements of a mask that a program looks at at a time."""
MAX_CUTS = 64
"""More take longer to merge than they save."""


@lru_cache
def _multiprocessors(index: int) -> int:
    return int(torch.cuda.get_device_properties(index).multi_processor_count)


def _start(starts: Any) -> int:
    return int(starts[0]) if len(starts) else 0


def _scale_strides(name: str, scales: tuple[Tensor, ...]) -> dict[str, int]:
    return strides(name, "bgt", scales[0]) if scales else dict.fromkeys((f"{name}_b", f"{name}_g", f"{name}_t"), 0)


# --------------------------------------------------------------------------------------------------- ahead of time

_TYPES = {torch.bfloat16: "bf16", torch.float16: "fp16", torch.float32: "fp32"}
_FEATURES: dict[str, dict[str, Any]] = {
    "token": {"KEYS": True},
    "token of many": {"KEYS": True, "SINKS": True, "CUTS": 1},
    "plain window": {"LEFT": True, "RIGHT": True},
    "mask, sinks": {"BIAS": int(kernels.BOOL_BIAS.value), "SHARED_BIAS": True, "SINKS": True},
    "everything": {
        **dict.fromkeys(("KEYS", "SOFTCAP", "LEFT", "RIGHT", "PREFIX", "SINKS"), True), "BIAS": 1, "PAGE": 64,
    },
}  # fmt: skip


def compile_specs() -> tuple[CompileSpec, ...]:
    """For compilation ahead of time: each storage and usual head size, with the features of programs of a token."""
    found = [
        _spec(dtype, size, storage, label, rows)
        for dtype in (torch.bfloat16, torch.float32)
        for size in (64, 128)
        for storage in _KINDS
        for label in _FEATURES
        for rows in ((16, 64) if label == "token" else (16,))
        if label == "everything" or (dtype == torch.bfloat16 and (label.startswith("token") or not storage))
    ]
    return (*found, *(_merge_spec(dtype, size) for dtype in (torch.bfloat16, torch.float32) for size in (64, 128)))


def _spec(dtype: torch.dtype, size: int, storage: str, label: str, rows: int) -> CompileSpec:
    config = default_config(dtype, size, rows, storage, label == "everything")
    width = size // (2 if storage == "int4" else 1)
    given = {
        "D": width, "E": width, "BLOCK_D": next_block(width), "BLOCK_E": next_block(width), "ROWS": rows,
        "BLOCK_N": config.block_n, "CUTS": 16, "SCAN": SCAN, "PAGE": 0, "STORAGE": int(_KINDS[storage].value),
        "BIAS": 0, "PRECISION": "ieee", **_FEATURES[label],
    }  # fmt: skip
    kernel = kernels.decode_kernel
    constexprs = {p.name: given.get(p.name, False) for p in kernel.params if p.is_constexpr}
    if given["BIAS"]:
        constexprs["bias_t"] = 1
    if storage:
        constexprs |= {"ks_t": 1, "vs_t": 1}
    stored = {"": f"*{_TYPES[dtype]}", "int8": "*i8", "fp8": "*u8", "int4": "*u8"}[storage]
    types = {
        **dict.fromkeys(("q", "key_scales", "value_scales", "bias", "sinks", "out"), f"*{_TYPES[dtype]}"),
        "k": stored, "v": stored,
        "keys": "*u8", "pages": "*i32", **dict.fromkeys(("acc_out", "m_out", "total_out", "lse"), "*fp32"),
        **dict.fromkeys(("multiplier", "cap"), "fp32"),
    }  # fmt: skip
    if given["BIAS"] == int(kernels.BOOL_BIAS.value):
        types["bias"] = "*u8"
    signature = {name: types.get(name, "i32") for name in kernel.arg_names if name not in constexprs}
    aligned = tuple(name for name, kind in signature.items() if kind[0] == "*" or name in _ALIGNED)
    name = f"decode {storage or 'plain'} {label}{'' if rows == 16 else f' {rows} rows'}"
    return CompileSpec(
        name,
        kernel,
        signature,
        constexprs,
        config.num_warps,
        config.num_stages,
        aligned,
        max_registers=config.max_registers,
    )


_ALIGNED = ("q_b", "q_h", "q_s", "k_b", "k_g", "k_t", "v_b", "v_g", "v_t", "ks_b", "ks_g", "vs_b", "vs_g")


def _merge_spec(dtype: torch.dtype, size: int) -> CompileSpec:
    kernel = kernels.merge_kernel
    constexprs = {"E": size, "BLOCK_E": size, "CUTS": 16, "SINKS": True}
    types = {**dict.fromkeys(("acc_in", "m_in", "total_in", "lse"), "*fp32"), "ROWS_ALL": "i32", "H": "i32", "S": "i32"}
    signature = {
        name: types.get(name, f"*{_TYPES[dtype]}") for name in kernel.arg_names if name not in constexprs
    }  # fmt: skip
    aligned = tuple(name for name, kind in signature.items() if kind[0] == "*")
    return CompileSpec("decode merge", kernel, signature, constexprs, 1, 3, aligned)
