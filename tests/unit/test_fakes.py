"""Operators of ours on fake tensors give the shapes, dtypes and strides that they give on real ones."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor
from torch._subclasses import FakeTensorMode

import autopar.operators

HEADS = torch.randn(8, 16, 4, 8).transpose(1, 2)
TABLES = torch.randn(1, 16, 8), torch.randn(1, 16, 8)
ROWS = torch.randn(4, 6, 16).transpose(0, 1)
NORMED = autopar.operators.rms_norm(ROWS, torch.ones(16), 1e-5)
CASES: dict[str, tuple[Any, ...]] = {
    "rotary": (HEADS, *TABLES),
    "rotary_backward": (HEADS, *TABLES),
    "rms_norm": (ROWS, torch.ones(16), 1e-5),
    "rms_norm_backward": (ROWS, ROWS, torch.ones(16), NORMED[1]),
}


def described(value: Any) -> list[tuple[Any, ...]]:
    values = value if isinstance(value, tuple | list) else (value,)
    return [(tuple(x.shape), x.dtype, x.stride()) for x in values]


@pytest.mark.parametrize("name", CASES)
def test_fakes_are_as_what_they_stand_for(name: str) -> None:
    """Breaks if a compiler is told another layout than an operator gives: inductor asserts strides, and stops."""
    operator = getattr(torch.ops.autopar, name)
    real = operator(*CASES[name])
    with FakeTensorMode() as mode:
        fake = operator(*(mode.from_tensor(x) if isinstance(x, Tensor) else x for x in CASES[name]))
    assert described(fake) == described(real)
