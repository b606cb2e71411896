"""What a layer of attention keeps of its keys, or of its values: as they are, or as codes with scales
(`base/codes.py`), one scale a head and token. Both are written with the token, and read by multiplying, so that what
attention sees of a token does not depend on whether it came in the prompt.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from autopar.base.codes import STORAGES

Seen = tuple["Kept", Any]
"""What is kept after a call, and what attention takes in it."""


@dataclass(frozen=True, slots=True)
class Kept:
    """Keys or values [batch, heads, length, dim]. storage: a name of `STORAGES`; None: as they are. scales: with it."""

    storage: str | None
    stored: Any
    scales: Any = None

    @staticmethod
    def take(storage: str | None, tensors: Iterator[Tensor]) -> Kept:
        """Of the next tensors; the inverse of `tensors`."""
        return Kept(storage, next(tensors), None if storage is None else next(tensors))

    @staticmethod
    def of(storage: str | None, x: Tensor) -> Kept:
        """x, to be kept."""
        return Kept(storage, x) if storage is None else Kept(storage, *STORAGES[storage].encode(x))

    @staticmethod
    def empty(storage: str | None, shape: tuple[int, ...], dtype: torch.dtype, device: torch.device) -> list[Tensor]:
        """The tensors of zeros of this shape, which take no memory until they are cut.

        Raises:
            AutoparError: see `Storage.codes_shape`.
        """
        if storage is None:
            return [torch.zeros((), dtype=dtype, device=device).expand(shape)]
        kind = STORAGES[storage]
        codes = torch.zeros((), dtype=kind.dtype, device=device).expand(kind.codes_shape(shape))
        return [codes, torch.zeros((), dtype=dtype, device=device).expand(*shape[:-1], 1)]

    @property
    def length(self) -> int:
        return int(self.stored.shape[-2])

    def tensors(self) -> list[Any]:
        return [self.stored] if self.storage is None else [self.stored, self.scales]

    def read(self, written: Any = None) -> Any:
        """[batch, heads, length, dim], as attention takes them."""
        return self.stored if self.storage is None else STORAGES[self.storage].decode(self.stored, self.scales)

    def written(self, at: Tensor, x: Tensor, before: Any = None) -> Seen:
        """With x [batch, heads, new, dim] at these positions."""
        new = Kept.of(self.storage, x).tensors()
        old = self.tensors()
        found = Kept(self.storage, *(one.index_copy(2, at, each) for one, each in zip(old, new, strict=True)))
        return found, found.read()
