"""What all attention kernels are told about one call: the tensors as they lie, the options as numbers and switches.

Shape suffixes: B batch, H query heads, G key heads, S queries, T keys, D head size, E head size of the values.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.operators.attention_options import AttentionOptions
from autopar.operators.key_heads import KeyHeads
from autopar.operators.positional import drop_threshold
from autopar.operators.scaled_dot_product import rows_whole
from autopar.operators.visibility import positions_of
from autopar.runtime.kernels import masks
from autopar.runtime.kernels.launch import capability, ceil_div, int32_tensor, launch, next_block

DTYPES = (torch.float16, torch.bfloat16, torch.float32)
MAX_HEAD_SIZE = 256


def supports(q: Tensor, k: Tensor, v: Tensor, options: AttentionOptions) -> str | None:
    """Why the kernels cannot compute this call; None where they can."""
    if not q.dtype == k.dtype == v.dtype:
        return f"queries, keys and values are {q.dtype}, {k.dtype} and {v.dtype}, not of one type"
    if q.dtype not in DTYPES:
        return f"{q.dtype} is none of float16, bfloat16, float32"
    if max(q.shape[-1], v.shape[-1]) > MAX_HEAD_SIZE or min(q.shape[-1], v.shape[-1]) == 0:
        return f"head sizes of {q.shape[-1]} and {v.shape[-1]} are not from 1 to {MAX_HEAD_SIZE}"
    if not (options.scale > 0 and math.isfinite(options.scale)):
        return f"the scale {options.scale} is not positive"
    if options.softcap < 0 or not math.isfinite(options.softcap):
        return f"the softcap {options.softcap} is negative"
    if q.device.type == "cuda" and capability(q.device) < 80:
        return f"compute capability {capability(q.device) / 10} is below 8.0"
    ends = [max((start + length for start, length in runs), default=0) for runs in (
        options.query_runs(q.shape[2]), options.key_runs(k.shape[2]))]  # fmt: skip
    if max(*ends, options.prefix) + max(options.left or 0, options.right or 0) >= 2**31:
        return "positions do not fit into 32 bits"
    return None


@dataclass(frozen=True, slots=True)
class AttentionProblem:
    """Arguments by the names the kernels give them, and the numbers that size their grids.

    arguments: tensors and numbers; switches: what is compiled in; rows: q, k, v as the kernels read them.
    """

    batch: int
    heads: int
    kv_heads: int
    queries: int
    keys: int
    query_runs: int
    key_runs: int
    arguments: dict[str, Any]
    switches: dict[str, Any]
    rows: tuple[Tensor, Tensor, Tensor]

    @staticmethod
    def build(
        q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, sinks: Tensor | None,
        seed: Tensor | None, options: AttentionOptions,
    ) -> AttentionProblem:  # fmt: skip
        """Raises AutoparError for what the kernels cannot do, and for shapes that do not fit."""
        reason = supports(q, k, v, options)
        if reason:
            raise AutoparError("The attention kernels cannot compute this call", values=reason,
                               remedy="Call autopar.operators.attention, which takes any")  # fmt: skip
        if not options.global_shape:
            options = replace(options, global_shape=(*q.shape[:3], k.shape[2]))
        q, k, v = rows_whole(q), rows_whole(k), rows_whole(v)
        batch, heads, queries, head_size = q.shape
        kv_heads, num_keys = k.shape[1], k.shape[2]
        KeyHeads.read(heads, kv_heads, options.group, options.first)  # raises where heads do not fit
        query_runs, key_runs = options.query_runs(queries), options.key_runs(num_keys)
        arguments: dict[str, Any] = {
            "q": q, "k": k, "v": v, "H": heads, "G": kv_heads, "S": queries, "T": num_keys,
            "group": options.group or max(heads // max(kv_heads, 1), 1), "first": options.first,
            "left": options.left or 0, "right": options.right or 0, "prefix": options.prefix,
            "query_starts": _starts(query_runs, q.device), "key_starts": _starts(key_runs, q.device),
            **strides("q", "bhs", q), **strides("k", "bgt", k), **strides("v", "bgt", v),
            **factors(options), **bias_arguments(bias, q, num_keys), **_dropout(q, seed, options),
            **_key_mask(keys, k, len(key_runs)), **_documents(q, options, len(query_runs), len(key_runs)),
            "sinks": q if sinks is None else sinks.contiguous(),
        }  # fmt: skip
        is_prefixed = not options.sees_all and options.prefix > 0
        switches = {
            "D": head_size, "E": v.shape[-1], "BLOCK_D": next_block(head_size), "BLOCK_E": next_block(v.shape[-1]),
            "QUERY_RUNS": len(query_runs), "KEY_RUNS": len(key_runs), "SOFTCAP": options.softcap > 0,
            "BIAS": bias_kind(bias), "KEYS": keys is not None, "SINKS": sinks is not None,
            "DROPOUT": options.dropout_p > 0, "LEFT": options.left is not None, "RIGHT": options.right is not None,
            "PREFIX": is_prefixed, "DOCUMENTS": options.documents is not None, "PRECISION": precision(q.dtype),
        }  # fmt: skip
        return AttentionProblem(
            batch, heads, kv_heads, queries, num_keys, len(query_runs), len(key_runs), arguments, switches, (q, k, v)
        )

    def query_blocks(self, rows: int) -> int:
        """Blocks of so many queries, none of which holds parts of two runs."""
        return self.query_runs * ceil_div(self.queries // self.query_runs, rows)

    def key_blocks(self, columns: int) -> int:
        """Blocks of so many keys, none of which holds parts of two runs."""
        return self.key_runs * ceil_div(self.keys // self.key_runs, columns)

    def query_spans(self) -> Tensor:
        """Where the documents of a block of keys lie among the queries (`document_extents`); any tensor without any."""
        own, others = self.arguments["key_documents"], self.arguments["documents"]
        return document_extents(own, others, self.key_runs, self.query_runs) if self.switches["DOCUMENTS"] else own

    @property
    def is_plain(self) -> bool:
        """Whether one run of queries meets one of keys, and at most a causal mask says what is seen."""
        features = ("SOFTCAP", "BIAS", "KEYS", "SINKS", "DROPOUT", "LEFT", "PREFIX", "DOCUMENTS")
        return self.query_runs == self.key_runs == 1 and not any(self.switches[name] for name in features)


_RICH = ("SOFTCAP", "BIAS", "DROPOUT")


def is_rich(switches: Mapping[str, Any]) -> bool:
    """Whether scores are changed or dropped one by one: what takes many registers."""
    return any(switches.get(name) for name in _RICH)


def is_crowded(switches: Mapping[str, Any]) -> bool:
    """Whether more is to be known of a score than its place in a causal window, or one thing done to it.

    That is padding, documents, a prefix, runs, or two of bias, soft-cap and dropout.
    """
    runs = max(switches.get("QUERY_RUNS", 1), switches.get("KEY_RUNS", 1))
    limited = any(switches.get(name) for name in ("KEYS", "DOCUMENTS", "PREFIX"))
    return runs > 1 or limited or sum(bool(switches.get(n)) for n in _RICH) > 1


def strides(name: str, dims: str, x: Tensor) -> dict[str, int]:
    """The strides of x as the arguments <name>_<dim>."""
    return {f"{name}_{dim}": x.stride(i) for i, dim in enumerate(dims)}


def precision(dtype: torch.dtype) -> str:
    """How products of float32 are taken: exactly, unless torch was told that less will do."""
    return "tf32" if dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest" else "ieee"


def bias_kind(bias: Tensor | None) -> int:
    """What kernels call BIAS."""
    kind = masks.NO_BIAS if bias is None else masks.BOOL_BIAS if bias.dtype == torch.bool else masks.FLOAT_BIAS
    return int(kind.value)


def heads_inside(shape: Sequence[int], like: Tensor) -> Tensor:
    """An empty tensor of shape [B, H, S, D], laid out as [B, S, H, D]."""
    b, h, s, d = shape
    return like.new_empty((b, s, h, d)).transpose(1, 2)


def _starts(runs: list[tuple[int, int]], device: torch.device) -> int | Tensor:
    return runs[0][0] if len(runs) == 1 else int32_tensor(tuple(start for start, _ in runs), device)


def factors(options: AttentionOptions) -> dict[str, float]:
    """multiplier of the products, cap of their tanh (units of log2), the scale of the gradients."""
    log2_e = float(masks.LOG2_E.value)
    factor = options.scale / options.softcap if options.softcap else options.scale * log2_e
    return {"multiplier": factor, "cap": options.softcap * log2_e, "scale": options.scale}


def bias_arguments(bias: Tensor | None, q: Tensor, num_keys: int) -> dict[str, Any]:
    """The bias, bools as bytes, and its strides over [B, H, S, T]: 0 where a dim is shared."""
    if bias is None:
        return {"bias": q, **dict.fromkeys(("bias_b", "bias_h", "bias_s", "bias_t"), 0)}
    if bias.dtype == torch.bool:
        bias = bias.view(torch.uint8)
    bias = bias.expand(*q.shape[:3], num_keys)
    return {"bias": bias, **strides("bias", "bhst", bias)}


def _dropout(q: Tensor, seed: Tensor | None, options: AttentionOptions) -> dict[str, Any]:
    """The state of the generator, and per query the number of its row in the whole tensor (int64)."""
    if options.dropout_p <= 0:
        return {"dropout_state": q, "dropout_rows": q, "threshold": 0, "kept_factor": 1.0}
    if seed is None:
        raise AutoparError("Dropout has no seed", values=f"dropout_p={options.dropout_p}",
                           remedy="Give an int64 scalar tensor as seed")  # fmt: skip
    p = min(options.dropout_p, 1.0)
    return {
        "dropout_state": seed + _int64(options.salt * int(masks.GAMMA.value)), "dropout_rows": _rows(q, options),
        "threshold": drop_threshold(p), "kept_factor": 1 / (1 - p) if p < 1 else 0.0,
    }  # fmt: skip


def _rows(q: Tensor, options: AttentionOptions) -> Tensor:
    if options.positions:
        batch, heads, queries = (index.to(torch.int64) for index in options.positions[:3])
    else:
        batch, heads = (torch.arange(size, device=q.device) for size in q.shape[:2])
        queries = positions_of(options.query_runs(q.shape[2]), q.device)
    _, all_heads, all_queries, _ = options.global_shape
    return (batch.view(-1, 1, 1) * all_heads + heads.view(-1, 1)) * all_queries + queries


def _int64(value: int) -> int:
    return (value + 2**63) % 2**64 - 2**63


def _key_mask(keys: Tensor | None, k: Tensor, key_runs: int) -> dict[str, Any]:
    """The mask as bytes, and per batch row and run the first key that is valid and the one after the last."""
    if keys is None:
        return {"keys": k, "extents": k}
    mask = keys.contiguous().view(torch.uint8)
    extents = torch.empty((keys.shape[0], key_runs, 2), dtype=torch.int32, device=keys.device)
    arguments = {"keys": mask, "extents": extents, "num_keys": keys.shape[1] // key_runs, "BLOCK": 1024}
    launch(_key_extents_kernel, keys.shape[0] * key_runs, keys.device, arguments)
    return {"keys": mask, "extents": extents}


@triton.jit(do_not_specialize=["num_keys"])
def _key_extents_kernel(keys, extents, num_keys, BLOCK: tl.constexpr):
    """Per run of keys: [first valid, last valid + 1), from the run's begin; (num_keys, 0) where there is none."""
    row = tl.program_id(0).to(tl.int64)
    first = tl.full([BLOCK], 0, tl.int32) + num_keys
    end = tl.zeros([BLOCK], tl.int32)
    for start in range(0, num_keys, BLOCK):
        column = start + tl.arange(0, BLOCK)
        valid = tl.load(keys + row * num_keys + column, mask=column < num_keys, other=0) != 0
        first = tl.minimum(first, tl.where(valid, column, num_keys))
        end = tl.maximum(end, tl.where(valid, column + 1, 0))
    tl.store(extents + row * 2, tl.min(first, 0))
    tl.store(extents + row * 2 + 1, tl.max(end, 0))


