"""The operators that stand for rows that a mask chooses while a model is traced (`chosen.py`, `chosen_rows.py`)."""

from __future__ import annotations

import math

import torch
from torch import Tensor

FIRST, SECOND = 1_000_003, 2_000_003
"""Where the primes of two traces begin: no size of a model is one of them, nor one of the other trace."""

_LIBRARY = torch.library.Library("autopar_chosen", "DEF")
_LIBRARY.define("chosen(Tensor x, Tensor mask, int dim, int rows) -> Tensor")
_LIBRARY.define("spread(Tensor rows, Tensor mask) -> Tensor")
CHOSEN, SPREAD = torch.ops.autopar_chosen.chosen.default, torch.ops.autopar_chosen.spread.default
"""What a mask takes of x, whose dims from `dim` on it has; and rows back in their places, whatever lies elsewhere."""


@torch.library.register_fake("autopar_chosen::chosen")
def _(x: Tensor, mask: Tensor, dim: int, rows: int) -> Tensor:
    return x.new_empty((*x.shape[:dim], rows, *x.shape[dim + mask.dim() :]))


@torch.library.register_fake("autopar_chosen::spread")
def _(rows: Tensor, mask: Tensor) -> Tensor:
    return rows.new_empty((*mask.shape, *rows.shape[1:]))


def prime_after(number: int) -> int:
    """The prime behind an odd number."""
    while True:
        number += 2
        if all(number % divisor for divisor in range(3, math.isqrt(number) + 1, 2)):
            return number
