"""Calls of attention, and what they must give: the formula in float64, differentiated by autograd."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from autopar.operators.attention_options import AttentionOptions
from autopar.operators.positional import dropout


@dataclass(frozen=True)
class Case:
    """Sizes as in the kernels' shape suffixes; bias: its shape, `bias_bool` its kind; keys: the valid ones per row;
    documents: how many queries, and keys, are of each document.
    """

    B: int = 1
    H: int = 2
    G: int = 1
    S: int = 40
    T: int = 56
    D: int = 32
    E: int = 32
    dtype: torch.dtype = torch.float32
    device: str = "cpu"
    bias: tuple[int, ...] | None = None
    bias_bool: bool = False
    keys: Sequence[tuple[int, int]] | None = None
    sinks: bool = False
    documents: tuple[Sequence[int], Sequence[int]] | None = None
    options: dict[str, Any] = field(default_factory=dict)

    def tensors(self, seed: int = 0) -> dict[str, Tensor | None]:
        """g, q, k, v, bias, keys, sinks, seed; some laid out as [B, S, H, D]."""
        generator = torch.Generator().manual_seed(seed)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator).to(self.dtype).to(self.device)

        keys = None
        if self.keys is not None:
            keys = torch.zeros(self.B, self.T, dtype=torch.bool)
            for row, (start, end) in enumerate(self.keys):
                keys[row, start:end] = torch.rand(max(end - start, 0), generator=generator) < 0.8
            keys = keys.to(self.device)
        bias = None if self.bias is None else random(*self.bias)
        return {
            "g": random(self.B, self.H, self.S, self.E),
            "q": random(self.B, self.S, self.H, self.D).transpose(1, 2),
            "k": random(self.B, self.G, self.T, self.D),
            "v": random(self.B, self.T, self.G, self.E).transpose(1, 2),
            "bias": bias > -0.5 if bias is not None and self.bias_bool else bias,
            "keys": keys,
            "sinks": random(self.H) if self.sinks else None,
            "seed": torch.tensor(81985529216486895, device=self.device) if self.options.get("dropout_p") else None,
        }

    def said(self) -> AttentionOptions:
        """The options; each row's documents have other numbers, neither small nor in order."""
        options = {"scale": 0.3, **self.options}
        if self.documents is not None:
            own, others = (torch.tensor(lengths) for lengths in self.documents)
            numbers = torch.tensor([7, -3, 2**40, 7, 12, 5, 1, 0])[: len(own)] + torch.arange(self.B)[:, None]
            for name, lengths in (("documents", own), ("key_documents", others)):
                options[name] = numbers.repeat_interleave(lengths, 1).to(self.device)
        return AttentionOptions(**options)


def expected(
    tensors: dict[str, Tensor | None], options: AttentionOptions, given: Tensor | None = None
) -> dict[str, Tensor]:
    """out, lse, dq, dk, dv and, where the bias is of floats, dbias: in float64.

    given: the `out` that the backward is handed, rounded to its type. Gradients are then those that it defines: the
    scores' are p * (g v^T - <g, given>), which is p * <g, out - given> more than with the exact one, and p is the
    gradient of the log-sum-exp. Sums of many scores' gradients that cancel otherwise show that rounding and no more.
    """
    wide = {
        name: x.double().requires_grad_() if x is not None and x.is_floating_point() else x
        for name, x in tensors.items()
    }
    q, k, v, bias, g = (wide[name] for name in ("q", "k", "v", "bias", "g"))
    out, lse = _attention(q, k, v, bias, wide["keys"], wide["sinks"], wide["seed"], options)
    inputs = {"dq": q, "dk": k, "dv": v} | ({"dbias": bias} if bias is not None and bias.is_floating_point() else {})
    total = (out * g).sum()
    if given is not None:
        off = (g * (out - given.double())).sum(-1).detach()
        total = total + (off * torch.where(lse > -torch.inf, lse, 0)).sum()
    grads = torch.autograd.grad(total, list(inputs.values()), materialize_grads=True)
    return {"out": out.detach(), "lse": lse.detach(), **dict(zip(inputs, grads, strict=True))}


