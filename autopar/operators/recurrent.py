"""Recurrent layers: one direction of one layer as one operator, by torch's own kernels.

Shape suffixes: T time, B batch, D inputs, H hidden, G gates times hidden (LSTM 4, GRU 3, plain 1). Rows of the batch
are independent; time and widths are whole. Time comes first, as the kernels have it. The gradient runs the layer
again, so that nothing is kept but what went in; what torch keeps differs from device to device.

With lengths[B], each row's sequence ends at its own: a state stays as it is there, what is beyond is 0, and with
`reverse` a row is walked from its end. torch's kernels for packed sequences do it, on rows in the order of lengths.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_padded_sequence, pad_packed_sequence

from autopar.base.torch_compat.autograd import recording

_KINDS = {"gru": torch.gru, "rnn_tanh": torch.rnn_tanh, "rnn_relu": torch.rnn_relu}
_ONE_LAYER: tuple[Any, ...] = (True, 1, 0.0, False, False, False)
"""has_biases, num_layers, dropout, train, bidirectional, batch_first"""


def lstm(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    lengths: Tensor | None = None, reverse: bool = False,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    """y[T, B, H], last hidden[B, H] and cell[B, H] state of x[T, B, D], h[B, H], c[B, H], w_ih[4H, D], w_hh[4H, H],
    b_ih[4H], b_hh[4H], whose rows end at lengths[B]. Source: Hochreiter and Schmidhuber 1997, as torch.nn.LSTM has it.
    """
    if lengths is not None:
        y, last, cell = _within(torch.lstm, x, (h, c), (w_ih, w_hh, b_ih, b_hh), lengths, reverse)
        return y, last, cell
    y, last, cell = torch.lstm(x, [h[None], c[None]], [w_ih, w_hh, b_ih, b_hh], *_ONE_LAYER)
    return y, last[0], cell[0]


def rnn(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str,
    lengths: Tensor | None = None, reverse: bool = False,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    """y[T, B, H] and the last hidden state[B, H] of x[T, B, D], h[B, H], w_ih[G, D], w_hh[G, H], b_ih[G], b_hh[G],
    whose rows end at lengths[B].

    kind: "gru" (G = 3H; Cho et al. 2014), "rnn_tanh" or "rnn_relu" (G = H), as torch.nn has them.
    """
    if lengths is not None:
        y, last = _within(_KINDS[kind], x, (h,), (w_ih, w_hh, b_ih, b_hh), lengths, reverse)
        return y, last
    y, last = _KINDS[kind](x, h[None], [w_ih, w_hh, b_ih, b_hh], *_ONE_LAYER)
    return y, last[0]


def _within(
    kernel: Callable[..., Any],
    x: Tensor,
    states: tuple[Tensor, ...],
    weights: tuple[Tensor, ...],
    lengths: Tensor,
    reverse: bool,
) -> tuple[Tensor, ...]:
    """y[T, B, H] and the last states[B, H] of rows that end at lengths[B]. Those of none, which torch's kernels refuse,
    keep their states.
    """
    time = x.shape[0]
    ends = lengths.clamp(1, time)
    walked = _reversed(x, ends) if reverse else x
    packed = pack_padded_sequence(walked, ends.cpu(), enforce_sorted=False)
    order, back = packed.sorted_indices, packed.unsorted_indices
    assert order is not None and back is not None
    first = [each[None].index_select(1, order) for each in states]
    data, *last = kernel(
        packed.data, packed.batch_sizes, first if len(first) > 1 else first[0], list(weights), *_ONE_LAYER[:-1]
    )
    y, _ = pad_packed_sequence(PackedSequence(data, packed.batch_sizes, order, back), total_length=time)
    y = _reversed(y, ends) if reverse else y
    is_within = torch.arange(time, device=x.device)[:, None, None] < lengths[:, None]
    is_empty = (lengths == 0)[:, None]
    kept = (
        torch.where(is_empty, before, after[0].index_select(0, back))
        for before, after in zip(states, last, strict=True)
    )
    return torch.where(is_within, y, 0), *kept


def _reversed(x: Tensor, ends: Tensor) -> Tensor:
    """x[T, B, D] with every row backwards up to its end[B]; what is beyond is one of its elements."""
    places = (ends - 1 - torch.arange(x.shape[0], device=x.device)[:, None]).clamp(min=0)
    return x.gather(0, places[..., None].expand(x.shape))


def lstm_grad(
    g: Tensor, g_last: Tensor, g_cell: Tensor, x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor,
    b_ih: Tensor, b_hh: Tensor, lengths: Tensor | None = None, reverse: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients to x, h, c, w_ih, w_hh, b_ih, b_hh of `lstm`, for those of its results."""
    layer = partial(lstm, lengths=lengths, reverse=reverse)
    return _gradients(layer, (x, h, c, w_ih, w_hh, b_ih, b_hh), (g, g_last, g_cell))


def rnn_grad(
    g: Tensor, g_last: Tensor, x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str,
    lengths: Tensor | None = None, reverse: bool = False,
) -> tuple[Tensor, ...]:  # fmt: skip
    """The gradients to x, h, w_ih, w_hh, b_ih, b_hh of `rnn`, for those of its results."""
    layer = partial(rnn, kind=kind, lengths=lengths, reverse=reverse)
    return _gradients(layer, (x, h, w_ih, w_hh, b_ih, b_hh), (g, g_last))


def _gradients(
    layer: Callable[..., tuple[Tensor, ...]], given: Sequence[Tensor], received: Sequence[Tensor]
) -> tuple[Tensor, ...]:
    with recording():
        leaves = [each.detach().requires_grad_() for each in given]
        return torch.autograd.grad(layer(*leaves), leaves, received)


class _LSTM(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, lengths: Tensor | None, reverse: bool, *given: Tensor) -> Any:
        ctx.reverse = reverse
        ctx.save_for_backward(*given, lengths)
        return torch.ops.autopar.lstm(*given, lengths, reverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        return None, None, *torch.ops.autopar.lstm_grad(*grads, *ctx.saved_tensors, ctx.reverse)


class _RNN(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, kind: str, lengths: Tensor | None, reverse: bool, *given: Tensor) -> Any:
        ctx.kind, ctx.reverse = kind, reverse
        ctx.save_for_backward(*given, lengths)
        return torch.ops.autopar.rnn(*given, kind, lengths, reverse)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        *given, lengths = ctx.saved_tensors
        return None, None, None, *torch.ops.autopar.rnn_grad(*grads, *given, ctx.kind, lengths, ctx.reverse)


def trace_lstm(
    x: Tensor, h: Tensor, c: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor,
    lengths: Tensor | None = None, reverse: bool = False,
) -> Any:  # fmt: skip
    """`lstm` with its gradient."""
    return _LSTM.apply(lengths, reverse, x, h, c, w_ih, w_hh, b_ih, b_hh)


def trace_rnn(
    x: Tensor, h: Tensor, w_ih: Tensor, w_hh: Tensor, b_ih: Tensor, b_hh: Tensor, kind: str,
    lengths: Tensor | None = None, reverse: bool = False,
) -> Any:  # fmt: skip
    """`rnn` with its gradient."""
    return _RNN.apply(kind, lengths, reverse, x, h, w_ih, w_hh, b_ih, b_hh)
