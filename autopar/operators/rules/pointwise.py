"""Pointwise operators: every dim of the broadcast result is a factor, and any of them may be split."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from autopar.ir.op_call import OpCall, TensorSpec, is_float
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import make_rule, replicate, rule

Groups = tuple[frozenset[int], ...]
_ALIASES = ("aten.alias.default", "aten.detach.default", "aten.lift_fresh.default")


def pointwise_rule(call: OpCall, linear: Groups = ()) -> Rule:
    """The rule of any operator that computes each element of its results from the elements at the same place.

    Replicated where that cannot be: random operators, results of unequal shapes, operands that do not broadcast.
    """
    shape = next((result.shape for result in call.results if result is not None), ())
    alike = all(result is None or result.shape == shape for result in call.results)
    if torch.Tag.nondeterministic_seeded in call.target.tags or not alike:
        return replicate(call)
    if not all(_broadcasts(operand.shape, shape) for operand in call.operands):
        return replicate(call)
    names = [f"d{i}" if size != 1 else "" for i, size in enumerate(shape)]
    operands = [_aligned(operand.shape, names) for operand in call.operands]
    results = [None if result is None else names for result in call.results]
    sizes = {name: size for name, size in zip(names, shape) if name}
    numel = float(torch.Size(shape).numel())
    floats = all(result is None or is_float(result.dtype) for result in call.results)
    terms = {i for i, operand in enumerate(call.operands) if floats and is_float(operand.dtype)}
    groups = tuple(g for g in linear if g <= terms)  # numbers of Python's are no operands
    alias = call.name in _ALIASES
    op_class = "view" if alias else "elementwise"
    flops = 0.0 if alias else numel
    return make_rule(call, operands, results, sizes, linear=groups, alias=alias, op_class=op_class, flops=flops)


def _broadcasts(shape: tuple[int, ...], to: tuple[int, ...]) -> bool:
    own = to[len(to) - len(shape) :]
    return len(shape) <= len(to) and all(a in (1, b) for a, b in zip(shape, own))


def _aligned(shape: tuple[int, ...], names: list[str]) -> list[str]:
    own = names[len(names) - len(shape) :]
    return [name if size != 1 else "" for size, name in zip(shape, own)]


def _group(*operands: int) -> frozenset[int]:
    return frozenset(operands)


def _register(linear: Callable[[OpCall], Groups], *names: str) -> None:
    @rule(*names)
    def linear_pointwise(call: OpCall) -> Rule:
        return pointwise_rule(call, linear(call))


def _sum_of_all(call: OpCall) -> Groups:
    """Sums and selections: linear in all their tensors together, unless a number is among the terms."""
    both = all(isinstance(arg, TensorSpec) for arg in call.args[:2])
    return (_group(0, 1),) if both else ()


def _each_of_two(call: OpCall) -> Groups:
    return (_group(0), _group(1)) if len(call.operands) == 2 else (_group(0),)


def _first(call: OpCall) -> Groups:
    return (_group(0),)


def _first_if_tensor(call: OpCall) -> Groups:
    return (_group(0),) if isinstance(call.args[0], TensorSpec) else ()


def _first_if_zero_value(call: OpCall) -> Groups:
    return (_group(0),) if call.arg("value") == 0 else ()


def _if_other_choice_is_zero(call: OpCall) -> Groups:
    return (_group(1),) if 0 in (call.arg("self"), call.arg("other")) else ()


def _keeps_range(call: OpCall) -> Groups:
    """Casts between float types, unless terms that cancel could overflow on the way (float32 to float16)."""
    source, result = call.operands[0].dtype, call.results[0]
    if result is None or not (source.is_floating_point and result.dtype.is_floating_point):
        return ()
    return (_group(0),) if torch.finfo(result.dtype).max >= 0.99 * torch.finfo(source).max else ()


_register(
    _sum_of_all, "aten.add.Tensor", "aten.sub.Tensor", "aten.rsub.Tensor", "aten.lerp.Scalar", "aten.complex.default"
)
_register(_each_of_two, "aten.mul.Tensor")
_register(_first_if_tensor, "aten.div.Tensor")
_register(
    _first,
    "aten._conj.default",
    "aten.neg.default",
    "aten.mul.Scalar",
    "aten.div.Scalar",
    "aten.alias.default",
    "aten.clone.default",
    "aten.contiguous.default",
    "aten.detach.default",
    "aten.lift_fresh.default",
    "aten.lift_fresh_copy.default",
    "aten.native_dropout_backward.default",
    # The gradients of pointwise functions: linear in the incoming gradient.
    "aten.elu_backward.default",
    "aten.gelu_backward.default",
    "aten.hardsigmoid_backward.default",
    "aten.hardswish_backward.default",
    "aten.hardtanh_backward.default",
    "aten.leaky_relu_backward.default",
    "aten.log_sigmoid_backward.default",
    "aten.mish_backward.default",
    "aten.sigmoid_backward.default",
    "aten.silu_backward.default",
    "aten.softplus_backward.default",
    "aten.tanh_backward.default",
    "aten.threshold_backward.default",
)
_register(lambda _: (_group(1, 2),), "aten.where.self")
_register(lambda _: (_group(0, 1), _group(0, 2)), "aten.addcmul.default")
_register(lambda _: (_group(0, 1),), "aten.addcdiv.default", "aten.lerp.Tensor")
_register(_if_other_choice_is_zero, "aten.where.ScalarSelf", "aten.where.ScalarOther")
_register(_first_if_zero_value, "aten.masked_fill.Scalar")
_register(lambda _: (_group(1),), "aten.copy.default")
_register(_keeps_range, "aten._to_copy.default", "prims.convert_element_type.default")
_register(
    lambda _: (),
    "aten.copy_.default",
    "aten.fill.Scalar",
    "aten.fill.Tensor",
    "aten.floor_divide.Scalar",
    "aten.floor_divide.default",
    "aten.hardswish.default",
    "aten.log_sigmoid_forward.default",
    "aten.masked_fill.Tensor",
    "aten.polar.default",
)


@rule("aten.view.dtype")
def _other_reading(call: OpCall) -> Rule:
    """The same bytes as another dtype: element by element where both are as large, no sums of terms."""
    source, result = call.operands[0], call.results[0]
    if result is None or source.dtype.itemsize != result.dtype.itemsize:
        return replicate(call)
    return replace(pointwise_rule(call), alias=True, op_class="view", flops=0.0)
