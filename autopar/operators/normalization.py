"""Batch norm over a batch that ranks may share: sums per channel that add up, and what is elementwise given them.

Shape suffixes: N batch, C channels, `...` space (any number of dims, none too). Statistics of half types are float32.
The sums are over N and space of what is at hand: of pieces of a batch, they are terms of the whole batch's sum. So the
statistics are those of the whole batch on every mesh, as in Ioffe and Szegedy (1502.03167) on one device.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.operators.basic import wide, wide_dtype


def channel_sum(x: Tensor) -> Tensor:
    """The sum of x[N, C, ...] over all dims but C: [C]."""
    return x.sum(_reduced(x), dtype=wide_dtype(x.dtype))


def centred_squares(x: Tensor, mean: Tensor) -> Tensor:
    """The sum of (x[N, C, ...] - mean[C])² over all dims but C: [C].

    About the mean of what is at hand first, then moved to `mean`: one pass, nothing of the size of x, and no large
    squares that cancel.
    """
    if x.numel() == 0:
        return torch.zeros_like(mean)
    variance, own = torch.var_mean(wide(x), _reduced(x), correction=0)
    return (variance + (own - mean).square()) * (x.numel() // x.shape[1])


def batch_norm(
    x: Tensor, mean: Tensor, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> Tensor:
    """(x[N, C, ...] - mean[C]) / sqrt(variance[C] + eps) * weight[C] + bias[C], in the dtype of x."""
    scale, shift = (None if each is None else each.to(mean.dtype) for each in (weight, bias))
    return F.batch_norm(x, mean, variance, scale, shift, False, 0.0, eps)


def batch_norm_grad_sums(g: Tensor, x: Tensor, mean: Tensor, variance: Tensor, eps: float) -> Tensor:
    """[2, C]: the sum of g[N, C, ...], and of g times the normalized x[N, C, ...]: the gradients to bias and weight.

    Asked of torch as in training, with statistics that were saved: CUDA's kernel has no others.
    """
    if x.numel() == 0:
        return torch.stack([torch.zeros_like(mean)] * 2)
    saved = mean, (variance + eps).rsqrt()
    args = (g, x, torch.ones_like(mean), None, None, *saved, True, eps, [False, True, True])
    _, of_weight, of_bias = torch.ops.aten.native_batch_norm_backward(*args)
    return torch.stack([of_bias, of_weight])


def batch_norm_grad_input(
    g: Tensor,
    x: Tensor,
    mean: Tensor,
    variance: Tensor,
    weight: Tensor | None,
    sums: Tensor | None,
    eps: float,
    count: int,
) -> Tensor:
    """The gradient of `batch_norm` to x[N, C, ...], in its dtype.

    sums: of the whole batch, as `batch_norm_grad_sums` gives them, where mean and variance are taken from its `count`
    elements per channel; None where they are given numbers.
    """
    shape = [1, -1, *[1] * (x.dim() - 2)]
    inverse = (variance + eps).rsqrt()
    scale = (inverse if weight is None else inverse * weight).view(shape)
    if sums is None:
        return (g * scale).to(x.dtype)
    of_bias, of_weight = (sums / count).unbind()
    through_variance = (of_weight * inverse).view(shape)
    centred = x - mean.view(shape)
    return centred.mul_(-through_variance).add_(g).sub_(of_bias.view(shape)).mul_(scale).to(x.dtype)


def moving_average(running: Tensor, new: Tensor, momentum: float, start: int = 0) -> Tensor:
    """running[D] * (1 - momentum) + new[C] * momentum, in the dtype of running, for the channels from `start` on that
    `new` has; 0 for the others.

    Buffers are whole on every rank: from ranks that hold some channels each, the whole is the sum of what they give.
    """
    own = running.narrow(0, start, new.shape[0])
    moved = (own.to(new.dtype) * (1 - momentum) + new * momentum).to(running.dtype)
    return F.pad(moved, (start, running.shape[0] - start - new.shape[0]))


def _reduced(x: Tensor) -> list[int]:
    return [dim for dim in range(x.dim()) if dim != 1]
