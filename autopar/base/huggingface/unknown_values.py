"""Forwards without data that ask how many rows there are of something: an answer with which they go on.

    for e in hit.nonzero(): w[e] …          all of them are hit, by all rows; any one's matrix will do
    sizes = counts.tolist()                 numbers that nobody knows
    x.split(sizes)                          the first part has the rows that are left

What layers keep of keys, values and states does not depend on which rows an expert gets, nor do their shapes. For
finding out that (`caches.new_cache`), and nothing else.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from autopar.base.torch_compat.values import all_nonzero

_SPLITS = (torch.split, Tensor.split, torch.split_with_sizes, Tensor.split_with_sizes, torch.functional.split)


class _Unknown(int):
    """A number of rows that nobody knows."""


class _Guessed(TorchFunctionMode):
    """While a model runs on meta: lists of whole numbers have numbers that nobody knows, an index is the first."""

    def __torch_function__(
        self, func: Callable[..., Any], types: Sequence[type], args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        kwargs = kwargs or {}
        if func is Tensor.tolist and _is_counts(args[0]):
            return [_Unknown(0) for _ in range(args[0].shape[0])]
        if func in _SPLITS and len(args) > 1:
            x, sizes, *dim = args
            args = (x, _fitting(x, sizes, *dim, **kwargs), *dim)
        if func is Tensor.__getitem__ and len(args) == 2:
            x, index = args
            args = (x, tuple(map(_first, index)) if isinstance(index, tuple) else _first(index))
        return func(*args, **kwargs)


def _is_counts(x: Tensor) -> bool:
    return x.is_meta and x.dim() == 1 and _is_whole(x)


def _first(index: Any) -> Any:
    """A part of an index, the number 0 for one that nobody knows."""
    is_unknown = isinstance(index, Tensor) and index.is_meta and not index.dim() and _is_whole(index)
    return 0 if is_unknown else index


def _is_whole(x: Tensor) -> bool:
    return not (x.is_floating_point() or x.is_complex() or x.dtype == torch.bool)


def _fitting(x: Tensor, sizes: Any, dim: int = 0, **_: Any) -> Any:
    """Sizes of parts that are all of a dim: what is known stays, the first unknown one gets the rest."""
    if not isinstance(sizes, list | tuple):
        return sizes
    unknown = next((place for place, each in enumerate(sizes) if isinstance(each, _Unknown)), None)
    if unknown is None:
        return sizes
    found = [int(each) for each in sizes]
    found[unknown] = x.shape[dim] - sum(found)
    return found


@contextmanager
def guessed() -> Iterator[None]:
    """Inside, tensors on meta are asked which of them are set, and are told: all of them."""
    with _Guessed(), all_nonzero():
        yield
