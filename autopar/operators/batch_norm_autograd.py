"""ATen's batch norms as functions whose forward and backward are made of sums that a split batch adds up."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)
from autopar.operators.words import called

_ops = torch.ops.autopar
_aten = torch.ops.aten


class _BatchNorm(torch.autograd.Function):
    """`count`: elements per channel where the statistics are taken from x, 0 where they are given numbers.

    Saved for the backward: x, mean and variance, as torch saves x, mean and the inverse root of the variance.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        mean: Tensor,
        variance: Tensor,
        eps: float,
        count: int,
    ) -> Tensor:
        ctx.save_for_backward(x, weight, mean, variance)
        ctx.options = (eps, count, None if bias is None else bias.dtype)
        return _ops.batch_norm(x, mean, variance, weight, bias, eps)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        x, weight, mean, variance = ctx.saved_tensors
        eps, count, bias_dtype = ctx.options
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        sums = grad_x = None
        if (count and wants_x) or wants_weight or wants_bias:
            sums = _ops.batch_norm_grad_sums(g, x, mean, variance, eps)
        if wants_x:
            grad_x = _ops.batch_norm_grad_input(g, x, mean, variance, weight, sums if count else None, eps, count)
        grad_weight = sums[1].to(weight.dtype) if sums is not None and wants_weight else None
        grad_bias = sums[0].to(bias_dtype) if sums is not None and wants_bias else None
        return grad_x, grad_weight, grad_bias, None, None, None, None


def _statistics(x: Tensor) -> tuple[Tensor, Tensor, int]:
    """Mean and biased variance per channel of x[N, C, ...], each [C], and the elements that a channel has."""
    x = x.detach()
    count = math.prod(size for dim, size in enumerate(x.shape) if dim != 1)
    mean = called("mean", _ops.channel_sum(x) * (1 / count))
    return mean, called("variance", _ops.centred_squares(x, mean) * (1 / count)), count


def _trace_training(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor, Tensor, int]:
    """The normalized x, then mean, variance, and the elements per channel."""
    mean, variance, count = _statistics(x)
    return _BatchNorm.apply(x, weight, bias, mean, variance, eps, count), mean, variance, count


def _trace_functional(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """As `aten::_native_batch_norm_legit_functional`: the output, what is saved, and the new running statistics."""
    if not training:
        given = _trace_given(x, weight, bias, running_mean, running_var, momentum, eps)
        return *given, running_mean, running_var
    out, mean, variance, count = _trace_training(x, weight, bias, eps)
    unbiased = called("unbiased", variance * (count / (count - 1) if count > 1 else math.nan))
    moved = [
        _ops.moving_average(old.detach(), new, momentum) for old, new in ((running_mean, mean), (running_var, unbiased))
    ]
    return out, mean, (variance + eps).rsqrt(), *moved


def _trace_no_statistics(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, training: bool, momentum: float, eps: float
) -> tuple[Tensor, ...]:
    out, mean, variance, _ = _trace_training(x, weight, bias, eps)
    return out, mean, (variance + eps).rsqrt()


def _trace_given(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor,
    running_var: Tensor,
    momentum: float,
    eps: float,
) -> tuple[Tensor, ...]:
    """With given statistics (eval mode): elementwise, and nothing is saved for them."""
    out = _BatchNorm.apply(x, weight, bias, running_mean.detach(), running_var.detach(), eps, 0)
    return out, running_mean.new_empty(0), running_var.new_empty(0)


def _trace_batch_norm(
    x: Tensor,
    weight: Tensor | None,
    bias: Tensor | None,
    running_mean: Tensor | None,
    running_var: Tensor | None,
    training: bool,
    momentum: float,
    eps: float,
    cudnn_enabled: bool,
) -> Tensor:
    if training or running_mean is None or running_var is None:
        return _trace_training(x, weight, bias, eps)[0]
    return _trace_given(x, weight, bias, running_mean, running_var, momentum, eps)[0]


AUTOGRAD: dict[Any, Callable[..., Any]] = {
    _aten.batch_norm.default: _trace_batch_norm,
    _aten._native_batch_norm_legit_functional.default: _trace_functional,
    _aten._native_batch_norm_legit.no_stats: _trace_no_statistics,
    _aten._native_batch_norm_legit_no_training.default: _trace_given,
}
