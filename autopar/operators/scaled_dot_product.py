"""Attention by whatever kernel the device has, with the log-sum-exp and the gradients.

Shape suffixes: B batch, H query heads, G key/value heads, S queries, T keys, D head size.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from autopar.operators.basic import HALF, wide


def attention(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    is_causal: bool,
    scale: float,
    *,
    group: int | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor]:
    """Scaled dot product attention and the log-sum-exp of its scores.

    q[B, H, S, D], k[B, G, T, D], v[B, G, T, E]; query head i reads key head (first + i) // group (group: H / G where
    it is not given), so a part of the query heads may come with more key heads than it reads. mask broadcasts to
    [B, H, S, T] (bool: what to keep, float: added to the scores); `is_causal` keeps key t for query s where t <= s.
    Returns out[B, H, S, E], laid out as [B, S, H, E], and lse[B, H, S] in float32 (float64 for float64). A query whose
    every key is masked gets zeros, and lse 0.
    """
    heads = KeyHeads.read(q.shape[1], k.shape[1], group, first)
    k, v = heads.take(k), heads.take(v)
    if _fits_cpu_flash(q, v):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _float_mask(mask, q.dtype)
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
            q, k, v, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _fits_cuda_flash(q, k, v, mask, is_causal):
        out, lse = torch.ops.aten._scaled_dot_product_flash_attention(q, k, v, 0.0, is_causal, False, scale=scale)[:2]
    elif _fits_cuda_efficient(q, k, v, mask, is_causal):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _expanded_mask(mask, q, k)
        out, lse = torch.ops.aten._scaled_dot_product_efficient_attention(
            q, k, v, bias, True, 0.0, is_causal, scale=scale
        )[:2]
        lse = lse[..., : q.shape[2]]
    else:
        out, lse = _attention_math(q, k, v, mask, is_causal, scale)
    return _heads_inside(out), lse.contiguous()


def attention_backward(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
    *,
    group: int | None = None,
    first: int = 0,
) -> tuple[Tensor, Tensor, Tensor]:
    """The gradients of `attention` to q, k and v, each laid out with its heads inside, as [B, S, H, D].

    Those to key heads that no query head reads are zero.
    """
    heads = KeyHeads.read(q.shape[1], k.shape[1], group, first)
    k, v = heads.take(k), heads.take(v)
    num_kv_heads = k.shape[1]
    if _fits_cpu_flash(q, v):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _float_mask(mask, q.dtype)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
            g, q, k, v, out, lse, 0.0, is_causal, attn_mask=bias, scale=scale
        )
    elif _fits_cuda_flash(q, k, v, mask, is_causal):
        seed = torch.zeros(2, dtype=torch.uint64, device=q.device)
        offset = torch.zeros((), dtype=torch.uint64, device=q.device)
        dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_backward(
            g, q, k, v, out, lse, None, None, q.shape[2], k.shape[2], 0.0, is_causal, seed, offset, scale=scale
        )
    elif _fits_cuda_efficient(q, k, v, mask, is_causal):
        k, v = _repeat_heads(k, q), _repeat_heads(v, q)
        bias = _expanded_mask(mask, q, k)
        padded = F.pad(lse, (0, -lse.shape[-1] % 32), value=math.inf)
        zero = torch.zeros((), dtype=torch.int64, device=q.device)
        needs = [True, True, True, False]
        dq, dk, dv, _ = torch.ops.aten._scaled_dot_product_efficient_attention_backward(
            g, q, k, v, bias, out, padded, zero, zero, 0.0, needs, is_causal, scale=scale
        )
    else:
        dq, dk, dv = _attention_backward_math(g, q, k, v, mask, out, lse, is_causal, scale)
    dk, dv = heads.put(_sum_heads(dk, num_kv_heads)), heads.put(_sum_heads(dv, num_kv_heads))
    return _heads_inside(dq), _heads_inside(dk), _heads_inside(dv)


@dataclass(frozen=True, slots=True)
class KeyHeads:
    """Which of `total` key heads a run of query heads reads: from `start` on, each for as many as `counts` says."""

    start: int
    counts: tuple[int, ...]
    total: int

    @staticmethod
    def read(num_heads: int, num_kv_heads: int, group: int | None, first: int) -> KeyHeads:
        """Query head i of `num_heads` reads key head (first + i) // group.

        Raises:
            ValueError: a head that is not there, or no group where the heads do not divide.
        """
        if group is None and num_heads % num_kv_heads:
            raise ValueError(f"{num_heads} query heads are no multiple of {num_kv_heads} key heads")
        group = group or num_heads // num_kv_heads
        start, stop = first // group, -(-(first + num_heads) // group)
        if not 0 <= start <= stop <= num_kv_heads:
            raise ValueError(
                f"query heads {first} to {first + num_heads - 1}, {group} for each key head, read beyond "
                f"{num_kv_heads} key heads"
            )
        ends = [min((head + 1) * group, first + num_heads) - max(head * group, first) for head in range(start, stop)]
        return KeyHeads(start, tuple(ends), num_kv_heads)

    def take(self, x: Tensor) -> Tensor:
        """The heads that are read of x[B, G, T, D]: each once where all are read equally often, else once a reader."""
        if len(self.counts) < self.total:
            x = x.narrow(1, self.start, len(self.counts))
        return x if self._is_even() else self.repeat(x)

    def put(self, x: Tensor) -> Tensor:
        """The inverse of `take` for gradients: [B, G, T, D], zeros where nothing was read."""
        if not self._is_even():
            x = self.sum(x)
        if len(self.counts) == self.total:
            return x
        whole = x.new_zeros((x.shape[0], self.total, *x.shape[2:]))
        whole.narrow(1, self.start, len(self.counts)).copy_(x)
        return whole

    def repeat(self, x: Tensor) -> Tensor:
        """Each of the heads that are read, once for each query head."""
        parts = [x[:, i : i + 1].expand(-1, count, -1, -1) for i, count in enumerate(self.counts)]
        return torch.cat(parts, 1) if parts else x[:, :0]

    def sum(self, x: Tensor) -> Tensor:
        """The gradient of `repeat`."""
        parts = x.split(list(self.counts), 1)
        return torch.cat([part.sum(1, keepdim=True) for part in parts], 1) if parts else x

    def _is_even(self) -> bool:
        return len(set(self.counts)) <= 1


def repeat_heads(x: Tensor, group: int, count: int, first: int = 0) -> Tensor:
    """[B, count, T, D] whose head i is head (first + i) // group of x[B, G, T, D]: keys as query heads read them."""
    heads = KeyHeads.read(count, x.shape[1], group, first)
    return heads.repeat(x.narrow(1, heads.start, len(heads.counts)))