def _attention(
    q: Tensor, k: Tensor, v: Tensor, bias: Tensor | None, keys: Tensor | None, sinks: Tensor | None,
    seed: Tensor | None, options: AttentionOptions,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    group = options.group or q.shape[1] // k.shape[1]
    readers = [(options.first + head) // group for head in range(q.shape[1])]
    x = options.scale * q @ k[:, readers].mT
    if options.softcap:
        x = options.softcap * torch.tanh(x / options.softcap)
    queries = _positions(options.query_starts, q.shape[2], q.device)
    positions = _positions(options.key_starts, k.shape[2], q.device)
    visible = torch.ones(x.shape, dtype=torch.bool, device=q.device)
    if options.left is not None:
        visible &= positions >= queries[:, None] - options.left
    if options.right is not None:
        visible &= positions <= queries[:, None] + options.right
    visible |= positions < options.prefix
    if options.documents is not None and options.key_documents is not None:
        visible &= (options.documents[:, :, None] == options.key_documents[:, None, :])[:, None]
    if keys is not None:
        visible &= keys[:, None, None, :]
    if bias is not None and bias.dtype == torch.bool:
        visible &= bias
    elif bias is not None:
        x = x + bias
    x = torch.where(visible, x, -torch.inf)
    if sinks is not None:
        x = torch.cat([x, sinks.view(1, -1, 1, 1).expand(*x.shape[:3], 1)], -1)
    top = x.detach().amax(-1, keepdim=True).clamp(min=-1e30) if x.shape[-1] else x.new_zeros((*x.shape[:3], 1))
    terms = (x - top).exp()
    total = terms.sum(-1, keepdim=True)
    lse = torch.where(total > 0, top + total.clamp(min=1e-300).log(), -torch.inf).squeeze(-1)
    p = terms[..., : k.shape[2]] / torch.where(total > 0, total, 1)
    if options.dropout_p:
        assert seed is not None
        local = [torch.arange(size, device=q.device) for size in q.shape[:2]]
        places = [*(options.positions or [*local, queries]), positions]
        p = p * dropout(
            torch.ones_like(p), options.dropout_p, seed, options.salt, places, options.global_shape or p.shape
        )
    return p @ v[:, readers], lse


def _positions(starts: Sequence[int], length: int, device: torch.device) -> Tensor:
    starts = starts or (0,)
    each = length // len(starts)
    return torch.cat([torch.arange(start, start + each, device=device) for start in starts])


CAUSAL = {"right": 0}
CASES = {
    "full": Case(),
    "full, even": Case(S=64, T=64),
    "causal": Case(S=56, options=CAUSAL),
    "causal, even": Case(S=64, T=64, options=CAUSAL),
    "more keys than queries": Case(S=17, T=71, options={**CAUSAL, "query_starts": [54]}),
    "one query": Case(S=1, T=53, options={**CAUSAL, "query_starts": [52]}),
    "window": Case(S=56, options={"left": 9, "right": 0}),
    "window on both sides": Case(S=56, options={"left": 5, "right": 11}),
    "left limit": Case(options={"left": 5}),
    "limits apart from the diagonal": Case(options={"left": -3, "right": 12}),
    "prefix": Case(options={**CAUSAL, "prefix": 21}),
    "prefix and window": Case(S=56, options={"left": 9, "right": 0, "prefix": 6}),
    "long prefix and window": Case(S=56, options={"left": 9, "right": 0, "prefix": 50}),
    "softcap": Case(options={**CAUSAL, "softcap": 1.5}),
    "sinks": Case(S=56, sinks=True, options={"left": 9, "right": 0}),
    "padding": Case(B=3, keys=[(17, 56), (0, 30), (0, 0)]),
    "padding, causal": Case(B=2, S=56, keys=[(17, 56), (0, 30)], sinks=True, options=CAUSAL),
    "padding and window": Case(B=2, S=56, keys=[(20, 56), (0, 30)], options={"left": 9, "right": 3}),
    "documents": Case(B=2, documents=((7, 20, 0, 13), (7, 20, 9, 20))),
    "documents, causal": Case(B=2, S=56, documents=((5, 30, 1, 20), (5, 30, 1, 20)), sinks=True, options=CAUSAL),
    "documents and window": Case(S=56, documents=((20, 36), (20, 36)), options={"left": 9, "right": 0}),
    "documents and prefix": Case(S=56, documents=((20, 36), (20, 36)), options={"left": 3, "right": 0, "prefix": 30}),
    "documents and padding": Case(B=2, documents=((16, 24), (16, 40)), keys=[(0, 50), (20, 56)]),
    "documents and bias": Case(B=2, S=56, bias=(1, 2, 56, 56), documents=((20, 36), (20, 36)), options=CAUSAL),
    "documents in runs": Case(
        S=64, T=64, documents=((20, 24, 20), (20, 24, 20)),
        options={**CAUSAL, "query_starts": [0, 96], "key_starts": [0, 96]},
    ),
    "bool bias": Case(B=2, bias=(2, 1, 40, 56), bias_bool=True),
    "bool bias per key": Case(B=2, bias=(2, 1, 1, 56), bias_bool=True, options=CAUSAL),
    "bias": Case(B=2, H=2, bias=(2, 2, 40, 56)),
    "bias shared by the batch": Case(B=2, bias=(1, 2, 40, 56), options=CAUSAL),
    "bias per key": Case(B=2, bias=(2, 1, 1, 56)),
    "bias per query": Case(bias=(1, 1, 40, 1)),
    "one bias": Case(bias=(1, 1, 1, 1)),
    "dropout": Case(S=56, options={**CAUSAL, "dropout_p": 0.3, "salt": 3}),
    "all dropped": Case(S=16, options={"dropout_p": 1.0}),
    "dropout of a part": Case(
        S=24, T=32,
        options={
            "dropout_p": 0.4, "salt": -(2**60), "global_shape": [5, 7, 96, 64], "key_starts": [32],
            "query_starts": [60],
            "positions": [torch.tensor([3]), torch.tensor([2, 5]), torch.arange(60, 84)],
        },
    ),
    "zigzag": Case(S=40, T=72, options={**CAUSAL, "query_starts": [20, 100], "key_starts": [0, 40, 80]}),
    "zigzag window": Case(
        S=40, T=72, options={"left": 30, "right": 0, "query_starts": [20, 60], "key_starts": [0, 90]}
    ),
    "keys all later": Case(options={**CAUSAL, "key_starts": [100]}),
    "four queries a key head": Case(H=4, G=1, options=CAUSAL),
    "uneven groups": Case(H=5, G=4, options={**CAUSAL, "group": 3, "first": 2}),
    "a key head too many": Case(H=2, G=3, options={"group": 2, "first": 2}),
    "odd heads": Case(D=24, E=40, S=37, T=53, options=CAUSAL),
    "head of one": Case(D=1, E=3),
    "no keys": Case(T=0),
    "no queries": Case(S=0),
    "everything": Case(
        B=2, H=4, G=2, S=32, T=48, D=24, E=16, bias=(1, 4, 32, 48), keys=[(3, 40), (20, 48)], sinks=True,
        options={
            "left": 60, "right": 4, "prefix": 9, "softcap": 2.0, "dropout_p": 0.2, "salt": 1, "query_starts": [20, 60],
            "key_starts": [0, 40],
        },
    ),
}  # fmt: skip
