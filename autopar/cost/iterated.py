"""What a loop that is one operator (operators/iterated.py) launches, moves and holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.region import NodeStrategy
from autopar.ir.sharding import num_pieces
from autopar.operators.rules.iterated import FORWARD, GRADIENT, rounds_of, steps_of_call

_VIEWS = ("aten.unsqueeze.default", "aten.squeeze.dim", "aten.transpose.int", "aten.alias.default")


def is_loop(call: OpCall) -> bool:
    """Whether a call is a loop, or the gradient of one."""
    return call.name in (FORWARD, GRADIENT)


def kernels_and_bytes(call: OpCall, strategy: NodeStrategy, sizes: Sequence[int]) -> tuple[float, float]:
    """The kernels that are launched, and what they read and write on one rank."""
    steps = [step for step in steps_of_call(call) if step.call.name not in _VIEWS]
    moved = sum(_bytes(each) for step in steps for each in (*step.call.operands, *step.call.results))
    return rounds_of(call) * len(steps), rounds_of(call) * moved / _pieces(strategy, sizes)


def held_bytes(call: OpCall, strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """What a rank holds while it runs, beside operands and result: a round's values; for the gradient also what each
    round was given, and the gradients of a round's values.
    """
    whole = sum(_bytes(each) for step in steps_of_call(call) for each in step.call.results)
    if call.name == GRADIENT:
        whole = 2 * whole + (float(call.arg("times")) - 1) * _bytes(call.operands[1])
    return math.ceil(whole / _pieces(strategy, sizes))


def _pieces(strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """Of x, which is the first operand, or lies as that does."""
    return num_pieces(strategy.operands[0], sizes)


def _bytes(spec: TensorSpec | None) -> float:
    return 0.0 if spec is None else float(spec.numel * spec.dtype.itemsize)
