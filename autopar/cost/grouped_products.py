"""What experts hold where PyTorch's grouped product computes them (operators/grouped_experts.py): on CUDA, where there
are no kernels of autopar's. It takes all choices of all tokens at once, a row each, sorted by experts.

Shape suffixes as in `autopar.operators.experts`, S = T K rows.
"""

from __future__ import annotations

import ast
from functools import lru_cache

import torch

from autopar.ir.op_call import OpCall
from autopar.machine.hardware import Hardware
from autopar.operators.basic import wide_dtype
from autopar.operators.grouped_experts import ALIGNED

FORWARD = "autopar.experts.default"
_INDEX_BYTES = 4 * 8 + 1
"""Of a row: its token, its place and the other way round, its expert, and whether that is here."""
_SORTING_BYTES = 3 * 4 + 4 * 8
"""Of a row while places are sorted: their numbers three times, and what comes of them."""


def serves(call: OpCall, hardware: Hardware) -> bool:
    """Whether it computes experts there, if the sizes here suit it (`held_bytes`)."""
    return (
        call.name.startswith("autopar.experts")
        and not call.arg("storage")
        and hardware.device == "cuda"
        and "experts" not in hardware.fused_kernels
        and all(each is None or each.dtype == torch.bfloat16 for each in call.results[:1])
    )


def held_bytes(call: OpCall, tokens: int, hidden: int, width: int, columns: int) -> int:
    """What a call of so many tokens holds beside its operands and results; 0 for sizes of which rows are not aligned,
    whose experts are multiplied one by one.

    hidden, width, columns: D, F and G F of an expert here.
    """
    if any(each % ALIGNED for each in (hidden, width, columns)):
        return 0
    is_grad = call.name != FORWARD
    x, weights = call.operands[1 if is_grad else 0], call.operands[3 if is_grad else 2]
    has_bias = len(call.operands) > (6 if is_grad else 5)
    size, wide, of_weight = x.dtype.itemsize, wide_dtype(x.dtype).itemsize, weights.dtype.itemsize
    text, chosen, rounded = str(call.arg("act")), weights.shape[-1], max(size, of_weight)
    between = wide if "wide" in text else size
    row, product, inner = hidden * size, columns * size, width * size
    multiplied = row + product * (3 if has_bias else 1)
    if not is_grad:
        activated = product + most_at_once(text) * width * between + inner
        most = max(multiplied, activated, product + 2 * row + hidden * rounded, product + 4 * row)
        last = product + 3 * row
    else:
        kept = 2 * row + product + (text.count("(") + 1) * width * between + inner
        through = width * (rounded + size) + columns * (size + between) + 2 * width * between
        parameters = 2 * product + inner + hidden * (rounded + size)
        most = max(row + multiplied, kept + 3 * width * wide, kept + through, kept + parameters)
        last = kept + product + 4 * row
    index = _INDEX_BYTES + of_weight + is_grad * (wide + of_weight + has_bias * ALIGNED * size)
    sums = tokens * hidden * wide + 16 * (call.operands[-1].shape[0] + 1)
    return max(tokens * chosen * (max(most, last) + index), tokens * chosen * (last + index) + sums,
               tokens * chosen * _SORTING_BYTES)  # fmt: skip


@lru_cache(maxsize=256)
def most_at_once(text: str) -> int:
    """How many results of an activation's operators live at once, its own among them, as they are computed in turn."""

    def counted(node: ast.expr) -> tuple[int, int]:
        """(at most, once it is computed)."""
        if not isinstance(node, ast.Call):
            return 0, 0
        most = held = 0
        for each in (*node.args, *(option.value for option in node.keywords)):
            inside, left = counted(each)
            most, held = max(most, held + inside), held + left
        return max(most, held + 1), 1

    return counted(ast.parse(text, mode="eval").body)[0]
