"""Buffers whose values decide what forward does, of a model that was compiled."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.distributed.device_mesh import init_device_mesh

import autopar
from autopar.base.errors import AutoparError
from tests.unit.runtime.saved_run import one_rank as one_rank


class Masked(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(6, 7)
        self.mask: Tensor
        self.register_buffer("mask", torch.arange(7) < 5)

    def forward(self, x: Tensor) -> Tensor:
        y = self.linear(x)
        if self.mask.any():
            y = y.masked_fill(~self.mask, 3.0)
        return y.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("has_example", [False, True])
def test_they_are_the_models_and_what_they_decide_is_looked_at_in_each_step(has_example: bool) -> None:
    """Breaks if such a model is refused because the copy that is traced has no values, if another model's are taken, or
    if a program goes on that stands for other values.
    """
    torch.manual_seed(0)
    mesh, x = init_device_mesh("cpu", (1,), mesh_dim_names=("dp",)), torch.randn(4, 6)
    plain = Masked()
    compiled: Any = autopar.compile(
        copy.deepcopy(plain), mesh, strategy="ddp", **({"example_inputs": {"x": x}} if has_example else {})
    )
    assert torch.allclose(compiled(x), plain(x))
    for model in (plain, compiled):
        model.mask.logical_not_()
    assert torch.allclose(compiled(x), plain(x))  # another mask, by which the same is done
    compiled.mask.zero_()
    with pytest.raises(AutoparError, match="takes for granted that what is asked for is as here"):
        compiled(x)
