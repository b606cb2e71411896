"""ATen's losses as sums of what each row, or each element, gives.

A loss with a reduction is the same operator without one, and then a sum: nothing of its arithmetic is written again,
so it is as stable as torch's. What cannot be said so (a mean that is weighted by the labels' classes, rows that do not
count) is written out. `DECOMPOSITIONS` acts below autograd (`reductions.py`), `AUTOGRAD` and
`trace_cross_entropy_terms` above it.

    mse_loss(x, y, mean)             →  sum(mse_loss(x, y, none)) / n
    mse_loss_backward(g, x, y, mean) →  mse_loss_backward(g / n, x, y, none)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor

from autopar.operators.basic import no_class
from autopar.operators.classes import take_class, trace_log_softmax

_aten = torch.ops.aten
_ops = torch.ops.autopar
NONE, MEAN, SUM = 0, 1, 2


def reduced(rows: Tensor, reduction: int) -> Tensor:
    """The loss of what each element gives."""
    if reduction == NONE:
        return rows
    total = rows.sum()
    return total / rows.numel() if reduction == MEAN else total


def _given(target: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[str, Any]:
    """What a loss is given, by name, its reduction among it."""
    names = [argument.name for argument in target._schema.arguments]
    return {"reduction": MEAN, **dict(zip(names, args, strict=False)), **kwargs}


def _apart(forward: Any) -> Callable[..., Any]:
    """A loss of one result, as the reduction of itself without one."""

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = _given(forward, args, kwargs)
        if given["reduction"] == NONE:
            return NotImplemented
        return reduced(forward(**{**given, "reduction": NONE}), given["reduction"])

    return traced


def _backward_apart(backward: Any) -> Callable[..., Any]:
    """The gradient of such a loss: of a mean, each element's is that of the sum, divided."""
    gradient = backward._schema.arguments[0].name

    def traced(*args: Any, **kwargs: Any) -> Any:
        given = _given(backward, args, kwargs)
        if given["reduction"] == NONE:
            return NotImplemented
        x, g = given["self"], given[gradient]
        g = g / x.numel() if given["reduction"] == MEAN else g
        return backward(**{**given, gradient: g.expand(x.shape), "reduction": NONE})

    return traced


# ------------------------------------------------------------------------------------------- likelihoods of classes


def _label_rows(
    taken: Tensor, target: Tensor, weight: Tensor | None, ignore_index: int, classes: int
) -> tuple[Tensor, Tensor]:
    """-w·x at the labels [N, ...] and w there (0 where a row does not count); taken [N, ...]: x there."""
    ignored = target == ignore_index
    taken = taken.masked_fill(no_class(target, classes, ignore_index), math.nan)
    safe = torch.where(ignored, 0, target)
    counts = torch.ones_like(taken) if weight is None else weight[safe].to(taken.dtype)
    counts = counts.masked_fill(ignored, 0)
    loss = -taken if weight is None else -taken * counts
    return loss.masked_fill(ignored, 0), counts


def _nll_loss(x: Tensor, target: Tensor, weight: Tensor | None, reduction: int, ignore_index: int) -> Any:
    """Loss and total weight, as `nll_loss_forward` and `nll_loss2d_forward` give them."""
    by_class = x.movedim(1, -1) if x.dim() > 2 else x
    rows, counts = _label_rows(_ops.take_label(by_class, target), target, weight, ignore_index, by_class.shape[-1])
    if reduction == NONE:
        return rows, x.new_zeros(())
    total = counts.sum()
    return (rows.sum() / total if reduction == MEAN else rows.sum()), total


def _nll_loss_backward(
    g: Tensor,
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    total_weight: Tensor,
) -> Any:
    dim = 1 if x.dim() > 1 else 0
    ignored = target == ignore_index
    if reduction == MEAN:
        g = g / total_weight
    rows = g.expand(target.shape)
    rows = rows if weight is None else rows * weight[torch.where(ignored, 0, target)].to(x.dtype)
    gradient = _ops.put_label(-rows.masked_fill(ignored, 0), target, x.shape[dim])
    return gradient.movedim(-1, 1) if x.dim() > 2 else gradient


