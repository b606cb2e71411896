"""RMSNorm and rotary embeddings as functions whose forward and backward are one operator each."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)
from autopar.operators.rotary import rotary

_ops = torch.ops.autopar


class _RMSNorm(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, w: Tensor | None, eps: float, options: dict[str, Any]) -> tuple[Tensor, Tensor]:
        y, rstd = _ops.rms_norm(x, w, eps, **options)
        ctx.save_for_backward(x, w, rstd)
        ctx.options = options
        ctx.mark_non_differentiable(rstd)
        return y, rstd

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        x, w, rstd = ctx.saved_tensors
        dx, dw = _ops.rms_norm_backward(grads[0], x, w, rstd, **ctx.options)
        return dx, None if w is None else dw, None, None


class _Rotary(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        ctx.save_for_backward(cos, sin)
        return _ops.rotary(x, cos, sin)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return _ops.rotary_backward(grads[0], *ctx.saved_tensors), None, None


def _trace_rms_norm(x: Tensor, w: Tensor | None, eps: float, **options: Any) -> tuple[Tensor, Tensor]:
    return _RMSNorm.apply(x, w, eps, options)


def _trace_rotary(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Tables that have a gradient of their own (learned frequencies) are multiplied by plain operators."""
    return rotary(x, cos, sin) if cos.requires_grad or sin.requires_grad else _Rotary.apply(x, cos, sin)


AUTOGRAD: dict[Any, Callable[..., Any]] = {_ops.rms_norm.default: _trace_rms_norm, _ops.rotary.default: _trace_rotary}
