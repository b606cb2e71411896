"""The operators that autopar puts into captured graphs, and that generated programs call.

Each is a plain, device-neutral torch function and also `torch.ops.autopar.<name>`, so that tracing records one node
where ATen would leave a dozen, or where the ATen operator cannot be sharded by its factors alone (a vocabulary-parallel
loss, a dropout mask that does not depend on the sharding). None has a derivative formula: `AUTOGRAD` maps ATen
operators to functions of the same signature whose forward *and* backward are made of these operators. `dispatched.py`
are those that a device may have kernels for (`runtime/kernels`): torch's dispatcher picks them, and where there are
none they are a few calls of torch. `registration.py` gives all of them names and shapes; `rules/` says how they, and
ATen's, split.

**`whole` and `part`.** Where pieces must meet in ways that no rule of one operator says, these two say it. `whole` puts
a piece in its place among zeros: a term of a sum. `part` takes out of what is whole the piece that a rank works on.
Phi-3 with grouped heads keeps queries and fewer keys and values in one matrix, for which no stripes of the stored
parameter are the rows one rank needs: it is stored `S(0)`, made whole for use, and each projection takes its heads'
rows. CLIP's loss needs all images on every rank: `whole` of the embeddings, the one activation that `ddp` sums.

**Dropout is a function of position.** An element's mask is a hash of the seed and of where the element lies in the
whole tensor. So shards draw different numbers, replicas equal ones, the same seed gives one result on every mesh, and
dropout can be proven. Each row of the last dim has a key of 64 bits, within which columns are hashed in 32 bits, which
vector units multiply as fast as floats (`positional.py`). So is every other random number: `random` gives uniform and
normal ones by position, of which ATen's other distributions are made (`random_autograd.py`); what is not made of them
is refused, as each rank would draw its own.

**A cross entropy over a split vocabulary** is four operators, of which the maximum, the sum of exponentials and the
label's logit are terms over the vocabulary's axis, and `cross_entropy` makes losses of them: no rank holds whole
logits. What else a loss does along classes (softmax, its logarithm, log-sum-exp, a label's) is made of such pieces too,
where classes are rows of a matrix of parameters outside of the repeated blocks (`classes.py`).

**A cache in pieces along its length** is read by four operators (`pieces.py`): attention to each piece, with its
log-sum-exp, the largest of these, the sum of what is weighed by it, and their ratio. The second is a maximum over the
axis, the third a sum of as many numbers as attention gives; no rank holds keys of others.

**Batch norm is made of sums per channel** (`normalization.py`), so a split batch costs two small all-reduces a layer
forward and one backward, and its statistics are those of the whole batch on every mesh, running ones too.
"""

from autopar.ir.positions import starts
from autopar.operators.attention_options import AttentionOptions
from autopar.operators.autograd import AUTOGRAD, FusedLinear, trace_coupled_product
from autopar.operators.basic import (
    cross_entropy,
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
from autopar.operators.classes import OVER_CLASSES, log_softmax, log_softmax_grad, put_label, softmax, softmax_grad
from autopar.operators.ctc import ctc_loss, ctc_loss_grad
from autopar.operators.decompositions import DECOMPOSITIONS
from autopar.operators.dispatched import (
    attention,
    attention_backward,
    attention_backward_bias,
    cache_write,
    cross_entropy_grad,
    experts,
    experts_grad,
    experts_grad_bias,
    iterate,
    iterate_grad,
    rms_norm,
    rms_norm_backward,
    rotary,
    rotary_backward,
    rotary_write,
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
from autopar.operators.pieces import attention_pieces, pieces_merged, pieces_top, pieces_total, write_piece
from autopar.operators.positional import dropout, positions, resize
from autopar.operators.random_autograd import AUTOGRAD as RANDOM
from autopar.operators.random_numbers import random
from autopar.operators.recurrent import lstm, lstm_grad, rnn, rnn_grad
from autopar.operators.scaled_dot_product import merge_attention

__all__ = [
    "AUTOGRAD", "DECOMPOSITIONS", "OVER_CLASSES", "RANDOM", "AttentionOptions", "FusedLinear", "attention",
    "attention_backward", "attention_backward_bias", "attention_pieces", "batch_norm", "batch_norm_grad_input",
    "batch_norm_grad_sums", "cache_write", "centred_squares", "channel_sum", "cross_entropy", "cross_entropy_grad",
    "ctc_loss", "ctc_loss_grad", "dropout", "embedding", "embedding_grad", "experts", "experts_grad",
    "experts_grad_bias", "iterate", "iterate_grad", "linear", "linear_grad_input", "linear_grad_weight", "log_softmax",
    "log_softmax_grad", "lstm", "lstm_grad", "matmul", "merge_attention", "moving_average", "part", "pieces_merged",
    "pieces_top", "pieces_total", "positions", "put_label", "random", "repeat_heads", "repeat_heads_grad", "resize",
    "rms_norm", "rms_norm_backward", "rnn", "rnn_grad", "rotary", "rotary_backward", "rotary_write", "softmax",
    "softmax_grad", "starts", "sum_exp", "take_label", "trace_coupled_product", "tracing_seed", "whole", "write_piece",
]  # fmt: skip