def trace_cross_entropy_terms(
    x: Tensor,
    target: Tensor,
    weight: Tensor | None,
    reduction: int,
    ignore_index: int,
    label_smoothing: float,
) -> Tensor:
    """A cross entropy with weights of classes, smoothed labels, or probabilities for labels, of x[N, C, ...] or [C]."""
    dim = 1 if x.dim() > 1 else 0
    logs = trace_log_softmax(x, dim)
    if target.is_floating_point():
        classes = x.shape[dim]
        if label_smoothing:
            target = target * (1 - label_smoothing) + label_smoothing / classes
        rows = -(logs * target if weight is None else logs * target * _along(weight, logs, dim)).sum(dim)
        return reduced(rows, reduction)
    rows, counts = _label_rows(take_class(logs, dim, target), target, weight, ignore_index, x.shape[dim])
    if label_smoothing:
        smooth = -(logs if weight is None else logs * _along(weight, logs, dim)).sum(dim)
        smooth = smooth.masked_fill(target == ignore_index, 0)
        rows = rows * (1 - label_smoothing) + smooth * (label_smoothing / x.shape[dim])
    if reduction == MEAN:
        return rows.sum() / counts.detach().sum()
    return rows.sum() if reduction == SUM else rows


def _along(weight: Tensor, x: Tensor, dim: int) -> Tensor:
    """A weight for each class, beside x."""
    return weight.reshape([-1 if each == dim else 1 for each in range(x.dim())])


# ---------------------------------------------------------------------------------------------------------- margins


def _trace_multi_margin_loss(
    x: Tensor,
    target: Tensor,
    p: float = 1,
    margin: float = 1,
    weight: Tensor | None = None,
    reduction: int = MEAN,
) -> Tensor:
    """Of x[N, C] or [C]: how far other classes come within the margin of the label's, in the mean over the classes.

    ATen's own gradient has no shapes for tracing.
    """
    dim, labels = x.dim() - 1, target.reshape(x.shape[:-1]).unsqueeze(-1)
    within = torch.relu(margin - x.gather(dim, labels) + x)
    within = within if p == 1 else within * within
    within = within if weight is None else within * weight[labels]
    own = torch.arange(x.shape[-1], device=x.device) == labels
    rows = within.masked_fill(own, 0).sum(-1) / x.shape[-1]
    return reduced(rows, reduction)


def _trace_multilabel_margin_loss(x: Tensor, target: Tensor, reduction: int = MEAN) -> Tensor:
    """Of x[N, C] or [C]: how far classes that are no labels come within 1 of those that are; the labels of a row stand
    before its first -1.
    """
    counts = (target >= 0).to(torch.int64).cumprod(-1).bool()
    labels = torch.where(counts, target, 0)
    is_label = torch.zeros_like(target).scatter_add(-1, labels, counts.to(target.dtype)) > 0
    within = torch.relu(1 - x.gather(-1, labels).unsqueeze(-1) + x.unsqueeze(-2))
    left_out = is_label.unsqueeze(-2) | ~counts.unsqueeze(-1)
    rows = within.masked_fill(left_out, 0).sum((-2, -1)) / x.shape[-1]
    return reduced(rows, reduction)


AUTOGRAD: Mapping[Any, Callable[..., Any]] = {
    _aten.multi_margin_loss.default: _trace_multi_margin_loss,
    _aten.multilabel_margin_loss.default: _trace_multilabel_margin_loss,
}

_PLAIN = (
    _aten.mse_loss, _aten.smooth_l1_loss, _aten.huber_loss, _aten.binary_cross_entropy,
    _aten.binary_cross_entropy_with_logits, _aten.soft_margin_loss,
)  # fmt: skip
_BACKWARDS = (
    _aten.mse_loss_backward, _aten.smooth_l1_loss_backward, _aten.huber_loss_backward,
    _aten.binary_cross_entropy_backward, _aten.soft_margin_loss_backward,
)  # fmt: skip

DECOMPOSITIONS: Mapping[Any, Callable[..., Any]] = {
    **{each.default: _apart(each.default) for each in _PLAIN},
    **{each.default: _backward_apart(each.default) for each in _BACKWARDS},
    _aten.nll_loss_forward.default: _nll_loss,
    _aten.nll_loss2d_forward.default: _nll_loss,
    _aten.nll_loss_backward.default: _nll_loss_backward,
    _aten.nll_loss2d_backward.default: _nll_loss_backward,
}
