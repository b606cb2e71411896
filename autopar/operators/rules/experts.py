"""The experts of a mixture: tokens are rows, experts and their widths are terms of a sum; or tokens go to experts."""

from __future__ import annotations

from autopar.base.codes import STORAGES_OF_WEIGHTS
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.coded_experts import Cut
from autopar.operators.rules.registry import bind, rule

EXPERTS_BACKWARD = 8 / 3
"""The gradient's products for each of the forward's: with a gate 16 of 6, without 10 of 4."""


@rule("autopar.experts.default")
def _experts(call: OpCall) -> Rule:
    """Split by t, rows; by e, tokens whole, what the experts here add; by t and e, tokens that go to their experts; by
    f, the parts of every expert's width.
    """
    if call.arg("storage"):
        held, bias, parts, marks = _codes(call)
    else:
        first, second, bias = _parameters(call)
        held, parts, marks = f"{first}, {second}", "", ""
    given = f"t d, t k, t k, {held}{f', {bias}' if call.operand_of('bias') is not None else ''}{parts}"
    stays = " ".join(map(str, range(3, len(call.operands))))
    linear = "2" if parts else "2; 4"
    text = f"{given} -> t d | {_marks(call)}{marks}, e sum, f sum, t exchange e {stays} | linear {linear}"
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


def _codes(call: OpCall) -> tuple[str, str, str, str]:
    """Of parameters that are codes: the dims of both, of the bias, and of scales and zeros behind it; and marks.
    Features that stay together are a factor of their own: `u` in a plain dim, `m` or `v` pieces of a dim that is cut.
    """
    shapes = [operand.shape for operand in call.operands]
    cut = Cut.of(str(call.arg("storage")), shapes[3], shapes[4], shapes[0][-1], bool(call.arg("gated")))
    assert cut is not None, f"codes {shapes[3:5]}: a block would have gate and up"
    sizes: dict[str, int] = {}

    def factor(name: str, size: int) -> str:
        if size > 1:
            sizes[name] = size
        return name if size > 1 else "1"

    together, gates = factor("u", cut.unit), "g" if call.arg("gated") else "1"
    is_mixed = bool(call.arg("gated") and call.arg("interleaved"))
    width = f"(f {together} {gates})" if is_mixed else f"({gates} f {together})"
    rows, columns = cut.first
    blocks = factor("m", cut.unit * (2 if is_mixed else 1) // rows) if rows else ""
    outward = width if not rows else f"(f {blocks})" if is_mixed else f"({gates} f {blocks})"
    first = ["e", outward, *(["a"] if rows else []), *(["n", "b"] if columns else ["d"])]
    rows, columns = cut.second
    inward = f"(f {factor('v', cut.unit // columns)})" if columns else f"(f {together})"
    second = ["e", *(["h", "i"] if rows else ["d"]), inward, *(["j"] if columns else [])]
    parts = ""
    for path, spec in list(call.operand_paths())[5:]:
        if str(path[0]).endswith(("_scales", "_zeros")):
            dims = first if str(path[0]).startswith("first") else second
            parts += ", " + " ".join("1" if i and size == 1 else dims[i] for i, size in enumerate(spec.shape))
    used = {name for name in (*first, *second) if len(name) == 1} - {"e", "d"}
    marks = "".join(f", {name} !" for name in sorted(used))
    marks += "".join(f", {name}={size} !" for name, size in sizes.items())
    return f"{' '.join(first)}, {' '.join(second)}", f"e {width}", parts, marks


def expert_width(call: OpCall, rule: Rule) -> int:
    """The features of an expert between its products, F: of the factor `f` so many, or as many times what codes keep
    together.
    """
    if not call.arg("storage"):
        return rule.sizes["f"]
    first, second = (operand.shape for operand in call.operands[3:5])
    cut = Cut.of(str(call.arg("storage")), first, second, call.operands[0].shape[-1], bool(call.arg("gated")))
    assert cut is not None
    return cut.width


def _marks(call: OpCall) -> str:
    return "k !, d !, g=2 !" if call.arg("gated") else "k !, d !"


def _flops(call: OpCall, at: int) -> float:
    """Two for each weight of the experts that a token goes through. at: the place of the tokens among the operands."""
    tokens, chosen = call.operands[at + 1].shape
    first, second = call.operands[at + 3], call.operands[at + 4]
    per_byte = STORAGES_OF_WEIGHTS[call.arg("storage")].per_byte if call.arg("storage") else 1
    return 2.0 * tokens * chosen * (first.numel + second.numel) * per_byte / first.shape[0]
