"""batching: averages over the same labels, in whichever shape these are seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from tests.unit.passes.microbatches import ROWS, analysed, prove


class Scored(nn.Module):
    def __init__(self, ignored: int = -100) -> None:
        super().__init__()
        self.linear, self.ignored = nn.Linear(4, 5), ignored

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        marked = labels != self.ignored
        found = y.argmax(-1) == labels
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()), (found & marked).sum() / marked.sum()


@pytest.mark.moderate
def test_averages_over_the_same_labels_have_one_count() -> None:
    """Breaks if an accuracy beside a loss keeps a batch from being cut, as its labels are seen in another shape, or one
    over other labels is weighted as the loss is.
    """
    labels = torch.randint(0, 5, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    labels[:3, 2:] = labels[5] = -100
    model, batch = Scored().double(), {"x": torch.randn(ROWS, 6, 4).double(), "labels": labels}
    prove(model, batch, analysed(model, batch, 4), 4)
    with pytest.raises(AutoparError, match="averages weighted by different counts"):
        analysed(Scored(3).double(), batch, 4)
