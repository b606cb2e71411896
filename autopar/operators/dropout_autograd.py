"""Dropout whose mask is a function of position, and the seed that a traced program draws from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError

_ops = torch.ops.autopar


@contextmanager
def tracing_seed(seed: Tensor) -> Iterator[None]:
    """Each dropout that `AUTOGRAD` traces within draws from `seed` (an int64 scalar), salted by its number."""
    token = _SEED.set((seed, itertools.count()))
    try:
        yield
    finally:
        _SEED.reset(token)


_SEED: ContextVar[tuple[Tensor, Iterator[int]] | None] = ContextVar("autopar_tracing_seed", default=None)


def draw(what: str) -> tuple[Tensor, int]:
    """The seed of the traced program, and the salt of the next operator that draws from it.

    Raises:
        AutoparError: not within `tracing_seed`.
    """
    state = _SEED.get()
    if state is None:
        raise AutoparError(f"{what} need a seed", remedy="trace under autopar.operators.tracing_seed(seed)")
    seed, salts = state
    return seed, next(salts)


class _Dropout(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, p: float, seed: Tensor, salt: int) -> Tensor:
        ctx.save_for_backward(seed)
        ctx.options = (p, salt)
        return _ops.dropout(x, p, seed, salt, [], list(x.shape))

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        p, salt = ctx.options
        return _ops.dropout(g, p, ctx.saved_tensors[0], salt, [], list(g.shape)), None, None, None


def trace_dropout(x: Tensor, p: float, train: bool) -> Tensor:
    """`aten.dropout`, its mask by position."""
    return x if p == 0 or not train else _Dropout.apply(x, p, *draw(f"dropout's masks (p={p})"))
