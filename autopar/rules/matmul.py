"""Products, attention, and the loss over a vocabulary."""

from __future__ import annotations

from typing import Any

from autopar.rules.notation import Rule
from autopar.rules.registry import OpCall, bind, rule


def _product(text: str, *names: str) -> None:
    """Register a product: two FLOPs for each point of its loop nest."""

    @rule(*names)
    def product(call: OpCall) -> Rule:
        return bind(call, text, flops_per_point=2.0, op_class="matmul")


_product("m k, k n -> m n | k sum | linear 0; 1", "aten.mm.default")
_product("b m k, b k n -> b m n | k sum | linear 0; 1", "aten.bmm.default")
_product("m k, k -> m | k sum | linear 0; 1", "aten.mv.default")
_product("k, k -> . | k sum | linear 0; 1", "aten.dot.default")
_product("... m k, ... k n -> ... m n | k sum | linear 0; 1", "autopar.matmul.default")
_product("... n, n k -> ... k | n sum | linear 0; 1", "autopar.linear_grad_input.default")


@rule("aten.addmm.default", "aten.baddbmm.default")
def _addmm(call: OpCall) -> Rule:
    """The added term counts once, so k is whole; capture writes the sum apart (`operators.AUTOGRAD`)."""
    batch = "b " if call.name == "aten.baddbmm.default" else ""
    result = call.results[0]
    assert result is not None
    names = [*batch.split(), "m", "n"]
    added = call.operands[0].shape
    own = names[len(names) - len(added) :]
    first = " ".join(n if size == whole else "1" for n, size, whole in zip(own, added, result.shape[-len(own) :]))
    text = f"{first or '.'}, {batch}m k, {batch}k n -> {batch}m n | k ! | linear 0 1; 0 2"
    return bind(call, text, flops_per_point=2.0, op_class="matmul")


@rule("autopar.linear.default", "aten.linear.default")
def _linear(call: OpCall) -> Rule:
    """With a bias, which must count once, k is whole and only x and the bias together are linear."""
    if len(call.operands) == 3:
        return bind(call, "... k, n k, n -> ... n | k ! | linear 0 2; 1 2", flops_per_point=2.0, op_class="matmul")
    text = "... k, n k -> ... n | k sum | linear 0; 1"
    # Columns of padding are -inf, as a sum of terms that are -inf is.
    offset_args = ((call.path("start"), "n"),) if call.arg("valid") is not None else ()
    return bind(call, text, flops_per_point=2.0, op_class="matmul", offset_args=offset_args)


@rule("autopar.linear_grad_weight.default")
def _linear_grad_weight(call: OpCall) -> Rule:
    lead = [f"b{i}" for i in range(call.operands[0].ndim - 1)]
    sums = f"| {', '.join(f'{name} sum' for name in lead)} " if lead else ""
    text = f"{' '.join(lead)} n, {' '.join(lead)} k -> n k {sums}| linear 0; 1"
    return bind(call, text, flops_per_point=2.0, op_class="matmul")


@rule("aten._grouped_mm.default", "transformers.grouped_mm_fallback.default")
def _grouped_mm(call: OpCall) -> Rule:
    """One product for each of e groups; the dim that `offs` cuts into groups is whole, and so are the groups."""
    a, w = (operand.ndim for operand in call.operands[:2])
    text = {
        (2, 3): "m k, e k n, e -> m n | m !, e !, k sum",
        (3, 2): "e m k, k n, e -> m n | n !, e !, k sum",
        (2, 2): "m k, k n, e -> e m n | k !, e !",
        (3, 3): "e m k, e k n -> e m n | k sum",
    }[a, w]
    groups = call.operands[0].shape[0] if (a, w) == (3, 3) else 1
    (*_, m, k), n = call.operands[0].shape, call.operands[1].shape[-1]
    return bind(call, f"{text} | linear 0; 1", flops=2.0 * groups * m * k * n, op_class="matmul")


@rule("transformers.grouped_mm_fallback_backward.default")
def _grouped_mm_backward(call: OpCall) -> Rule:
    (m, k), n = call.operands[0].shape, call.operands[3].shape[1]
    text = "m k, e k n, e, m n -> m k, e k n | m !, e !, n sum | linear 3"
    return bind(call, text, flops=4.0 * m * k * n, op_class="matmul")


def _heads(call: OpCall, q: int, k: int) -> tuple[str, str]:
    """The head factors of queries, and of keys: alike, or each key head for `r` query heads."""
    return ("h", "h") if call.operands[q].shape[1] == call.operands[k].shape[1] else ("(h r)", "h")


def _group(call: OpCall) -> tuple[str, dict[str, Any]]:
    """Where the call says how many query heads read a key head, a run of query heads may be split off that reads only
    a part of the key heads: the keys are then whole, their gradients terms. The mark, and the arguments that follow.
    """
    if call.arg("group") is None or call.arg("group") == 1:
        return "", {}
    args = {"size_args": ((call.path("group"), "r"),), "offset_args": ((call.path("first"), "(h r)"),)}
    return ", (h r)", args


def _mask(call: OpCall, index: int | None, heads: str) -> str:
    if index is None:
        return ""
    dims = ("b", heads, "s", "t")
    return ", " + " ".join("1" if size == 1 else dim for size, dim in zip(call.operands[index].shape, dims))


@rule("autopar.attention.default")
def _attention(call: OpCall) -> Rule:
    """Keys are whole; queries may be split unless the mask is causal, for then their places count."""
    heads, kv_heads = _heads(call, 0, 1)
    mask = _mask(call, call.operand_of("mask"), heads)
    causal = bool(call.arg("is_causal"))
    joint, fields = _group(call)
    marks = f"| {'s !, ' if causal else ''}t !, d !{joint}"
    text = f"b {heads} s d, b {kv_heads} t d, b {kv_heads} t e{mask} -> b {heads} s e, b {heads} s {marks}"
    return bind(call, text, op_class="attention", flops=_attention_flops(call, 0, causal), **fields)


