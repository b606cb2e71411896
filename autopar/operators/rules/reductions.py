"""Reductions: sums and maxima give terms when the reduced dims are split; the others need them whole."""

from __future__ import annotations

from autopar.ir.op_call import OpCall, is_float
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import make_rule, normal_dim, rule

_FIRST = (frozenset({0}),)


def _reduction(call: OpCall, reduce: str | None, *, linear: bool = False) -> Rule:
    """The rule of a reduction over `dim` (none: all), with or without `keepdim`."""
    shape = call.operands[0].shape
    given = call.arg("dim")
    dims = [given] if isinstance(given, int) else given or range(len(shape))
    reduced = {normal_dim(dim, len(shape)) for dim in dims} if shape else set()
    names = [f"d{i}" for i in range(len(shape))]
    keep = bool(call.arg("keepdim", False))
    result = [("" if i in reduced else name) for i, name in enumerate(names) if keep or i not in reduced]
    gone = {names[i] for i in reduced}
    return make_rule(
        call, [names], [result] * len(call.results), dict(zip(names, shape)),
        blocked=frozenset() if reduce else gone, reduce=dict.fromkeys(gone, reduce) if reduce else {},
        linear=_FIRST if linear and _stays_float(call) else (), op_class="reduction",
        flops=float(call.operands[0].numel),
    )  # fmt: skip


def _stays_float(call: OpCall) -> bool:
    """Whether nothing is rounded to integers on the way, by a `dtype` argument."""
    return all(is_float(spec.dtype) for spec in (call.operands[0], *call.results) if spec is not None)


@rule("aten.sum.default", "aten.sum.dim_IntList")
def _sum(call: OpCall) -> Rule:
    return _reduction(call, "sum", linear=True)


@rule("aten.amax.default", "aten.max.default")
def _max(call: OpCall) -> Rule:
    return _reduction(call, "max")


@rule("aten.mean.default", "aten.mean.dim")
def _mean(call: OpCall) -> Rule:
    """The reduced dims are whole: a mean of a part divides by the wrong number."""
    return _reduction(call, None, linear=True)


@rule(
    "aten.all.default",
    "aten.all.dim",
    "aten.all.dims",
    "aten.amin.default",
    "aten.any.default",
    "aten.any.dim",
    "aten.any.dims",
    "aten.argmax.default",
    "aten.argmin.default",
    "aten.linalg_vector_norm.default",
    "aten.logsumexp.default",
    "aten.max.dim",
    "aten.min.default",
    "aten.min.dim",
    "aten.prod.default",
    "aten.prod.dim_int",
    "aten.std.correction",
    "aten.var.correction",
    "aten.var.dim",
    "aten.var_mean.correction",
)
def _whole(call: OpCall) -> Rule:
    return _reduction(call, None)


@rule(
    "aten.cummax.default",
    "aten.cumprod.default",
    "aten.cumsum.default",
    "aten.logcumsumexp.default",
    "aten.sort.default",
    "aten.sort.stable",
    "aten.argsort.default",
    "aten.argsort.stable",
    "aten._softmax.default",
    "aten._log_softmax.default",
    "aten._safe_softmax.default",
    "aten._softmax_backward_data.default",
    "aten._log_softmax_backward_data.default",
)
def _along_one_dim(call: OpCall) -> Rule:
    """Results as large as the operands; the dim that is scanned, sorted or normalized is whole."""
    shape = call.operands[0].shape
    names = [f"d{i}" for i in range(len(shape))]
    blocked = {names[normal_dim(call.arg("dim", -1), len(shape))]} if shape else set()
    linear = call.name == "aten.cumsum.default" or "backward" in call.name
    return make_rule(
        call, [names] * len(call.operands), [names] * len(call.results), dict(zip(names, shape)), blocked=blocked,
        linear=_FIRST if linear and _stays_float(call) else (), op_class="reduction",
        flops=5.0 * call.operands[0].numel if "softmax" in call.name else float(call.operands[0].numel),
    )  # fmt: skip


@rule("aten.topk.default")
def _topk(call: OpCall) -> Rule:
    shape, result = call.operands[0].shape, call.result
    names = [f"d{i}" for i in range(len(shape))]
    sizes = dict(zip(names, shape))
    found = list(names)
    blocked: set[str] = set()
    if shape:
        dim = normal_dim(call.arg("dim", -1), len(shape))
        found[dim] = "k"
        blocked = {names[dim], "k"}
        sizes["k"] = result.shape[dim]
    return make_rule(call, [names], [found, found], sizes, blocked=blocked, op_class="reduction")
