"""Loops as one operator: what every operator of a round leaves apart may be split, all else is whole."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch

from autopar.ir.op_call import OpCall, TensorSpec
from autopar.ir.rule import Rule
from autopar.operators.iterated import Step, steps_of
from autopar.operators.rules.lookup import rule_for
from autopar.operators.rules.registry import make_rule, rule

Dim = tuple[int, int]
"""A dim of a value of a round, by their numbers."""
Specs = tuple[tuple[tuple[int, ...], torch.dtype], ...]
FORWARD, GRADIENT = "autopar.iterate.default", "autopar.iterate_grad.default"
GRADIENT_ROUNDS = 3
"""A round's gradient takes it once more, and about two more operators for each of its own."""


@rule(FORWARD)
def _iterate(call: OpCall) -> Rule:
    dims = dims_of_values(call.operands, str(call.arg("body")))
    return _of(call, dims, dims[0])


@rule(GRADIENT)
def _iterate_grad(call: OpCall) -> Rule:
    """What x walks and another operand does not is summed up in the gradient to that."""
    dims = dims_of_values(call.operands[1:], str(call.arg("body")))
    wanted = dims[int(call.arg("wrt"))]
    summed = {name: "sum" for name in dims[0] if name and name not in wanted}
    return _of(call, (dims[0], *dims), wanted, reduce=summed, linear=(frozenset({0}),))


def _of(call: OpCall, operands: Sequence[Sequence[str]], result: Sequence[str], **more: Any) -> Rule:
    walked = [(name, size) for dims, spec in zip(operands, call.operands) for name, size in zip(dims, spec.shape)]
    sizes = {name: size for name, size in walked if name}
    flops = rounds_of(call) * sum(float(max(each.numel for each in step.call.operands)) for step in steps_of_call(call))
    blocked = {name for name in sizes if name.startswith("w")}
    return make_rule(call, operands, [result], sizes, blocked=blocked, op_class="reduction", flops=flops, **more)


def rounds_of(call: OpCall) -> float:
    """How often a loop, or its gradient, does what a round does."""
    return float(call.arg("times")) * (GRADIENT_ROUNDS if call.name == GRADIENT else 1)


def steps_of_call(call: OpCall) -> tuple[Step, ...]:
    """The operators of a round of a loop, or of one whose gradient a call is."""
    given = call.operands[1:] if call.name == GRADIENT else call.operands
    return steps_of(str(call.arg("body")), specs_of(given))[0]


def specs_of(operands: Sequence[TensorSpec]) -> Specs:
    """Shapes and dtypes, to be looked up by."""
    return tuple((spec.shape, spec.dtype) for spec in operands)


def dims_of_values(operands: Sequence[TensorSpec], body: str) -> tuple[tuple[str, ...], ...]:
    """The factors of x and the others: d0, d1, … may be split, w0, w1, … are whole; "" for dims of size 1."""
    return _names(specs_of(operands), body)


@lru_cache(maxsize=256)
def _names(specs: Specs, body: str) -> tuple[tuple[str, ...], ...]:
    """Dims of values of a round that its operators walk by one factor are one dim; which of them some operator sums
    over, walks with others, or does not split, is whole everywhere.
    """
    steps, result = steps_of(body, specs)
    same = _Classes()
    shapes = {number: shape for number, (shape, _) in enumerate(specs)}
    for step in steps:
        rule = rule_for(step.call)
        tensors = [*zip(step.operands, rule.operands, strict=True), *zip(step.results, rule.results, strict=True)]
        fixed = rule.shape_args or rule.size_args or rule.offset_args or rule.position_args or rule.starts_args
        for factor in rule.factors:
            places = [
                (number, place)
                for number, dims in tensors if dims is not None
                for place, dim in enumerate(dims) if factor.name in dim
            ]  # fmt: skip
            alone = all(
                dims is None or all(dim == (factor.name,) for dim in dims if factor.name in dim) for _, dims in tensors
            )
            kept = all(dims is None or any(factor.name in dim for dim in dims) for dims in rule.results)
            for place in places:
                same.join(places[0], place)
            if fixed or not (alone and kept and factor.split and factor.reduce is None):
                same.whole.add(places[0])
    for dim in range(len(specs[0][0])):  # a round is given what the one before made
        same.join((0, dim), (result, dim))
    return same.names(shapes)


class _Classes:
    """Dims that are one, and those that are whole."""

    def __init__(self) -> None:
        self._of: dict[Dim, Dim] = {}
        self.whole: set[Dim] = set()

    def find(self, dim: Dim) -> Dim:
        while (above := self._of.get(dim, dim)) != dim:
            dim = above
        return dim

    def join(self, a: Dim, b: Dim) -> None:
        self._of[self.find(a)] = self.find(b)

    def names(self, shapes: Mapping[int, Sequence[int]]) -> tuple[tuple[str, ...], ...]:
        """A name for each dim of these values; dims of one value that are one are whole."""
        whole = {self.find(dim) for dim in self.whole}
        for number, shape in shapes.items():
            roots = [self.find((number, dim)) for dim in range(len(shape))]
            whole.update(root for root in roots if roots.count(root) > 1)
        known: dict[Dim, str] = {}
        found = []
        for number, shape in shapes.items():
            names = []
            for dim in range(len(shape)):
                root = self.find((number, dim))
                if root in whole:  # two of one value would be its diagonal
                    known[number, dim] = f"w{len(known)}"
                    names.append(known[number, dim])
                else:
                    names.append(known.setdefault(root, f"d{len(known)}"))
            found.append(tuple(name if size != 1 else "" for name, size in zip(names, shape, strict=True)))
        return tuple(found)
