"""A model of another library: what makes it, small, and the batch that it takes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

ROWS = 4
Made = tuple[nn.Module, Any]
"""A model, and its batch: one tensor, arguments in order, or by keyword."""


@dataclass(frozen=True)
class Entry:
    """make: the model with random weights and its batch. family: what the library calls the kind."""

    library: str
    family: str
    name: str
    make: Callable[[], Made]

    @property
    def package(self) -> str:
        """What has to be installed for it; nothing for a model that a script writes."""
        return self.library * (self.library != "scripts")

    @property
    def key(self) -> str:
        return f"{self.library} | {self.family} | {self.name}"


def images(size: int, channels: int = 3) -> Tensor:
    """f32[ROWS, channels, size, size]"""
    return torch.randn(ROWS, channels, size, size, generator=torch.Generator().manual_seed(0))


def tokens(vocabulary: int, length: int = 16, rows: int = ROWS) -> Tensor:
    """i64[rows, length]"""
    return torch.randint(0, vocabulary, (rows, length), generator=torch.Generator().manual_seed(1))


def numbered(library: str, family: str, made: Mapping[str, Callable[[], Made]]) -> list[Entry]:
    """Entries of one family by their names."""
    return [Entry(library, family, name, make) for name, make in made.items()]
