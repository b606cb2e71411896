"""batching: averages over the same labels, in whichever shape these are seen."""

from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.base.errors import AutoparError
from tests.unit.passes.microbatches import ROWS, analysed, prove


class Scored(nn.Module):
    def __init__(self, ignored: int = -100, *, reads: bool = False) -> None:
        super().__init__()
        self.linear, self.ignored, self.reads = nn.Linear(4, 5), ignored, reads

    def forward(self, x: Tensor, labels: Tensor) -> tuple[Tensor, ...]:
        y = self.linear(x)
        marked = labels != self.ignored
        found = y.argmax(-1) == labels
        right, number = (found & marked).sum(), marked.sum()
        numbers = [each.detach().reshape([]).to(torch.float64) for each in (right, number)]  # as item() is traced
        share = (numbers[0] / numbers[1], right.trunc()) if self.reads else (right / number,)
        return F.cross_entropy(y.flatten(0, 1), labels.flatten()), *share


class Whole(nn.Module):
    """The whole part of a sum over rows."""

    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(4, 5)

    def forward(self, x: Tensor) -> tuple[Tensor, Tensor]:
        y = self.linear(x)
        return y.square().mean(), y.sum().trunc()


@pytest.mark.moderate
def test_averages_over_the_same_labels_have_one_count() -> None:
    """Breaks if an accuracy beside a loss keeps a batch from being cut, as its labels are seen in another shape or read
    as numbers, or one over other labels is weighted as the loss is.
    """
    labels = torch.randint(0, 5, (ROWS, 6), generator=torch.Generator().manual_seed(0))
    labels[:3, 2:] = labels[5] = -100
    model, batch = Scored().double(), {"x": torch.randn(ROWS, 6, 4).double(), "labels": labels}
    prove(model, batch, analysed(model, batch, 4), 4)
    found = analysed(Scored(reads=True).double(), batch, 4)
    assert [each.combine for each in found.outputs] == ["weighted", "weighted", "sum"]
    with pytest.raises(AutoparError, match="trunc is not linear"):
        analysed(Whole().double(), {"x": batch["x"]}, 4)
    with pytest.raises(AutoparError, match="averages weighted by different counts"):
        analysed(Scored(3).double(), batch, 4)
