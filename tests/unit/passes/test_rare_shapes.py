"""Small models with what those of the catalogue lack, each proven: whole programs in which one rare thing decides."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

import autopar
from autopar.api.plan import Plan
from autopar.machine.mesh import Mesh


def plan_of(model: nn.Module, mesh: dict[str, int], strategy: Any, **options: Any) -> Plan:
    batch = {"x": torch.randn(4, 8, generator=torch.Generator().manual_seed(0))}
    return autopar.plan(model, Mesh(mesh, hardware="cpu"), example_inputs=batch, strategy=strategy, **options)


class Mixed(nn.Module):
    """Parameters of two precisions in one region."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.Linear(8, 8).double(), nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return self.second(self.first(x.double()).float()).square().mean()


def test_parameters_of_two_precisions() -> None:
    """Breaks if they travel in one bucket, which is of one dtype."""
    plan = plan_of(Mixed(), {"dp": 2}, "zero3")
    assert plan.program is not None
    for region in plan.program.regions:
        _, call = next(plan.program.calls_of(region.name))
        for bucket in (*region.transfers["gather"], *region.transfers["reduce"]):
            dtypes = {plan.program.variable(call.slots[move.slot]).type.dtype for move in bucket.moves}
            assert len(dtypes) == 1 and len(bucket.moves) == 2


class Terms(nn.Module):
    """A value that two products read, and, between them, something else."""

    def __init__(self) -> None:
        super().__init__()
        self.inner, self.first, self.second = (nn.Linear(8, 8) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        y = self.inner(x)
        return (self.first(y) + y.tanh() + self.second(y)).square().mean()


def test_a_term_between_products() -> None:
    """Breaks if a term of a gradient is lost, or counted twice, where products are added first."""
    plan = plan_of(Terms(), {"dp": 2}, "ddp")
    assert plan.verify().raise_on_failure().ok
