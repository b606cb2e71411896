"""Writes into a slice of complex numbers, of which torch has no gradient: they are written as pairs of real ones."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _trace_scatter(scatter: Callable[..., Tensor], x: Tensor, part: Tensor, dim: int = 0, *place: Any) -> Tensor:
    """As `scatter` (`aten.slice_scatter`, `aten.select_scatter`): x with `part` at a place along a dim."""
    if not x.is_complex():
        return scatter(x, part, dim, *place)
    pairs = (torch.view_as_real(each.resolve_conj()) for each in (x, part))
    return torch.view_as_complex(scatter(*pairs, dim % x.dim(), *place))


AUTOGRAD: dict[Any, Callable[..., Any]] = {
    scatter: partial(_trace_scatter, scatter) for scatter in (_aten.slice_scatter.default, _aten.select_scatter.default)
}
