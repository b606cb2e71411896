"""Dropout whose mask is a function of position, and the seed that a traced program draws from."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from typing import Any

import torch
from torch import Tensor

from autopar.base.errors import AutoparError

_ops = torch.ops.autopar


@contextmanager
def tracing_seed(seed: Tensor, first: int = 0) -> Iterator[list[tuple[int, ...]]]:
    """Each draw that `AUTOGRAD` traces within is from `seed` (an int64 scalar), salted by its number, from `first` on;
    yields the shapes of what was drawn.
    """
    shapes: list[tuple[int, ...]] = []
    token = _SEED.set((seed, itertools.count(first), shapes))
    try:
        yield shapes
    finally:
        _SEED.reset(token)


_State = tuple[Tensor, Iterator[int], list[tuple[int, ...]]]
_SEED: ContextVar[_State | None] = ContextVar("autopar_tracing_seed", default=None)


def draw(what: str, shape: Sequence[int]) -> tuple[Tensor, int]:
    """The seed of the traced program, and the salt of the next operator that draws from it, numbers of this shape.

    Raises:
        AutoparError: not within `tracing_seed`.
    """
    state = _SEED.get()
    if state is None:
        raise AutoparError(f"{what} need a seed", remedy="trace under autopar.operators.tracing_seed(seed)")
    seed, salts, shapes = state
    shapes.append(tuple(shape))
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
    return x if p == 0 or not train else _Dropout.apply(x, p, *draw(f"dropout's masks (p={p})", x.shape))
