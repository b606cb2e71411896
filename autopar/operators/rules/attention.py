"""Attention, and heads repeated for several readers."""

from __future__ import annotations

from typing import Any

import numpy as np

from autopar.base.codes import STORAGES
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.rules.attention_cost import seen_pairs, window_of
from autopar.operators.rules.registry import bind, rule


def _heads(call: OpCall, q: int, k: int) -> tuple[str, str]:
    """The head factors of queries, and of keys: alike, or each key head for `r` query heads."""
    return ("h", "h") if call.operands[q].shape[1] == call.operands[k].shape[1] else ("(h r)", "h")


def _group(call: OpCall, heads: str) -> tuple[str, dict[str, Any]]:
    """Where the call says how many query heads read a key head, a run of query heads may be split off that reads only
    a part of the key heads: the keys are then whole, their gradients terms. The mark, and the arguments that follow.
    """
    if call.arg("group") is None or heads != "(h r)":
        return "", {}
    args = {"size_args": ((call.path("group"), "r"),), "offset_args": ((call.path("first"), "(h r)"),)}
    return ", (h r)", args


def _bias_dims(call: OpCall, index: int, heads: str, keys: str = "t") -> tuple[str, ...]:
    dims = ("b", heads, "s", keys)
    return tuple("1" if size == 1 else dim for size, dim in zip(call.operands[index].shape, dims))


def _masks(call: OpCall, heads: str, keys: str = "t") -> str:
    """The operands between the values and what follows: bias, keys, sinks, seed, where they are given. keys: what the
    keys' dim walks.
    """
    text = ""
    if (bias := call.operand_of("bias")) is not None:
        text += ", " + " ".join(_bias_dims(call, bias, heads, keys))
    text += f", b {keys}" if call.operand_of("keys") is not None else ""
    text += f", {heads}" if call.operand_of("sinks") is not None else ""
    return text + (", ." if call.operand_of("seed") is not None else "")


def _documents(call: OpCall, keys: str = "t") -> str:
    """The operands behind all others: the document of each query, and of each key."""
    given = (("documents", "b s"), ("key_documents", f"b {keys}"))
    return "".join(f", {dims}" for name, dims in given if call.operand_of(name) is not None)


def _stored(call: OpCall, kv_heads: str, keys: str = "t") -> tuple[str, str, str]:
    """What the last dims of keys and values walk, and the operands that are their scales, where they are codes. A byte
    that holds two codes has one of either half of a head: it walks neither.
    """
    storage = call.arg("storage")
    if not storage:
        return "d", "e", ""
    key, value = ("d", "e") if STORAGES[storage].per_byte == 1 else ("x", "y")
    return key, value, f", b {kv_heads} {keys} 1" * 2


def _places(call: OpCall, q: int) -> dict[str, Any]:
    """Queries are split at their places: what they see, and what is dropped, depends on these."""
    fields: dict[str, Any] = {"starts_args": ((call.path("query_starts"), "s"),)}
    if call.arg("dropout_p"):
        fields["position_args"] = ((call.path("positions"), q),)
    return fields


@rule("autopar.attention.default")
def _attention(call: OpCall) -> Rule:
    """Queries may be split; keys are whole, or go round."""
    heads, kv_heads = _heads(call, 0, 1)
    joint, fields = _group(call, heads)
    key, value, scales = _stored(call, kv_heads)
    kv = f"b {kv_heads} t {key}, b {kv_heads} t {value}"
    operands = f"b {heads} s d, {kv}{_masks(call, heads)}{_documents(call)}{scales}"
    marks = ", x !, y !, e !" if key == "x" else ""
    ring = ", s !" if scales else ", s ring t 1 2"  # codes are read for a few queries, which stay together
    text = f"{operands} -> b {heads} s e, b {heads} s | t !, d !{marks}{joint}{ring}"
    return bind(call, text, op_class="attention", flops=attention_flops(call, 0), **fields, **_places(call, 0))


