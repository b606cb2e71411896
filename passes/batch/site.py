"""An operator where the analysis stands: what it is, and what may be asked about its operands."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, Literal

from torch import fx

from autopar.base.spoken import spoken
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.passes.batch.composites import Law, law_of
from autopar.passes.batch.of_batch import Edits
from autopar.passes.batch.states import Coupled, Rows, State

PRODUCTS = frozenset(
    f"aten.{name}"
    for name in (
        "mul.Tensor", "mul.Scalar", "mm.default", "bmm.default", "mv.default", "dot.default", "matmul.default",
        "linear.default",
    )
)  # fmt: skip
QUOTIENTS = frozenset({"aten.div.Tensor", "aten.div.Scalar", "aten.true_divide.Tensor"})
FILLED_WITH = {
    "aten.full.default": "fill_value",
    "aten.new_full.default": "fill_value",
    "aten.scalar_tensor.default": "s",
}
"""Operators that multiply, divide, or make a tensor of, a number."""

CountKind = Literal["inputs", "constant", "model"]
"""What a count depends on: the program's inputs, nothing that varies, or also what the model computes or draws."""


@dataclass(frozen=True, slots=True)
class Site:
    """One operator of the larger capture, and the same one of the smaller, if there are two.

    rows: of the batch in the larger capture. ratio: how many times those of the smaller. as_rows(i, state): whether
    operand i, known as whole, may be read as rows, because it is a constant that is alike in every row.
    same_count: whether two nodes compute the same count. where: module and source line. edits: notes what makes terms
    of a mean out of others; None: nothing is changed.
    """

    node: fx.Node
    call: OpCall
    law: Law
    rows: int
    where: str
    smaller: OpCall | None = None
    ratio: int = 1
    as_rows: Callable[[int, Rows], bool] = field(default=lambda index, state: False)
    same_count: Callable[[fx.Node | None, fx.Node | None], bool] = field(default=lambda a, b: a is b)
    count_kind: Callable[[fx.Node], CountKind] = field(default=lambda node: "model")
    is_zero: Callable[[int], bool] = field(default=lambda index: False)
    operand_nodes: tuple[fx.Node, ...] = ()
    edits: Edits | None = None

    @property
    def rule(self) -> Rule:
        """The factors of the larger capture's operator."""
        return self.law.rule

    def coupled(self, why: str) -> Coupled:
        """The state of what this operator couples."""
        return Coupled(f"{spoken(self.call.name)} {why}", self.where)

    def all(self, state: State) -> list[State]:
        """The same state for each result."""
        return [state] * len(self.call.results)


def make_site(node: fx.Node, call: OpCall, rows: int, where: str, **fields: Any) -> Site:
    """A site with its law."""
    return Site(node, call, law_of(call), rows, where, **fields)
