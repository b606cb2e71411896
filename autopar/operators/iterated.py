"""A loop whose rounds do the same, as one operator: what a round makes is what the next one is given.

    for _ in range(19):                                        x' = iterate(x, [], "div(x, add(sum(x, [-1], True), e))",
        x = x / (x.sum(-1, keepdim=True) + e)             →                19)

A round is text (`expressions.py`): assignments between semicolons, and last what it makes of `x`, which lies as x does.
`y0`, `y1`, … are tensors that all rounds read. Only what torch tags as pointwise is called, and the reductions and
views of one dim below, so that text of any origin computes numbers and nothing else. The gradient runs the loop again:
nothing is kept but what went in.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.autograd import recording
from autopar.base.torch_compat.functions import overload_called
from autopar.base.torch_compat.tracing import outside_of_tracing
from autopar.ir.op_call import OpCall, op_call
from autopar.operators.expressions import Called, Evaluated, evaluated

_MOST_CHARACTERS = 4000
OTHERS = frozenset(
    {
        "sum", "mean", "amax", "amin", "prod", "logsumexp", "_softmax", "_log_softmax", "softmax", "log_softmax",
        "linalg_vector_norm", "var", "std", "cumsum", "unsqueeze", "squeeze", "transpose", "alias",
    }
)  # fmt: skip
"""What a round may call beside pointwise operators."""
_UNTRIED = frozenset({torch.Tag.nondeterministic_seeded, torch.Tag.data_dependent_output})


def iterate(x: Tensor, others: Sequence[Tensor], body: str, times: int) -> Tensor:
    """What so many rounds make of x[...], shaped as x. others: y0, y1, … of the text.

    Raises:
        AutoparError: text of another form, or that calls what no round may.
    """
    run = parsed(body)
    for _ in range(times):
        x = run(x, others)
    return x.contiguous()  # as shapes for tracing have it


def iterate_grad(g: Tensor, x: Tensor, others: Sequence[Tensor], body: str, times: int, wrt: int) -> Tensor:
    """The gradient of `iterate` to x (`wrt` 0), or to the `wrt`-th of the others, counted from 1, for g of its result.

    What each round was given is made again first; then rounds are differentiated one by one, the last one first.
    """
    run, states = parsed(body), [x]
    for _ in range(times - 1):
        states.append(run(states[-1], others))
    total: Tensor | None = None
    with recording():
        given = [each.detach() for each in others]
        if wrt:
            given[wrt - 1].requires_grad_()
        while states:
            state = states.pop().detach().requires_grad_()
            wanted = [state, *([given[wrt - 1]] if wrt else [])]
            found = torch.autograd.grad(run(state, given), wanted, g, allow_unused=True, materialize_grads=True)
            g = found[0]
            if wrt:
                total = found[1] if total is None else total + found[1]
    return (g if total is None else total).contiguous()


class _Iterate(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, body: str, times: int, x: Tensor, *others: Tensor) -> Tensor:
        ctx.body, ctx.times = body, times
        ctx.save_for_backward(x, *others)
        found: Tensor = torch.ops.autopar.iterate(x, list(others), body, times)
        return found

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, *others = ctx.saved_tensors
        found = [
            torch.ops.autopar.iterate_grad(grads[0], x, others, ctx.body, ctx.times, wrt) if needed else None
            for wrt, needed in enumerate(ctx.needs_input_grad[2:])
        ]
        return None, None, *found


def trace_iterate(x: Tensor, others: Sequence[Tensor], body: str, times: int) -> Any:
    """`iterate` with its gradient."""
    return _Iterate.apply(body, times, x, *others)


# --------------------------------------------------------------------------------------------------------------- text


@dataclass(frozen=True, slots=True)
class Round:
    """What a text says: values that get a name, in order, and what is made of them."""

    steps: tuple[tuple[str, Evaluated], ...]
    result: Evaluated

    def __call__(self, x: Tensor, others: Sequence[Tensor]) -> Any:
        """What the round makes of x."""
        return _run(self, _named(x, others))


def _named(x: Tensor, others: Sequence[Tensor]) -> dict[str, Tensor]:
    return {"x": x, **{f"y{number}": each for number, each in enumerate(others)}}


def _run(round_: Round, values: dict[str, Tensor]) -> Any:
    for name, step in round_.steps:
        values[name] = step(values)
    return round_.result(values)


@lru_cache(maxsize=256)
def parsed(body: str) -> Round:
    """A round of that text.

    Raises:
        AutoparError: text of another form, or that calls what no round may.
    """
    try:
        if len(body) > _MOST_CHARACTERS:
            raise ValueError("it is too long")
        *before, last = ast.parse(body).body
        if not isinstance(last, ast.Expr):
            raise ValueError("what it makes stands last")
        names = {"x", *_read(body)}
        steps = []
        for each in before:
            name = each.targets[0] if isinstance(each, ast.Assign) and len(each.targets) == 1 else None
            if not isinstance(each, ast.Assign) or not isinstance(name, ast.Name) or name.id in names:
                raise ValueError(f"{ast.unparse(each)[:40]} gives no new value a name")
            steps.append((name.id, evaluated(each.value, names, _function)))
            names.add(name.id)
        return Round(tuple(steps), evaluated(last.value, names, _function))
    except (SyntaxError, ValueError, IndexError, RecursionError, MemoryError) as error:
        raise AutoparError(
            f"{body[:80]!r} is no round of a loop",
            values=str(error),
            remedy="write nested calls of pointwise operators of torch and sums over dims: div(x, sum(x, [-1], True))",
        ) from None


def _read(body: str) -> set[str]:
    """y0, y1, …"""
    found = (node.id for node in ast.walk(ast.parse(body)) if isinstance(node, ast.Name))
    return {name for name in found if name[0] == "y" and name[1:].isdigit()}


def may_be_called(target: Any) -> bool:
    """Whether a round may call this overload of ATen's."""
    tags = target.tags
    if target.namespace != "aten" or target._schema.is_mutable or not _UNTRIED.isdisjoint(tags):
        return False
    return torch.Tag.pointwise in tags or target.overloadpacket.__name__ in OTHERS


