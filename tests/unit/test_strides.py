"""Operators of torch that read their operands as if they lay row by row: programs copy these first."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar
from autopar.operators.ctc import ctc_loss, ctc_loss_grad
from autopar.passes.emission.statements import _IN_ORDER


def turned(x: Tensor) -> Tensor:
    """The same values, the last dim first in memory."""
    order = list(range(x.ndim))[::-1]
    return x.permute(order).contiguous().permute(order) if x.ndim > 1 else torch.stack([x, x], -1)[:, 0]


class Block(nn.Module):
    """Traced once for all: how what it is given lies in memory is not known there."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.mix = nn.GroupNorm(3, 6), nn.Conv1d(6, 6, 1)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.mix(self.norm(x))


class Model(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.blocks = nn.Linear(6, 6), nn.ModuleList(Block() for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.first(x).transpose(1, 2) + torch.arange(5.0)  # a sum lies as its operands do
        for block in self.blocks:
            x = block(x)
        return (x.transpose(1, 2) * torch.arange(30.0).view(5, 6)).sum()


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ddp", "zero3"])
def test_programs_hand_over_what_lies_row_by_row(strategy: str) -> None:
    """Breaks if an operator gets memory in another order than it reads it in."""
    torch.manual_seed(0)
    inputs = {"x": torch.randn(4, 5, 6)}
    plan = autopar.plan(Model(), autopar.Mesh({"dp": 2}), example_inputs=inputs, strategy=strategy)
    assert plan.verify().ok


@pytest.mark.parametrize("name", ["native_group_norm", "native_group_norm_backward"])
def test_torch_reads_so(name: str) -> None:
    """Breaks if torch no longer needs the copies: then they go."""
    x, w = torch.randn(4, 6, 5, dtype=torch.float64), torch.randn(6, dtype=torch.float64)
    sizes = (4, 6, 5, 3)
    mean, rstd = torch.native_group_norm(x, w, w, *sizes, 1e-5)[1:]
    given: dict[str, tuple[Any, ...]] = {
        "native_group_norm": (x, w, w, *sizes, 1e-5),
        "native_group_norm_backward": (x, x, mean, rstd, w, *sizes, [True, True, True]),
    }
    operator = getattr(torch.ops.aten, name).default
    wanted = operator(*given[name])
    for place in _IN_ORDER[str(operator)]:
        args = [turned(arg) if i == place else arg for i, arg in enumerate(given[name])]
        assert not args[place].is_contiguous()
        try:
            found = operator(*args)
        except RuntimeError:
            continue
        assert not all(map(torch.allclose, found, wanted)), f"operand {place} may lie as it likes"


def test_ctc_takes_what_lies_otherwise() -> None:
    """Breaks if lengths, targets or log-probabilities of every second row are taken for those of every row."""
    torch.manual_seed(0)
    given = [
        torch.randn(7, 6, 5).log_softmax(-1),
        torch.randint(1, 5, (6, 3)),
        torch.full((6,), 7),
        torch.arange(6) % 3,
    ]
    rows = [given[0][:, ::2], *(x[::2] for x in given[1:])]
    copies = [x.contiguous() for x in rows]
    wanted = F.ctc_loss(*copies, reduction="none")
    assert torch.allclose(ctc_loss(*rows), wanted)
    found = [ctc_loss_grad(torch.ones(3), *each) for each in (rows, copies)]
    assert torch.allclose(*found)
