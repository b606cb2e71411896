"""A call, or several, of every operator that has a rule: what rules are proved by (test_rules.py).

A sample is positional arguments, and a dict of keyword arguments if it ends in one.
"""

# ruff: noqa: E501, SIM905 (the table of samples)
from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from tests.unit.rules.tensors import (
    AFFINE,
    ATTENTION,
    BATCH,
    BIASED,
    CODED,
    CODED_EXPERTS,
    CODED_PIECES,
    CTC,
    CTC_TARGETS,
    ENDS,
    EXPERTS,
    F32,
    F64,
    GROUP,
    GRU,
    I64,
    IMAGE,
    LABELS,
    LAYER,
    LOG_SOFT,
    LOGSUM,
    LOOPS,
    LSTM,
    NORM,
    OFFS,
    PACKED,
    PIECES,
    PLACES,
    Q6,
    RMS,
    RNN,
    ROW_LABELS,
    ROWS,
    SEED,
    SINKS,
    SOFT,
    TOKENS,
    WRITES,
    G,
    Q,
    X,
    Y,
    b,
    i,
    p,
    pick,
    r,
)

# fmt: off
SAMPLES: dict[str, list[tuple[Any, ...]]] = {
    # products
    "aten.mm.default": [(r(4, 6), r(6, 8))],
    "aten.bmm.default": [(r(2, 4, 6), r(2, 6, 8))],
    "aten.mv.default": [(r(4, 6), r(6))],
    "aten.dot.default": [(r(6), r(6))],
    "aten.linalg_solve_triangular.default": [
        (p(2, 4, 6, 6), r(2, 4, 6, 8), {"upper": False}), (p(6, 6), r(2, 6, 8), {"upper": True, "unitriangular": True}),
        (p(4, 6, 6), r(4, 8, 6), {"upper": False, "left": False}), (p(2, 4, 6, 6), r(2, 1, 6, 8), {"upper": False}),
    ],
    "aten.addmm.default": [(r(8), r(4, 6), r(6, 8)), (r(4, 8), r(4, 6), r(6, 8)), (r(4, 1), r(4, 6), r(6, 8)), (r(), r(4, 6), r(6, 8))],
    "aten.baddbmm.default": [(r(2, 4, 8), r(2, 4, 6), r(2, 6, 8)), (r(1, 1, 8), r(2, 4, 6), r(2, 6, 8))],
    "aten.linear.default": [(r(2, 4, 6), r(8, 6)), (r(4, 6), r(8, 6), r(8))],
    "autopar.linear.default": [(r(2, 4, 6), r(8, 6)), (r(4, 6), r(8, 6), r(8)), (r(6), r(8, 6)), (r(2, 4, 6), r(8, 6), {"valid": 7}), (r(4, 6), r(8, 6), {"valid": 3})],
    "autopar.linear_grad_input.default": [(r(2, 4, 8), r(8, 6))],
    "autopar.matmul.default": [(r(2, 4, 6, 8), r(2, 4, 8, 6)), (r(2, 4, 6), r(2, 6, 8))],
    "autopar.linear_grad_weight.default": [(r(2, 4, 8), r(2, 4, 6)), (r(8), r(6))],
    "autopar.attention.default": [*(forward for forward, _ in ATTENTION), *CODED],
    "autopar.attention_backward.default": [back for _, back in ATTENTION],
    "autopar.attention_backward_bias.default": BIASED,
    "autopar.repeat_heads.default": [(r(2, 2, 6, 8), 2, 4), (r(2, 3, 6, 8), 4, 12)],
    "autopar.repeat_heads_grad.default": [(r(2, 4, 6, 8), 2, 2), (r(2, 12, 6, 8), 3, 4)],
    "aten._grouped_mm.default": [
        (r(16, 8).float(), r(4, 8, 8).float(), OFFS), (r(8, 16).float(), r(16, 8).float(), OFFS), (r(4, 8, 16).float(), r(4, 16, 16).float()),
        (r(4, 8, 8).float(), r(8, 16).float(), OFFS)],
    "transformers.grouped_mm_fallback.default": [(r(16, 8), r(4, 8, 6), OFFS)],
    "transformers.grouped_mm_fallback_backward.default": [(r(16, 8), r(4, 8, 6), OFFS, r(16, 6))],
    "autopar.embedding.default": [(r(8, 6), i(8, 2, 4)), (r(8, 6), i(8, 2, 4), 2)],
    "autopar.embedding_grad.default": [(r(2, 4, 6), i(8, 2, 4), 8), (r(2, 4, 6), i(8, 2, 4), 8, 0, 3)],
    "autopar.part.default": [(r(8, 6), 0, 0, 4), (r(4, 12), 1, 4, 8), (r(8), 0, 2, 4)],
    "autopar.whole.default": [(X, 1, 6), (r(4, 6), 0, 12, 2), (r(8), 0, 16, 8)],
    "autopar.attention_pieces.default": [*PIECES, *CODED_PIECES],
    "autopar.pieces_top.default": [(PACKED,)],
    "autopar.pieces_total.default": [(PACKED, PACKED[..., -1].amax(0))],
    "autopar.pieces_merged.default": [(p(4, 4, 6, 9), r(4, 4, 6)), (p(4, 4, 6, 9), r(4, 4, 6), SINKS)],
    "autopar.write_piece.default": [(r(2, 4, 8, 2), 2, torch.tensor([5, 2, 3]), r(2, 4, 3, 2)), (r(4, 8), 1, torch.tensor([6]), r(4, 1))],
    "autopar.take_label.default": [(X, LABELS), (X, LABELS, 2), (r(8), i(8))],
    "autopar.put_label.default": [(r(4, 6), i(8, 4, 6), 8), (r(4), i(8, 4), 4, 2), (r(), i(8), 8)],
    "autopar.log_softmax.default": [(X, X.amax(-1), X.amax(-1).exp()), (r(8), r(), r().exp())],
    "autopar.softmax.default": [(X, X.amax(-1), X.amax(-1).exp()), (r(8), r(), r().exp())],
    "autopar.log_softmax_grad.default": [(G, X, X.sum(-1)), (r(8), r(8), r())],
    "autopar.softmax_grad.default": [(G, X, X.sum(-1)), (r(8), r(8), r())],
    "autopar.rms_norm.default": [(X, p(8), 1e-5), (X, None, 1e-5), (X, p(8), 1e-5, {"offset": 1.0})],
    "autopar.rms_norm_backward.default": [(G, X, p(8), NORM[1]), (G, X, None, NORM[1])],
    "autopar.rotary.default": [(Q, r(4, 6, 8), r(4, 6, 8)), (Q, r(1, 6, 8), r(1, 6, 8)), (Q6[:1], r(1, 6, 8), r(1, 6, 8))],
    "autopar.rotary_backward.default": [(Q, r(4, 6, 8), r(4, 6, 8)), (Q, r(1, 6, 8), r(1, 6, 8))],
    "autopar.rotary_write.default": TOKENS,
    "autopar.cache_write.default": WRITES,
    "autopar.sum_exp.default": [(X, X.amax(-1)), (r(8), r())],
    "autopar.iterate.default": [(p(4, 6, 4), others, body, 3) for body, others in LOOPS],
    "autopar.iterate_grad.default": [
        (r(4, 6, 4), p(4, 6, 4), others, body, 3, wrt) for body, others in LOOPS for wrt in range(len(others) + 1)
    ],
    "autopar.lstm.default": [LSTM, (*LSTM, ENDS), (*LSTM, ENDS, True)],
    "autopar.lstm_grad.default": [(r(5, 4, 8), r(4, 8), r(4, 8), *given) for given in (LSTM, (*LSTM, ENDS, True))],
    "autopar.rnn.default": [(*GRU, "gru"), (*RNN, "rnn_tanh"), (*RNN, "rnn_relu"), (*GRU, "gru", ENDS)],
    "autopar.rnn_grad.default": [
        (r(5, 4, 8), r(4, 8), *given) for given in ((*GRU, "gru"), (*RNN, "rnn_tanh"), (*RNN, "rnn_relu"), (*GRU, "gru", ENDS))
    ],
    "autopar.experts.default": [*(forward for forward, _ in EXPERTS), *CODED_EXPERTS],
    "autopar.experts_grad.default": [back for forward, back in EXPERTS if len(forward) == 6],
    "autopar.experts_grad_bias.default": [back for forward, back in EXPERTS if len(forward) == 7],
    "autopar.ctc_loss.default": [(CTC, *CTC_TARGETS), (CTC, *CTC_TARGETS, 2, True)],
    "autopar.ctc_loss_grad.default": [(r(4), CTC, *CTC_TARGETS), (r(4), CTC, *CTC_TARGETS, 2, True)],
    "autopar.cross_entropy_grad.default": [(r(4, 6), X, LABELS, LOGSUM), (r(), r(8), i(8), r()), (r(), X, LABELS, LOGSUM, 0, 1)],
    "autopar.cross_entropy.default": [(X.amax(-1), LOGSUM.exp(), r(4, 6), LABELS, 1), (r(), p(), r(), i(8))],
    "autopar.random.default": [(X, "normal", SEED, 3, [], [4, 6, 8]), (r(), "uniform", SEED, 3, [], [])],
    "autopar.dropout.default": [(X, 0.4, SEED, 3, [], [4, 6, 8]), (r(), 0.4, SEED, 3, [], [])],
    # pointwise
    "aten.add.Tensor": [(X, Y), (X, r(8)), (X, 2.0), (r(4, 1, 8), r(6, 1))],
    "aten.sub.Tensor": [(X, Y), (X, r(6, 1)), (X, 2.0)],
    "aten.mul.Tensor": [(X, Y), (X, r(8)), (X, 2.0), (X, b(4, 6, 8))],
    "aten.div.Tensor": [(X, p(4, 6, 8)), (X, 2.0), (i(9, 4, 6), p(6))],
    "aten.mul.Scalar": [(X, 3.0)],
    "aten.div.Scalar": [(X, 3.0)],
    "aten.neg.default": [(X,)],
    "aten.lerp.Scalar": [(X, Y, 0.3)],
    "aten.lerp.Tensor": [(X, Y, p(8))],
    "aten.addcmul.default": [(X, Y, r(8))],
    "aten.addcdiv.default": [(X, Y, p(8))],
    "aten.where.self": [(b(4, 6, 8), X, r(8)), (b(6, 1), X, r())],
    "aten.where.ScalarSelf": [(b(4, 6, 8), 0, X), (b(4, 6, 8), 1, X)],
    "aten.where.ScalarOther": [(b(4, 6, 8), X, 0), (b(4, 6, 8), X, 1)],
    "aten.masked_fill.Scalar": [(X, b(6, 8), 0), (X, b(6, 8), 1.5)],
    "aten.masked_fill.Tensor": [(X, b(6, 8), r())],
    "aten.copy.default": [(X, r(8))],
    "aten.copy_.default": [(X, r(8))],
    "aten.fill.Scalar": [(X, 2.0)],
    "aten.fill.Tensor": [(X, r())],
    "aten._to_copy.default": [(X, {"dtype": F32}), (X.float(), {"dtype": F64}), (i(9, 4), {"dtype": F32})],
    "prims.convert_element_type.default": [(X.float(), F64)],
    "aten.native_dropout_backward.default": [(G, b(4, 6, 8), 2.0)],
    "aten.log_sigmoid_forward.default": [(X,)],
    "aten.log_sigmoid_backward.default": [(G, X, (-X.abs()).exp())],
    "aten.elu_backward.default": [(G, 1.0, 1.0, 1.0, False, X)],
    "aten.leaky_relu_backward.default": [(G, X, 0.1, False)],
    "aten.hardtanh_backward.default": [(G, X, -1.0, 1.0)],
    "aten.softplus_backward.default": [(G, X, 1.0, 20.0)],
    "aten.threshold_backward.default": [(G, X, 0)],
    "aten.gelu_backward.default": [(G, X), (G, X, {"approximate": "tanh"})],
    "aten.rsub.Tensor": [(X, Y)],
    "aten.complex.default": [(X, Y)],
    "aten._conj.default": [(torch.complex(X, Y),)],
    "aten.floor_divide.Scalar": [(i(9, 4, 6), 2)],
    "aten.floor_divide.default": [(i(9, 4, 6), i(3, 6) + 1)],
    "aten.hardswish.default": [(X,)],
    "aten.polar.default": [(p(4, 6), p(4, 6))],
    "aten.view_as_real.default": [(torch.complex(X, Y),)],
    "aten.view_as_complex.default": [(r(4, 6, 2),)],
    "aten.pixel_shuffle.default": [(r(2, 8, 4, 6), 2), (r(18, 4, 6), 3)],
    "aten.pixel_unshuffle.default": [(r(2, 4, 8, 4), 2)],
    "aten.glu.default": [(X,), (X, 1)],
    "aten.glu_backward.default": [(r(4, 6, 4), X, -1)],
    # views and moves
    "aten.view.default": [
        (X, [24, 8]), (r(24, 8), [4, 6, 2, 4]), (r(6, 4), [8, 3]), (r(4, 6, 4), [4, 8, 3]), (r(4, 12), [4, 1, 12]), (r(2, 3, 4), [24]),
        (r(0, 4), [4, 0]), (r(12, 4), [8, 6])],
    "aten.view.dtype": [(X, torch.int64)],
    "aten._unsafe_view.default": [(X, [4, 48])],
    "aten.view_copy.default": [(X, [4, 48])],
    "aten.reshape.default": [(X, [4, -1])],
    "aten._reshape_copy.default": [(X, [4, 48])],
    "aten.flatten.using_ints": [(X, 1)],
    "aten.unflatten.int": [(X, 2, [2, 4])],
    "aten.unsqueeze.default": [(X, 1)],
    "aten.squeeze.default": [(r(4, 1, 2),)],
    "aten.squeeze.dim": [(r(4, 1, 2), 1), (r(4, 1, 2), 2)],
    "aten.squeeze.dims": [(r(4, 1, 2, 1), [1, -1])],
    "aten.expand.default": [(r(1, 6, 1), [4, 6, 8]), (r(6, 1), [4, -1, 8])],
    "aten.expand_copy.default": [(r(1, 6, 1), [4, 6, 8])],
    "aten.permute.default": [(X, [2, 0, -2])],
    "aten.transpose.int": [(X, 0, -1)],
    "aten.t.default": [(r(4, 6),), (r(4),)],
    "aten.mT.default": [(X,)],
    "aten.movedim.int": [(X, 0, 2)],
    "aten.select.int": [(X, 1, 3)],
    "aten.select_copy.int": [(X, -1, 3)],
    "aten.unbind.int": [(X, 1)],
    "aten.select_backward.default": [(r(4, 8), [4, 6, 8], 1, 3)],
    "aten.select_scatter.default": [(X, r(4, 8), 1, 3)],
    "aten.slice.Tensor": [
        (X, 2, 0, 4), (X, 2, 4, 8), (X, 2, 4, 2**63 - 1), (X, 1, 0, 2**63 - 1), (X, 2, -4), (X, 1, 1, 4), (X, 1, 0, 6, 2), (r(12), 0, 4, 8), (r(12), 0, 2, 6),
        (X, 2, -8, -4)],
    "aten.slice_copy.Tensor": [(X, 2, 0, 4)],
    "aten.slice_backward.default": [(r(4, 6, 4), [4, 6, 8], 2, 4, 2**63 - 1, 1), (r(4, 3, 8), [4, 6, 8], 1, 1, 4, 1)],
    "aten.slice_scatter.default": [(X, r(4, 6, 4), 2, 0, 4), (X, r(4, 3, 8), 1, 1, 4)],
    "aten.split.Tensor": [(r(4, 12), 4, 1), (r(4, 12), 5, 1), (r(12), 4)],
    "aten.split_copy.Tensor": [(r(4, 12), 4, 1)],
    "aten.split_with_sizes.default": [(r(4, 12), [4, 4, 4], 1), (r(4, 12), [8, 2, 2], -1)],
    "aten.split_with_sizes_copy.default": [(r(4, 12), [4, 4, 4], 1)],
    "aten.chunk.default": [(r(4, 12), 3, 1)],
    "aten.cat.default": [([r(4, 6), r(4, 6), r(4, 6)], 1), ([r(4, 6), r(4, 2)], -1), ([r(4), r(4)],)],
    "aten.stack.default": [([r(4, 6), r(4, 6)], 1), ([r(4), r(4)], -1)],
    "aten.diagonal.default": [(X, 0, 1, 2)],
    "aten.as_strided.default": [(X, [4, 8], [48, 1], 8)],
    "aten.unfold.default": [(r(4, 8), 1, 4, 2), (r(4, 8, 6), -2, 3, 2)],
    "aten.unfold_backward.default": [(r(4, 3, 4), [4, 8], 1, 4, 2), (r(4, 3, 6, 3), [4, 8, 6], -2, 3, 2)],
    "aten.constant_pad_nd.default": [(X, [1, 2]), (X, [0, 0, 1, 1], 2.0), (X, [-1, 0])],
    "aten.roll.default": [(X, [1], [1]), (X, [5])],
    "aten.flip.default": [(X, [-1])],
    "aten.tril.default": [(X,)],
    "aten.triu.default": [(X, 1)],
    "aten.repeat.default": [(r(4, 6), [2, 1, 2]), (r(4, 1), [1, 8])],
    # reductions
    "aten.sum.default": [(X,), (b(4, 6),)],
    "aten.sum.dim_IntList": [(X, [0, 2]), (X, [1], True), (X, []), (X, None), (X.float(), [1], {"dtype": F64}), (i(9, 4, 6), [0]), (4 * r(4, 6), [1], {"dtype": I64})],
    "aten.amax.default": [(X, [-1]), (X, [0, 1], True)],
    "aten.max.default": [(X,)],
    "aten.mean.default": [(X,)],
    "aten.mean.dim": [(X, [-1], True)],
    "aten.all.default": [(b(4, 6),)],
    "aten.any.default": [(b(4, 6),)],
    "aten.linalg_vector_norm.default": [(X, 2, [1])],
    "aten.max.dim": [(X, 1)],
    "aten.min.dim": [(X, 1, True)],
    "aten.prod.dim_int": [(X, 1)],
    "aten.std.correction": [(X, [1], {"correction": 1})],
    "aten.var.correction": [(X, [1], {"correction": 0, "keepdim": True})],
    "aten.var_mean.correction": [(X, [1], {"correction": 0})],
    "aten.var.dim": [(X, [1])],
    "aten.logsumexp.default": [(X, [1])],
    "aten._softmax.default": [(X, -1, False)],
    "aten._log_softmax.default": [(X, 1, False)],
    "aten._safe_softmax.default": [(X, -1)],
    "aten._softmax_backward_data.default": [(G, SOFT, -1, F64)],
    "aten._log_softmax_backward_data.default": [(G, LOG_SOFT, -1, F64)],
    "aten.sort.stable": [(X, {"stable": True, "dim": 1})],
    "aten.argsort.stable": [(X, {"stable": True, "dim": 1})],
    "aten.topk.default": [(X, 3, 1), (X, 2)],
    # creation
    "aten.empty.memory_format": [([4, 6],)],
    "aten.full.default": [([4, 6], 1.5), ([], 2)],
    "aten.ones.default": [([4, 6],)],
    "aten.zeros.default": [([4, 6],)],
    "aten.scalar_tensor.default": [(2.0,)],
    "aten.new_empty.default": [(X, [4, 6])],
    "aten.new_full.default": [(X, [4, 6, 8], 2.0)],
    "aten.new_ones.default": [(X, [4, 3, 8])],
    "aten.new_zeros.default": [(X, [4, 6, 8]), (X, [8])],
    "aten.full_like.default": [(X, 0), (X, 3)],
    "aten.arange.default": [(8,)],
    "aten.arange.start": [(2, 8)],
    "aten.arange.start_step": [(2, 8, 2)],
    "aten.bernoulli.p": [(X, 0.5)],
    "aten.bernoulli.default": [(p(4, 6),)],
    "aten.eye.default": [(4,)],
    "aten.eye.m": [(4, 6)],
    **{f"aten.{name}_window.default": [(8,)] for name in ("blackman", "hamming", "hann")},
    **{f"aten.{name}_window.periodic": [(8, False)] for name in ("blackman", "hamming", "hann")},
    "aten.linspace.default": [(0, 1, 8)],
    "aten.new_empty_strided.default": [(X, [4, 6], [6, 1])],
    "aten.native_dropout.default": [(X, 0.5, True)],
    "aten.normal_functional.default": [(X,)],
    "aten.rand.default": [([4, 6],)],
    "aten.randn.default": [([4, 6],)],
    "aten.randint.default": [(9, [4, 6])],
    "aten.randint.low": [(1, 9, [4, 6])],
    "aten.randint_like.default": [(X, 9)],
    "aten.randint_like.low_dtype": [(X, 1, 9)],
    "aten.randperm.default": [(8,)],
    "prims.iota.default": [(8, {"start": 0, "step": 1, "dtype": I64, "device": torch.device("cpu"), "requires_grad": False})],
    # indexing
    "aten.embedding.default": [(r(8, 6), i(8, 2, 4)), (r(8, 6), i(8))],
    "aten.embedding_dense_backward.default": [(r(2, 4, 6), i(8, 2, 4), 8, -1, False), (r(2, 4, 6), i(8, 2, 4), 8, 3, True)],
    "aten.one_hot.default": [(i(8, 2, 4), 8), (i(6), 6)],
    "aten.gather.default": [(X, 2, i(8, 4, 6, 2)), (X, 1, i(6, 2, 4, 8)), (X, -1, i(8, 4, 6, 8))],
    "aten.scatter.src": [(X, 1, i(6, 4, 1, 8), r(4, 1, 8)), (X, 1, i(6, 2, 1, 8), r(4, 6, 8))],
    "aten.scatter.value": [(X, 2, i(8, 4, 6, 1), 0), (X, 2, i(8, 4, 6, 1), 2.0)],
    "aten.scatter.reduce": [(X, 1, i(6, 4, 6, 8), r(4, 6, 8), {"reduce": "add"})],
    "aten.scatter.value_reduce": [(X, 1, i(6, 4, 6, 8), 2.0, {"reduce": "multiply"})],
    "aten.scatter_add.default": [(X, 1, i(6, 4, 4, 8), r(4, 6, 8)), (X, 1, i(6, 4, 6, 8), r(4, 6, 8))],
    "aten.scatter_reduce.two": [(X, 1, i(6, 4, 6, 8), r(4, 6, 8), "amax")],
    "aten.index_select.default": [(X, 1, i(6, 4))],
    "aten.index_add.default": [(X, 1, i(6, 4), r(4, 4, 8))],
    "aten.index_copy.default": [(X, 1, torch.tensor([0, 3]), r(4, 2, 8))],
    "aten.index_fill.int_Scalar": [(X, 1, i(6, 4), 2.0)],
    "aten.index.Tensor": [
        (X, pick(i(4, 2))), (X, pick(None, i(6, 2, 4))), (X, pick(i(4, 2, 1), i(6, 4))), (X, pick(i(4, 6), None, i(8, 6))), (X, pick(b(4))),
        (X, pick(None, i(6, 4), i(8, 4)))],
    "aten.index_put.default": [
        (X, pick(i(4, 2)), r(2, 6, 8), True), (X, pick(None, torch.tensor([1, 4])), r(4, 2, 8)), (X, pick(i(4, 6), i(6, 6)), r(8), True),
        (X, pick(None, i(6, 2)), r(), True)],
    # normalization
    "aten.native_layer_norm.default": [(X, [8], r(8), r(8), 1e-5), (X, [6, 8], None, None, 1e-5)],
    "aten.native_layer_norm_backward.default": [
        (G, X, [8], LAYER[1], LAYER[2], r(8), r(8), [True, True, True]), (G, X, [8], LAYER[1], LAYER[2], r(8), None, [True, True, False])],
    "aten._fused_rms_norm.default": [(X, [8], p(8), 1e-5), (X, [8], None, 1e-5)],
    "aten._fused_rms_norm_backward.default": [(G, X, [8], RMS[1], p(8), [True, True]), (G, X, [8], RMS[1], None, [True, False])],
    "aten.native_group_norm.default": [(IMAGE, AFFINE, AFFINE, 4, 8, 16, 4, 1e-5), (IMAGE, None, None, 4, 8, 16, 2, 1e-5)],
    "aten.native_group_norm_backward.default": [
        (r(4, 8, 4, 4), IMAGE, GROUP[1], GROUP[2], AFFINE, 4, 8, 16, 4, [True, True, True]),
        (r(4, 8, 4, 4), IMAGE, GROUP[1], GROUP[2], None, 4, 8, 16, 4, [True, False, False])],
    "aten.native_batch_norm.default": [
        (IMAGE, AFFINE, AFFINE, r(8), p(8), True, 0.1, 1e-5), (IMAGE, AFFINE, None, r(8), p(8), False, 0.1, 1e-5)],
    "aten._native_batch_norm_legit.default": [(IMAGE, AFFINE, AFFINE, r(8), p(8), True, 0.1, 1e-5)],
    "aten._native_batch_norm_legit.no_stats": [(IMAGE, AFFINE, AFFINE, True, 0.1, 1e-5)],
    "aten._native_batch_norm_legit_functional.default": [
        (IMAGE, AFFINE, AFFINE, r(8), p(8), True, 0.1, 1e-5), (IMAGE, AFFINE, AFFINE, r(8), p(8), False, 0.1, 1e-5)],
    "aten._native_batch_norm_legit_no_training.default": [(IMAGE, AFFINE, AFFINE, r(8), p(8), 0.1, 1e-5)],
    "aten._batch_norm_with_update.default": [(IMAGE, AFFINE, AFFINE, r(8), p(8), 0.1, 1e-5)],
    "aten._batch_norm_with_update_functional.default": [(IMAGE, AFFINE, AFFINE, r(8), p(8), 0.1, 1e-5)],
    "aten._batch_norm_no_update.default": [(IMAGE, AFFINE, AFFINE, r(8), p(8), 0.1, 1e-5)],
    "aten.native_batch_norm_backward.default": [
        (r(4, 8, 4, 4), IMAGE, AFFINE, r(8), p(8), BATCH[1], BATCH[2], True, 1e-5, [True, True, True]),
        (r(4, 8, 4, 4), IMAGE, AFFINE, r(8), p(8), torch.empty(0, dtype=F64), torch.empty(0, dtype=F64), False, 1e-5, [True, True, True]),
        (r(4, 8, 4, 4), IMAGE, None, None, None, BATCH[1], BATCH[2], True, 1e-5, [True, False, False])],
    "aten.batch_norm_backward.default": [
        (r(4, 8, 4, 4), IMAGE, AFFINE, r(8), p(8), BATCH[1], BATCH[2], True, 1e-5, [True, True, True], torch.empty(0, dtype=torch.uint8))],
    "autopar.moving_average.default": [(r(8), r(8), 0.1), (r(8), r(8), 0.1, 0)],
    "autopar.channel_sum.default": [(IMAGE,), (r(4, 8),), (IMAGE.float(),)],
    "autopar.centred_squares.default": [(IMAGE, r(8)), (r(4, 8), r(8)), (r(4, 8, 6), r(8))],
    "autopar.batch_norm.default": [(IMAGE, r(8), p(8), AFFINE, r(8), 1e-5), (r(4, 8), r(8), p(8), None, None, 1e-5)],
    "autopar.batch_norm_grad_sums.default": [(r(4, 8, 4, 4), IMAGE, r(8), p(8), 1e-5), (r(4, 8), r(4, 8), r(8), p(8), 1e-5)],
    "autopar.batch_norm_grad_input.default": [
        (r(4, 8, 4, 4), IMAGE, r(8), p(8), AFFINE, r(2, 8), 1e-5, 64), (r(4, 8), r(4, 8), r(8), p(8), None, r(2, 8), 1e-5, 4),
        (r(4, 8, 4, 4), IMAGE, r(8), p(8), AFFINE, None, 1e-5, 0)],
    # convolution: plain, with bias, grouped, depthwise, transposed, one dim
    "aten.convolution.default": [
        (IMAGE, r(6, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1), (IMAGE, r(6, 8, 3, 3), r(6), [2, 2], [1, 1], [1, 1], False, [0, 0], 1),
        (IMAGE, r(4, 4, 3, 3), r(4), [1, 1], [1, 1], [1, 1], False, [0, 0], 2), (IMAGE, r(8, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 8),
        (IMAGE, r(8, 6, 3, 3), None, [2, 2], [1, 1], [1, 1], True, [1, 1], 1), (IMAGE, r(8, 2, 3, 3), None, [1, 1], [1, 1], [1, 1], True, [0, 0], 2),
        (r(2, 4, 10), r(6, 4, 3), None, [1], [0], [1], False, [0], 1)],
    "aten.convolution_backward.default": [
        (r(4, 6, 4, 4), IMAGE, r(6, 8, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, False]),
        (r(4, 6, 4, 4), IMAGE, r(6, 8, 3, 3), [6], [1, 1], [1, 1], [1, 1], False, [0, 0], 1, [True, True, True]),
        (r(4, 4, 4, 4), IMAGE, r(4, 4, 3, 3), [4], [1, 1], [1, 1], [1, 1], False, [0, 0], 2, [False, True, True]),
        (r(4, 8, 4, 4), IMAGE, r(8, 1, 3, 3), None, [1, 1], [1, 1], [1, 1], False, [0, 0], 8, [True, True, False]),
        (r(4, 6, 8, 8), IMAGE, r(8, 6, 3, 3), [6], [2, 2], [1, 1], [1, 1], True, [1, 1], 1, [True, True, True])],
    # pooling and resampling
    "aten.max_pool2d_with_indices.default": [(IMAGE, [2, 2]), (r(8, 4, 4), [2, 2])],
    "aten.max_pool2d_with_indices_backward.default": [(r(4, 8, 2, 2), IMAGE, [2, 2], [2, 2], [0, 0], [1, 1], False, PLACES)],
    "aten.avg_pool2d.default": [(IMAGE, [2, 2])],
    "aten.avg_pool2d_backward.default": [(r(4, 8, 2, 2), IMAGE, [2, 2], [2, 2], [0, 0], False, True, None)],
    "aten._adaptive_avg_pool2d.default": [(IMAGE, [1, 1])],
    "aten._adaptive_avg_pool2d_backward.default": [(r(4, 8, 1, 1), IMAGE)],
    "aten.avg_pool1d.default": [(r(2, 4, 8), [2])],
    "aten.adaptive_avg_pool1d.default": [(r(2, 4, 8), [2])],
    "aten.upsample_nearest1d.default": [(r(2, 4, 8), [16])],
    "aten.upsample_nearest1d_backward.default": [(r(2, 4, 16), [16], [2, 4, 8])],
    "aten.upsample_linear1d.default": [(r(2, 4, 8), [16], False)],
    "aten.upsample_linear1d_backward.default": [(r(2, 4, 16), [16], [2, 4, 8], False)],
    "aten.upsample_nearest2d.default": [(IMAGE, [8, 8])],
    "aten.upsample_nearest2d_backward.default": [(r(4, 8, 8, 8), [8, 8], [4, 8, 4, 4])],
    "aten.reflection_pad1d.default": [(r(2, 4, 8), [1, 2])],
    "aten.reflection_pad1d_backward.default": [(r(2, 4, 11), r(2, 4, 8), [1, 2])],
    # losses
    "aten.nll_loss_forward.default": [
        *((ROWS, ROW_LABELS, w, reduction, -100) for reduction in (0, 1, 2) for w in (None, p(8))), (r(8), i(8), None, 1, -100)],
    "aten.nll_loss_backward.default": [
        (r(), ROWS, ROW_LABELS, None, 1, -100, torch.tensor(6.0, dtype=F64)), (r(6), ROWS, ROW_LABELS, p(8), 0, -100, r())],
    "aten.binary_cross_entropy.default": [(p(4, 6), p(4, 6)), (p(4, 6), p(4, 6), None, 2)],
    "aten.binary_cross_entropy_backward.default": [(r(4, 6), p(4, 6), p(4, 6), None, 0)],
    "aten.binary_cross_entropy_with_logits.default": [(X, SOFT, None, p(8), 2)],
    "aten.huber_loss.default": [(X, Y, 2, 1.0)],
    "aten.huber_loss_backward.default": [(r(), X, Y, 2, 1.0)],
    "aten.smooth_l1_loss.default": [(X, Y, 0, 1.0)],
    "aten.smooth_l1_loss_backward.default": [(r(), X, Y, 2, 1.0)],
    "aten.im2col.default": [(r(4, 3, 4, 6), [2, 2], [1, 1], [0, 0], [2, 2])],
    "aten.col2im.default": [(r(4, 12, 6), [4, 6], [2, 2], [1, 1], [0, 0], [2, 2])],
    "aten.affine_grid_generator.default": [(r(4, 2, 3), [4, 3, 4, 6], False), (r(4, 3, 4), [4, 3, 2, 4, 6], True)],
    "aten.affine_grid_generator_backward.default": [(r(4, 4, 6, 2), [4, 3, 4, 6], False)],
    "aten.upsample_nearest3d.default": [(r(4, 8, 2, 2, 2), [4, 4, 4])],
    "aten.upsample_nearest3d.vec": [(r(4, 8, 2, 2, 2), [4, 4, 4], None)],
    "aten.upsample_nearest3d_backward.default": [(r(4, 8, 4, 4, 4), [4, 4, 4], [4, 8, 2, 2, 2])],
    "aten.grid_sampler_2d.default": [
        (IMAGE, r(4, 6, 2, 2), mode, padding, align) for mode, padding, align in [(0, 0, False), (1, 1, True), (2, 2, False)]
    ] + [(r(4, 2, 1, 4), r(4, 1, 2, 2), 0, 0, False)],
    "aten.grid_sampler_2d_backward.default": [
        (r(4, 8, 6, 2), IMAGE, r(4, 6, 2, 2), 0, 0, False, [True, True]),
        (r(4, 8, 6, 2), IMAGE, r(4, 6, 2, 2), 1, 1, True, [True, True]),
        (r(4, 8, 6, 2), IMAGE, r(4, 6, 2, 2), 2, 2, False, [True, True]),
        (r(4, 8, 6, 2), IMAGE, r(4, 6, 2, 2), 0, 0, False, [False, True]),
        (r(4, 2, 1, 2), r(4, 2, 1, 4), r(4, 1, 2, 2), 0, 0, False, [True, True]),
        (r(4, 2, 2, 2), r(4, 2, 1, 1), r(4, 2, 2, 2), 0, 1, True, [True, True]),
    ],
    "aten.grid_sampler_3d.default": [(r(2, 4, 3, 3, 2), r(2, 2, 2, 4, 3), 0, 0, False), (r(2, 4, 1, 3, 2), r(2, 2, 2, 4, 3), 1, 2, True)],
    "aten.grid_sampler_3d_backward.default": [
        (r(2, 4, 2, 2, 4), r(2, 4, 3, 3, 2), r(2, 2, 2, 4, 3), 0, 0, False, [True, True]),
        (r(2, 4, 2, 2, 4), r(2, 4, 1, 3, 1), r(2, 2, 2, 4, 3), 1, 2, True, [True, True]),
        (r(2, 4, 2, 2, 4), r(2, 4, 3, 3, 2), r(2, 2, 2, 4, 3), 0, 0, False, [False, True]),
    ],
    "aten.upsample_trilinear3d.default": [(r(4, 8, 2, 2, 2), [4, 4, 4], False)],
    "aten.upsample_trilinear3d.vec": [(r(4, 8, 2, 2, 2), [4, 4, 4], False, None)],
    "aten.upsample_trilinear3d_backward.default": [(r(4, 8, 4, 4, 4), [4, 4, 4], [4, 8, 2, 2, 2], False)],
    "aten._upsample_nearest_exact1d.default": [(r(4, 8, 4), [6])],
    "aten._upsample_nearest_exact1d.vec": [(r(4, 8, 4), [6], None)],
    "aten._upsample_nearest_exact1d_backward.default": [(r(4, 8, 6), [6], [4, 8, 4])],
    "aten._upsample_nearest_exact2d.default": [(IMAGE, [6, 6])],
    "aten._upsample_nearest_exact2d.vec": [(IMAGE, [6, 6], None)],
    "aten._upsample_nearest_exact2d_backward.default": [(r(4, 8, 6, 6), [6, 6], [4, 8, 4, 4])],
    "aten._upsample_nearest_exact3d.default": [(r(4, 8, 2, 2, 2), [4, 4, 4])],
    "aten._upsample_nearest_exact3d.vec": [(r(4, 8, 2, 2, 2), [4, 4, 4], None)],
    "aten._upsample_nearest_exact3d_backward.default": [(r(4, 8, 4, 4, 4), [4, 4, 4], [4, 8, 2, 2, 2])],
    "aten._upsample_bilinear2d_aa.default": [(IMAGE, [2, 2], False)],
    "aten._upsample_bilinear2d_aa.vec": [(IMAGE, [2, 2], False, None)],
    "aten._upsample_bilinear2d_aa_backward.default": [(r(4, 8, 2, 2), [2, 2], [4, 8, 4, 4], False)],
    "aten._upsample_bicubic2d_aa.default": [(IMAGE, [2, 2], False)],
    "aten._upsample_bicubic2d_aa.vec": [(IMAGE, [2, 2], False, None)],
    "aten._upsample_bicubic2d_aa_backward.default": [(r(4, 8, 2, 2), [2, 2], [4, 8, 4, 4], False)],
    "aten.soft_margin_loss.default": [(X, Y.sign(), 0), (X, Y.sign(), 2)],
    "aten.soft_margin_loss_backward.default": [(G, X, Y.sign(), 0), (r(), X, Y.sign(), 2)],
    "aten.mse_loss_backward.default": [(r(), X, Y, 1), (r(), X, Y, 2), (r(4, 6, 8), X, Y, 0)],
}
# fmt: on
SAMPLES |= {
    f"aten.{name}.default": [(X,)]
    for name in "alias clone contiguous detach lift_fresh lift_fresh_copy empty_like ones_like zeros_like rand_like randn_like".split()
}
SAMPLES |= {
    f"aten.{name}_backward.default": [(G, X)] for name in "hardsigmoid hardswish mish silu sigmoid tanh".split()
}
SAMPLES |= {
    f"aten.{name}.default": [(X, 1)] for name in "cumsum cumprod logcumsumexp cummax sort argsort argmin".split()
}
SAMPLES["aten.cumsum.default"].append((p(4, 6), 1, {"dtype": I64}))
SAMPLES |= {f"aten.{name}.default": [(X, 1), (X,)] for name in ("argmax", "amin")}
SAMPLES |= {f"aten.{name}.default": [(X,)] for name in ("min", "prod")}
SAMPLES |= {f"aten.{name}.dim": [(b(4, 6), 1)] for name in ("all", "any")}
SAMPLES |= {f"aten.{name}.dims": [(b(4, 6), [1]), (b(4, 6), None)] for name in ("all", "any")}
SAMPLES |= {f"aten.{name}_loss.default": [(X, Y, k) for k in (0, 1, 2)] for name in ("l1", "mse")}
SAMPLES |= {f"aten.upsample_{name}2d.vec": [(IMAGE, [8, 8], False, None)] for name in ("bilinear", "bicubic")}
SAMPLES |= {f"aten.upsample_{name}2d.default": [(IMAGE, [8, 8], False)] for name in ("bilinear", "bicubic")}
SAMPLES |= {
    f"aten.upsample_{name}2d_backward.default": [(r(4, 8, 8, 8), [8, 8], [4, 8, 4, 4], False)]
    for name in ("bilinear", "bicubic")
}
SAMPLES["aten.upsample_nearest2d.vec"] = [(IMAGE, [8, 8], None)]
SAMPLES |= {f"aten.{name}_pad2d.default": [(IMAGE, [1, 1, 1, 1])] for name in ("reflection", "replication")}
SAMPLES |= {
    f"aten.{n}_pad2d_backward.default": [(r(4, 8, 6, 6), IMAGE, [1] * 4)] for n in ("reflection", "replication")
}
SAMPLES["aten._unsafe_index.Tensor"] = SAMPLES["aten.index.Tensor"][:1]
SAMPLES["aten._unsafe_index_put.default"] = SAMPLES["aten.index_put.default"][:1]
POINTWISE = "exp log sqrt rsqrt silu gelu tanh sigmoid relu abs cos sin erf reciprocal bitwise_not logical_not".split()
CASES = [(name, *sample) for name, samples in sorted(SAMPLES.items()) for sample in samples]


def rms_norm_backward(g: Tensor, x: Tensor, shape: list[int], rstd: Tensor, w: Tensor | None, mask: list[bool]) -> Any:
    """`aten._fused_rms_norm_backward`, which has no CPU kernel."""
    normal, gw = x * rstd, g if w is None else g * w
    grad_x = rstd * (gw - normal * (gw * normal).mean(-1, keepdim=True))
    return grad_x if mask[0] else None, (g * normal).sum((0, 1)) if mask[1] else None


STAND_INS = {"aten._fused_rms_norm_backward.default": rms_norm_backward}