def _documents(q: Tensor, options: AttentionOptions, query_runs: int, key_runs: int) -> dict[str, Any]:
    """The document of each query, and of each key, and where those of a block of queries lie among the keys."""
    if options.documents is None or options.key_documents is None:
        return {"documents": q, "key_documents": q, "key_spans": q}
    own, others = options.documents.contiguous(), options.key_documents.contiguous()
    spans = document_extents(own, others, query_runs, key_runs)
    return {"documents": own, "key_documents": others, "key_spans": spans}


def document_extents(own: Tensor, others: Tensor, own_runs: int, other_runs: int) -> Tensor:
    """Where documents of elements lie on the other side: int32[B, own_runs, blocks, other_runs, 2], per block of
    DOCUMENT_GRAIN elements of a run of own[B, S], and run of others[B, T]: [first, last + 1) from the run's begin, of
    which all others outside are of other documents; (the run's length, 0) where there is none.

    What is between may be of other documents, too: blocks are compared by their least and their greatest numbers.
    """
    batch, num_own, num_others = own.shape[0], own.shape[1] // own_runs, others.shape[1] // other_runs
    other_blocks = ceil_div(num_others, _RANGE)
    ranges = torch.empty((batch, other_runs, other_blocks, 2), dtype=others.dtype, device=others.device)
    arguments = {"documents": others, "ranges": ranges, "num": num_others, "num_blocks": other_blocks, "BLOCK": _RANGE}
    launch(_document_ranges_kernel, batch * other_runs * other_blocks, own.device, arguments)
    grain = int(masks.DOCUMENT_GRAIN.value)
    blocks = ceil_div(num_own, grain)
    extents = torch.empty((batch, own_runs, blocks, other_runs, 2), dtype=torch.int32, device=own.device)
    arguments = {
        "documents": own, "ranges": ranges, "extents": extents, "num": num_own, "num_blocks": blocks,
        "num_others": num_others, "other_blocks": other_blocks, "own_runs": own_runs, "other_runs": other_runs,
        "GRAIN": grain, "RANGE": _RANGE, "BLOCK": 256,
    }  # fmt: skip
    launch(_document_extents_kernel, batch * own_runs * blocks, own.device, arguments)
    return extents


