"""RMSNorm as one operator, and its gradients.

Shape suffixes: N normalized dim, ... rows.
"""

from __future__ import annotations

import torch
from torch import Tensor

from autopar.operators.basic import HALF, wide, wide_dtype


def rms_norm(
    x: Tensor, w: Tensor | None, eps: float, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """x[..., N] / sqrt(mean(x²) + eps) * (w[N] + offset) over the last dim, and the factor rstd[...] of each row.

    Computed in float32 for half types, as models write it. Where the result is rounded differs: `round_first`: to the
    dtype of x before the weight (Llama), so that y has the dtype of their product; else behind it (Gemma, whose offset
    is 1, and `torch.nn.functional.rms_norm`), and y has the dtype of x. rstd is float32 (float64 for float64).
    """
    wide_x = wide(x)
    rstd = torch.rsqrt(wide_x.square().mean(-1, keepdim=True) + eps)
    y = wide_x * rstd
    if round_first:
        y = y.to(x.dtype)
        return (y if w is None else y * _scale(w, offset)), rstd.squeeze(-1)
    return (y if w is None else y * _scale(wide(w), offset)).to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward(
    g: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of `rms_norm` to x[..., N] and w[N] (empty without w), from g[..., N] and its rstd[...].

    dw is summed over all rows, in float32 for half types.
    """
    normal = wide(x) * rstd.unsqueeze(-1)
    grad = wide(g)
    dw = x.new_empty((0,))
    if w is not None:
        rounded = wide(normal.to(x.dtype)) if round_first and x.dtype in HALF else normal
        dw = (grad * rounded).reshape(-1, x.shape[-1]).sum(0).to(w.dtype)
        grad = grad * _scale(wide(w), offset)
    mean = (grad * normal).mean(-1, keepdim=True)
    return ((grad - normal * mean) * rstd.unsqueeze(-1)).to(x.dtype), dw


def result_dtype(x: torch.dtype, w: Tensor | None, round_first: bool) -> torch.dtype:
    """The dtype of y."""
    return torch.promote_types(x, w.dtype) if round_first and w is not None else x


def fake_rms_norm(
    x: Tensor, w: Tensor | None, eps: float, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of `rms_norm`."""
    y = x.new_empty(x.shape, dtype=result_dtype(x.dtype, w, round_first))
    return y, x.new_empty(x.shape[:-1], dtype=wide_dtype(x.dtype))


def fake_rms_norm_backward(
    g: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """Shapes and dtypes of `rms_norm_backward`."""
    return x.new_empty(x.shape), x.new_empty((0,)) if w is None else w.new_empty(w.shape)


def _scale(w: Tensor, offset: float) -> Tensor:
    return w + offset if offset else w
