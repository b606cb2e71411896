"""Tensors, and operands of attention and of experts, that samples of operators are made of (samples.py)."""

# ruff: noqa: E501 (tables of operands)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from autopar import operators as ops
from autopar.base.codes import STORAGES
from autopar.base.stored_weights import StoredWeight

GENERATOR = torch.Generator().manual_seed(0)


def r(*shape: int) -> Tensor:
    return torch.randn(shape, dtype=torch.float64, generator=GENERATOR)


def p(*shape: int) -> Tensor:
    return torch.rand(shape, dtype=torch.float64, generator=GENERATOR) * 0.8 + 0.1


def i(high: int, *shape: int) -> Tensor:
    return torch.randint(0, high, shape, generator=GENERATOR)


def b(*shape: int) -> Tensor:
    return torch.rand(shape, generator=GENERATOR) > 0.5


def pick(*indices: Tensor | None) -> list[Tensor | None]:
    return list(indices)


F32, F64, I64 = torch.float32, torch.float64, torch.int64
X, Y, G = r(4, 6, 8), r(4, 6, 8), r(4, 6, 8)
IMAGE, AFFINE = r(4, 8, 4, 4), p(8)
PLACES = torch.ops.aten.max_pool2d_with_indices(IMAGE, [2, 2])[1]
LAYER = torch.ops.aten.native_layer_norm(X, [8], r(8), r(8), 1e-5)
GROUP = torch.ops.aten.native_group_norm(IMAGE, AFFINE, AFFINE, 4, 8, 16, 4, 1e-5)
NORM = ops.rms_norm(X, None, 1e-5)
RMS = torch.ops.aten._fused_rms_norm(X, [8], p(8), 1e-5)
BATCH = torch.ops.aten.native_batch_norm(IMAGE, AFFINE, AFFINE, None, None, True, 0.1, 1e-5)
SOFT, LOG_SOFT = X.softmax(-1), X.log_softmax(-1)
MASK, SEED = torch.rand(4, 1, 6, 10, generator=GENERATOR) > 0.3, torch.tensor(5)
Q, K, V, K2, V2 = r(4, 4, 6, 8), r(4, 4, 10, 8), r(4, 4, 10, 8), r(4, 2, 10, 8), r(4, 2, 10, 8)
Q6, K3, V3 = r(2, 6, 6, 8), r(2, 3, 10, 8), r(2, 3, 10, 8)
OWN, OTHERS = i(2, 4, 6), i(2, 4, 10)
KEYS, SINKS = torch.rand(4, 10, generator=GENERATOR) > 0.3, r(4)
CAUSAL, WINDOW = {"scale": 0.3, "right": 0}, {"scale": 0.3, "left": 2, "right": 0, "softcap": 5.0}
DROPS = {"scale": 0.3, "right": 1, "dropout_p": 0.4, "salt": 3, "global_shape": [4, 4, 6, 10]}
PACKED = r(4, 4, 4, 6, 9)
PLAIN, GROUPED = {"scale": 0.3}, {"scale": 0.3, "group": 2}


def chosen(gated: bool, transposed: bool, *bias: Tensor, **options: Any) -> tuple[tuple[Any, ...], tuple[Any, ...]]:
    """Samples of experts, and of their gradient: 8 tokens, two of four experts of width 12 each."""
    columns = 24 if gated else 12
    first, second = ((4, 6, columns), (4, 12, 6)) if transposed else ((4, columns, 6), (4, 6, 12))
    operands = (r(8, 6), i(4, 8, 2), r(8, 2), r(*first), r(*second), *bias)
    layout = {"gated": gated, "transposed": transposed, **options}
    return (*operands, layout), (r(8, 6), *operands, layout)


