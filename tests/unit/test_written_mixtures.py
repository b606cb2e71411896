"""Mixtures as people write them: einsums with a capacity, experts that choose tokens; every gradient is eager's."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

pytestmark = pytest.mark.unit
WIDTH, INNER, EXPERTS = 8, 12, 4


class Capacity(nn.Module):
    """Lepikhin et al., GShard (2006.16668): two experts a token, tokens beyond a capacity dropped, by einsums."""

    def __init__(self, capacity: int = 2) -> None:
        super().__init__()
        self.gate, self.capacity = nn.Linear(WIDTH, EXPERTS, bias=False), capacity
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.2)
        self.second = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        gates = self.gate(x).softmax(-1)
        first = F.one_hot(gates.argmax(-1), EXPERTS).to(x.dtype)
        second = F.one_hot((gates * (1 - first)).argmax(-1), EXPERTS).to(x.dtype)
        loss = (gates.mean(1) * first.mean(1)).mean() * EXPERTS**2
        places = (first.cumsum(1) - 1) * first, (second.cumsum(1) - 1 + first.sum(1, keepdim=True)) * second
        combine = torch.zeros_like(gates)[..., None]
        for mask, place in zip((first, second), places, strict=True):
            kept = mask * (place < self.capacity)
            slot = F.one_hot((place * kept).sum(-1).long(), self.capacity).to(x.dtype)
            combine = combine + ((gates * kept).sum(-1, keepdim=True) * kept)[..., None] * slot[:, :, None]
        sent = torch.einsum("gsec,gsd->egcd", (combine > 0).to(x.dtype), x)
        made = torch.einsum("egch,ehd->egcd", torch.einsum("egcd,edh->egch", sent, self.first).relu(), self.second)
        return torch.einsum("gsec,egcd->gsd", combine, made), loss


class Choosing(nn.Module):
    """Zhou et al., expert choice (2202.09368): each expert takes the tokens of the whole batch that it likes best."""

    def __init__(self) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, INNER) * 0.2)
        self.second = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.2)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        tokens = x.reshape(-1, WIDTH)
        scores = self.gate(tokens).softmax(-1).t()
        weights, chosen = scores.topk(len(tokens) * 2 // EXPERTS, -1)
        made = torch.bmm(F.silu(torch.bmm(tokens[chosen], self.first)), self.second) * weights[..., None]
        return torch.zeros_like(tokens).index_add(0, chosen.reshape(-1), made.reshape(-1, WIDTH)).view_as(
            x
        ), x.sum() * 0


class Net(nn.Module):
    def __init__(self, kind: type[nn.Module]) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x, extra = self.embedding(ids), torch.zeros(())
        for layer in self.layers:
            made, loss = layer(F.layer_norm(x, (WIDTH,)))
            x, extra = x + made, extra + loss
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten()) + 0.01 * extra


@pytest.mark.moderate
@pytest.mark.sampled(3)
@pytest.mark.parametrize(
    ("kind", "strategy"),
    [(Capacity, "zero3"), (Capacity, "expert"), (Choosing, "ddp"), (Choosing, "zero3"), (Choosing, "auto")],
)
def test_mixtures_as_people_write_them(kind: type[nn.Module], strategy: str) -> None:
    """Breaks if tokens beyond a capacity are counted by rank, or if a layer in which experts choose among all tokens is
    refused by strategies that split the batch, or chooses among those of a rank.
    """
    torch.manual_seed(0)
    ids = torch.randint(0, 32, (4, 6))
    with warnings.catch_warnings(record=True) as said:
        warnings.simplefilter("always")
        plan = autopar.plan(
            Net(kind), autopar.Mesh.parse("dp=2", hardware="cpu"), strategy=strategy,
            example_inputs={"ids": ids, "labels": ids},
        )  # fmt: skip
    assert plan.verify(rtol=1e-9).ok
    if kind is Choosing and strategy != "auto":
        assert any("topk" in str(each.message) and "all rows of the batch" in str(each.message) for each in said)
