"""Batches that no axis divides, and to which no rows are added, are told why."""

from __future__ import annotations

import logging

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.api.additions import Additions


class Net(nn.Module):
    """A linear layer whose results a batch norm may keep statistics of."""

    def __init__(self, keeps: bool) -> None:
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4) if keeps else nn.Identity()

    def forward(self, x: Tensor) -> Tensor:
        return self.norm(self.linear(x))


@pytest.mark.parametrize("keeps", [False, True])
def test_the_reason_is_said(keeps: bool, caplog: pytest.LogCaptureFixture) -> None:
    """Breaks if an odd batch is refused, and nobody hears why it was not made even."""
    model = Net(keeps)
    plan = autopar.plan(
        model, autopar.Mesh.parse("dp=2", hardware="cpu"), example_inputs={"x": torch.randn(4, 4)}, strategy="ddp"
    )
    additions = Additions(model, None, None, lambda net: net)
    with caplog.at_level(logging.WARNING, "autopar"):
        found = additions.rows({"x": torch.randn(5, 4)}, plan.interface, lambda find: find(), training=True)
    assert (found is None) is keeps
    assert ("no rows for the axes to divide it: the model keeps statistics" in caplog.text) is keeps
