"""Experts that visit other ranks of their axis, while a layer runs: these take a part of their tokens.

An expert is its own rank's. Where it visits another one, its parameters go there before the layer computes, forward and
backward (He et al., FasterMoE, PPoPP 2022, shadow hot experts so), and the gradients that it gets there come back and
are added to its own: parameters, optimizers and what is saved know nothing of it. A rank computes with its guests
beside its own experts, and both add to the same tokens.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.runtime.communicator import Communicator
from autopar.runtime.expert_layers import ExpertLayer

Compute = Callable[..., Any]


@dataclass(frozen=True, slots=True)
class Visitors:
    """The guests of one layer. room: experts of a rank. own: of this rank, in order. rows[i][j]: how many of rank i's
    experts visit rank j.
    """

    comm: Communicator
    layer: ExpertLayer
    room: int
    rows: tuple[tuple[int, ...], ...]

    @staticmethod
    def of(comm: Communicator, layer: ExpertLayer | None) -> Visitors | None:
        """None where nobody visits anybody."""
        if layer is None or not layer.spare:
            return None
        room = layer.num // layer.ranks
        homes = [[layer.slots[expert] // room for expert in own] for own in layer.guests]
        ranks = range(layer.ranks)
        return Visitors(comm, layer, room, tuple(tuple(homes[j].count(i) for j in ranks) for i in ranks))

    @property
    def width(self) -> int:
        """Slots of a rank, with those of guests."""
        return self.room + self.layer.spare

    def come(self, parameters: Sequence[Tensor | None]) -> list[Tensor | None]:
        """The guests' rows of parameters [room, …], in the order of guests; of none, None. Collective."""
        rows = torch.tensor(self._leaving(), dtype=torch.int64)
        found: list[Tensor | None] = []
        for each in parameters:
            if each is None:
                found.append(None)
                continue
            received = self.comm.exchange_rows(each.index_select(0, rows.to(each.device)), self._axis, self.rows)
            order = torch.tensor(self._arrived(), dtype=torch.int64, device=each.device)
            found.append(torch.empty_like(received).index_copy_(0, order, received))
        return found

    def go(self, gradients: Sequence[Tensor], own: Sequence[Tensor]) -> None:
        """The guests' gradients, in the order of guests, home, where they are added to those there. Collective."""
        back = tuple(zip(*self.rows, strict=True))
        for gradient, total in zip(gradients, own, strict=True):
            order = torch.tensor(self._arrived(), dtype=torch.int64, device=gradient.device)
            received = self.comm.exchange_rows(gradient.index_select(0, order), self._axis, back)
            rows = torch.tensor(self._leaving(), dtype=torch.int64, device=gradient.device)
            total.index_add_(0, rows, received)

    @property
    def _axis(self) -> str:
        return self.layer.planned.axis

    def _leaving(self) -> list[int]:
        """Rows of this rank's experts that visit others: those of the first rank first, each in the order of guests."""
        here, slots = self.comm.index(self._axis), self.layer.slots
        return [slots[e] % self.room for own in self.layer.guests for e in own if slots[e] // self.room == here]

    def _arrived(self) -> list[int]:
        """The places of this rank's guests, in the order in which they come: those of the first rank first."""
        own = self.layer.guests[self.comm.index(self._axis)]
        return sorted(range(len(own)), key=lambda place: self.layer.slots[own[place]] // self.room)
