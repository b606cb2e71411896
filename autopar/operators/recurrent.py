"""Recurrent layers: one direction of one layer as one operator, by torch's own kernels.

Shape suffixes: T time, B batch, D inputs, H hidden, G gates times hidden (LSTM 4, GRU 3, plain 1). Rows of the batch
are independent; time and widths are whole. Time comes first, as the kernels have it. The gradient runs the layer
again, so that nothing is kept but what went in; what torch keeps differs from device to device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor

from autopar.base.torch_compat.autograd import recording

_KINDS = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}
_ONE_LAYER: tuple[Any, ...] = (True, 1, 0.0, False, False, False)
"""has_biases, num_layers, dropout, train, bidirectional, batch_first"""


def lstm(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """y[T, B, H], last hidden[B, H] and cell[B, H] state of x[T, B, D], h[B, H], c[B, H], w_ih[4H, D], w_hh[4H, H],
    b_ih[4H], b_hh[4H]. Source: Hochreiter and Schmidhuber 1997, as torch.nn.LSTM has it.
    """
    y, last, cell = torch.lstm(x, [h[None], c[None]], [w_ih, w_hh, b_ih, b_hh], *_ONE_LAYER)
    return y, last[0], cell[0]


def rnn(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str
) -> tuple[Tensor, Tensor]:
    """y[T, B, H] and the last hidden state[B, H] of x[T, B, D], h[B, H], w_ih[G, D], w_hh[G, H], b_ih[G], b_hh[G].

    kind: "gru" (G = 3H; Cho et al. 2014), "rnn_tanh" or "rnn_relu" (G = H), as torch.nn has them.
    """
    y, last = _KINDS[kind](x, h[None], [w_ih, w_hh, b_ih, b_hh], *_ONE_LAYER)
    return y, last[0]


def lstm_grad(
    g: Tensor, g_last: Tensor, g_cell: Tensor, x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor, b_hh: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients to x, h, c, w_ih, w_hh, b_ih, b_hh of `lstm`, for those of its results."""
    return _gradients(lstm, (x, h, c, w_ih, w_hh, b_ih, b_hh), (g, g_last, g_cell))


def rnn_grad(
    g: Tensor, g_last: Tensor, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str
) -> tuple[Tensor, ...]:
    """The gradients to x, h, w_ih, w_hh, b_ih, b_hh of `rnn`, for those of its results."""
    return _gradients(partial(rnn, kind=kind), (x, h, w_ih, w_hh, b_ih, b_hh), (g, g_last))


def _gradients(
    layer: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor], received: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    with recording():
        leaves = [each.detach().requires_grad_() for each in given]
        return torch.autograd.grad(layer(*leaves), leaves, received)


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Tensor) -> Any:
        ctx.save_for_backward(*given)
        return torch.ops.autopar.lstm(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return tuple(torch.ops.autopar.lstm_grad(*grads, *ctx.saved_tensors))


class _RNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *given: Any) -> Any:
        *tensors, ctx.kind = given
        ctx.save_for_backward(*tensors)
        return torch.ops.autopar.rnn(*given)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return *torch.ops.autopar.rnn_grad(*grads, *ctx.saved_tensors, ctx.kind), None


def trace_lstm(*given: Tensor) -> Any:
    """`lstm` with its gradient."""
    return _LSTM.apply(*given)


def trace_rnn(*given: Any) -> Any:
    """`rnn` with its gradient."""
    return _RNN.apply(*given)
