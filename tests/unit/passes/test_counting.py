"""Counts of numbers whose size `minlength` says, as losses of routers have them."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar


class Routed(nn.Module):
    """Experts per token by topk, and a loss on how many tokens each has. by: where the counted numbers are from."""

    def __init__(self, by: str, is_weighted: bool = False) -> None:
        super().__init__()
        self.embed, self.route = nn.Embedding(17, 12), nn.Linear(12, 6, bias=False)
        self.head = nn.Linear(12, 17)
        self.by, self.is_weighted = by, is_weighted

    def forward(self, ids: Tensor) -> Tensor:
        h = self.embed(ids)
        share = self.route(h).softmax(-1)
        weights, places = share.topk(2, -1)
        numbers = {"topk": places, "argmax": share.argmax(-1)[..., None], "sort": share.sort(-1)[1][..., :1]}
        counted = numbers.get(self.by, ids[..., None])
        of = weights.detach()[..., : counted.shape[-1]].flatten() if self.is_weighted else None
        counts = torch.bincount(counted.flatten(), of, minlength=6).to(h.dtype)
        balance = (counts[:6] / counts.sum() * share.flatten(0, 1).mean(0)).sum()
        h = h * weights.sum(-1, keepdim=True)
        return F.cross_entropy(self.head(h).flatten(0, 1), ids.flatten()) + balance


def planned(by: str, ids: Tensor, strategy: Any = "ddp", mesh: str = "dp=2", is_weighted: bool = False) -> autopar.Plan:
    torch.manual_seed(0)
    model = Routed(by, is_weighted)
    return autopar.plan(model, autopar.Mesh.parse(mesh), example_inputs={"ids": ids}, strategy=strategy)


@pytest.mark.moderate
@pytest.mark.parametrize("is_weighted", [False, True])
@pytest.mark.parametrize("by", ["topk", "argmax", "sort"])
def test_places_along_a_dim_are_counted(by: str, is_weighted: bool) -> None:
    """Breaks if counts of a part of the rows are taken for those of all, or places for numbers of any size."""
    plan = planned(by, torch.randint(0, 17, (8, 5)), is_weighted=is_weighted)
    assert plan.verify().ok and not plan.interface.granted


@pytest.mark.moderate
@pytest.mark.parametrize("mesh, strategy", [("dp=2", "zero3"), ("dp=2,tp=2", "auto")])
def test_counts_under_other_strategies(mesh: str, strategy: str) -> None:
    """Breaks as above, where parameters are split."""
    assert planned("topk", torch.randint(0, 17, (8, 5)), strategy, mesh).verify().ok


@pytest.mark.moderate
def test_that_other_numbers_lie_below_is_taken_for_granted() -> None:
    """Breaks if a batch with larger numbers, of which eager makes more counts, gives other numbers without a sign."""
    torch.manual_seed(0)
    small = torch.randint(0, 6, (8, 5))
    plan = planned("tokens", small)
    (granted,) = plan.interface.granted
    assert "bincount's numbers lie below its minlength" in granted and "test_counting.py" in granted
    assert plan.verify().ok


@pytest.mark.moderate
def test_beyond_them_the_loss_is_nan() -> None:
    """Breaks if the guard is left out."""
    from autopar.runtime.simulate import simulate

    torch.manual_seed(0)
    small = torch.randint(0, 6, (8, 5))
    plan = planned("tokens", small)
    state = dict(Routed("tokens").state_dict())
    for ids, is_nan in ((small, False), (small + 6, True)):
        found = simulate(plan.interface, plan.source, state, {"ids": ids}, backward=False)
        assert bool(found.outputs[0].isnan()) == is_nan


def test_counts_as_torch() -> None:
    """Breaks if a count is in another place, or of another dtype than torch's."""
    from autopar.passes import counting

    numbers, weights = torch.tensor([3, 1, 3, 0]), torch.tensor([0.5, 1.0, 2.0, -1.0])
    for most in (counting.MOST_COMPARED, 0):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(counting, "MOST_COMPARED", most)
            for given in (None, weights, weights.double(), weights.half()):
                want = torch.bincount(numbers, given, 5)
                found = counting.counted(numbers, given, 5)
                assert found.dtype == want.dtype and torch.equal(found, want)