def _function(name: str) -> Called:
    packet = getattr(torch.ops.aten, name, None)
    if packet is None or not any(may_be_called(getattr(packet, each)) for each in packet.overloads()):
        raise ValueError(f"a round does not call {name}")

    def call(values: Mapping[str, Tensor], *args: Any, **options: Any) -> Any:
        found = packet(*args, **options)
        if isinstance(values, _Noted):
            values.note(overload_called(packet, args, options), args, options, found)
        return found

    return call


# -------------------------------------------------------------------------------------------------- what a round calls


@dataclass(frozen=True, slots=True)
class Step:
    """An operator of a round, and the numbers of the values that it reads and makes: 0 is x, then the others."""

    call: OpCall
    operands: tuple[int, ...]
    results: tuple[int, ...]


@lru_cache(maxsize=256)
def steps_of(body: str, specs: tuple[tuple[tuple[int, ...], torch.dtype], ...]) -> tuple[tuple[Step, ...], int]:
    """The operators of a round in their order, and the number of what it makes. specs: of x and the others."""
    with outside_of_tracing():
        x, *others = (torch.empty(shape, dtype=dtype, device="meta") for shape, dtype in specs)
        noted = _Noted([x, *others])
        result = _run(parsed(body), noted)
        return tuple(noted.steps), noted.number(result)


class _Noted(dict[str, Tensor]):
    """Values of a round, by their names, and the operators that are called on them."""

    def __init__(self, given: Sequence[Tensor]) -> None:
        super().__init__(_named(given[0], given[1:]))
        self._values = list(given)
        self.steps: list[Step] = []

    def number(self, value: Any) -> int:
        return next(number for number, each in enumerate(self._values) if each is value)

    def note(self, target: Any, args: Sequence[Any], options: Mapping[str, Any], found: Any) -> None:
        """A call, and what it gave."""
        first = len(self._values)
        self._values += list(found) if isinstance(found, tuple | list) else [found]
        operands = tuple(self.number(each) for each in _tensors([*args, *options.values()]))
        self.steps.append(Step(op_call(target, args, options, found), operands, tuple(range(first, len(self._values)))))


def _tensors(values: Sequence[Any]) -> Iterator[Tensor]:
    for each in values:
        if isinstance(each, Tensor):
            yield each
        elif isinstance(each, list | tuple):
            yield from _tensors(each)
