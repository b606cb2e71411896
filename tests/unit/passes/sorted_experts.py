"""Layers of experts that sort tokens, and programs against eager."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from autopar.api import interpret
from autopar.ir.program import Program

WIDTH, INNER, EXPERTS, CHOICES = 8, 6, 4, 2


class Sequential(nn.Module):
    """Experts that multiply one after the other their part of the tokens, which are sorted by experts."""

    def __init__(self) -> None:
        super().__init__()
        self.router = nn.Linear(WIDTH, EXPERTS, bias=False)
        self.first = nn.Parameter(torch.randn(EXPERTS, WIDTH, 2 * INNER) * 0.2)
        self.second = nn.Parameter(torch.randn(EXPERTS, INNER, WIDTH) * 0.2)

    def multiplied(self, x: Tensor, weight: Tensor, counts: Tensor) -> Tensor:
        out = torch.zeros(len(x), weight.shape[-1], dtype=x.dtype)
        ends = torch.cat([counts.new_zeros(1), counts.cumsum(0)])
        for expert in range(EXPERTS):
            start, end = ends[expert], ends[expert + 1]
            out[start:end] = x[start:end] @ weight[expert]
        return out

    def forward(self, x: Tensor) -> Tensor:
        tokens = x.reshape(-1, WIDTH)
        chosen, indices = self.router(tokens).topk(CHOICES, -1)
        counts = torch.bincount(indices.flatten(), minlength=EXPERTS)
        order = indices.flatten().argsort()
        up, gate = self.multiplied(tokens[order // CHOICES], self.first, counts).chunk(2, -1)
        made = self.multiplied(F.silu(gate) * up, self.second, counts)
        back = torch.zeros_like(made).index_copy(0, order, made).view(-1, CHOICES, WIDTH)
        return (back * chosen.softmax(-1)[..., None]).sum(1).view_as(x)


class Net(nn.Module):
    """kind: of its layers."""

    def __init__(self, kind: type[nn.Module] = Sequential) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(32, WIDTH), nn.Linear(WIDTH, 32)
        self.layers = nn.ModuleList(kind() for _ in range(2))

    def forward(self, ids: Tensor, labels: Tensor) -> Tensor:
        x = self.embedding(ids)
        for layer in self.layers:
            x = x + layer(F.layer_norm(x, (WIDTH,)))
        return F.cross_entropy(self.head(x).flatten(0, 1), labels.flatten())


def tokens_of(kind: str) -> dict[str, Tensor]:
    """Tokens that differ, or one alone, which all experts but two get nothing of."""
    ids = torch.randint(0, 32, (4, 6), generator=torch.Generator().manual_seed(3))
    return {"ids": ids if kind == "all" else torch.full_like(ids, 5), "labels": ids}


def compare(model: nn.Module, program: Program, batch: Mapping[str, Tensor]) -> None:
    """A captured program against eager, with gradients."""
    (found, *_), gradients = interpret.run(program, interpret.state_of(model, program), batch)
    wanted = model(**batch)
    torch.testing.assert_close(found, wanted)
    named = dict(model.named_parameters())
    for name, gradient in zip(named, torch.autograd.grad(wanted, list(named.values()), allow_unused=True), strict=True):
        torch.testing.assert_close(gradients[name], torch.zeros_like(named[name]) if gradient is None else gradient)