_RANGE = 64
"""So many elements of the other side have one least and one greatest document."""


@triton.jit(do_not_specialize=["num", "num_blocks"])
def _document_ranges_kernel(documents, ranges, num, num_blocks, BLOCK: tl.constexpr):
    """The least and the greatest document of each block of a run."""
    program = tl.program_id(0).to(tl.int64)
    start = program % num_blocks * BLOCK
    places = tl.minimum(start + tl.arange(0, BLOCK), num - 1)
    numbers = tl.load(documents + program // num_blocks * num + places)
    tl.store(ranges + program * 2, tl.min(numbers, 0))
    tl.store(ranges + program * 2 + 1, tl.max(numbers, 0))


@triton.jit(do_not_specialize=["num", "num_blocks", "num_others", "other_blocks", "own_runs", "other_runs"])
def _document_extents_kernel(
    documents, ranges, extents, num, num_blocks, num_others, other_blocks, own_runs, other_runs,
    GRAIN: tl.constexpr, RANGE: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One block of GRAIN elements: see `document_extents`."""
    program = tl.program_id(0).to(tl.int64)
    batch = program // num_blocks // own_runs
    places = tl.minimum(program % num_blocks * GRAIN + tl.arange(0, GRAIN), num - 1)
    numbers = tl.load(documents + program // num_blocks * num + places)
    least, greatest = tl.min(numbers, 0), tl.max(numbers, 0)
    for run in range(other_runs):
        run_ranges = ranges + (batch * other_runs + run) * other_blocks * 2
        first = tl.full([BLOCK], 0, tl.int32) + num_others
        end = tl.zeros([BLOCK], tl.int32)
        for start in range(0, other_blocks, BLOCK):
            block = start + tl.arange(0, BLOCK)
            inside = block < other_blocks
            low = tl.load(run_ranges + block * 2, mask=inside, other=0)
            high = tl.load(run_ranges + block * 2 + 1, mask=inside, other=0)
            meets = inside & (low <= greatest) & (high >= least)
            first = tl.minimum(first, tl.where(meets, block * RANGE, num_others))
            end = tl.maximum(end, tl.where(meets, tl.minimum((block + 1) * RANGE, num_others), 0))
        place = extents + (program * other_runs + run) * 2
        tl.store(place, tl.min(first, 0))
        tl.store(place + 1, tl.max(end, 0))