@rule("autopar.attention_backward.default", "autopar.attention_backward_bias.default")
def _attention_backward(call: OpCall) -> Rule:
    """Linear in the incoming gradient; queries that are split, or heads that share keys, give terms of dk and dv."""
    heads, kv_heads = _heads(call, 1, 2)
    joint, fields = _group(call, heads)
    q, kv = f"b {heads} s d", f"b {kv_heads} t d, b {kv_heads} t e"
    results, sums = f"{q}, {kv}", ["s"] + ["r"] * (heads == "(h r)")
    if len(call.results) == 4:
        bias = call.operand_of("bias")
        assert bias is not None
        dims = _bias_dims(call, bias, heads)
        results += ", " + " ".join(dims)
        sums += ["b"] * (dims[0] == "1") + ["h"] * (dims[1] == "1")
    marks = f"{', '.join(f'{name} sum' for name in sums)}, t !, d !, e !{joint}, s ring t 2 3"
    text = (
        f"b {heads} s e, {q}, {kv}{_masks(call, heads)}, b {heads} s e, b {heads} s{_documents(call)} "
        f"-> {results} | {marks} | linear 0"
    )
    return bind(call, text, op_class="attention", flops=2.5 * attention_flops(call, 1), **fields, **_places(call, 1))


@rule("autopar.attention_pieces.default")
def _attention_pieces(call: OpCall) -> Rule:
    """Each piece of the keys by itself: `p` of them, which may lie anywhere."""
    heads, kv_heads = _heads(call, 0, 1)
    joint, fields = _group(call, heads)
    key, value, scales = _stored(call, kv_heads, "(p c)")
    kv = f"b {kv_heads} (p c) {key}, b {kv_heads} (p c) {value}"
    operands = f"b {heads} s d, {kv}{_masks(call, heads, '(p c)')}{_documents(call, '(p c)')}{scales}"
    marks = ", x !" if key == "x" else ""
    text = f"{operands} -> p b {heads} s f | p={call.arg('count')}, c !, d !, {value} !, f !{marks}{joint}"
    fields["size_args"] = (*fields.get("size_args", ()), (call.path("count"), "p"))
    fields["offset_args"] = (*fields.get("offset_args", ()), (call.path("start"), "p"))
    return bind(call, text, op_class="attention", flops=attention_flops(call, 0), **fields, **_places(call, 0))


@rule("autopar.pieces_top.default")
def _pieces_top(call: OpCall) -> Rule:
    return bind(call, "p b h s f -> b h s | p max, f !", op_class="reduction", flops=float(call.result.numel))


@rule("autopar.pieces_total.default")
def _pieces_total(call: OpCall) -> Rule:
    """The largest score is that of all pieces, so the sums of parts add up."""
    return bind(call, "p b h s f, b h s -> b h s f | p sum, f !", op_class="reduction", flops_per_point=2.0)


@rule("autopar.pieces_merged.default")
def _pieces_merged(call: OpCall) -> Rule:
    sinks = ", h" if call.operand_of("sinks") is not None else ""
    return bind(call, f"b h s f, b h s{sinks} -> b h s e | f !, e !", flops_per_point=1.0 / call.operands[0].shape[-1])


@rule("autopar.repeat_heads.default")
def _repeat_heads(call: OpCall) -> Rule:
    """Each head r times; a run of the repeated ones may be split off that shows only a part of the heads."""
    count = call.path("count")
    return bind(
        call, "b h t d -> b (h r) t d | (h r) | linear 0",
        size_args=((call.path("group"), "r"), (count, "h"), (count, "r"), (count, "(h r)")),
        offset_args=((call.path("first"), "(h r)"),),
    )  # fmt: skip


@rule("autopar.repeat_heads_grad.default")
def _repeat_heads_grad(call: OpCall) -> Rule:
    return bind(
        call, "b (h r) t d -> b h t d | r sum, (h r) | linear 0", op_class="reduction",
        size_args=((call.path("num_heads"), "h"), (call.path("group"), "r")),
        offset_args=((call.path("first"), "(h r)"),),
    )  # fmt: skip


def attention_flops(call: OpCall, first: int) -> float:
    """Two products, 2 (d + e) for each pair of a query and a key that it sees, as far as the window says
    (Dao, FlashAttention-2, 2307.08691, §4.1: half of all pairs where attention is causal).
    """
    (batch, heads, queries, size), keys, value = (call.operands[first + i].shape for i in range(3))
    start = np.zeros(1, dtype=np.int64)
    pairs = seen_pairs(start, queries, start, keys[2], window_of(call))
    value_size = value[3] * (STORAGES[call.arg("storage")].per_byte if call.arg("storage") else 1)
    return 2.0 * batch * heads * float(pairs.sum()) * (size + value_size)
