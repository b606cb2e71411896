"""What marks blocks in a graph that is being traced: where one begins and ends, and where one is repeated."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar

import torch
from torch import Tensor
from torch.fx import has_side_effect

_LIBRARY = torch.library.Library("autopar_capture", "DEF")
_LIBRARY.define("enter(Tensor[] values, int key) -> Tensor[]")
_LIBRARY.define("leave(Tensor[] values, int key) -> Tensor[]")
_LIBRARY.define("again(Tensor[] values, int key, str path) -> Tensor[]")
_LIBRARY.define("again_one(Tensor[] values, int key, str path) -> Tensor")
ENTER, LEAVE, AGAIN, AGAIN_ONE = (
    getattr(torch.ops.autopar_capture, name).default for name in ("enter", "leave", "again", "again_one")
)
_LIBRARY.define("given(Tensor[] values, str path, str[] words) -> ()")
GIVEN = has_side_effect(torch.ops.autopar_capture.given.default)
"""Says what the forward of the block at `path` calls what it is given, and makes nothing: it may stand anywhere."""
REPEATS = (AGAIN, AGAIN_ONE)
"""Calls of a repeated block: of one that makes several tensors, or none, and of one that makes one, which is what most
do, and half as much for a tracer to handle.
"""
MARKS = (ENTER, LEAVE, *REPEATS)

_MAKER: ContextVar[Callable[[int], list[Tensor]]] = ContextVar("autopar_made_by")


@contextmanager
def made_by(maker: Callable[[int], list[Tensor]]) -> Iterator[None]:
    """What makes the results of a repeated block by its key, in the trace that is under way."""
    token = _MAKER.set(maker)
    try:
        yield
    finally:
        _MAKER.reset(token)


def _like(values: list[Tensor]) -> list[Tensor]:
    return [torch.empty_strided(v.shape, v.stride(), dtype=v.dtype, device=v.device) for v in values]


@torch.library.register_fake("autopar_capture::enter")
def _(values: list[Tensor], key: int) -> list[Tensor]:
    return _like(values)


@torch.library.register_fake("autopar_capture::leave")
def _(values: list[Tensor], key: int) -> list[Tensor]:
    return _like(values)


@torch.library.register_fake("autopar_capture::given")
def _(values: list[Tensor], path: str, words: list[str]) -> None:
    pass


@torch.library.register_fake("autopar_capture::again")
def _(values: list[Tensor], key: int, path: str) -> list[Tensor]:
    return _MAKER.get()(key)


@torch.library.register_fake("autopar_capture::again_one")
def _(values: list[Tensor], key: int, path: str) -> Tensor:
    (made,) = _MAKER.get()(key)
    return made
