"""Rotary position embedding as one operator, and its gradient.

Shape suffixes: B batch, H heads, S positions, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, for x[B, H, S, D] and tables cos and sin, [B, S, D] or [1, S, D].

    rotate_half takes (a, b) to (-b, a), of the two halves of D. In the dtype of x, every product rounded, as models
    write it; laid out like x.
    """
    return x * cos.unsqueeze(1) + _rotate_half(x) * sin.unsqueeze(1)


def rotary_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `rotary` to x, from g[B, H, S, D]: a rotation back."""
    return g * cos.unsqueeze(1) - _rotate_half(g * sin.unsqueeze(1))


def _rotate_half(x: Tensor) -> Tensor:
    half = x.shape[-1] // 2
    return torch.cat([-x[..., half:], x[..., :half]], -1)
