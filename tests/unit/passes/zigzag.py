"""A model whose operators want to know where their elements lie, as causal attention does, without attention."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.library import Library, register_autograd, register_fake

from autopar import operators
from autopar.ir.op_call import OpCall
from autopar.ir.rule import Rule
from autopar.operators.rules import registry
from autopar.operators.rules.registry import bind

_LIBRARY = Library("autopar", "FRAGMENT")
VOCABULARY, FEATURES = 16, 8


def places(length: int, starts: Sequence[int]) -> Tensor:
    """The global index of each of `length` local elements, in equal runs that begin at `starts`; empty: one at 0."""
    begins = starts or [0]
    assert length % len(begins) == 0
    return torch.cat([begin + torch.arange(length // len(begins)) for begin in begins])


def weigh_places(x: Tensor, *, starts: Sequence[int] = ()) -> Tensor:
    """x[b, s, f] times 1 + s / 8, with s the global index: its own derivative."""
    return x * (1 + places(x.shape[1], starts) / 8).to(x.dtype)[:, None]


_LIBRARY.define("weigh_places(Tensor x, *, int[] starts=[]) -> Tensor")
_LIBRARY.impl("weigh_places", weigh_places, "CompositeExplicitAutograd")
register_fake("autopar::weigh_places", lambda x, starts=(): x.new_empty(x.shape), lib=_LIBRARY)
register_autograd("autopar::weigh_places", lambda _, g: torch.ops.autopar.weigh_places(g.contiguous()), lib=_LIBRARY)


def rule_of_weigh_places(call: OpCall) -> Rule:
    """s may be split in any way."""
    return bind(call, "b s f -> b s f | linear 0", starts_args=((call.path("starts"), "s"),))


@contextmanager
def known() -> Iterator[None]:
    """Meanwhile rules know the operator, and so do generated programs, which say `ops.weigh_places`."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(registry._RULES, "autopar.weigh_places.default", rule_of_weigh_places)
        patch.setattr(operators, "weigh_places", weigh_places, raising=False)
        yield


class Output(NamedTuple):
    loss: Tensor
    logits: Tensor


class Block(nn.Module):
    def __init__(self, dropout: float) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(FEATURES)
        self.up, self.down = nn.Linear(FEATURES, 2 * FEATURES), nn.Linear(2 * FEATURES, FEATURES)
        self.dropout = nn.Dropout(dropout)

    def forward(self, x: Tensor) -> Tensor:
        x = x + torch.ops.autopar.weigh_places(self.norm(x))
        batch, length, features = x.shape
        hidden = F.relu(self.up(x.reshape(batch * length, features)))
        return x + self.dropout(self.down(hidden)).reshape(batch, length, features)


class Places(nn.Module):
    """ids, labels [batch, length] -> the mean loss, and logits where asked for."""

    def __init__(self, dropout: float = 0.0, *, logits: bool = False, length: int = 16) -> None:
        super().__init__()
        self.embed, self.position = nn.Embedding(VOCABULARY, FEATURES), nn.Parameter(torch.randn(length, FEATURES))
        self.blocks = nn.ModuleList(Block(dropout) for _ in range(2))
        self.head = nn.Linear(FEATURES, VOCABULARY, bias=False)
        self.logits = logits

    def forward(self, ids: Tensor, labels: Tensor) -> Any:
        x = self.embed(ids) + self.position
        for block in self.blocks:
            x = block(x)
        logits = self.head(x)
        loss = F.cross_entropy(logits.view(-1, VOCABULARY), labels.view(-1))
        return Output(loss, logits) if self.logits else (loss,)


def batch_of(rows: int, length: int = 16) -> dict[str, Tensor]:
    """Random ids and labels."""
    generator = torch.Generator().manual_seed(0)
    return {name: torch.randint(VOCABULARY, (rows, length), generator=generator) for name in ("ids", "labels")}
