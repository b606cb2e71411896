"""Connectionist temporal classification: a loss of each row, by torch's own recurrence over time.

Shape suffixes: T time, N batch, C classes, S the longest target. Rows are independent; time, classes and targets are
whole. The gradient walks the recurrence again, so that nothing of [N, T, 2S + 1] is kept.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

_aten = torch.ops.aten


def ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """losses[N] of log_probs[T, N, C] for targets[N, S], of which the first `target_lengths[N]` count, in
    `input_lengths[N]` steps. Infinite, or 0 if `zero_infinity`, where a target does not fit. Source: Graves
    et al. 2006.
    """
    given = _in_order(log_probs, targets, input_lengths, target_lengths)
    losses, _ = _aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    return losses.masked_fill(losses == torch.inf, 0) if zero_infinity else losses


def ctc_loss_grad(
    g: Tensor, log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """The gradient [T, N, C] to log_probs, for g[N]; of rows with infinite losses zero if `zero_infinity`."""
    given = _in_order(log_probs, targets, input_lengths, target_lengths)
    losses, alpha = _aten._ctc_loss.Tensor(*given, blank, zero_infinity)
    found: Tensor = _aten._ctc_loss_backward.Tensor(g.contiguous(), *given, losses, alpha, blank, zero_infinity)
    return found


def _in_order(*tensors: Tensor) -> tuple[Tensor, ...]:
    """Row by row in memory: torch reads them so, however they lie."""
    return tuple(x.contiguous() for x in tensors)


class _CTC(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Tensor:
        *tensors, blank, zero_infinity = given
        ctx.save_for_backward(*tensors)
        ctx.options = (blank, zero_infinity)
        losses: Tensor = torch.ops.autopar.ctc_loss(*tensors, blank, zero_infinity)
        return losses

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        found = torch.ops.autopar.ctc_loss_grad(grads[0], *ctx.saved_tensors, *ctx.options)
        return found, None, None, None, None, None


def trace_ctc_loss(
    log_probs: Tensor, targets: Tensor, input_lengths: Tensor, target_lengths: Tensor, blank: int = 0,
    zero_infinity: bool = False,
) -> Tensor:  # fmt: skip
    """`ctc_loss` with its gradient."""
    found: Tensor = _CTC.apply(log_probs, targets, input_lengths, target_lengths, blank, zero_infinity)
    return found
