"""Products of stacks of matrices whose leading dims stay apart, forward and backward."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_ops = torch.ops.autopar


class _Matmul(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, a: Tensor, b: Tensor) -> Tensor:
        ctx.save_for_backward(a, b)
        return _ops.matmul(a, b)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, Tensor | None]:
        (g,) = grads
        a, b = ctx.saved_tensors
        grad_a = _ops.matmul(g, b.transpose(-1, -2).conj()) if ctx.needs_input_grad[0] else None
        return grad_a, _ops.matmul(a.transpose(-1, -2).conj(), g) if ctx.needs_input_grad[1] else None


def trace_matmul(a: Tensor, b: Tensor) -> Tensor:
    """a @ b; one `autopar.matmul` where both have the same leading dims."""
    if a.dim() == b.dim() and a.dim() > 2 and a.shape[:-2] == b.shape[:-2]:
        return _Matmul.apply(a, b)
    return torch.matmul(a, b)
