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
    x = x.contiguous()  # so that y is, as the kernel's
    wide_x = wide(x)
    y = wide_x.square()
    rstd = torch.rsqrt(y.mean(-1, keepdim=True) + eps)
    # In the memory of the squares: large tensors cost more to get than to fill.
    y = torch.mul(wide_x, rstd, out=y)
    if round_first:
        y = y.to(x.dtype)
        return (y if w is None else _times(y, _scale(w, offset))), rstd.squeeze(-1)
    return (y if w is None else _times(y, _scale(wide(w), offset))).to(x.dtype), rstd.squeeze(-1)


def rms_norm_backward(
    g: Tensor, x: Tensor, w: Tensor | None, rstd: Tensor, *, offset: float = 0.0, round_first: bool = False
) -> tuple[Tensor, Tensor]:
    """The gradients of `rms_norm` to x[..., N] and w[N] (empty without w), from g[..., N] and its rstd[...].

    dw is summed over all rows, in float32 for half types. Of g * x, [R, N], both sums are products with a vector: dw
    with rstd (but where the normalized rows are rounded before the weight), and with w what every row needs for dx,
        dx = rstd * (g * w - x * (sum over N of g * w * x) * rstd² / N).
    """
    size, g, x = x.shape[-1], g.contiguous(), x.contiguous()
    wide_x, grad, scale = wide(x), wide(g), None if w is None else _scale(wide(w), offset)
    products = wide_x * grad
    rows, dw = products.reshape(-1, size), x.new_empty((0,))
    if w is None or scale is None:
        along = rows.sum(-1)
    else:
        along = rows @ scale.to(rows.dtype)
        if round_first and x.dtype in HALF:
            dw = (grad * wide((wide_x * rstd.unsqueeze(-1)).to(x.dtype))).reshape(-1, size).sum(0).to(w.dtype)
        else:
            dw = (rstd.reshape(-1) @ rows).to(w.dtype)
    along = along.view(rstd.shape).mul_(rstd).mul_(rstd).div_(-size)
    dx = products.copy_(grad) if scale is None else torch.mul(grad, scale, out=products)
    return dx.addcmul_(wide_x, along.unsqueeze(-1)).mul_(rstd.unsqueeze(-1)).to(x.dtype), dw


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


def _times(y: Tensor, scale: Tensor) -> Tensor:
    """Their product, in the memory of y where it has the same dtype."""
    return y.mul_(scale) if torch.promote_types(y.dtype, scale.dtype) == y.dtype else y * scale


def _scale(w: Tensor, offset: float) -> Tensor:
    return w + offset if offset else w
