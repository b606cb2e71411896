"""Attention by whatever kernel of PyTorch the device has, with the log-sum-exp and the gradients.

For query s and key t, at their global positions, of batch row b and head h:

    x = scale · <q, k>                       softcap · tanh(x / softcap), where there is a soft-cap; + bias
    x = -inf                                 unless s - left <= t <= s + right or t < prefix, and keys[b, t], and bias,
                                             and documents[b, s] = key_documents[b, t]
    lse = log(Σ_t exp(x) + exp(sinks[h]))    sinks: only where given
    out = Σ_t dropout(exp(x - lse)) · v      the mask of dropout is that of the element's place (positional.py)

Results over blocks of keys merge exactly (`merge_attention`); given `out` and `lse` of all keys, the gradients of a
block are its own part (Dao et al., FlashAttention, 2205.14135; Liu et al., Ring Attention, 2310.01889).

Shape suffixes: B batch, H query heads, G key/value heads, S queries, T keys, D head size, E of the values.
"""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.base import environment
from autopar.base.codes import STORAGES
from autopar.base.torch_compat.attention import prefers_cudnn
from autopar.operators.attention_math import attention_backward_math, attention_math, finite, per_query_head
from autopar.operators.attention_options import AttentionOptions
from autopar.operators.basic import HALF
from autopar.operators.key_heads import KeyHeads
from autopar.operators.visibility import additive_mask, is_plainly_causal, sees_plainly

_aten = torch.ops.aten


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    *,
    storage: str = "",
    key_scales: Tensor | None = None,
    value_scales: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """Scaled dot product attention and the log-sum-exp of its scores.

    Args:
        q, k, v: [B, H, S, D], [B, G, T, D], [B, G, T, E]; query head i reads key head (first + i) // group (group:
            H / G where it is not given), so a part of the query heads may come with more key heads than it reads.
        bias: broadcasts to [B, H, S, T]; floats are added to the scores, of bools True is what to keep.
        keys: bool[B, T], which keys there are (False: padding).
        sinks: [H], a logit of each head that takes part in the softmax and reads nothing.
        seed: int64 scalar, of the dropout.
        storage, key_scales, value_scales: where k and v are codes (`base/codes.py`), how, and [B, G, T, 1] of each.
        options: `AttentionOptions`; `scale` has no default.

    Returns:
        out[B, H, S, E], laid out as [B, S, H, E], and lse[B, H, S] in float32 (float64 for float64). A query that
        sees nothing gets zeros, and lse -inf (that of the sink, where there is one).

    Raises:
        ValueError: heads that do not fit together; dropout without a seed.
    """
    k, v = numbers_of(k, storage, key_scales), numbers_of(v, storage, value_scales)
    said, _, k, v = _read(q, k, v, seed, options)
    q, k, v = rows_whole(q), rows_whole(k), rows_whole(v)
    causal = is_plainly_causal(said)
    if said.softcap or said.dropout_p:
        out, lse = attention_math(q, k, v, bias, keys, seed, said)
    elif _fits_cpu_flash(q, v, bias):
        mask = _mask(said, bias, keys, q, k)
        shape, rows = q.shape, q
        if q.shape[2] == 1 and not causal and (mask is None or mask.dim() < 3 or mask.shape[-3] == 1):
            rows = q.reshape(shape[0], k.shape[1], -1, shape[3])  # one token: heads that read the same keys are queries
        else:
            k, v = per_query_head(k, q), per_query_head(v, q)
        out, lse = _aten._scaled_dot_product_flash_attention_for_cpu(
            rows, k, v, 0.0, causal, attn_mask=mask, scale=said.scale
        )
        lse = _hidden(lse, mask, rows, k, causal)
        out, lse = out.reshape(*shape[:3], -1), lse.reshape(shape[:3])
    elif _fits_cuda_flash(q, k, v, bias, keys, said) and takes_cudnn(q):
        out, lse = _aten._scaled_dot_product_cudnn_attention(q, k, v, None, True, 0.0, causal, False, scale=said.scale)[
            :2
        ]
        lse = lse.reshape(q.shape[:3])
    elif _fits_cuda_flash(q, k, v, bias, keys, said):
        out, lse = _aten._scaled_dot_product_flash_attention(q, k, v, 0.0, causal, False, scale=said.scale)[:2]
    elif _fits_cuda_efficient(q, k, v, bias, keys, said):
        mask = _expanded(_mask(said, bias, keys, q, k), q, k)
        k, v = per_query_head(k, q), per_query_head(v, q)
        out, lse = _aten._scaled_dot_product_efficient_attention(q, k, v, mask, True, 0.0, causal, scale=said.scale)[:2]
        lse = _hidden(lse[..., : q.shape[2]], mask, q, k, causal)
    else:
        out, lse = attention_math(q, k, v, bias, keys, seed, said)
    if sinks is not None:
        out, lse = add_sinks(out, lse, sinks)
    return heads_inside(out), lse.contiguous()


