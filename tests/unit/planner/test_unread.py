"""Inputs that nothing reads are seen, and only these."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from autopar.planner.unread import nobody_reads


class Model(nn.Module):
    """Two blocks that are handed `limits`, of which `use` makes something."""

    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(use) for _ in range(2))

    def forward(self, x: Tensor, limits: Any = None) -> Tensor:
        for layer in self.layers:
            x = layer(x, limits=limits)
        return x.sum()


class Block(nn.Module):
    def __init__(self, use: Callable[[Tensor, Any], Tensor]) -> None:
        super().__init__()
        self.linear, self.use = nn.Linear(4, 4), use

    def forward(self, x: Tensor, **kwargs: Any) -> Tensor:
        return self.use(self.linear(x), kwargs["limits"])


USES: dict[str, tuple[Callable[[Tensor, Any], Tensor], bool]] = {
    "handed on": (lambda x, limits: x, True),
    "told from None, for nothing": (lambda x, limits: x if limits is None else x + 0 if limits is None else x, True),
    "told from None": (lambda x, limits: x if limits is None else x * 2, False),
    "its shape": (lambda x, limits: x * (1 if limits is None else limits.shape[0]), False),
    "its values": (lambda x, limits: x if limits is None else x + limits.sum(), False),
    "a truth": (lambda x, limits: x * 2 if limits is not None and limits else x, False),
    "compared": (lambda x, limits: x * 2 if limits == 3 else x, False),
    "an operand": (lambda x, limits: x if limits is None else torch.add(x, limits), False),
}


@pytest.mark.parametrize("name", USES)
def test_what_is_read(name: str) -> None:
    """Breaks if an input that decides or is computed with is left out of a program, or one that is not stays."""
    use, unread = USES[name]
    inputs = {"x": torch.zeros(2, 4), "limits": torch.tensor([0, 2, 4])}
    assert nobody_reads(["limits"], Model(use), inputs, precision=None, training=True) == unread
