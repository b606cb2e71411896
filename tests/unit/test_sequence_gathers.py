"""Operators that no split of the sequence serves, beside attention that goes round a ring."""

from __future__ import annotations

import warnings

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import autopar

WIDTH, HEADS, SEQUENCE = 16, 2, 16


class Block(nn.Module):
    """Causal attention, then something along the sequence."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qkv, self.out, self.gate = nn.Linear(WIDTH, 3 * WIDTH), nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, 1)

    def forward(self, x: Tensor) -> Tensor:
        batch, sequence, _ = x.shape
        q, k, v = self.qkv(x).view(batch, sequence, 3, HEADS, -1).permute(2, 0, 3, 1, 4)
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).reshape(x.shape)
        x = x + self.out(y)
        if self.kind == "mean":
            return x * torch.sigmoid(self.gate(x.mean(1, keepdim=True)))
        if self.kind == "recurrence":
            return x + x.cumsum(1) * torch.sigmoid(self.gate(x))
        tokens = x.reshape(-1, WIDTH)
        score = torch.sigmoid(self.gate(tokens)[:, 0])
        order = score.argsort()
        ranked = tokens[order] * score[order][:, None] * torch.linspace(0, 1, len(tokens))[:, None]
        return x + torch.zeros_like(tokens).index_add(0, order, ranked).view(x.shape)


class Model(nn.Module):
    """Two such blocks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.layers = nn.ModuleList(Block(kind) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


@pytest.mark.moderate
@pytest.mark.parametrize("strategy", ["ring", "ulysses"])
@pytest.mark.parametrize(("kind", "word"), [("recurrence", "cumsum"), ("sorted", "sort"), ("mean", "add")])
def test_what_needs_the_whole_sequence_is_computed_whole_and_said(kind: str, word: str, strategy: str) -> None:
    """Breaks if a sort of tokens or a recurrence is refused under a split of the sequence, if it is done on a rank's
    own tokens, or if nobody is told; or if terms of a mean over the sequence are taken for what could be added up
    inside a block, where no axis of the sequence adds.
    """
    torch.manual_seed(0)
    mesh = autopar.Mesh.parse("dp=2,cp=2", hardware="cpu")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        plan = autopar.plan(
            Model(kind),
            mesh,
            example_inputs={"x": torch.randn(4, SEQUENCE, WIDTH)},
            strategy={"dp": "ddp", "cp": strategy},
        )
    assert any(word in note and "the whole sequence" in note for note in plan.notes), plan.notes
    plan.verify().raise_on_failure()