def repeat_heads_grad(g: Tensor, num_heads: int, group: int, first: int = 0) -> Tensor:
    """The gradient of `repeat_heads`, from g[B, count, T, D] to [B, num_heads, T, D]."""
    heads = KeyHeads.read(g.shape[1], num_heads, group, first)
    whole = g.new_zeros((g.shape[0], num_heads, *g.shape[2:]))
    whole.narrow(1, heads.start, len(heads.counts)).copy_(heads.sum(g))
    return whole


def _attention_math(
    q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool, scale: float
) -> tuple[Tensor, Tensor]:
    scores = _scores(q, k, mask, is_causal, scale)
    lse = scores.logsumexp(-1)
    lse = lse.masked_fill_(lse == -math.inf, 0)
    out = (scores - lse.unsqueeze(-1)).exp_() @ _repeat_heads(wide(v), q)
    return out.to(q.dtype), lse


def _attention_backward_math(
    g: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    mask: Tensor | None,
    out: Tensor,
    lse: Tensor,
    is_causal: bool,
    scale: float,
) -> tuple[Tensor, Tensor, Tensor]:
    g, out = wide(g), wide(out)
    probabilities = (_scores(q, k, mask, is_causal, scale) - lse.unsqueeze(-1)).exp_()
    delta = (g * out).sum(-1, keepdim=True)
    score_grad = probabilities * (g @ _repeat_heads(wide(v), q).mT - delta) * scale
    dq = score_grad @ _repeat_heads(wide(k), q)
    return dq.to(q.dtype), (score_grad.mT @ wide(q)).to(k.dtype), (probabilities.mT @ g).to(v.dtype)


def _scores(q: Tensor, k: Tensor, mask: Tensor | None, is_causal: bool, scale: float) -> Tensor:
    scores = (wide(q) * scale) @ _repeat_heads(wide(k), q).mT
    if is_causal:
        keep = torch.ones(scores.shape[-2:], dtype=torch.bool, device=q.device).tril()
        scores = scores.masked_fill(~keep, -math.inf)
    if mask is not None:
        scores = scores.masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else scores + mask.to(scores.dtype)
    return scores


def _fits_cpu_flash(q: Tensor, v: Tensor) -> bool:
    return q.device.type == "cpu" and q.shape[-1] == v.shape[-1] and q.numel() > 0 and v.numel() > 0


def _fits_cuda_flash(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    head_fits = q.shape[-1] == v.shape[-1] and q.shape[-1] % 8 == 0 and q.shape[-1] <= 256
    lengths_fit = not is_causal or q.shape[2] == k.shape[2]
    return q.device.type == "cuda" and q.dtype in HALF and mask is None and head_fits and lengths_fit


def _fits_cuda_efficient(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, is_causal: bool) -> bool:
    head_fits = q.shape[-1] % 8 == 0 and v.shape[-1] % 8 == 0
    mask_fits = mask is None or (not is_causal and k.shape[2] % 16 == 0)
    lengths_fit = not is_causal or q.shape[2] == k.shape[2]
    return q.device.type == "cuda" and q.dtype != torch.float64 and head_fits and mask_fits and lengths_fit


def _float_mask(mask: Tensor | None, dtype: torch.dtype) -> Tensor | None:
    if mask is None or mask.dtype != torch.bool:
        return None if mask is None else mask.to(dtype)
    return torch.zeros(mask.shape, dtype=dtype, device=mask.device).masked_fill_(~mask, -math.inf)


def _expanded_mask(mask: Tensor | None, q: Tensor, k: Tensor) -> Tensor | None:
    """The mask as the memory-efficient kernel wants it: rows whole in memory, other dims expanded by stride 0."""
    bias = _float_mask(mask, q.dtype)
    if bias is None:
        return None
    bias = bias.expand(*bias.shape[:-1], k.shape[2]).contiguous()
    return bias.expand(q.shape[0], q.shape[1], q.shape[2], k.shape[2])


def _repeat_heads(x: Tensor, q: Tensor) -> Tensor:
    return x if x.shape[1] == q.shape[1] else x.repeat_interleave(q.shape[1] // x.shape[1], 1)


def _sum_heads(x: Tensor, num_heads: int) -> Tensor:
    return x if x.shape[1] == num_heads else x.unflatten(1, (num_heads, -1)).sum(2)


def _heads_inside(x: Tensor) -> Tensor:
    """[B, H, S, D] laid out as [B, S, H, D], so that joining the heads afterwards moves no memory."""
    return x.transpose(1, 2).contiguous().transpose(1, 2)
