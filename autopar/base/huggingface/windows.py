"""Keys with a scale a channel of a group of tokens, values with one a token, and the last tokens of both as they are:
KIVI (Liu et al., 2402.02750), but for codes and scales, which are those of `base/codes.py`, symmetric.

    keys     whole windows of 128 tokens are codes, in groups of 32 tokens that share a scale a channel; what follows
             them is as it is
    values   all but the last 128 tokens are codes, with a scale a token

Tokens that come together, a prompt, see each other as they are; who comes later sees codes of all before the window.
Everything has one shape at every step: codes of a window that is not whole are written with every token, and not read.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import codes_of

GROUP, WINDOW = 32, 128
"""Tokens that share a scale, and tokens that are kept as they are: G and R of the paper's experiments."""


def places(length: int) -> int:
    """Tokens that there is room for, where `length` are wanted: whole windows, and one that follows them."""
    return (-(-length // WINDOW) + 1) * WINDOW


@dataclass(frozen=True, slots=True)
class Windowed:
    """Keys or values [batch, heads, length, dim]. storage: of `CACHES`, by channel. of_keys: whether it is keys.

    stored: codes [batch, heads, length, …]. scales: [batch, heads, length / 32, dim] of keys, [batch, heads, length, 1]
    of values. window: [batch, heads, 128, dim].
    """

    storage: str
    of_keys: bool
    stored: Any
    scales: Any
    window: Any

    @staticmethod
    def take(storage: str, of_keys: bool, tensors: Iterator[Tensor]) -> Windowed:
        """Of the next tensors; the inverse of `tensors`."""
        return Windowed(storage, of_keys, next(tensors), next(tensors), next(tensors))

    @staticmethod
    def empty(
        storage: str, of_keys: bool, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device
    ) -> list[Tensor]:
        """As `Kept.empty`."""
        rows, heads, length, size = shape
        kind, room = codes_of(storage), places(length)
        codes = torch.zeros((), dtype=kind.dtype, device=device).expand(kind.codes_shape((rows, heads, room, size)))
        zero = torch.zeros((), dtype=dtype, device=device)
        scales = zero.expand(rows, heads, room // GROUP, size) if of_keys else zero.expand(rows, heads, room, 1)
        return [codes, scales, zero.expand(rows, heads, WINDOW, size)]

    @property
    def length(self) -> int:
        return int(self.stored.shape[2])

    def tensors(self) -> list[Any]:
        return [self.stored, self.scales, self.window]

    def read(self, written: Tensor) -> Any:
        """[batch, heads, length, dim], where so many tokens are written (int64 [])."""
        kind, codes, scales = codes_of(self.storage), self.stored, self.scales
        if self.of_keys:
            found = kind.decode(codes.unflatten(2, (-1, GROUP)), scales.unsqueeze(3)).flatten(2, 3)
        else:
            found = kind.decode(codes, scales)
        return found.index_copy(2, self._window_at(written), self.window)

    def written(self, at: Tensor, x: Tensor, before: Tensor) -> tuple[Windowed, Any]:
        """With x [batch, heads, new, dim] at these positions, behind `before` tokens; and what attention takes."""
        count, kind = x.shape[2], codes_of(self.storage)
        whole = self.read(before).index_copy(2, at, x)
        if self.of_keys:
            begin = before - before % WINDOW
            most = -(-count // WINDOW) * WINDOW  # windows that may be whole by then
            rows = torch.arange(most, device=x.device) + begin
            groups = torch.arange(most // GROUP, device=x.device) + begin // GROUP
            codes, scales = kind.encode(whole.index_select(2, rows).unflatten(2, (-1, GROUP)), (3,))
            codes, scales = codes.flatten(2, 3), scales.flatten(2, 3)
        else:
            rows = groups = at
            codes, scales = kind.encode(x)
        return Windowed(
            self.storage, self.of_keys, self.stored.index_copy(2, rows, codes),
            self.scales.index_copy(2, groups, scales), whole.index_select(2, self._window_at(before + count)),
        ), whole  # fmt: skip

    def _window_at(self, written: Tensor) -> Tensor:
        """The positions of the window where so many tokens are written."""
        begin = written - written % WINDOW if self.of_keys else (written - WINDOW).clamp(min=0)
        return torch.arange(WINDOW, device=written.device) + begin
