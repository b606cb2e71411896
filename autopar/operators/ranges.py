"""Rows of numbers between bounds that are tensors: made of arange, as torch asks for the values of the bounds
otherwise, which nothing has that only knows shapes.

    linspace(a, b, 5)  →  n = arange(5);  where(n < 2.5, a + n (b - a) / 4, b - (4 - n) (b - a) / 4)
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def _linspace(
    start: Tensor | float,
    end: Tensor | float,
    steps: int,
    *,
    dtype: torch.dtype | None = None,
    layout: Any = None,
    device: Any = None,
    pin_memory: bool | None = None,
) -> Any:
    """From both ends, as torch does, so that the last number is the bound itself."""
    dtype = dtype or torch.get_default_dtype()
    if not dtype.is_floating_point or steps < 2:
        return NotImplemented
    number = torch.arange(steps, device=device)
    step = (end - start) / (steps - 1)
    rising, falling = start + step * number.to(dtype), end - step * (steps - 1 - number).to(dtype)
    return torch.where(number < steps / 2, rising, falling).to(dtype)


DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    _aten.linspace.Tensor_Tensor: _linspace,
    _aten.linspace.Tensor_Scalar: _linspace,
    _aten.linspace.Scalar_Tensor: _linspace,
}
