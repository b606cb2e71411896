"""A vocabulary that `tensor` does not divide, with a loss of the user's: right, priced, and told."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.ir.sharding import Shard

WORDS = 101


class Model(nn.Module):
    def __init__(self, words: int) -> None:
        super().__init__()
        self.table, self.up, self.down = nn.Embedding(words, 16), nn.Linear(16, 32), nn.Linear(32, 16)
        self.head = nn.Linear(16, words, bias=False)

    def forward(self, tokens: Tensor) -> Tensor:
        found: Tensor = self.head(self.down(torch.relu(self.up(self.table(tokens)))))
        return found


def _cross_entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())


def _smoothed(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return F.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten(), label_smoothing=0.1)


def _with_penalty(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    return _cross_entropy(logits, batch) + 0.1 * logits.logsumexp(-1).pow(2).mean()


def _entropy(logits: Tensor, batch: Mapping[str, Any]) -> Tensor:
    log_p = logits.log_softmax(-1)
    return -(log_p.exp() * log_p).sum(-1).mean() - log_p.gather(-1, batch["labels"][..., None]).mean()


def _plan(words: int, loss: Callable[[Tensor, Mapping[str, Any]], Tensor]) -> autopar.Plan:
    ids = torch.randint(0, words, (4, 8), generator=torch.Generator().manual_seed(0))
    mesh = autopar.Mesh({"tp": 2}, hardware="h100")
    batch = {"tokens": ids, "labels": ids.roll(-1, 1)}
    return autopar.plan(Model(words), mesh, example_inputs=batch, strategy="tensor", loss=loss)


def _head(plan: autopar.Plan) -> bool:
    """Whether the last layer is split."""
    (entry,) = [each for each in plan.interface.parameters if each.name == "head.weight"]
    return isinstance(entry.sharding[0], Shard)


@pytest.mark.moderate
def test_rows_are_added_for_a_cross_entropy() -> None:
    """Breaks if the last layer stays whole, or a row that was added has a part in the loss."""
    plan = _plan(WORDS, _cross_entropy)
    assert plan.verify().ok and _head(plan)
    assert "head.weight 101 to 102" in " ".join(plan.notes)


@pytest.mark.moderate
@pytest.mark.parametrize("loss", [_smoothed, _with_penalty, _entropy])
def test_other_losses_have_the_last_layer_whole(loss: Callable[[Tensor, Mapping[str, Any]], Tensor]) -> None:
    """Breaks if rows are added that would be in a loss, or if the whole last layer has no price, or is not told."""
    odd, even = _plan(WORDS, loss), _plan(WORDS + 1, loss)
    assert odd.verify().ok and even.verify().ok
    assert (_head(odd), _head(even)) == (False, True)
    assert odd.cost.compute_s > even.cost.compute_s
    (note,) = [note for note in odd.notes if "head.weight" in note]
    assert "is whole on every rank of tp: its 101 rows do not divide over tp=2, 102 would" in note
