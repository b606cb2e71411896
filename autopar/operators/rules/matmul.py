"""Products, and the loss over a vocabulary."""

from __future__ import annotations

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import bind, rule


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
    result = call.result
    names = [*batch.split(), "m", "n"]
    added = call.operands[0].shape
    own = names[len(names) - len(added) :]
    first = " ".join(n if size == whole else "1" for n, size, whole in zip(own, added, result.shape[-len(own) :]))
    text = f"{first or '.'}, {batch}m k, {batch}k n -> {batch}m n | k ! | linear 0 1; 0 2"
    return bind(call, text, flops_per_point=2.0, op_class="matmul")


@rule("autopar.linear.default", "aten.linear.default")
def _linear(call: OpCall) -> Rule:
    """With a bias, which must count once, k is whole and only x and the bias together are linear. A vector of weights
    gives one number a row.
    """
    if call.operands[1].ndim == 1:
        text = (
            "... k, k, . -> ... | k ! | linear 0 2; 1 2"
            if len(call.operands) == 3
            else "... k, k -> ... | k sum | linear 0; 1"
        )
        return bind(call, text, flops_per_point=2.0, op_class="matmul")
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


@rule("aten.linalg_solve_triangular.default")
def _solve_triangular(call: OpCall) -> Rule:
    """Columns of the right side are independent, and so are systems."""
    a, b = call.operands
    lead = call.result.shape[:-2]
    systems = [_aligned(each.shape[:-2], lead) for each in (a, b)]
    columns = "n k" if call.arg("left") else "k n"
    text = f"{systems[0]}m n, {systems[1]}{columns} -> {_aligned(lead, lead)}{columns} | m !, n ! | linear 1"
    return bind(call, text, flops=1.0 * call.result.numel * a.shape[-1], op_class="matmul")


def _aligned(shape: tuple[int, ...], whole: tuple[int, ...]) -> str:
    """A factor for each dim of `whole` that an operand has; 1 where it is broadcast: `b0 1 `."""
    first = len(whole) - len(shape)
    return "".join(f"b{first + i} " if size == whole[first + i] else "1 " for i, size in enumerate(shape))


# ----------------------------------------------------------------------------------------- embeddings and cross entropy


def _dims(letter: str, operand: TensorSpec) -> str:
    """A factor for each dim: `b0 b1`."""
    return " ".join(f"{letter}{i}" for i in range(operand.ndim))


@rule("autopar.embedding.default")
def _embedding(call: OpCall) -> Rule:
    """Rows may be split: a rank has zeros for the ids it does not hold."""
    ids = _dims("b", call.operands[1])
    text = f"v d, {ids or '.'} -> {ids} d | v sum | linear 0"
    return bind(call, text, op_class="gather", offset_args=((call.path("start"), "v"),))


@rule("autopar.embedding_grad.default")
def _embedding_grad(call: OpCall) -> Rule:
    ids = _dims("b", call.operands[1])
    sums = f"| {', '.join(f'{name} sum' for name in ids.split())} " if ids else ""
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
    rows = _dims("b", call.operands[1])
    text = f"{rows} v, {rows or '.'} -> {rows or '.'} | v sum | linear 0"
    return bind(call, text, op_class="gather", offset_args=((call.path("start"), "v"),))


@rule("autopar.sum_exp.default")
def _sum_exp(call: OpCall) -> Rule:
    rows = _dims("b", call.operands[1])
    text = f"{rows} v, {rows or '.'} -> {rows or '.'} | v sum"
    return bind(call, text, op_class="reduction", flops_per_point=2.0)


@rule("autopar.put_label.default")
def _put_label(call: OpCall) -> Rule:
    rows = _dims("b", call.operands[1])
    text = f"{rows or '.'}, {rows or '.'} -> {rows} v | linear 0"
    offsets, sizes = ((call.path("start"), "v"),), ((call.path("size"), "v"),)
    return bind(call, text, op_class="gather", offset_args=offsets, size_args=sizes)


@rule("autopar.log_softmax.default", "autopar.softmax.default")
def _over_classes(call: OpCall) -> Rule:
    """Classes may be split: what whole rows give is known."""
    rows = _dims("b", call.operands[1])
    text = f"{rows} v, {rows or '.'}, {rows or '.'} -> {rows} v"
    return bind(call, text, flops_per_point=3.0)


@rule("autopar.log_softmax_grad.default", "autopar.softmax_grad.default")
def _over_classes_grad(call: OpCall) -> Rule:
    rows = _dims("b", call.operands[2])
    return bind(call, f"{rows} v, {rows} v, {rows or '.'} -> {rows} v", flops_per_point=3.0)


@rule("autopar.cross_entropy.default")
def _cross_entropy(call: OpCall) -> Rule:
    """Rows that are split give terms of the loss, and of how many count."""
    rows = _dims("b", call.operands[3]) or "."
    sums = ", ".join(f"{name} sum" for name in rows.split() if name != ".")
    text = f"{rows}, {rows}, {rows}, {rows} -> ., ., {rows}{f' | {sums}' if sums else ''}"
    return bind(call, text, op_class="reduction", flops=4.0 * call.operands[3].numel)


@rule("autopar.cross_entropy_grad.default")
def _cross_entropy_grad(call: OpCall) -> Rule:
    rows = _dims("b", call.operands[2])
    alone = rows or "."
    text = f"{alone if call.operands[0].ndim else '.'}, {rows} v, {alone}, {alone} -> {rows} v | linear 0"
    return bind(call, text, flops_per_point=4.0, offset_args=((call.path("start"), "v"),))


@rule("autopar.random.default")
def _random(call: OpCall) -> Rule:
    """Numbers depend on global places alone, so every dim may be split."""
    names = _dims("d", call.operands[0]) or "."
    lists = "".join(f", p{i}" for i in range(len(call.operands) - 2))
    marks = ", ".join(f"p{i} !" for i in range(len(call.operands) - 2))
    text = f"{names}, .{lists} -> {names}{f' | {marks}' if marks else ''}"
    return bind(call, text, flops_per_point=20.0, position_args=((call.path("positions"), 0),))


@rule("autopar.dropout.default")
def _dropout(call: OpCall) -> Rule:
    """The mask depends on global places alone, so every dim may be split, and terms of a sum have one mask."""
    names = _dims("d", call.operands[0]) or "."
    lists = "".join(f", p{i}" for i in range(len(call.operands) - 2))
    marks = ", ".join(f"p{i} !" for i in range(len(call.operands) - 2))
    text = f"{names}, .{lists} -> {names} {f'| {marks} ' if marks else ''}| linear 0"
    return bind(call, text, flops_per_point=10.0, position_args=((call.path("positions"), 0),))
