"""The operators that autopar puts into captured graphs, and that generated programs call.

Each is a plain, device-neutral torch function and also `torch.ops.autopar.<name>`, so that tracing records one node
where ATen would leave a dozen, or where the ATen operator cannot be sharded by its factors alone (a vocabulary-parallel
loss, a dropout mask that does not depend on the sharding). None has a derivative formula: `AUTOGRAD` maps ATen
operators to functions of the same signature whose forward *and* backward are made of these operators.
"""

from autopar.operators.attention_options import AttentionOptions
from autopar.operators.autograd import AUTOGRAD, FusedLinear, trace_coupled_product
from autopar.operators.basic import (
    embedding,
    embedding_grad,
    linear,
    linear_grad_input,
    linear_grad_weight,
    matmul,
    part,
    take_label,
    whole,
)
from autopar.operators.dispatched import (
    attention,
    attention_backward,
    attention_backward_bias,
    cross_entropy_grad,
    rms_norm,
    rms_norm_backward,
    rotary,
    rotary_backward,
    sum_exp,
)
from autopar.operators.dropout_autograd import tracing_seed
from autopar.operators.key_heads import repeat_heads, repeat_heads_grad
from autopar.operators.normalization import (
    batch_norm,
    batch_norm_grad_input,
    batch_norm_grad_sums,
    centred_squares,
    channel_sum,
    moving_average,
)
from autopar.operators.positional import dropout, positions, resize, starts
from autopar.operators.scaled_dot_product import merge_attention

__all__ = [
    "AUTOGRAD",
    "AttentionOptions",
    "FusedLinear",
    "attention",
    "attention_backward",
    "attention_backward_bias",
    "batch_norm",
    "batch_norm_grad_input",
    "batch_norm_grad_sums",
    "centred_squares",
    "channel_sum",
    "cross_entropy_grad",
    "dropout",
    "embedding",
    "embedding_grad",
    "linear",
    "linear_grad_input",
    "linear_grad_weight",
    "matmul",
    "merge_attention",
    "moving_average",
    "part",
    "positions",
    "repeat_heads",
    "repeat_heads_grad",
    "resize",
    "rms_norm",
    "rms_norm_backward",
    "rotary",
    "rotary_backward",
    "starts",
    "sum_exp",
    "take_label",
    "trace_coupled_product",
    "tracing_seed",
    "whole",
]
