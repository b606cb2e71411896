"""Types of tensors: of which whole tensor a rank holds what part."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor

from autopar.base.torch_compat.distributed import without_dispatch
from autopar.ir.sharding import REPLICATE, Placement, Sharding, code, format_shape, replicated
from autopar.ir.tensor_type import dtype_name
from autopar.ir.terms import Term, leaf

_ATTRIBUTE = "_autopar_types"
UNKNOWN = leaf("unknown")


class Typed(NamedTuple):
    """A part of a whole tensor of `shape`: one placement an axis, in mesh order. Axes of one rank replicate.

    term: what is computed there (`autopar.ir.terms`).
    """

    shape: tuple[int, ...]
    sharding: Sharding
    term: Term = UNKNOWN

    def over(self, axis: int, placement: Placement) -> Typed:
        """The same but for what one axis does."""
        return Typed(self.shape, (*self.sharding[:axis], placement, *self.sharding[axis + 1 :]), self.term)

    @property
    def bare(self) -> Typed:
        """Without its term: how it lies."""
        return Typed(self.shape, self.sharding)

    def of(self, term: Term) -> Typed:
        """The same of another expression."""
        return Typed(self.shape, self.sharding, term)


Types = frozenset[Typed]
"""All that is known to be true of one tensor; never empty."""


@dataclass(frozen=True, slots=True)
class Axes:
    """The mesh that the tensors lie on."""

    names: tuple[str, ...]
    sizes: tuple[int, ...]

    def typed(self, shape: Sequence[int], sharding: Sharding, term: Term = UNKNOWN) -> Typed:
        """The type in its one form: what one rank splits is whole."""
        plain = (REPLICATE if size == 1 else placement for placement, size in zip(sharding, self.sizes, strict=True))
        return Typed(tuple(shape), tuple(plain), term)

    def whole(self, shape: Sequence[int], term: Term = UNKNOWN) -> Types:
        """The type of what every rank has alike."""
        return frozenset({Typed(tuple(shape), replicated(len(self.sizes)), term)})

    def text(self, x: Tensor, types: Iterable[Typed] | None = None) -> str:
        """`f32[8/dp, 64] or f32[4, 64]`."""
        known = self.of(x) if types is None else types
        texts = sorted({format_shape(dtype_name(x.dtype), each.shape, each.sharding, self.names) for each in known})
        return " or ".join(texts[:3])

    def of(self, x: Tensor) -> Types:
        """What is known of a tensor; one of which nothing was said is made by every rank alike."""
        return frozenset(itertools.starmap(Typed.of, zip(*self.said(x), strict=True)))

    def said(self, x: Tensor) -> Said:
        """The same, as `Said`."""
        found: Said | None = getattr(x, _ATTRIBUTE, None)
        return self.said_whole(x.shape) if found is None else found

    def said_whole(self, shape: Sequence[int], term: Term = UNKNOWN) -> Said:
        """`whole`, as `Said`."""
        return (Typed(tuple(shape), replicated(len(self.sizes))),), (term,)


Said = tuple[tuple[Typed, ...], tuple[Term, ...]]
"""The types of a tensor, in order: how it may be taken to lie, once for each of the terms that it is then."""


def give(x: Tensor, types: Iterable[Typed]) -> Tensor:
    """Say what is true of a tensor; the tensor."""
    return give_said(x, ordered(types))


def ordered(types: Iterable[Typed]) -> Said:
    """Types in an order that depends, terms apart, on how they lie alone."""
    found = set(types)
    if len(found) == 1:
        (one,) = found
        return (one.bare,), (one.term,)
    rows = sorted(found, key=lambda each: (in_order(each), each.term))
    return tuple(each.bare for each in rows), tuple(each.term for each in rows)


def give_said(x: Tensor, said: Said) -> Tensor:
    """`give`, of what is in order."""
    setattr(x, _ATTRIBUTE, said)
    return x


def alike(x: Tensor) -> Tensor:
    """Another tensor of the same shape, of which nothing is said yet."""
    with without_dispatch():
        return like(x)


def like(x: Tensor) -> Tensor:
    """`alike`, where no mode types what is called."""
    return x.detach() if x.is_contiguous() else torch.empty(x.shape, dtype=x.dtype, device="meta")


def in_order(typed: Typed) -> tuple[object, ...]:
    """What types are sorted by, in every process alike: how they lie, not what they are of."""
    return typed.shape, tuple(map(code, typed.sharding))


def bare(types: Iterable[Typed]) -> frozenset[Typed]:
    """How a tensor may be taken to lie."""
    return frozenset(each.bare for each in types)
