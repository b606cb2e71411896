"""Every operator as `torch.ops.autopar.<name>`, with its shapes for tracing."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.library import Library, register_fake

from autopar.operators import normalization
from autopar.operators.basic import (
    cross_entropy,
    cross_entropy_grad,
    embedding,
    embedding_grad,
    linear,
    linear_grad_input,
    linear_grad_weight,
    matmul,
    part,
    sum_exp,
    take_label,
    whole,
    wide_dtype,
)
from autopar.operators.classes import log_softmax, log_softmax_grad, put_label, softmax, softmax_grad
from autopar.operators.ctc import ctc_loss, ctc_loss_grad
from autopar.operators.experts import experts, experts_grad, experts_grad_bias
from autopar.operators.iterated import iterate, iterate_grad
from autopar.operators.key_heads import repeat_heads, repeat_heads_grad
from autopar.operators.pieces import (
    attention_pieces,
    fake_attention_pieces,
    fake_pieces_merged,
    numbers_in,
    pieces_merged,
    pieces_top,
    pieces_total,
    write_piece,
)
from autopar.operators.positional import dropout
from autopar.operators.random_numbers import random
from autopar.operators.recurrent import lstm, lstm_grad, rnn, rnn_grad
from autopar.operators.rms_norm import fake_rms_norm, fake_rms_norm_backward, rms_norm, rms_norm_backward
from autopar.operators.rotary import rotary, rotary_backward
from autopar.operators.rotary_write import (
    cache_write,
    cache_write_,
    fake_cache_write,
    fake_rotary_write,
    rotary_write,
    rotary_write_,
)
from autopar.operators.scaled_dot_product import attention, attention_backward, attention_backward_bias

_LIBRARY = Library("autopar", "DEF")
SPELLED_OUT: dict[Any, Callable[..., Any]] = {}
"""Each operator -> the calls of torch that it is where a device has no kernel of its own for it."""


def _register(schema: str, kernel: Callable[..., Any], fake: Callable[..., Any]) -> None:
    name = schema.partition("(")[0]
    _LIBRARY.define(schema)
    _LIBRARY.impl(name, kernel, "CompositeExplicitAutograd")
    register_fake(f"autopar::{name}", fake, lib=_LIBRARY)
    SPELLED_OUT[getattr(torch.ops.autopar, name).default] = kernel


def _fake_attention(
    q: Tensor, k: Tensor, v: Tensor, *_: Any, storage: str = "", **__: Any
) -> tuple[Tensor, Tensor]:  # fmt: skip
    batch, heads, queries = q.shape[:3]
    out = q.new_empty((batch, queries, heads, numbers_in(v, storage))).transpose(1, 2)
    return out, q.new_empty((batch, heads, queries), dtype=wide_dtype(q.dtype))


def _fake_attention_backward(g: Tensor, q: Tensor, k: Tensor, v: Tensor, *_: Any, **__: Any) -> tuple[Tensor, ...]:
    return tuple(x.new_empty((x.shape[0], x.shape[2], x.shape[1], x.shape[3])).transpose(1, 2) for x in (q, k, v))


_register(
    "linear(Tensor x, Tensor w, Tensor? b=None, *, int? valid=None, int start=0) -> Tensor",
    linear,
    lambda x, w, b=None, valid=None, start=0: x.new_empty((*x.shape[:-1], w.shape[0])),
)
_register(
    "linear_grad_input(Tensor g, Tensor w) -> Tensor",
    linear_grad_input,
    lambda g, w: g.new_empty((*g.shape[:-1], w.shape[1])),
)
_register(
    "linear_grad_weight(Tensor g, Tensor x) -> Tensor",
    linear_grad_weight,
    lambda g, x: g.new_empty((g.shape[-1], x.shape[-1])),
)
_register("matmul(Tensor a, Tensor b) -> Tensor", matmul, lambda a, b: a.new_empty((*a.shape[:-1], b.shape[-1])))
_register(
    "embedding(Tensor weight, Tensor ids, int start=0) -> Tensor",
    embedding,
    lambda weight, ids, start=0: weight.new_empty((*ids.shape, weight.shape[1])),
)
_register(
    "embedding_grad(Tensor g, Tensor ids, int num_rows, int start=0, int padding_idx=-1) -> Tensor",
    embedding_grad,
    lambda g, ids, num_rows, start=0, padding_idx=-1: g.new_empty((num_rows, g.shape[-1])),
)
_register(
    "take_label(Tensor x, Tensor target, int start=0) -> Tensor",
    take_label,
    lambda x, target, start=0: x.new_empty(target.shape),
)
_register(
    "part(Tensor x, int dim, int start, int length) -> Tensor",
    part,
    lambda x, dim, start, length: x.new_empty((*x.shape[:dim], length, *x.shape[dim + 1 :])),
)
_register(
    "whole(Tensor x, int dim, int size, int start=0) -> Tensor",
    whole,
    lambda x, dim, size, start=0: x.new_empty((*x.shape[:dim], size, *x.shape[dim + 1 :])),
)
_register(
    "sum_exp(Tensor x, Tensor m) -> Tensor", sum_exp, lambda x, m: x.new_empty(m.shape, dtype=wide_dtype(x.dtype))
)
_register(
    "log_softmax(Tensor x, Tensor maximum, Tensor total) -> Tensor", log_softmax, lambda x, *_: x.new_empty(x.shape)
)
_register(
    "log_softmax_grad(Tensor g, Tensor y, Tensor total) -> Tensor",
    log_softmax_grad,
    lambda g, y, total: y.new_empty(y.shape),
)
_register("softmax(Tensor x, Tensor maximum, Tensor total) -> Tensor", softmax, lambda x, *_: x.new_empty(x.shape))
_register(
    "softmax_grad(Tensor g, Tensor y, Tensor total) -> Tensor", softmax_grad, lambda g, y, total: y.new_empty(y.shape)
)
_register(
    "put_label(Tensor g, Tensor target, int size, int start=0) -> Tensor",
    put_label,
    lambda g, target, size, start=0: g.new_empty((*g.shape, size)),
)
_register(
    "cross_entropy(Tensor maximum, Tensor total, Tensor label, Tensor target, int ignore_index=-100, "
    "int classes=0) -> (Tensor loss, Tensor count, Tensor lse)",
    cross_entropy,
    lambda maximum, total, *_, **__: (
        total.new_empty(()),
        total.new_empty(()),
        total.new_empty(total.shape),
    ),
)
_register(
    "cross_entropy_grad(Tensor g, Tensor x, Tensor target, Tensor lse, int start=0, int ignore_index=-100) -> Tensor",
    cross_entropy_grad,
    lambda g, x, target, lse, start=0, ignore_index=-100: x.new_empty(x.shape),
)
_CTC = (
    "Tensor log_probs, Tensor targets, Tensor input_lengths, Tensor target_lengths, int blank=0, "
    "bool zero_infinity=False"
)
_register(f"ctc_loss({_CTC}) -> Tensor", ctc_loss, lambda x, *_: x.new_empty(x.shape[1]))
_register(f"ctc_loss_grad(Tensor g, {_CTC}) -> Tensor", ctc_loss_grad, lambda g, x, *_: x.new_empty(x.shape))
_WEIGHTS = "Tensor w_ih, Tensor w_hh, Tensor b_ih, Tensor b_hh"
_ENDS = "Tensor? lengths=None, bool reverse=False"
_LIKE_WEIGHTS = "Tensor dw_ih, Tensor dw_hh, Tensor db_ih, Tensor db_hh"


def _fake_recurrent(x: Tensor, *states: Tensor) -> tuple[Tensor, ...]:
    return x.new_empty((*x.shape[:2], states[0].shape[-1])), *(each.new_empty(each.shape) for each in states)


def _fake_gradients(*given: Tensor) -> tuple[Tensor, ...]:
    return tuple(each.new_empty(each.shape) for each in given)


_register(
    f"lstm(Tensor x, Tensor h, Tensor c, {_WEIGHTS}, {_ENDS}) -> (Tensor y, Tensor last, Tensor cell)",
    lstm,
    lambda x, h, c, *_: _fake_recurrent(x, h, c),
)
_register(
    f"lstm_grad(Tensor g, Tensor g_last, Tensor g_cell, Tensor x, Tensor h, Tensor c, {_WEIGHTS}, {_ENDS}) "
    f"-> (Tensor dx, Tensor dh, Tensor dc, {_LIKE_WEIGHTS})",
    lstm_grad,
    lambda g, g_last, g_cell, *given: _fake_gradients(*given[:7]),
)
_register(
    f"rnn(Tensor x, Tensor h, {_WEIGHTS}, str kind, {_ENDS}) -> (Tensor y, Tensor last)",
    rnn,
    lambda x, h, *_: _fake_recurrent(x, h),
)
_register(
    f"rnn_grad(Tensor g, Tensor g_last, Tensor x, Tensor h, {_WEIGHTS}, str kind, {_ENDS}) "
    f"-> (Tensor dx, Tensor dh, {_LIKE_WEIGHTS})",
    rnn_grad,
    lambda g, g_last, *given: _fake_gradients(*given[:6]),
)
_EXPERTS = "Tensor x, Tensor indices, Tensor weights, Tensor first, Tensor second"
_LAYOUT = "*, str act, bool gated=True, bool interleaved=False, bool transposed=False, int start=0"
_register(
    f'experts({_EXPERTS}, Tensor? bias=None, {_LAYOUT}, str storage="", Tensor? first_scales=None, '
    "Tensor? second_scales=None, Tensor? first_zeros=None, Tensor? second_zeros=None) -> Tensor",
    experts,
    lambda x, *_, **__: x.new_empty(x.shape),
)
_register(
    f"experts_grad(Tensor g, {_EXPERTS}, {_LAYOUT}) -> (Tensor dx, Tensor dweights, Tensor dfirst, Tensor dsecond)",
    experts_grad,
    lambda g, x, indices, *given, **_: _fake_gradients(x, *given),
)
_register(
    f"experts_grad_bias(Tensor g, {_EXPERTS}, Tensor bias, {_LAYOUT}) "
    "-> (Tensor dx, Tensor dweights, Tensor dfirst, Tensor dsecond, Tensor dbias)",
    experts_grad_bias,
    lambda g, x, indices, *given, **_: _fake_gradients(x, *given),
)
_OPTIONS = (
    "float scale, int? left=None, int? right=None, int prefix=0, float softcap=0.0, float dropout_p=0.0, int salt=0, "
    "Tensor[]? positions=None, int[] global_shape=[], int? group=None, int first=0, int[] query_starts=[], "
    "int[] key_starts=[], Tensor? documents=None, Tensor? key_documents=None"
)
_STORED = 'str storage="", Tensor? key_scales=None, Tensor? value_scales=None'
_BACKWARD = (
    "(Tensor g, Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? keys=None, Tensor? sinks=None, "
    f"Tensor? seed=None, Tensor? output=None, Tensor? lse=None, *, {_OPTIONS})"
)
_register(
    "attention(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? keys=None, Tensor? sinks=None, "
    f"Tensor? seed=None, *, {_OPTIONS}, {_STORED}) -> (Tensor out, Tensor lse)",
    attention,
    _fake_attention,
)
_register(
    f"attention_backward{_BACKWARD} -> (Tensor dq, Tensor dk, Tensor dv)", attention_backward, _fake_attention_backward
)
_register(
    f"attention_backward_bias{_BACKWARD} -> (Tensor dq, Tensor dk, Tensor dv, Tensor dbias)",
    attention_backward_bias,
    lambda g, q, k, v, bias, *_, **__: (*_fake_attention_backward(g, q, k, v), bias.new_empty(bias.shape)),
)
_register(
    "attention_pieces(Tensor q, Tensor k, Tensor v, Tensor? bias=None, Tensor? keys=None, *, int count, int start=0, "
    f"{_OPTIONS}, {_STORED}) -> Tensor",
    attention_pieces,
    fake_attention_pieces,
)
_register("pieces_top(Tensor packed) -> Tensor", pieces_top, lambda packed: packed.new_empty(packed.shape[1:-1]))
_register(
    "pieces_total(Tensor packed, Tensor top) -> Tensor",
    pieces_total,
    lambda packed, top: packed.new_empty(packed.shape[1:]),
)
_register("pieces_merged(Tensor total, Tensor top, Tensor? sinks=None) -> Tensor", pieces_merged, fake_pieces_merged)
_register(
    "write_piece(Tensor x, int dim, Tensor at, Tensor source, int start=0) -> Tensor",
    write_piece,
    lambda x, dim, at, source, start=0: torch.empty_like(x),
)
_register(
    "repeat_heads(Tensor x, int group, int count, int first=0) -> Tensor",
    repeat_heads,
    lambda x, group, count, first=0: x.new_empty((x.shape[0], count, *x.shape[2:])),
)
_register(
    "repeat_heads_grad(Tensor g, int num_heads, int group, int first=0) -> Tensor",
    repeat_heads_grad,
    lambda g, num_heads, group, first=0: g.new_empty((g.shape[0], num_heads, *g.shape[2:])),
)
_register(
    "random(Tensor x, str kind, Tensor seed, int salt, Tensor[] positions, int[] global_shape) -> Tensor",
    random,
    lambda x, *_: torch.empty_like(x),
)
_register(
    "dropout(Tensor x, float p, Tensor seed, int salt, Tensor[] positions, int[] global_shape) -> Tensor",
    dropout,
    lambda x, p, seed, salt, positions, global_shape: x.new_empty(x.shape),
)
_register(
    "channel_sum(Tensor x) -> Tensor",
    normalization.channel_sum,
    lambda x: x.new_empty((x.shape[1],), dtype=wide_dtype(x.dtype)),
)
_register(
    "centred_squares(Tensor x, Tensor mean) -> Tensor",
    normalization.centred_squares,
    lambda x, mean: mean.new_empty(mean.shape),
)
_register(
    "batch_norm(Tensor x, Tensor mean, Tensor variance, Tensor? weight, Tensor? bias, float eps) -> Tensor",
    normalization.batch_norm,
    lambda x, mean, variance, weight, bias, eps: x.new_empty(x.shape),
)
_register(
    "batch_norm_grad_sums(Tensor g, Tensor x, Tensor mean, Tensor variance, float eps) -> Tensor",
    normalization.batch_norm_grad_sums,
    lambda g, x, mean, variance, eps: mean.new_empty((2, *mean.shape)),
)
_register(
    "batch_norm_grad_input(Tensor g, Tensor x, Tensor mean, Tensor variance, Tensor? weight, Tensor? sums, float eps, "
    "int count) -> Tensor",
    normalization.batch_norm_grad_input,
    lambda g, x, mean, variance, weight, sums, eps, count: x.new_empty(x.shape),
)
_register(
    "moving_average(Tensor running, Tensor new, float momentum, int start=0) -> Tensor",
    normalization.moving_average,
    lambda running, new, momentum, start=0: running.new_empty(running.shape),
)
_register(
    "rms_norm(Tensor x, Tensor? w, float eps, *, float offset=0.0, bool round_first=False) -> (Tensor y, Tensor rstd)",
    rms_norm,
    fake_rms_norm,
)
_register(
    "rms_norm_backward(Tensor g, Tensor x, Tensor? w, Tensor rstd, *, float offset=0.0, bool round_first=False) "
    "-> (Tensor dx, Tensor dw)",
    rms_norm_backward,
    fake_rms_norm_backward,
)
_register("rotary(Tensor x, Tensor cos, Tensor sin) -> Tensor", rotary, lambda x, cos, sin: torch.empty_like(x))
_register(
    "rotary_backward(Tensor g, Tensor cos, Tensor sin) -> Tensor",
    rotary_backward,
    lambda g, cos, sin: torch.empty_like(g),
)
_CACHES = "Tensor{} keys, Tensor{} values, Tensor at, Tensor{}? key_scales=None, Tensor{}? value_scales=None"
_NEW = _CACHES.format("", "", "", "")
_IN_PLACE = _CACHES.format("(a!)", "(b!)", "(c!)", "(d!)")
_STORED = '*, str storage="", '
_TURNED = "Tensor q, Tensor k, Tensor v, Tensor cos, Tensor sin"
_HOW = "bool interleaved=False, bool half_tables=False, bool in_float32=False"
_register(f"rotary_write({_TURNED}, {_NEW}, {_STORED}{_HOW}) -> Tensor[]", rotary_write, fake_rotary_write)
_register(
    f"rotary_write_({_TURNED}, {_IN_PLACE}, {_STORED}{_HOW}) -> Tensor",
    rotary_write_,
    lambda q, *_, **__: torch.empty_like(q),
)
_register(
    f"cache_write(Tensor k, Tensor v, {_NEW}, {_STORED}int? start=None) -> Tensor[]", cache_write, fake_cache_write
)
_register(
    f"cache_write_(Tensor k, Tensor v, {_IN_PLACE}, {_STORED}int? start=None) -> ()",
    cache_write_,
    lambda *_, **__: None,
)
_register(
    "iterate(Tensor x, Tensor[] others, str body, int times) -> Tensor",
    iterate,
    lambda x, *_: x.new_empty(x.shape),
)
_register(
    "iterate_grad(Tensor g, Tensor x, Tensor[] others, str body, int times, int wrt) -> Tensor",
    iterate_grad,
    lambda g, x, others, body, times, wrt: torch.empty_like([x, *others][wrt], memory_format=torch.contiguous_format),
)
_register(
    "own_gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] saved, str function) -> Tensor[]",
    lambda outputs, inputs, saved, function: [x.clone() for x in outputs],
    lambda outputs, inputs, saved, function: [torch.empty_like(x) for x in outputs],
)


def _not_written_out(*_: Any) -> Any:
    raise RuntimeError("this operator stands for others while a model is traced, and does not run")


_register(
    "inner_gradient(Tensor[] outputs, Tensor[] inputs, Tensor[] grad_outputs, bool zeros, bool pushed) -> Tensor[]",
    _not_written_out,
    lambda outputs, inputs, grad_outputs, zeros, pushed: [torch.empty_like(x) for x in inputs],
)
_register("apart(Tensor x) -> Tensor", _not_written_out, torch.empty_like)
torch.library.register_vmap(
    "autopar::inner_gradient",
    lambda info, dims, outputs, inputs, grad_outputs, zeros, pushed: (
        [torch.empty_like(x) for x in inputs],
        list(dims[1]),
    ),
    lib=_LIBRARY,
)  # while a model is traced, which asks for sizes alone
