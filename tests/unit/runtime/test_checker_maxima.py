"""Maxima of terms that travel together: what the checker knows of the stack that they travel in."""

from __future__ import annotations

import re

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.base.errors import AutoparError
from autopar.machine.mesh import Mesh
from autopar.runtime.checker.program import check_types

pytestmark = pytest.mark.unit


class Ranges(nn.Module):
    """Two maxima of weights and a sum, all due together: of each, ranks have a term."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.last = nn.Linear(8, 16, bias=False), nn.Linear(16, 8, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        high, low, total = self.first.weight.max(), self.last.weight.max(), self.first.weight.sum()
        return (self.last(self.first(x)) * (high * low * total)).square().mean()


def planned(**sizes: int) -> Plan:
    strategies = {"dp": "zero3", "tp": "tensor"}
    return autopar.plan(
        Ranges(), Mesh(sizes, hardware="cpu"), example_inputs={"x": torch.randn(4, 8)},
        strategy={axis: strategies[axis] for axis in sizes},
    )  # fmt: skip


JOINED = re.compile(r'comm\.all_reduce\(torch\.stack\(\[(\w+), (\w+)\]\), "(\w+)", op="max"\)')


@pytest.mark.moderate
@pytest.mark.parametrize("sizes", [{"tp": 2}, {"dp": 2, "tp": 2}], ids=["tp", "dp,tp"])
def test_maxima_travel_together(sizes: dict[str, int]) -> None:
    """Breaks if two maxima that are one message are refused, as every model with two was, or are other numbers."""
    plan = planned(**sizes)
    assert JOINED.search(plan.source)
    proof = plan.verify()
    assert proof.ok, str(proof)


@pytest.mark.moderate
def test_maxima_are_not_taken_for_sums() -> None:
    """Breaks if what is stacked may be the terms of a maximum and of a sum at once, or be added up."""
    plan = planned(tp=2)
    joined = JOINED.search(plan.source)
    assert joined is not None
    one, other, _ = joined.groups()
    check_types(plan.source, plan.interface)
    for instead, said in (
        (f'comm.all_reduce(torch.stack([{one}, {other}]), "tp")', "no terms of a sum over tp"),
        (f'comm.all_reduce(torch.stack([{one}, total]), "tp", op="max")', "stack on these parts"),
        (f'comm.all_reduce(torch.stack([{one}, total]), "tp")', "stack on these parts"),
    ):
        with pytest.raises(AutoparError, match=said):
            check_types(plan.source.replace(joined.group(), instead), plan.interface)
