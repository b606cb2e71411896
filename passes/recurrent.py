"""Recurrent layers of torch.nn while a model is traced: by layer and direction, an operator each.

    torch.lstm(x, …, num_layers=2, bidirectional=True)   →   y = cat(lstm(x, …), flip(lstm(flip(x), …))); dropout; again

A trace of torch's own has an operator for every step of time. States that are projected (`proj_size`) are left to it.
Sequences that are packed have a size that values decide, so a model that packs is traced once more (`packed.py`).
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base.errors import AutoparError
from autopar.base.torch_compat.tracing import pack_padded_sequence
from autopar.operators import registration  # noqa: F401 (defines torch.ops.autopar)

_Layer = Callable[..., tuple[Tensor, ...]]
"""x[T, B, D], the states [B, H], four weights → y[T, B, H], the last states."""


def _lstm(input: Tensor, hx: Any, params: Any, *options: Any) -> Any:
    return _stacked(torch.lstm, torch.ops.autopar.lstm, input, tuple(hx), params, options)


def _other(kind: str, input: Tensor, hx: Tensor, params: Any, *options: Any) -> Any:
    return _stacked(getattr(torch, kind), _layer_of(kind), input, (hx,), params, options)


def _layer_of(kind: str) -> _Layer:
    def layer(*given: Any, **ends: Any) -> Any:
        return torch.ops.autopar.rnn(*given, kind, **ends)

    return torch.ops.autopar.lstm if kind == "lstm" else layer


def of_lengths(
    function: Callable[..., Any], x: Tensor, lengths: Tensor, hx: Any, params: Sequence[Tensor], *options: Any
) -> Any:
    """y[B, T, H], and the last states, of x[B, T, D] whose rows end at lengths[B], by layers of one of `KINDS`.

    options: has_biases, num_layers, dropout, train, bidirectional.

    Raises:
        AutoparError: states are projected.
    """
    directions = 2 if options[4] else 1
    if len(params) != options[1] * directions * (4 if options[0] else 2):
        raise AutoparError(
            "a layer of packed sequences has states that are projected (proj_size), for which there is no operator",
            remedy="project what the layer returns by an nn.Linear, or hand the padded sequence to the layer",
        )
    states = (hx,) if isinstance(hx, Tensor) else tuple(hx)
    return _stacked(function, _layer_of(function.__name__), x, states, params, (*options, True), lengths)


def _stacked(
    function: Callable[..., Any],
    layer: _Layer,
    input: Tensor,
    states: tuple[Tensor, ...],
    params: Sequence[Tensor],
    options: Sequence[Any],
    lengths: Tensor | None = None,
) -> Any:
    """options: has_biases, num_layers, dropout, train, bidirectional, batch_first. Returns y, and the last states."""
    has_biases, num_layers, dropout, train, bidirectional, batch_first = options
    directions = 2 if bidirectional else 1
    each = 4 if has_biases else 2
    if len(params) != num_layers * directions * each:
        return function(input, states if function is torch.lstm else states[0], params, *options)
    x = input.transpose(0, 1) if batch_first else input
    last = []
    for number in range(num_layers):
        found = []
        for direction in range(directions):
            at = number * directions + direction
            weights = _with_biases(params[at * each : (at + 1) * each])
            given = (*(state[at] for state in states), *weights)
            if lengths is not None:
                y, *rest = layer(x, *given, lengths=lengths, reverse=bool(direction))
            else:
                y, *rest = layer(x.flip(0) if direction else x, *given)
                y = y.flip(0) if direction else y
            found.append(y)
            last.append(rest)
        x = torch.cat(found, -1) if bidirectional else found[0]
        if dropout and train and number + 1 < num_layers:
            x = F.dropout(x, dropout)
    return x.transpose(0, 1) if batch_first else x, *(torch.stack(of_state) for of_state in zip(*last, strict=True))


def _with_biases(weights: Sequence[Tensor]) -> Sequence[Tensor]:
    if len(weights) == 4:
        return weights
    none = weights[0].new_zeros(weights[0].shape[0])
    return *weights, none, none


class Packs(AutoparError):
    """What a model that packs sequences is told where that is not looked for."""


def _packed(*_: Any, **__: Any) -> Any:
    raise Packs(
        "pack_padded_sequence makes a tensor whose size the lengths' values decide, which a program cannot have",
        remedy="hand the padded sequence to the layer, leave padding out of the loss, and take a row's last state by "
        "its length, y[torch.arange(len(y)), lengths - 1]; for the backward direction flip rows within their lengths",
    )


KINDS = (torch.lstm, torch.gru, torch.rnn_tanh, torch.rnn_relu)
FUNCTIONS: Mapping[Callable[..., Any], Callable[..., Any]] = {
    torch.lstm: _lstm,
    pack_padded_sequence: _packed,
    **{kind: functools.partial(_other, kind.__name__) for kind in KINDS[1:]},
}
