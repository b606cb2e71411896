"""Experts in loops under strategies that give each rank some of them: where their parameters lie, and what moves."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from tests.unit.passes.sorted_experts import Net

pytestmark = pytest.mark.unit
WIDTH, INNER, EXPERTS, CHOSEN = 8, 12, 4, 2


class Apart(nn.Module):
    """Experts that are modules of their own, with biases; each takes so many tokens of a sequence at most."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.experts = nn.ModuleList(
            nn.Sequential(nn.Linear(WIDTH, INNER), nn.ReLU(), nn.Linear(INNER, WIDTH)) for _ in range(EXPERTS)
        )

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x).softmax(-1)
        hot = F.one_hot(scores.argmax(-1), EXPERTS)
        kept = (hot * (hot.cumsum(1) <= 2)).flatten(0, 1)
        tokens, weights = x.flatten(0, 1), scores.amax(-1).flatten()
        out = torch.zeros_like(tokens)
        for e, expert in enumerate(self.experts):
            rows = torch.where(kept[:, e])[0]
            out.index_add_(0, rows, expert(tokens[rows]) * weights[rows, None])
        return out.view_as(x)


class Stacked(nn.Module):
    """Experts whose matrices lie one below the other, gate and up apart."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.w1, self.v1, self.w2 = (nn.Parameter(torch.randn(EXPERTS * INNER, WIDTH) * 0.3) for _ in range(3))

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.flatten(0, 1)
        weights, indices = self.gate(tokens).softmax(-1).topk(CHOSEN)
        w1, v1, w2 = (each.view(EXPERTS, INNER, WIDTH) for each in (self.w1, self.v1, self.w2))
        out = torch.zeros_like(tokens)
        for e in range(EXPERTS):
            rows, nth = torch.where(indices == e)
            made = (F.silu(tokens[rows] @ w1[e].t()) * (tokens[rows] @ v1[e].t())) @ w2[e]
            out.index_add_(0, rows, made * weights[rows, nth, None])
        return out.view_as(x)


def planned(kind: type[nn.Module], strategy: Any, mesh: str) -> autopar.Plan:
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 6))
    return autopar.plan(
        Net(kind), autopar.Mesh.parse(mesh, hardware="cpu"), strategy=strategy,
        example_inputs={"ids": ids, "labels": ids},
    )  # fmt: skip


@pytest.mark.sampled(3)
@pytest.mark.slow
@pytest.mark.parametrize(
    ("kind", "strategy", "mesh", "lies", "moves"),
    [
        (Apart, "expert", "dp=2", "f32[12/dp, 8]", True),
        (Apart, {"dp": "zero3", "ep": "expert"}, "dp=2,ep=2", "f32[12/ep, 8/dp]", True),
        (Apart, {"dp": "zero1", "ep": "expert+sum"}, "dp=2,ep=2", "", None),
        (Apart, {"dp": "expert", "tp": "tensor"}, "dp=2,tp=2", "f32[12/tp, 8/dp]", True),
        (Stacked, "expert", "dp=4", "f32[48/dp, 8]", False),
        (Stacked, {"dp": "expert", "tp": "tensor"}, "dp=2,tp=2", "", None),
        (Stacked, "tensor", "tp=2", "", None),
    ],
    ids=str,
)
def test_experts_of_loops_are_split(
    kind: type[nn.Module], strategy: Any, mesh: str, lies: str, moves: bool | None
) -> None:
    """Breaks if experts that lie in one parameter are moved, or if each rank has all of those that are modules of their
    own; if tokens beyond a capacity are sent to an expert, or are counted by rank.
    """
    plan = planned(kind, strategy, mesh)
    assert plan.verify(rtol=1e-9).ok and plan.source is not None
    asked = strategy if isinstance(strategy, str) else " ".join(strategy.values())
    assert ("comm.exchange_experts(" if "expert" in asked.replace("expert+sum", "") else "ops.experts(") in plan.source
    if lies:
        parameters = ("experts.0.0.weight", "layers.*.w1")
        assert any(lies in line and any(each in line for each in parameters) for line in str(plan).splitlines())
    if moves is not None:
        assert ("comm.all_to_all(" in plan.source) == moves
