"""Attention with its gradients: what tracing calls instead of ATen's, and instead of `autopar.attention` itself."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from autopar.operators.dropout_autograd import draw, trace_dropout
from autopar.operators.matmul_autograd import trace_matmul

_aten = torch.ops.aten
_ops = torch.ops.autopar


class _Attention(torch.autograd.Function):
    """Of q, k, v, bias, keys, sinks, seed and the options, a dict."""

    @staticmethod
    def forward(ctx: Any, *given: Any) -> tuple[Tensor, Tensor]:
        *tensors, ctx.options = given
        out, lse = _ops.attention(*tensors, **ctx.options)
        ctx.save_for_backward(*tensors, out, lse)
        ctx.mark_non_differentiable(lse)
        return out, lse

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        g = grads[0]
        saved = ctx.saved_tensors
        sinks, out, lse = saved[5], saved[7], saved[8]
        bias_needs, sinks_need = ctx.needs_input_grad[3], ctx.needs_input_grad[5]
        operator = _ops.attention_backward_bias if bias_needs else _ops.attention_backward
        dq, dk, dv, *dbias = operator(g, *saved, **ctx.options)
        dsinks = _sinks_grad(g, out, lse, sinks) if sinks_need else None
        return dq, dk, dv, *(dbias or [None]), None, dsinks, None, None


def _sinks_grad(g: Tensor, out: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """[H]: what a head's sink takes of the weights, times what these would have brought; nothing where it is -inf."""
    weight = (sinks.to(lse.dtype).view(1, -1, 1) - lse.clamp(min=torch.finfo(lse.dtype).min)).exp()
    delta = (g.to(lse.dtype) * out.to(lse.dtype)).sum(-1)
    return -(weight * delta).sum([0, 2]).to(sinks.dtype)


def trace_attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    bias: Tensor | None = None,
    keys: Tensor | None = None,
    sinks: Tensor | None = None,
    seed: Tensor | None = None,
    **options: Any,
) -> tuple[Tensor, Tensor]:
    """`autopar.attention` with gradients to q, k, v, a float bias and sinks.

    Dropout without a seed draws from the program's.
    """
    if q.shape[1] != k.shape[1]:
        # Query heads that share a key head are told apart from those of a rank, which may have other shapes.
        options.setdefault("group", q.shape[1] // k.shape[1])
    if options.get("dropout_p") and seed is None:
        seed, options["salt"] = draw("attention's dropout", (*q.shape[:3], k.shape[2]))
        options["global_shape"] = [*q.shape[:3], k.shape[2]]
    return _Attention.apply(q, k, v, bias, keys, sinks, seed, options)


def trace_sdpa(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attn_mask: Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    *,
    scale: float | None = None,
    enable_gqa: bool = False,
) -> Tensor:
    """`F.scaled_dot_product_attention`; step by step where its operands do not have the dims [B, H, S, D]."""
    scale = 1 / math.sqrt(query.shape[-1]) if scale is None else scale
    if query.dim() == 3 and key.dim() == 3 and value.dim() == 3:
        mask = attn_mask.unsqueeze(1) if attn_mask is not None and attn_mask.dim() == 3 else attn_mask
        q, k, v = query.unsqueeze(1), key.unsqueeze(1), value.unsqueeze(1)
        return trace_sdpa(q, k, v, mask, dropout_p, is_causal, scale=scale).squeeze(1)
    if _is_attention(query, key, value):
        while attn_mask is not None and attn_mask.dim() < 4:
            attn_mask = attn_mask.unsqueeze(0)
        options: dict[str, Any] = {"scale": scale}
        if is_causal:
            options["right"] = 0
        if dropout_p:
            options["dropout_p"] = dropout_p
        return trace_attention(query, key, value, attn_mask, **options)[0]
    return _attention_by_steps(query, key, value, attn_mask, dropout_p, is_causal, scale)


def _is_attention(q: Tensor, k: Tensor, v: Tensor) -> bool:
    ranks_fit = q.dim() == 4 and k.dim() == 4 and v.dim() == 4
    return (
        ranks_fit
        and q.shape[0] == k.shape[0] == v.shape[0]
        and k.shape[1] == v.shape[1]
        and q.shape[1] % k.shape[1] == 0
    )


def _attention_by_steps(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, dropout_p: float, is_causal: bool, scale: float
) -> Tensor:
    """Attention as product, softmax, product."""
    if q.dim() > 2 and q.shape[-3] != k.shape[-3]:
        repeats = q.shape[-3] // k.shape[-3]
        k, v = (trace_repeat_heads(x, repeats) for x in (k, v))
    scores = trace_matmul(q * scale, k.transpose(-1, -2))
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = torch.where(keep, scores, -math.inf)
    if mask is not None:
        scores = torch.where(mask, scores, -math.inf) if mask.dtype == torch.bool else scores + mask
    probabilities = scores.softmax(-1) if mask is None else _aten._safe_softmax.default(scores, -1)
    return trace_matmul(trace_dropout(probabilities, dropout_p, True), v)


class _RepeatHeads(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, group: int) -> Tensor:
        ctx.num_heads, ctx.group = x.shape[1], group
        return _ops.repeat_heads(x, group, x.shape[1] * group)

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> Any:
        (g,) = grads
        return _ops.repeat_heads_grad(g, ctx.num_heads, ctx.group), None


def trace_repeat_heads(x: Tensor, group: int, count: int | None = None) -> Tensor:
    """x[..., G, T, D] with each of its heads `group` times; `count`, if given, is G * group."""
    if x.dim() == 4:
        return _RepeatHeads.apply(x, group)
    return x.unsqueeze(-3).expand(*x.shape[:-2], group, *x.shape[-2:]).flatten(-4, -3)
