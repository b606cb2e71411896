"""What is detached and then written has the gradient of what is written."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor, nn

import autopar
from autopar.base.errors import AutoparError


class Positions(nn.Module):
    """Adds rows of a table to positions, in place; `how` says what these are detached from, and what is read after."""

    waves: Tensor

    def __init__(self, how: str) -> None:
        super().__init__()
        self.table, self.kinds, self.how = nn.Embedding(8, 8), nn.Embedding(2, 8), how
        self.register_buffer("waves", torch.randn(16, 8))

    @torch.no_grad()
    def _without_gradient(self, ids: Tensor) -> Tensor:
        return self.waves[: ids.shape[1]].expand(*ids.shape, -1).contiguous()

    def forward(self, ids: Tensor) -> Tensor:
        x = self.table(ids)
        if self.how == "made":
            places = self.waves.index_select(0, ids.view(-1)).view(*ids.shape, -1).detach()
        elif self.how == "without gradient":
            places = self._without_gradient(ids)
        else:
            places = x[:, 1:].detach()
        places += self.kinds.weight[0]
        read = self.table(ids) if self.how == "read before" else x
        return (read[:, : places.shape[1]] + places).square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("how", ["made", "without gradient", "read before"])
def test_what_is_written_keeps_its_gradient(how: str) -> None:
    """Breaks if making a graph functional detaches what is written into what was detached."""
    ids = torch.randint(8, (4, 6))
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    assert autopar.plan(Positions(how), mesh, example_inputs={"ids": ids}, strategy="ddp").verify().ok


def test_what_is_read_after_a_write_beside_the_gradient_is_refused() -> None:
    """Breaks if the program reads what was there before, or differentiates what eager does not."""
    mesh = autopar.Mesh.parse("dp=2", hardware="cpu")
    with pytest.raises(AutoparError, match=r"what it was detached from .*test_detached_writes\.py:.*detach\(\)\.clone"):
        autopar.plan(Positions("read"), mesh, example_inputs={"ids": torch.randint(8, (4, 6))}, strategy="ddp")