@rule("autopar.attention_backward.default")
def _attention_backward(call: OpCall) -> Rule:
    """Linear in the incoming gradient; queries that are split, or heads that share keys, give terms of dk and dv."""
    heads, kv_heads = _heads(call, 1, 2)
    mask = _mask(call, call.operand_of("mask"), heads)
    causal = bool(call.arg("is_causal"))
    kv = f"b {kv_heads} t d, b {kv_heads} t e"
    rep = ", r sum" if heads == "(h r)" else ""
    joint, fields = _group(call)
    marks = f"| {'s !' if causal else 's sum'}, t !, d !, e !{rep}{joint}"
    q = f"b {heads} s d"
    text = f"b {heads} s e, {q}, {kv}{mask}, b {heads} s e, b {heads} s -> {q}, {kv} {marks} | linear 0"
    return bind(call, text, op_class="attention", flops=2.5 * _attention_flops(call, 1, causal), **fields)


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


def _attention_flops(call: OpCall, first: int, causal: bool) -> float:
    """Two products, 2 b h s t (d + e); half of it when causal (Dao, FlashAttention-2, 2023, §4.1)."""
    (batch, heads, queries, size), keys, value = (call.operands[first + i].shape for i in range(3))
    return 2.0 * batch * heads * queries * keys[2] * (size + value[3]) * (0.5 if causal else 1.0)


# ----------------------------------------------------------------------------------------- embeddings and cross entropy


@rule("autopar.embedding.default")
def _embedding(call: OpCall) -> Rule:
    """Rows may be split: a rank has zeros for the ids it does not hold."""
    ids = " ".join(f"b{i}" for i in range(call.operands[1].ndim))
    text = f"v d, {ids or '.'} -> {ids} d | v sum | linear 0"
    return bind(call, text, op_class="gather", offset_args=((call.path("start"), "v"),))


@rule("autopar.embedding_grad.default")
def _embedding_grad(call: OpCall) -> Rule:
    names = [f"b{i}" for i in range(call.operands[1].ndim)]
    ids = " ".join(names)
    sums = f"| {', '.join(f'{name} sum' for name in names)} " if names else ""
    return bind(
        call, f"{ids} d, {ids or '.'} -> v d {sums}| linear 0", op_class="gather",
        offset_args=((call.path("start"), "v"),), size_args=((call.path("num_rows"), "v"),),
    )  # fmt: skip


@rule("autopar.part.default")
def _part(call: OpCall) -> Rule:
    """Where a dim is whole, which part of it a rank takes may differ."""
    names, after = _one_dim_changed(call, "f")
    dim = names[call.arg("dim")]
    return bind(
        call, f"{' '.join(names)} -> {' '.join(after)} | {dim} ! | linear 0", op_class="view", alias=True,
        offset_args=((call.path("start"), "f"),), size_args=((call.path("length"), "f"),),
    )  # fmt: skip


@rule("autopar.whole.default")
def _whole(call: OpCall) -> Rule:
    """The pieces of a dim, each in its place among zeros, are terms of the whole."""
    names, after = _one_dim_changed(call, "w")
    dim = names[call.arg("dim")]
    text = f"{' '.join(names)} -> {' '.join(after)} | {dim} sum, w ! | linear 0"
    return bind(call, text, offset_args=((call.path("start"), dim),))


def _one_dim_changed(call: OpCall, new: str) -> tuple[list[str], list[str]]:
    """The dims of the operand, and of the result, whose `dim` is another factor."""
    names = [f"d{i}" for i in range(call.operands[0].ndim)]
    dim = call.arg("dim")
    return names, [*names[:dim], new, *names[dim + 1 :]]


@rule("autopar.take_label.default")
def _take_label(call: OpCall) -> Rule:
    rows = " ".join(f"b{i}" for i in range(call.operands[1].ndim))
    text = f"{rows} v, {rows or '.'} -> {rows or '.'} | v sum | linear 0"
    return bind(call, text, op_class="gather", offset_args=((call.path("start"), "v"),))


@rule("autopar.sum_exp.default")
def _sum_exp(call: OpCall) -> Rule:
    rows = " ".join(f"b{i}" for i in range(call.operands[1].ndim))
    text = f"{rows} v, {rows or '.'} -> {rows or '.'} | v sum"
    return bind(call, text, op_class="reduction", flops_per_point=2.0)


@rule("autopar.cross_entropy_grad.default")
def _cross_entropy_grad(call: OpCall) -> Rule:
    rows = " ".join(f"b{i}" for i in range(call.operands[0].ndim))
    alone = rows or "."
    text = f"{alone}, {rows} v, {alone}, {alone} -> {rows} v | linear 0"
    return bind(call, text, flops_per_point=4.0, offset_args=((call.path("start"), "v"),))


@rule("autopar.dropout.default")
def _dropout(call: OpCall) -> Rule:
    """The mask depends on global places alone, so every dim may be split, and terms of a sum have one mask."""
    names = " ".join(f"d{i}" for i in range(call.operands[0].ndim)) or "."
    lists = "".join(f", p{i}" for i in range(len(call.operands) - 2))
    marks = ", ".join(f"p{i} !" for i in range(len(call.operands) - 2))
    text = f"{names}, .{lists} -> {names} {f'| {marks} ' if marks else ''}| linear 0"
    return bind(call, text, flops_per_point=10.0, position_args=((call.path("positions"), 0),))
