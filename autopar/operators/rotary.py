"""Rotary position embedding as one operator, and its gradient.

Shape suffixes: B batch, H heads, S positions, D head size.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.operators.basic import HALF


def rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """x * cos + rotate_half(x) * sin, for x[B, H, S, D] and tables cos and sin, [B, S, D] or [1, S, D].

    rotate_half takes (a, b) to (-b, a), of the two halves of D. In the dtype of x, every product rounded, as models
    write it; laid out like x.
    """
    half, sin = x.shape[-1] // 2, sin.unsqueeze(1)
    y = x * cos.unsqueeze(1)
    if x.shape[2] == 1:  # a token: calls take longer than products do
        _add_product(y, x.roll(half, -1), torch.cat([-sin[..., :half], sin[..., half:]], -1), 1)
        return y
    _add_product(y[..., :half], x[..., half:], sin[..., :half], -1)
    _add_product(y[..., half:], x[..., :half], sin[..., half:], 1)
    return y


def rotary_backward(g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """The gradient of `rotary` to x, from g[B, H, S, D]: a rotation back."""
    half, sin = g.shape[-1] // 2, sin.unsqueeze(1)
    dx = g * cos.unsqueeze(1)
    _add_product(dx[..., :half], g[..., half:], sin[..., half:], 1)
    _add_product(dx[..., half:], g[..., :half], sin[..., :half], -1)
    return dx


def _add_product(y: Tensor, a: Tensor, b: Tensor, sign: int) -> None:
    """y += sign * a * b; of half types the product is rounded by itself, as models write it."""
    if y.dtype in HALF:
        y.add_(a * b, alpha=sign)
    else:
        y.addcmul_(a, b, value=sign)
