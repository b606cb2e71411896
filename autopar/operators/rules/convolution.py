"""Convolutions: batch, groups, input and output channels are factors; space is whole."""

from __future__ import annotations

import math

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import ArgPath, Rule
from autopar.operators.rules.registry import bind, rule


@rule("aten.convolution.default")
def _convolution(call: OpCall) -> Rule:
    """`b (g i) x, (g o) i k -> b (g o) y`, summed over i; with a bias, which must count once, i is whole."""
    groups = call.arg("groups")
    x, w, y, space = _dims(call, 0, 1)
    bias = len(call.operands) == 3
    text = f"{x}, {w}{', (g o)' if bias else ''} -> {y} | g={groups}{_whole_group(groups)}, {space}"
    text += ", i !" if bias else ", i sum"
    text += "" if bias else " | linear 0; 1"
    return bind(call, text, op_class="conv", flops=_flops(call, 1, call.results[0]), size_args=_group_arg(call))


@rule("aten.convolution_backward.default")
def _convolution_backward(call: OpCall) -> Rule:
    """Output channels are summed in the gradient to the input, the batch in those to weight and bias."""
    groups = call.arg("groups")
    x, w, y, space = _dims(call, 1, 2)
    dims = [text if result is not None else "_" for text, result in zip((x, w, "(g o)"), call.results)]
    # The bias gradient does not have i, and is not a sum over it.
    i = "i !" if call.results[2] is not None else "i sum"
    text = (
        f"{y}, {x}, {w} -> {', '.join(dims)} | g={groups}{_whole_group(groups)}, {space}, b sum, o sum, {i} | linear 0"
    )
    size_args = _group_arg(call)
    if call.arg("bias_sizes"):
        size_args += ((call.path("bias_sizes"), "o"), (call.path("bias_sizes"), "g"))
    products = sum(1 for result in call.results[:2] if result is not None)
    return bind(
        call, text, op_class="conv", flops=products * _flops(call, 2, call.operands[0]), size_args=size_args
    )  # fmt: skip


def _dims(call: OpCall, x: int, w: int) -> tuple[str, str, str, str]:
    """The dims of input, weight and output, and the marks of the spatial factors."""
    num_dims = call.operands[x].ndim - 2
    space, kernel, out = ([f"{letter}{i}" for i in range(num_dims)] for letter in "xky")
    channels = "(g i) o" if call.arg("transposed") else "(g o) i"
    marks = ", ".join(f"{name} !" for name in (*space, *kernel, *out))
    return f"b (g i) {' '.join(space)}", f"{channels} {' '.join(kernel)}", f"b (g o) {' '.join(out)}", marks


def _whole_group(groups: int) -> str:
    return " !" if groups == 1 else ""


def _group_arg(call: OpCall) -> tuple[tuple[ArgPath, str], ...]:
    return ((call.path("groups"), "g"),)


def _flops(call: OpCall, weight: int, output: TensorSpec | None) -> float:
    """Two for each weight and each place at which the kernel is applied."""
    moving = call.operands[weight - 1] if call.arg("transposed") else output
    assert moving is not None
    shape = moving.shape
    return 2.0 * math.prod(call.operands[weight].shape) * shape[0] * math.prod(shape[2:])
