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
    wide = "d" if cos.shape[-1] == q.shape[-1] else "w"  # of a head what is rotated
    tables = ", ".join(f"b s {wide}" if x.shape[0] == q.shape[0] else f"1 s {wide}" for x in call.operands[3:5])
    storage, marks = call.arg("storage"), ["d !", "s !", "t !", *(["w !"] if wide == "w" else [])]
    key, value, scales = "d", "e", ""
    if storage:
        scales = ", b h t 1" * 2
        key, value = ("d", "e") if STORAGES[storage].per_byte == 1 else ("x", "y")
        marks += ["e !"] if key == "d" else ["e !", "x !", "y !"]
    marks += ["r !"] if heads == "(h r)" else []  # keys would be whole, which other ranks' writes know nothing of
    caches = f"b h t {key}, b h t {value}"
    text = f"b {heads} s d, b h s d, b h s e, {tables}, {caches}, s{scales} -> b {heads} s d, {caches}{scales}"
    return bind(call, f"{text} | {', '.join(marks)}", op_class="gather")


def _rows(ndim: int) -> str:
    return " ".join(f"b{i}" for i in range(ndim - 1))
