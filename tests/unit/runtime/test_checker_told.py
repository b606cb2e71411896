"""The checker knows by itself what an operator on parts must be told: rules that forget it are found by programs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch
from torch import Tensor

import autopar
from autopar.base.errors import AutoparError
from autopar.cli.models import catalogue
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule, with_fields
from autopar.ir.sharding import Shard
from autopar.machine.mesh import Mesh
from autopar.operators.rules import lookup
from autopar.operators.rules.registry import _RULES
from autopar.runtime.checker.types import Axes, Typed, give
from autopar.runtime.checker.typing_mode import Typing

pytestmark = pytest.mark.unit
Change = Callable[[Rule], Rule]


def largest(rule: Rule) -> Rule:
    return with_fields(rule, factors=tuple(replace(f, reduce=f.reduce and "max") for f in rule.factors))


def untold(rule: Rule) -> Rule:
    return with_fields(rule, offset_args=(), position_args=())


@pytest.mark.sampled(4)
@pytest.mark.moderate
@pytest.mark.parametrize(
    ("operator", "change", "mesh", "strategy"),
    [
        ("autopar.linear", untold, {"tp": 2}, "tensor"),
        ("autopar.embedding", untold, {"tp": 2}, "tensor"),
        ("autopar.embedding_grad", untold, {"tp": 2}, "tensor"),
        ("autopar.take_label", untold, {"tp": 2}, "tensor"),
        ("autopar.cross_entropy_grad", untold, {"tp": 2}, "tensor"),
        ("autopar.dropout", untold, {"dp": 2}, "ddp"),
        ("aten.mm", largest, {"tp": 2}, "tensor"),
        ("autopar.linear_grad_weight", largest, {"dp": 2}, "ddp"),
    ],
)
def test_a_rule_that_forgets_what_an_operator_must_be_told(
    monkeypatch: pytest.MonkeyPatch, operator: str, change: Change, mesh: dict[str, int], strategy: str
) -> None:
    """Breaks when the checker believes a rule that tells an operator nothing of where its rank's rows, columns or draws
    lie, or takes the largest term for the sum: the program, its types and its terms are then all of one piece.
    """
    lookup.registered()
    right = _RULES[f"{operator}.default"]

    def wrong(call: OpCall) -> Rule:
        return change(right(call))

    monkeypatch.setitem(_RULES, f"{operator}.default", wrong)
    loaded = catalogue.load("gpt2", tiny=True, device="cpu", dropout=0.1)
    with pytest.raises(AutoparError, match="does not pass its own checker"):
        autopar.plan(loaded.model, Mesh(mesh, hardware="cpu"), example_inputs=loaded.batch, strategy=strategy)


@pytest.mark.parametrize("other", [Shard(0, 2), Shard(0, 2, True), Shard(1)])
def test_operands_that_lie_in_other_stripes(other: Shard) -> None:
    """Breaks when pieces of other elements, of one shape by chance, may be added to each other."""
    typing = Typing(Axes(("dp",), (2,)), "")

    def part(placement: Shard) -> Tensor:
        whole = (8, 4) if placement.dim == 0 else (4, 8)
        return give(torch.empty((4, 4), device="meta"), {Typed(whole, (placement,))})

    for one in (Shard(0), other):
        typing.typed(torch.ops.aten.add.Tensor, (part(one), part(one)), {})
    with pytest.raises(AutoparError, match="no part of one whole"):
        typing.typed(torch.ops.aten.add.Tensor, (part(Shard(0)), part(other)), {})
