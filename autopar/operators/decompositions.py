"""Operators that are made of others while a region is differentiated, below autograd."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from autopar.operators import losses, ranges, reductions

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    **reductions.DECOMPOSITIONS,
    **losses.DECOMPOSITIONS,
    **ranges.DECOMPOSITIONS,
}
"""ATen overload -> a function of the same signature, which may return `NotImplemented`."""
