"""Values that are made lists of pieces and are put together again stay split by rows."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.passes.capture import capture


class Lists(nn.Module):
    """Features of each image as rows of a list, as models of images and text hand them on."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.linear, self.how = nn.Linear(6, 6), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        sizes = [1] * len(x) if self.how != "unequal" else [1, 3, 2, 2]
        pieces = [each.reshape(-1, 6) for each in y.split(sizes)]
        if self.how == "other order":
            pieces = pieces[::-1]
        if self.how == "some":
            pieces = pieces[:-1]
        if self.how == "across":
            pieces = [each.transpose(1, 2).reshape(-1, 6) for each in y.split(sizes)]
        return (torch.cat(pieces).cumsum(1) * torch.arange(6)).square().mean()


@pytest.mark.parametrize("how", ["ones", "unequal", "other order", "some", "across"])
def test_pieces_that_are_put_together_again_are_what_was_taken_apart(how: str) -> None:
    """Breaks if all pieces in order are not taken for the whole, which splits by rows, or others are."""
    batch = {"x": torch.randn(8, 5, 6)}
    program = capture(Lists(how), batch)
    names = {str(node.target) for node in program.regions[0].graph.nodes}
    assert ("aten.cat.default" in names) == (how not in ("ones", "unequal"))
    if how in ("ones", "unequal"):
        plan = autopar.plan(Lists(how), autopar.Mesh.parse("dp=2"), example_inputs=batch, strategy="ddp")
        assert plan.verify().ok and not plan.notes


@pytest.mark.moderate
def test_pieces_that_are_not_simplified_are_eager_s() -> None:
    """Breaks if a program of pieces in another order computes others."""
    model, batch = Lists("other order"), {"x": torch.randn(8, 5, 6)}
    plan = autopar.plan(model, autopar.Mesh.parse("dp=1"), example_inputs=batch, strategy="ddp")
    assert plan.verify().ok
