"""Which keys a constant mask lets each query see, as numbers: causal, a window, a prefix."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions
from autopar.operators.visibility import visible_keys
from autopar.passes.attention.constants import Constant, Diagonal, Value


@dataclass(frozen=True, slots=True)
class Band:
    """Key t is visible to query s where s - left <= t <= s + right, or t < prefix; None: no such limit.

    left and right are at least 0.
    """

    left: int | None = None
    right: int | None = None
    prefix: int = 0

    def intersection(self, other: Band) -> Band | None:
        """The band of what both show; None where that is no band."""
        if self == Band() or other == Band():
            return other if self == Band() else self
        if self.prefix or other.prefix:
            return self if self == other else None
        return Band(_least(self.left, other.left), _least(self.right, other.right))


def _least(a: int | None, b: int | None) -> int | None:
    return min((n for n in (a, b) if n is not None), default=None)


def read_band(visible: Value, queries: int, keys: int) -> Band | None:
    """The band that shows exactly what `visible` does (bool, broadcasts to [..., S, T]); None if none does."""
    if isinstance(visible, Diagonal):
        shown = torch.arange(1 - queries, keys)[visible.value.expand(queries + keys - 1)]
        return _limits(shown, queries, keys) if _is_run(shown) else None
    plane = _plane(visible, queries, keys)
    if plane is None:
        return None
    if bool(plane.all()):
        return Band()
    offset = torch.arange(keys)[None, :] - torch.arange(queries)[:, None]
    open_columns = plane.all(0).long()
    prefixes = (0, int(open_columns.cumprod(0).sum()))
    for prefix in prefixes:
        band = _limits(offset[:, prefix:][plane[:, prefix:]], queries, keys, prefix)
        if band is not None and torch.equal(shown_by(band, queries, keys), plane):
            return band
    return None


def shown_by(band: Band, queries: int, keys: int) -> Tensor:
    """What a band shows: bool [S, T]."""
    options = AttentionOptions(1.0, band.left, band.right, band.prefix)
    return visible_keys(options, torch.arange(queries), torch.arange(keys))


def all_rows_see(visible: Value, queries: int, keys: int) -> bool:
    """Whether each query sees at least one key."""
    if isinstance(visible, Constant):
        return bool(visible.value.any(-1).all())
    shown = torch.arange(1 - queries, keys)[visible.value.expand(queries + keys - 1)]
    if not _is_run(shown):
        return False
    rows = torch.arange(queries)
    first, last = torch.maximum(shown[0], -rows), torch.minimum(shown[-1], keys - 1 - rows)
    return bool((first <= last).all())


def sees_itself(visible: Value, queries: int, keys: int) -> bool:
    """Whether each query sees the key of its own place."""
    if isinstance(visible, Diagonal):
        return bool(visible.value.expand(queries + keys - 1)[queries - 1])
    whole = visible.value.expand(*visible.value.shape[:-2], queries, keys)
    return queries == keys and bool(whole.diagonal(dim1=-2, dim2=-1).all())


def _plane(visible: Constant, queries: int, keys: int) -> Tensor | None:
    """bool [S, T], where it is the same for all rows of the batch and all heads."""
    value = visible.value
    if any(size > 1 for size in value.shape[:-2]):
        return None
    value = value.reshape(value.shape[-2:]) if value.dim() > 1 else value
    return value.expand(queries, keys)


def _is_run(shown: Tensor) -> bool:
    return bool(shown.numel()) and int(shown[-1] - shown[0]) == shown.numel() - 1


def _limits(shown: Tensor, queries: int, keys: int, prefix: int = 0) -> Band | None:
    """The band from the least to the largest t - s; limits that nothing meets are none."""
    if not shown.numel():
        return None
    low, high = int(shown.min()), int(shown.max())
    if low > 0 or high < 0:
        return None
    return Band(None if low <= prefix - queries + 1 else -low, None if high >= keys - 1 else high, prefix)
