"""The fused operators of autopar/operators/: RMSNorm, rotary embeddings, and what writes a token into a cache."""

from __future__ import annotations

from autopar.base.codes import STORAGES
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import bind, rule


@rule("autopar.rms_norm.default")
def _rms_norm(call: OpCall) -> Rule:
    """The normalized dim is whole, all others are free."""
    rows = _rows(call.operands[0].ndim)
    weight = ", d" * (len(call.operands) - 1)
    return bind(call, f"{rows} d{weight} -> {rows} d, {rows or '.'} | d !", flops_per_point=6.0, op_class="reduction")


@rule("autopar.rms_norm_backward.default")
def _rms_norm_backward(call: OpCall) -> Rule:
    """Rows that are split give terms of the gradient to the weight."""
    rows = _rows(call.operands[0].ndim)
    sums = "".join(f", {name} sum" for name in rows.split())
    x, weight, dw = f"{rows} d", ", d" * (len(call.operands) - 3), "d" if len(call.operands) == 4 else "e"
    text = f"{x}, {x}{weight}, {rows or '.'} -> {x}, {dw} | d !{', e !' * (dw == 'e')}{sums} | linear 0"
    return bind(call, text, flops_per_point=14.0, op_class="reduction")


@rule("autopar.rotary.default", "autopar.rotary_backward.default")
def _rotary(call: OpCall) -> Rule:
    """Both halves of a head are met together; a table of one row is that of every row of the batch."""
    tables = ", ".join(
        "b s d" if table.shape[0] == call.operands[0].shape[0] else "1 s d" for table in call.operands[1:]
    )
    return bind(call, f"b h s d, {tables} -> b h s d | d ! | linear 0", flops_per_point=3.0)


@rule("autopar.rotary_write.default")
def _rotary_write(call: OpCall) -> Rule:
    """Rows of the batch, and query heads with the key head that they read."""
    heads = "h" if call.operands[0].shape[1] == call.operands[1].shape[1] else "(h r)"
    q, cos = call.operands[0], call.operands[3]
    wide = "d" if cos.shape[-1] == q.shape[-1] else "w"  # of a head what is rotated, or half of it
    tables = ", ".join(f"b s {wide}" if x.shape[0] == q.shape[0] else f"1 s {wide}" for x in call.operands[3:5])
    caches, scales, marks = _caches(call)
    marks += ["t !", *(["w !"] if wide == "w" else [])]
    marks += ["r !"] if heads == "(h r)" else []  # keys would be whole, which other ranks' writes know nothing of
    text = f"b {heads} s d, b h s d, b h s e, {tables}, {caches}, s{scales} -> b {heads} s d, {caches}{scales}"
    return bind(call, f"{text} | {', '.join(marks)}", op_class="gather")


@rule("autopar.cache_write.default")
def _cache_write(call: OpCall) -> Rule:
    """Rows of the batch, and heads; positions of caches that are pieces."""
    caches, scales, marks = _caches(call)
    pieces = () if call.arg("start") is None else ((call.path("start"), "t"),)
    marks += [] if pieces else ["t !"]
    text = f"b h s d, b h s e, {caches}, s{scales} -> {caches}{scales} | {', '.join(marks)}"
    return bind(call, text, op_class="gather", offset_args=pieces)


def _caches(call: OpCall) -> tuple[str, str, list[str]]:
    """The dims of caches and of scales, and what of them is whole."""
    storage, marks = call.arg("storage"), ["d !", "s !"]
    if not storage:
        return "b h t d, b h t e", "", marks
    is_apart = STORAGES[storage].per_byte == 1
    caches = "b h t d, b h t e" if is_apart else "b h t x, b h t y"
    return caches, ", b h t 1" * 2, [*marks, "e !", *([] if is_apart else ["x !", "y !"])]


def _rows(ndim: int) -> str:
    return " ".join(f"b{i}" for i in range(ndim - 1))