def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None,
    keys: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attention` to q, k and v, each laid out with its heads inside, as [B, S, H, D].

    out, lse: of all keys, where k and v are a block of them. Those to key heads that no query head reads are zero.
    """
    said, heads, k, v = _read(q, k, v, seed, options)
    num_kv_heads = k.shape[1]
    g, q, k, v, out = (rows_whole(x) for x in (g, q, k, v, out))
    causal = is_plainly_causal(said)
    if said.softcap or said.dropout_p:
        dq, dk, dv, _ = attention_backward_math(g, q, k, v, bias, keys, seed, out, lse, said)
    elif _fits_cpu_flash(q, v, bias):
        mask = _mask(said, bias, keys, q, k)
        k, v = per_query_head(k, q), per_query_head(v, q)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, finite(lse), 0.0, causal, attn_mask=mask, scale=said.scale
        )
    elif _fits_cuda_flash(q, k, v, bias, keys, said) and takes_cudnn(q):
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_cudnn_attention_backward(
            g, q, k, v, out, lse.unsqueeze(-1), zero, zero, None, None, None, q.shape[2], k.shape[2], 0.0, causal,
            scale=said.scale,
        )  # fmt: skip
    elif _fits_cuda_flash(q, k, v, bias, keys, said):
        rng = torch.zeros(2, dtype=torch.uint64, device=q.device), torch.zeros((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = _aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, causal, *rng, scale=said.scale
        )
    elif _fits_cuda_efficient(q, k, v, bias, keys, said):
        mask = _expanded(_mask(said, bias, keys, q, k), q, k)
        k, v = per_query_head(k, q), per_query_head(v, q)
        padded = F.pad(finite(lse), (0, -lse.shape[-1] % 32), value=math.inf)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        needs = [True, True, True, False]
        dq, dk, dv, _ = _aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, mask, out, padded, zero, zero, 0.0, needs, causal, scale=said.scale
        )
    else:
        dq, dk, dv, _ = attention_backward_math(g, q, k, v, bias, keys, seed, out, lse, said)
    return _laid_out(dq, dk, dv, heads, num_kv_heads)


def attention_backward_bias(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor,
    keys: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    out: Tensor,
    lse: Tensor,
    **options: Any,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """As `attention_backward`, and the gradient to the float bias, in its shape."""
    said, heads, k, v = _read(q, k, v, seed, options)
    dq, dk, dv, scores_grad = attention_backward_math(g, q, k, v, bias, keys, seed, out, lse, said)
    over = [dim for dim, size in enumerate(bias.shape) if size == 1 and scores_grad.shape[dim] > 1]
    dbias = (scores_grad.sum(over, keepdim=True) if over else scores_grad).to(bias.dtype)
    return *_laid_out(dq, dk, dv, heads, k.shape[1]), dbias


def numbers_of(x: Tensor, storage: str, scales: Tensor | None) -> Tensor:
    """Keys or values as numbers, of what is stored: themselves where nothing is said of a storage.

    Raises:
        ValueError: codes without scales.
    """
    if not storage:
        return x
    if scales is None:
        raise ValueError(f"keys and values that are stored as {storage} come with scales")
    return STORAGES[storage].decode(x, scales)


def merge_attention(out: Tensor, lse: Tensor, other: Tensor, other_lse: Tensor) -> tuple[Tensor, Tensor]:
    """Attention to two disjoint sets of keys, from that to each: out, other[B, H, S, E], lse, other_lse[B, H, S]."""
    merged = torch.logaddexp(lse, other_lse)
    safe = finite(merged)
    parts = ((out, lse), (other, other_lse))
    weighted = [part.to(lse.dtype) * (own - safe).exp().unsqueeze(-1) for part, own in parts]
    return (weighted[0] + weighted[1]).to(out.dtype), merged


def add_sinks(out: Tensor, lse: Tensor, sinks: Tensor) -> tuple[Tensor, Tensor]:
    """Attention with sinks[H], from that without: out[B, H, S, E], lse[B, H, S]."""
    merged = torch.logaddexp(lse, sinks.to(lse.dtype).view(1, -1, 1))
    return (out.to(lse.dtype) * (lse - finite(merged)).exp().unsqueeze(-1)).to(out.dtype), merged


def rows_whole(x: Tensor) -> Tensor:
    """x, copied where the elements of its last dim do not lie side by side: kernels take for granted that they do."""
    return x if x.stride(-1) == 1 or x.shape[-1] <= 1 else x.contiguous()


def _read(
    q: Tensor, k: Tensor, v: Tensor, seed: Tensor | None, options: dict[str, Any]
) -> tuple[AttentionOptions, KeyHeads, Tensor, Tensor]:
    """The options, and the heads of k and v that are read."""
    said = AttentionOptions(**options)
    if said.dropout_p and seed is None:
        raise ValueError(f"attention with dropout_p={said.dropout_p} needs a seed")
    heads = KeyHeads.read(q.shape[1], k.shape[1], said.group, said.first)
    return said, heads, heads.take(k), heads.take(v)


def _mask(options: AttentionOptions, bias: Tensor | None, keys: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """`additive_mask` of what the kernel's own causal flag does not say."""
    options = replace(options, right=None) if is_plainly_causal(options) else options
    return additive_mask(options, bias, keys, q, k.shape[2])


def _hidden(lse: Tensor, mask: Tensor | None, q: Tensor, k: Tensor, causal: bool) -> Tensor:
    """lse[B, H, S], -inf for the queries for which the mask leaves no key."""
    if mask is None:
        return lse
    hidden = (mask == -math.inf).expand(*mask.shape[:-1], k.shape[2])
    if causal:
        hidden = hidden | torch.ones(q.shape[2], k.shape[2], dtype=torch.bool, device=q.device).triu(1)
    return lse.masked_fill(hidden.all(-1), -math.inf)


def _fits_cpu_flash(q: Tensor, v: Tensor, bias: Tensor | None) -> bool:
    return (
        not _is_added(bias)
        and q.device.type == "cpu"
        and q.shape[-1] == v.shape[-1]
        and q.numel() > 0
        and v.numel() > 0
    )


def _is_added(bias: Tensor | None) -> bool:
    """Whether the bias may hide all keys of a query by a large number: lse is then that number, and PyTorch's kernels
    make gradients of it as many times too large as there are keys.
    """
    return bias is not None and bias.dtype != torch.bool


def takes_cudnn(q: Tensor) -> bool:
    """Whether plain attention goes to cuDNN's kernel where flash attention would serve: where AUTOPAR_ATTENTION=cudnn
    or the order of `torch.nn.attention.sdpa_kernel` says so, which a program puts cuDNN's first in where that was
    measured to be faster; to head size 128. Not where torch's deterministic algorithms are asked for: flash attention
    has some.
    """
    if q.shape[-1] > 128 or torch.are_deterministic_algorithms_enabled():
        return False
    said = environment.attention_backend()
    return said == "cudnn" or (said != "flash" and prefers_cudnn())


def _fits_cuda_flash(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, options: AttentionOptions
) -> bool:
    head_fits = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    plain = bias is None and keys is None and sees_plainly(options, q, k)
    return q.device.type == "cuda" and q.dtype in HALF and plain and head_fits


def _fits_cuda_efficient(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, options: AttentionOptions
) -> bool:
    head_fits = q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0
    plain = bias is None and keys is None and sees_plainly(options, q, k)
    mask_fits = plain or (not is_plainly_causal(options) and k.shape[2] % 16 == 0 and not _is_added(bias))
    return q.device.type == "cuda" and q.dtype != torch.float64 and head_fits and mask_fits


def _expanded(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel wants it: rows whole in memory, other dims expanded by stride 0."""
    if mask is None:
        return None
    mask = mask.expand(*mask.shape[:-1], k.shape[2]).contiguous()
    return mask.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _sum_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)


def _laid_out(dq: Tensor, dk: Tensor, dv: Tensor, heads: KeyHeads, num_kv_heads: int) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients to all heads of q, k and v, from those to the heads that are read, dk and dv also one a reader."""
    dk, dv = (heads.put(_sum_heads(x, num_kv_heads)) for x in (dk, dv))
    return heads_inside(dq), heads_inside(dk), heads_inside(dv)


def heads_inside(x: Tensor) -> Tensor:
    """[B, H, S, D] laid out as [B, S, H, D], so that joining the heads afterwards moves no memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