def coded_experts(way: str, block: int, *bias: Tensor, **layout: Any) -> tuple[Any, ...]:
    """A sample of experts that are codes: 8 tokens, two of four experts of width 16 each; block: what shares a scale."""
    operands: list[Tensor] = [r(8, 8), i(4, 8, 2), r(8, 2)]
    parts: dict[str, Tensor] = {}
    cut: tuple[int, ...]
    dims: tuple[int, ...]
    for name, out, inputs in (("first", 32 if layout.get("gated", True) else 16, 8), ("second", 8, 16)):
        cut, dims = (out, inputs), (0, 1) if way.endswith("tensor") else (1,)
        if way.endswith("block"):
            cut, dims = (out // block, block, inputs // block, block), (1, 3)
        elif block:
            cut, dims = (out, inputs // block, block), (2,)
        held = StoredWeight(name, way, (out, inputs), cut, dims, turned=False, experts=4).encode(r(4, out, inputs))
        operands.append(held["codes"])
        parts |= {f"{name}_{part}": value for part, value in held.items() if part != "codes"}
    parts = dict(sorted(parts.items(), key=lambda each: each[0].partition("_")[2]))
    return (*operands, *bias, {**layout, "storage": way.partition("-")[0], **parts})


def attended(*operands: Any) -> list[tuple[Any, ...]]:
    """The samples of attention's forward, and its backward, for the same operands and options (the last of them)."""
    *tensors, options = operands
    tensors += [None] * (7 - len(tensors))
    out, lse = ops.attention(*tensors, **options)
    return [(*tensors, options), (torch.randn(out.shape, generator=GENERATOR, dtype=F64), *tensors, out, lse, options)]


ATTENTION = [attended(*operands) for operands in (
    (Q, K, V, PLAIN), (Q, K, V, MASK, PLAIN), (Q, K2, V2, r(1, 4, 1, 10), PLAIN), (Q, K, V, CAUSAL), (Q, Q, Q, CAUSAL),
    (Q, K2, V2, r(4, 4, 6, 10), PLAIN), (Q, K2, V2, r(1, 4, 6, 10), GROUPED), (Q6, K3, V3, GROUPED),
    (Q6, K3, V3, r(1, 6, 6, 10), GROUPED), (Q, K, V, None, KEYS, CAUSAL), (Q, K2, V2, r(1, 1, 6, 10), KEYS, SINKS, WINDOW),
    (Q, K, V, {"scale": 0.3, "right": 0, "documents": OWN, "key_documents": OTHERS}),
    (Q, K2, V2, r(1, 4, 6, 10), KEYS, {"scale": 0.3, "group": 2, "documents": OWN, "key_documents": OTHERS}),
    (Q, K, V, None, None, SINKS, SEED, DROPS), (Q, K2, V2, r(4, 1, 6, 10), None, None, SEED, DROPS),
)]  # fmt: skip
K8, V8, KEYS8, MASK8 = r(4, 2, 8, 8), r(4, 2, 8, 6), torch.rand(4, 8, generator=GENERATOR) > 0.3, b(4, 1, 6, 8)
PIECES = [
    (Q, K8, V8, {"scale": 0.3, "count": 4}), (Q, K8, V8, MASK8, {"scale": 0.3, "group": 2, "count": 4}),
    (Q, K8, V8, r(1, 4, 6, 1), KEYS8, {"scale": 0.3, "count": 4, "left": 2, "right": 1, "softcap": 5.0}),
    (Q6, r(2, 3, 8, 8), r(2, 3, 8, 8), r(1, 6, 6, 8), {"scale": 0.3, "group": 2, "count": 8, "documents": i(2, 2, 6), "key_documents": i(2, 2, 8)}),
]  # fmt: skip


def coded(storage: str, q: Tensor, k: Tensor, v: Tensor, *others: Any) -> tuple[Any, ...]:
    """A call of attention to keys and values that are stored so, from that to them as numbers."""
    (keys, key_scales), (values, value_scales) = (STORAGES[storage].encode(x) for x in (k, v))
    *masks, said = others
    return q, keys, values, *masks, {**said, "storage": storage, "key_scales": key_scales, "value_scales": value_scales}


CODED = [
    coded("int8", Q, K, V, PLAIN), coded("fp8", Q, K2, V2, r(1, 4, 6, 10), KEYS, SINKS, GROUPED),
    coded("int4", Q6, K3, V3, GROUPED), coded("int4", Q, K, V, None, KEYS, CAUSAL),
]  # fmt: skip
CODED_PIECES = [
    coded("int8", Q, K8, V8, MASK8, {"scale": 0.3, "group": 2, "count": 4}),
    coded("int4", Q, K8, V8, None, KEYS8, {"scale": 0.3, "count": 2, "left": 2, "right": 1}),
]  # fmt: skip


ACT = {"act": "mul(silu(gate), up)"}
CODED_EXPERTS = [
    coded_experts("int8", 0, **ACT), coded_experts("fp8-tensor", 0, act="relu(gate)", gated=False),
    coded_experts("int4", 4, r(4, 32), **ACT), coded_experts("mxfp4", 4, r(4, 32), interleaved=True, **ACT),
    coded_experts("fp8-block", 4, **ACT), coded_experts("fp8-block", 2, interleaved=True, **ACT),
    coded_experts("int4-zero", 4, **ACT), coded_experts("int8-zero", 8, act="relu(gate)", gated=False),
]  # fmt: skip


def token(
    storage: str, q: Tensor, k: Tensor, v: Tensor, tables: int, at: list[int], wide: int | None = None
) -> tuple[Any, ...]:
    """A call of `rotary_write`; tables: rows of them; wide: of a head what is rotated."""
    cos, sin = (r(tables, q.shape[2], wide or q.shape[3]) for _ in range(2))
    caches = [r(*x.shape[:2], 8, x.shape[3]) for x in (k, v)]
    if not storage:
        return q, k, v, cos, sin, *caches, torch.tensor(at)
    (keys, key_scales), (values, value_scales) = (STORAGES[storage].encode(x) for x in caches)
    return q, k, v, cos, sin, keys, values, torch.tensor(at), key_scales, value_scales, {"storage": storage}


TOKENS = [
    token("", r(4, 4, 2, 8), r(4, 4, 2, 8), r(4, 4, 2, 6), 4, [5, 2]), token("", Q[:, :, :1], r(4, 2, 1, 8), r(4, 2, 1, 8), 1, [3]),
    token("int8", Q[:, :, :2], r(4, 2, 2, 8), r(4, 2, 2, 6), 4, [0, 7]), token("int4", Q[:, :, :1], r(4, 4, 1, 8), r(4, 4, 1, 6), 1, [6]),
    token("", Q[:, :, :2], r(4, 2, 2, 8), r(4, 2, 2, 6), 4, [3, 1], 6),
    (*token("", Q[:, :, :2], r(4, 2, 2, 8), r(4, 2, 2, 6), 4, [3, 1], 2), {"interleaved": True, "half_tables": True}),
]  # fmt: skip
WRITES: list[tuple[Any, ...]] = [
    (*given[1:3], *given[5:-1], {**given[-1], **pieces}) if isinstance(given[-1], dict) else (*given[1:3], *given[5:], pieces)
    for given in TOKENS[:4] for pieces in ({}, {"start": 0})
]  # fmt: skip
BIASED = [back for forward, back in ATTENTION if forward[3] is not None and forward[3].dtype == F64]
LABELS = i(8, 4, 6)
LABELS[0, 0] = -100
LOGSUM = X.logsumexp(-1)
OFFS = torch.tensor([4, 6, 6, 16], dtype=torch.int32)
ENDS = torch.tensor([3, 5, 1, 4])
LOOPS: list[tuple[str, list[Tensor]]] = [
    ("t0 = div(x, add(sum(x, [-1], True), 1e-06)); div(t0, add(sum(t0, [-1], True), 1e-06))", []),
    ("mul(softmax(add(x, y0), -1), sigmoid(y1))", [p(4), p(6, 1)]),
    ("tanh(add(x, transpose(y0, -1, -2)))", [p(4, 4, 6)]),
    ("squeeze(div(unsqueeze(x, -1), sum(mul(unsqueeze(x, -1), unsqueeze(x, -2)), [-1], True)), -1)", []),
]
"""Rounds of loops over x[4, 6, 4], and what all of them read."""
LSTM, GRU, RNN = (
    (r(5, 4, 6), *(r(4, 8) for _ in range(states)), r(gates * 8, 6), r(gates * 8, 8), r(gates * 8), r(gates * 8))
    for states, gates in ((2, 4), (1, 3), (1, 1))
)
CTC = r(8, 4, 6).log_softmax(-1)
CTC_TARGETS = (
    torch.tensor([[1, 3, 3], [5, 4, 1], [1, 1, 1], [3, 5, 0]]),
    torch.tensor([8, 6, 4, 2]),
    torch.tensor([3, 3, 3, 2]),
)
ROWS, ROW_LABELS = r(6, 8), i(8, 6)

# fmt: off
EXPERTS = [
    chosen(True, False, act="mul(silu(gate), up)"), chosen(True, True, act="mul(gelu(gate), up)", interleaved=True), chosen(False, False, act="relu(gate)"),
    chosen(True, True, r(4, 24), act="mul(add(up, 1), silu(gate))", interleaved=True), chosen(True, False, r(4, 24), act="mul(silu(gate), up)", start=1),
]
# fmt: on
