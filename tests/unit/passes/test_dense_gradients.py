"""Tables whose gradient is asked for as a sparse tensor, and values that leave for NumPy."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError


class Words(nn.Module):
    """The mean of the words of a table, sorted into two classes. how: of three ways to look them up."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.linear = how, nn.Linear(8, 2)
        self.table: nn.Module = nn.Embedding(32, 8, sparse=True, padding_idx=3)
        if how == "bag":
            self.table = nn.EmbeddingBag(32, 8, mode="sum", sparse=True)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        if self.how == "function":
            weight: Any = self.table.weight
            words = F.embedding(ids, weight, sparse=True)
        else:
            words = self.table(ids)
        return F.cross_entropy(self.linear(words.mean(1) if words.dim() == 3 else words), labels)


def planned(model: nn.Module, strategy: str = "zero3") -> autopar.Plan:
    """On two ranks."""
    batch = {"ids": torch.arange(20).reshape(4, 5) % 7, "labels": torch.tensor([0, 1, 1, 0])}
    return autopar.plan(model, autopar.Mesh.parse("dp=2", hardware="cpu"), example_inputs=batch, strategy=strategy)


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["module", "function", "bag"])
def test_sparse_gradients_are_dense(how: str) -> None:
    """Breaks if a program makes a sparse tensor, of which no part can be summed or cut, or nobody hears of it."""
    plan = planned(Words(how))
    assert plan.verify().ok
    assert "_sparse_coo" not in plan.source
    told = [note for note in plan.notes if "the gradient is dense" in note]
    assert len(told) == (how != "bag"), "bags are taken apart before"
    assert all("test_dense_gradients.py" in note and "SparseAdam" in note for note in told)


class Ordered(nn.Module):
    """Rows in an order that NumPy finds."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(5, 2)

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        out = self.linear(ids.float())
        order = torch.as_tensor(out.detach().cpu().numpy()[:, 0].argsort())
        return F.cross_entropy(out[order], labels)


def test_values_for_numpy_are_refused_in_words() -> None:
    """Breaks if what is said of them is what torch says of its tracer."""
    with pytest.raises(AutoparError, match=r"hands values of tensors to NumPy.*test_dense_gradients.py.*outside of fo"):
        planned(Ordered(), "ddp")
