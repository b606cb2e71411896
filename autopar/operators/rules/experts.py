"""The experts of a mixture: tokens are rows, experts and their widths are terms of a sum; or tokens go to experts."""

from __future__ import annotations

from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.rules.registry import bind, rule

EXPERTS_BACKWARD = 8 / 3
"""The gradient's products for each of the forward's: with a gate 16 of 6, without 10 of 4."""


@rule("autopar.experts.default")
def _experts(call: OpCall) -> Rule:
    """Split by t, rows; by e, tokens whole, what the experts here add; by t and e, tokens that go to their experts; by
    f, the parts of every expert's width.
    """
    first, second, bias = _parameters(call)
    given = f"t d, t k, t k, {first}, {second}{f', {bias}' if call.operand_of('bias') is not None else ''}"
    stays = "3 4 5" if call.operand_of("bias") is not None else "3 4"
    text = f"{given} -> t d | {_marks(call)}, e sum, f sum, t exchange e {stays} | linear 2; 4"
    return bind(
        call, text, op_class="matmul", flops=_flops(call, 0), offset_args=((call.path("start"), "e"),)
    )  # fmt: skip


@rule("autopar.experts_grad.default", "autopar.experts_grad_bias.default")
def _experts_grad(call: OpCall) -> Rule:
    """Linear in the incoming gradient. Split tokens give terms of the gradients of parameters; split experts, and
    split widths, of those of tokens and of the router's weights.
    """
    first, second, bias = _parameters(call)
    last = f", {bias}" if len(call.operands) == 7 else ""
    text = f"t d, t d, t k, t k, {first}, {second}{last} -> t d, t k, {first}, {second}{last} "
    stays = "4 5 6" if last else "4 5"
    text += f"| {_marks(call)}, t sum, e sum, f sum, t exchange e {stays} | linear 0"
    flops = EXPERTS_BACKWARD * _flops(call, 1)
    return bind(call, text, op_class="matmul", flops=flops, offset_args=((call.path("start"), "e"),))


def _parameters(call: OpCall) -> tuple[str, str, str]:
    """The dims of the two matrices and the bias of all experts: columns of the first are gate and up."""
    width = "f" if not call.arg("gated") else "(f g)" if call.arg("interleaved") else "(g f)"
    if call.arg("transposed"):
        return f"e d {width}", "e f d", f"e {width}"
    return f"e {width} d", "e d f", f"e {width}"


def _marks(call: OpCall) -> str:
    return "k !, d !, g=2 !" if call.arg("gated") else "k !, d !"


def _flops(call: OpCall, at: int) -> float:
    """Two for each weight of the experts that a token goes through. at: the place of the tokens among the operands."""
    tokens, chosen = call.operands[at + 1].shape
    first, second = call.operands[at + 3], call.operands[at + 4]
    return 2.0 * tokens * chosen * (first.numel + second.numel) / first.shape[0]
