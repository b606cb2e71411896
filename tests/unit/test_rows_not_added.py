"""Batches that no axis divides, and to which no rows are added, are told why."""

from __future__ import annotations

import logging
from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api.added_rows import rows_added
from autopar.api.additions import Additions
from autopar.base.errors import AutoparError


class Net(nn.Module):
    """A linear layer whose results a batch norm may keep statistics of."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4) if keeps else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.moderate
@pytest.mark.parametrize("keeps", [False, True])
def test_the_reason_is_said(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if an odd batch is refused, and nobody hears why it was not made even."""
    model = Net(keeps)
    additions = Additions(model, None, None, lambda net: net)
    with caplog.at_level(logging.WARNING, "autopar"):
        found = additions.rows({"x": torch.randn(5, 4)}, 2, lambda find: find(), training=True)
    assert (found is None) is keeps
    assert ("no rows for the axes to divide it: the model keeps statistics" in caplog.text) is keeps


class Measures(nn.Module):
    """A loss, and what `how` makes of hits and labels."""

    def __init__(self, how: Callable[[Tensor, Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(4, 4), how

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        logits = self.linear(x)
        found = self.how(logits, logits.argmax(-1) == labels, labels)
        return F.cross_entropy(logits, labels), found


COUNTED: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda logits, hits, labels: (hits & (labels != -100)).sum() / (labels != -100).sum(),
    lambda logits, hits, labels: (hits & ~(labels == -100)).sum().detach() * 1.0,
    lambda logits, hits, labels: torch.where(labels != -100, logits.square().sum(-1), 0.0).sum(),
    lambda logits, hits, labels: hits.float().masked_fill(labels == -100, 0).sum(),
]
IN_IT: list[Callable[[Tensor, Tensor, Tensor], Tensor]] = [
    lambda logits, hits, labels: hits.float().mean(),
    lambda logits, hits, labels: (hits | (labels != -100)).sum(),
    lambda logits, hits, labels: (hits & (labels == -100)).sum(),
    lambda logits, hits, labels: torch.where(labels != -100, logits.square().sum(-1), 1.0).sum(),
    lambda logits, hits, labels: hits.float().masked_fill(labels != -100, 0).sum(),
]


@pytest.mark.moderate
@pytest.mark.parametrize(("how", "counts"), [*((each, True) for each in COUNTED), *((each, False) for each in IN_IT)])
def test_metrics_that_labels_tell_leave_added_rows_out(how: Callable[..., Tensor], counts: bool) -> None:
    """Breaks if an odd last batch is refused for its accuracy, or a row that was added is in a metric."""
    model, batch = Measures(how), {"x": torch.randn(3, 4), "labels": torch.tensor([1, -100, 2])}
    if not counts:
        with pytest.raises(AutoparError, match="rows that were added would be in it"):
            rows_added(model, batch, 2, precision=None, training=True)
        return
    added = rows_added(model, batch, 2, precision=None, training=True)
    for one, other in zip(model(**batch), model(**added.pad(batch)), strict=True):
        torch.testing.assert_close(one, other)
