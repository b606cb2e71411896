"""What a loop that is one operator (operators/iterated.py) launches, moves and holds."""

from __future__ import annotations

import math
from collections.abc import Sequence

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.region import NodeStrategy
from autopar.ir.rule import Rule
from autopar.ir.sharding import num_pieces
from autopar.operators.iterated import Step, steps_of
from autopar.operators.rules.iterated import specs_of

FORWARD, GRADIENT = "autopar.iterate.default", "autopar.iterate_grad.default"
_KERNELS_OF_GRADIENT = 3
"""For each of a round: its own once more, and about two of its gradient."""


def kernels_and_bytes(call: OpCall, strategy: NodeStrategy, sizes: Sequence[int]) -> tuple[float, float]:
    """The kernels that are launched, and what they read and write on one rank."""
    steps = [step for step in _steps(call) if step.call.name not in _VIEWS]
    moved = sum(_bytes(each) for step in steps for each in (*step.call.operands, *step.call.results))
    times = float(call.arg("times")) * (_KERNELS_OF_GRADIENT if call.name == GRADIENT else 1)
    return times * len(steps), times * moved / _pieces(strategy, sizes)


def held_bytes(call: OpCall, rule: Rule, strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """What a rank holds while it runs, beside operands and result: a round's values; for the gradient also what each
    round was given, and the gradients of a round's values.
    """
    made = sum(_bytes(each) for step in _steps(call) for each in step.call.results)
    x = call.operands[1 if call.name == GRADIENT else 0]
    whole = 2 * made + (float(call.arg("times")) - 1) * _bytes(x) if call.name == GRADIENT else made
    return math.ceil(whole / _pieces(strategy, sizes))


def _steps(call: OpCall) -> tuple[Step, ...]:
    given = call.operands[1:] if call.name == GRADIENT else call.operands
    return steps_of(str(call.arg("body")), specs_of(given))[0]


def _pieces(strategy: NodeStrategy, sizes: Sequence[int]) -> int:
    """Of x, which is the first operand of either, or lies as that does."""
    return num_pieces(strategy.operands[0], sizes)


def _bytes(spec: TensorSpec | None) -> float:
    return 0.0 if spec is None else float(spec.numel * spec.dtype.itemsize)


_VIEWS = ("aten.unsqueeze.default", "aten.squeeze.dim", "aten.transpose.int", "aten.alias.default")
