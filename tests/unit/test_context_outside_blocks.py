"""Strategies that split the sequence on models whose attention is in no repeated block."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.strategies.context import SequenceDoesNotDivide


class Spelled(nn.Module):
    """Two layers of causal attention to documents, spelled out in the model's own forward."""

    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(16, 8), nn.Linear(8, 16)
        self.into = nn.ModuleList(nn.Linear(8, 24) for _ in range(2))

    def forward(self, ids: Tensor, documents: Tensor, labels: Tensor) -> Tensor:
        hidden, length = self.embed(ids), ids.shape[1]
        seen = (documents[:, None, :] == documents[:, :, None]) & torch.ones(length, length).tril().bool()
        for into in self.into:
            q, k, v = into(hidden).view(*ids.shape, 3, 2, 4).permute(2, 0, 3, 1, 4)
            hidden = hidden + F.scaled_dot_product_attention(q, k, v, seen[:, None]).transpose(1, 2).flatten(2)
        return F.cross_entropy(self.head(hidden).flatten(0, 1), labels.flatten())


def batch(length: int) -> dict[str, Tensor]:
    """Two documents in each row."""
    ids = torch.randint(16, (2, length))
    return {"ids": ids, "documents": (torch.arange(length) > 4).long().expand(2, -1).clone(), "labels": ids.roll(-1, 1)}


@pytest.mark.moderate
@pytest.mark.parametrize(("axes", "strategy"), [("cp=2", "ring"), ("cp0=2,cp1=2", "cp0=ring,cp1=ulysses")])
def test_attention_that_a_forward_spells_out_is_split(axes: str, strategy: str) -> None:
    """Breaks if it is refused, if it is done by other means than the strategy's name says, or if its share of a step is
    not known to what compares strategies.
    """
    mesh = autopar.Mesh.parse(axes, hardware="cpu")
    named = dict(each.split("=") for each in strategy.split(",")) if "=" in strategy else strategy
    plan = autopar.plan(Spelled(), mesh, example_inputs=batch(8), strategy=named)
    assert any(row.kind == "ring" for row in plan.collectives)
    plan.verify().raise_on_failure()


@pytest.mark.moderate
def test_a_length_that_an_axis_does_not_divide_is_one_of_the_sequence() -> None:
    """Breaks if a later batch of it is refused, where it could be whole on the axis; or if a rule is said as a rule."""
    mesh = autopar.Mesh({"cp": 4}, hardware="cpu")
    with pytest.raises(SequenceDoesNotDivide, match="cannot split 6 queries and 6 keys over cp=4") as raised:
        autopar.plan(Spelled(), mesh, example_inputs=batch(6), strategy="ring")
    assert "->" not in str(raised.value)
