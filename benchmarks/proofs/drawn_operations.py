"""Operations of which drawn modules are made: a table by kind, a line (`drawn_lines.py`) for each."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from benchmarks.proofs.drawn_lines import (
    TOKENS,
    Apply,
    Line,
    Made,
    Operation,
    Values,
    along,
    layer,
    linear,
    on,
    parameter,
)

ANY, SEQUENCE, IMAGE, VECTOR = "b ... d", "b s d", "b c h w", "b d"


# --------------------------------------------------------------------------------------- what is longer than a line


def mlp(activation: nn.Module, dropout: float, n: Any) -> nn.Module:
    return nn.Sequential(nn.Linear(n.d, 2 * n.d), activation, nn.Dropout(dropout), nn.Linear(2 * n.d, n.d))


def swiglu(m: Any, x: Tensor) -> Tensor:
    a, b = m.up(x).chunk(2, dim=-1)
    return m.down(F.silu(a) * b)


def used_again(values: Values) -> Made | None:
    """A module that was used before, once more: its parameters are shared."""
    kept = [m for m in values.made if isinstance(m, nn.Linear | nn.Sequential | nn.LayerNorm)]
    if not kept:
        return None
    module = values.pick(reversed(kept))
    first: Any = module[0] if isinstance(module, nn.Sequential) else module
    n = SimpleNamespace(d=first.normalized_shape[-1] if isinstance(first, nn.LayerNorm) else first.in_features)
    index = values.find(ANY, n)
    return None if index is None else Made(module, [index])


def tied(values: Values) -> Made | None:
    """A product with the weights, or their transpose, of a module used before."""
    kept = [m for m in values.made if isinstance(m, nn.Linear | nn.Embedding)]
    if not kept:
        return None
    module: Any = values.pick(reversed(kept))
    turned = isinstance(module, nn.Embedding) or values.pick([True, False])
    index = values.find(ANY, SimpleNamespace(d=module.weight.shape[1 if turned else 0]))
    product = (lambda m, x: x @ m.of.weight.t()) if turned else (lambda m, x: x @ m.of.weight)
    return None if index is None else Made(Apply(product, {"of": module}), [index])


def attend(how: str, heads: int, m: Any, x: Tensor, y: Tensor) -> Tensor:
    q, k, w = (each.unflatten(-1, (heads, -1)).transpose(1, 2) for each in (m.q(x), *m.kv(y).chunk(2, -1)))
    if how in ("by hand", "window"):
        score = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
        if how == "window":
            at = torch.arange(x.shape[1], device=x.device)
            score = score.masked_fill((at[:, None] - at).abs() > 1, float("-inf"))
        out = score.softmax(-1) @ w
    else:
        bias = m.bias if how == "biased" else None
        out = F.scaled_dot_product_attention(q, k, w, attn_mask=bias, is_causal=how == "causal")
    return m.out(out.transpose(1, 2).flatten(2))


def attention(how: str, heads: int = 4) -> Line:
    """how: with which mask, written by hand or not, over itself or another sequence."""
    reads, function = (
        ("b s d, b t d", attend) if how == "cross" else (SEQUENCE, lambda h, n, m, x: attend(h, n, m, x, x))
    )
    bias = {"bias": lambda n: parameter(f"{heads} s s", n)} if how == "biased" else {}
    layers = {"q": linear("d", "d"), "kv": lambda n: nn.Linear(n.d, 2 * n.d), "out": linear("d", "d"), **bias}
    return on(reads, partial(function, how, heads), lambda n: n.d % heads == 0, **layers)


def attention_layer(needs_weights: bool) -> Line:
    def function(m: Any, x: Tensor) -> Tensor:
        y, weights = m.layer(x, x, x, need_weights=needs_weights)
        return y + weights.sum(-1, keepdim=True) if needs_weights else y

    made = {"layer": lambda n: nn.MultiheadAttention(n.d, 4, batch_first=True)}
    return on(SEQUENCE, function, lambda n: n.d % 4 == 0, **made)


def loop(m: Any, x: Tensor) -> Tensor:
    state, out = x.new_zeros(x.shape[0], 6), []
    for step in x.unbind(1):
        state = torch.tanh(m.a(step) + m.b(state))
        out.append(state)
    return torch.stack(out, 1)


def conditioned(m: Any, x: Tensor, y: Tensor) -> Tensor:
    """Adaptive scale and shift: a row's vector on all of its positions."""
    scale, shift = m.project(y).chunk(2, dim=1)
    return x * (1 + scale[:, None]) + shift.unsqueeze(1)


def conditioned_images(m: Any, x: Tensor, y: Tensor) -> Tensor:
    scale, shift = m.project(y).chunk(2, dim=1)
    return x * (1 + scale[:, :, None, None]) + shift[..., None, None]


def sinus(x: Tensor) -> Tensor:
    s, d = x.shape[1:]
    at = torch.arange(s, device=x.device, dtype=x.dtype)[:, None]
    rate = torch.exp(torch.arange(d, device=x.device, dtype=x.dtype) * -0.3)
    return x + torch.where(torch.arange(d, device=x.device) % 2 == 0, (at * rate).sin(), (at * rate).cos())


def half(x: Tensor, d: int) -> int:
    return max(1, x.shape[d] // 2)


def sparse(x: Tensor, d: int) -> Tensor:
    values, at = x.topk(half(x, d), d)
    return torch.zeros_like(x).scatter(d, at, values.softmax(d))


def bins(x: Tensor, at: Tensor) -> tuple[Tensor, Tensor]:
    """Integers below 5 for each number of some positions, and those positions."""
    at = (at % 5)[:, : x.shape[1], None].expand(-1, -1, x.shape[2])
    return at, x[:, : at.shape[1]]


def filtered(m: Any, x: Tensor) -> Tensor:
    return torch.fft.irfft(torch.fft.rfft(x) * torch.view_as_complex(m.filter), n=x.shape[-1])


def warped(m: Any, x: Tensor) -> Tensor:
    theta = m.project(x.mean((2, 3))).view(-1, 2, 3)
    return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)


def first_zero(x: Tensor) -> Tensor:
    y = x.clone()
    y[:, 0] = 0
    return y


def halves_written(x: Tensor) -> Tensor:
    y = torch.zeros_like(x)
    y[..., ::2] = x[..., ::2].sin()
    y[:, 1:] += x[:, :-1]
    return y


def filled(x: Tensor) -> Tensor:
    y = torch.empty(x.shape, device=x.device, dtype=x.dtype).fill_(0.5)
    for t in range(x.shape[1]):
        y[:, t] = x[:, t] * (t + 1)
    return y


def clipped(x: Tensor) -> Tensor:
    y = x * 1
    y[y > 0.5] = 0.5
    return y.mul_(2).add_(x)


def wide(n: Any) -> bool:
    """Room for a window of three."""
    return min(n.rest if hasattr(n, "rest") else (n.h, n.w) if hasattr(n, "h") else (n.d,)) >= 3


def even_image(n: Any) -> bool:
    return n.h % 2 == 0 and n.w % 2 == 0


def resize(images: str, factor: float, mode: str, corners: bool | None = None) -> Line:
    small = lambda n: factor > 1 or min(getattr(n, "h", n.d if hasattr(n, "d") else 0), getattr(n, "w", 9)) >= 2  # noqa: E731
    return on(images, lambda x: F.interpolate(x, scale_factor=factor, mode=mode, align_corners=corners), small)


# --------------------------------------------------------------------------------------------------------- the table

TABLE: dict[str, list[Operation]] = {
    "linear": [
        layer(ANY, linear("d", "d")),
        layer(ANY, linear("d", 8)),
        layer(ANY, linear("d", 12, bias=False)),
        layer(ANY, linear("d", 5)),
        layer("b d, b e", lambda n: nn.Bilinear(n.d, n.e, 6)),
        layer("b s d, b s e", lambda n: nn.Bilinear(n.d, n.e, 6)),
    ],
    "mlp": [
        layer(ANY, partial(mlp, nn.GELU(), 0.0)),
        layer(ANY, partial(mlp, nn.ReLU(), 0.1)),
        layer(ANY, partial(mlp, nn.SiLU(), 0.0)),
        on(ANY, swiglu, up=lambda n: nn.Linear(n.d, 2 * n.d), down=linear("d", "d")),
    ],
    "used again": [used_again, tied],
    "weights that forward makes": [
        on(ANY, lambda m, x: F.linear(x, m.a / m.a.norm(dim=1, keepdim=True) * m.scale[:, None]), a="d d", scale="d"),
        on(ANY, lambda m, x: F.linear(x, F.softplus(m.a)), a="d d"),
        on(ANY, lambda m, x: F.linear(x, m.a @ m.b), a="d 2", b="2 d"),
        on(ANY, lambda m, x: F.linear(x, m.a.tril()), a="d d"),
        on(ANY, lambda m, x: F.linear(x, m.a + m.a.t()), a="d d"),
    ],
    "embedding": [
        layer("int b ...", lambda n: nn.Embedding(TOKENS, 8)),
        layer("int b ...", lambda n: nn.Embedding(TOKENS, 12, padding_idx=3)),
        layer("int b s", lambda n: nn.EmbeddingBag(TOKENS, 8)),
        layer("int b s", lambda n: nn.EmbeddingBag(TOKENS, 12, mode="sum")),
        layer("int b s", lambda n: nn.EmbeddingBag(TOKENS, 8, mode="max")),
        on("int b s", lambda m, x: F.one_hot(x, TOKENS).to(m.weight.dtype) @ m.weight, weight="16 8"),
        on("int b s", lambda m, x: m.weight[x], weight="16 8"),
    ],
    "norm": [
        layer(ANY, lambda n: nn.LayerNorm(n.d)),
        layer(ANY, lambda n: nn.LayerNorm(n.d, elementwise_affine=False)),
        layer(ANY, lambda n: nn.RMSNorm(n.d)),
        layer("b s t ...", lambda n: nn.GroupNorm(2, n.s), lambda n: n.s % 2 == 0),
        layer(SEQUENCE, lambda n: nn.GroupNorm(n.s, n.s), lambda n: n.d > 1),
        layer(SEQUENCE, lambda n: nn.InstanceNorm1d(n.s, affine=True), lambda n: n.d > 1),
        layer(IMAGE, lambda n: nn.InstanceNorm2d(n.c), lambda n: n.h * n.w > 1),
        layer(VECTOR, lambda n: nn.BatchNorm1d(n.d).eval()),
        layer(SEQUENCE, lambda n: nn.BatchNorm1d(n.s).eval()),
        layer(IMAGE, lambda n: nn.BatchNorm2d(n.c).eval()),
        layer("b ...", lambda n: nn.LayerNorm(n.rest)),
        on(ANY, lambda x: F.normalize(x, dim=-1)),
        layer("b s t ...", lambda n: nn.LocalResponseNorm(3)),
    ],
    "convolution": [
        layer(SEQUENCE, lambda n: nn.Conv1d(n.s, n.s, 3, padding=1), wide),
        layer(SEQUENCE, lambda n: nn.Conv1d(n.s, 8, 2, stride=2), wide),
        layer(SEQUENCE, lambda n: nn.Conv1d(n.s, n.s, 3, padding="same", groups=n.s, bias=False), wide),
        layer(SEQUENCE, lambda n: nn.Conv1d(n.s, 6, 3, padding=2, dilation=2), wide),
        layer(SEQUENCE, lambda n: nn.ConvTranspose1d(n.s, 6, 3, stride=2, padding=1), wide),
        layer(SEQUENCE, lambda n: nn.Conv1d(n.s, 8, 3, padding=1, padding_mode="circular"), wide),
        layer(IMAGE, lambda n: nn.Conv2d(n.c, 8, 3, padding=1), wide),
        layer(IMAGE, lambda n: nn.Conv2d(n.c, n.c, 2, stride=2), wide),
        layer(IMAGE, lambda n: nn.Conv2d(n.c, 8, 3, padding=1, groups=2), lambda n: wide(n) and n.c % 2 == 0),
        layer(IMAGE, lambda n: nn.Conv2d(n.c, n.c, 3, padding="same", groups=n.c), wide),
        layer(IMAGE, lambda n: nn.Conv2d(n.c, 6, 3, padding=2, dilation=2), wide),
        layer(IMAGE, lambda n: nn.Conv2d(n.c, 8, 3, padding=1, padding_mode="reflect"), wide),
        layer(IMAGE, lambda n: nn.ConvTranspose2d(n.c, 6, 3, padding=1), wide),
    ],
    "attention": [
        attention("fused"), attention("causal", 2), attention("by hand"), attention("window", 2), attention("cross"),
        attention("biased", 2), attention_layer(False), attention_layer(True),
    ],
    "recurrent": [
        on(SEQUENCE, lambda m, x: m.layer(x)[0], lambda n: n.s <= 8, layer=lambda n: nn.GRU(n.d, 6, batch_first=True)),
        on(SEQUENCE, loop, lambda n: n.s <= 8, a=linear("d", 6), b=linear(6, 6, bias=False)),
        on(SEQUENCE, lambda m, x: m.layer(x)[0], lambda n: n.s <= 8, layer=lambda n: nn.LSTM(n.d, 6, batch_first=True)),
        on(SEQUENCE, lambda m, x: m.layer(x)[0], lambda n: n.s <= 8, layer=lambda n: nn.RNN(n.d, 6, batch_first=True)),
    ],
    "conditioned": [
        on("b s d, b e", conditioned, project=lambda n: nn.Linear(n.e, 2 * n.d)),
        on("b c h w, b e", conditioned_images, project=lambda n: nn.Linear(n.e, 2 * n.c)),
        on("b s d, b e", lambda m, x, y: x * m.gate(y)[:, None].sigmoid(), gate=linear("e", "d")),
    ],
    "parameters beside rows": [
        on(SEQUENCE, lambda m, x: x + m.at(torch.arange(x.shape[1])), at=lambda n: nn.Embedding(n.s, n.d)),
        on(SEQUENCE, lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1), token="1 1 d"),
        on(SEQUENCE, lambda m, x: torch.cat([x, m.p[None].repeat(x.size(0), 1, 1)], dim=1), p="2 d"),
        on(ANY, lambda m, x: x * m.scale.exp() + m.shift, scale="1", shift="d"),
        on(SEQUENCE, lambda m, x: x + m.table[: x.shape[1]] * 0.5, table=lambda n: torch.randn(n.s + 3, n.d)),
        on(SEQUENCE, sinus),
    ],
    "activation": [
        *(layer(ANY, lambda n, make=make: make()) for make in (
            nn.Tanh, nn.ReLU, nn.GELU, nn.Sigmoid, nn.Softplus, nn.LeakyReLU, nn.ELU, nn.Hardswish, nn.Mish,
            nn.Softsign, nn.Hardtanh, nn.LogSigmoid, nn.CELU, nn.Softshrink, nn.ReLU6,
            partial(nn.Threshold, 0.1, 0.2), partial(nn.GELU, "tanh"),
        )),
        layer("b s ...", lambda n: nn.PReLU(n.s)),
    ],
    "pointwise": [on(ANY, function) for function in (
        lambda x: x.sin(), lambda x: x.abs().sqrt(), lambda x: (x * x + 1).log(), lambda x: torch.erf(x),
        lambda x: x.clamp(-1, 1), lambda x: x / (1 + x.abs()), lambda x: x.tanh() ** 3, lambda x: 1 - x,
        lambda x: torch.expm1(x.clamp(max=1)), lambda x: x * x.sign(), lambda x: x.square().add(1).rsqrt(),
        lambda x: torch.nan_to_num(x / x.abs().add(1)), lambda x: x.atan(), lambda x: x.pow(2).log1p(),
        lambda x: x.float().type_as(x) * 2, lambda x: x.detach() * x, lambda x: x + (x.round() - x).detach(),
        lambda x: torch.polar(x.abs() + 1, x).real, lambda x: torch.logit(x.sigmoid(), 1e-3),
        lambda x: torch.where(x > 0, x, x.exp() - 1), lambda x: x.masked_fill(x.abs() > 1, 0.5),
        lambda x: torch.lerp(x, x.tanh(), 0.3), lambda x: torch.addcmul(x, x, x.tanh(), value=0.5),
    )],
    "two values": [on("b ..., b ...", function) for function in (
        lambda x, y: x + y, lambda x, y: x * y, lambda x, y: x - y, torch.maximum, lambda x, y: x / (1 + y.abs()),
        lambda x, y: torch.where(x > y, x, y * 2), lambda x, y: torch.cat([x, y], -1),
        lambda x, y: torch.stack([x, y], 1).mean(1), lambda x, y: torch.cat([x, y], 1),
        lambda x, y: torch.stack((x, y), dim=-1).flatten(-2), lambda x, y: torch.hypot(x, y + 3),
        lambda x, y: torch.atan2(x, y.abs() + 1), lambda x, y: torch.stack([x, y]).sum(0), torch.logaddexp,
        lambda x, y: F.cosine_similarity(x, y, dim=-1).unsqueeze(-1) * x, lambda x, y: x.copysign(y),
        lambda x, y: torch.complex(x, y).abs(),
    )],
    "product": [
        on(SEQUENCE, lambda x: torch.einsum("bsd,btd->bst", x, x) / x.shape[-1]),
        on(SEQUENCE, lambda m, x: torch.einsum("bsd,de->bse", x, m.w), w="d 6"),
        on(SEQUENCE, lambda m, x: torch.einsum("bsd,st->btd", x, m.w), w="s s"),
        on(SEQUENCE, lambda x: torch.einsum("bsd,bse->bde", x, x) / x.shape[1]),
        on(SEQUENCE, lambda m, x: torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, -1)), m.w).flatten(2),
           lambda n: n.d % 2 == 0, w=lambda n: nn.Parameter(torch.randn(2, n.d // 2, n.d // 2))),
        on(SEQUENCE, lambda x: torch.bmm(x.transpose(1, 2), x) / x.shape[1]),
        on("b s d, b t d", lambda x, y: x @ y.mT / x.shape[-1]),
        on(SEQUENCE, lambda m, x: torch.cdist(x, m.w), w="5 d"),
        on(SEQUENCE, lambda m, x: x @ m.a @ m.b, a="d 2", b="2 d"),
        on(VECTOR, lambda x: torch.einsum("bi,bj->bij", x, x)),
        on("b c h w", lambda m, x: torch.einsum("bchw,cd->bdhw", x, m.w), w="c 6"),
    ],
    "softmax": [along("b ...", function) for function in (
        lambda x, d: x.softmax(d), lambda x, d: x.log_softmax(d), lambda x, d: F.softmin(x, d),
        lambda x, d: x - x.logsumexp(d, keepdim=True), lambda x, d: x.softmax(d, dtype=torch.float32).to(x.dtype),
    )],
    "reduction": [along("b s t ...", function) for function in (
        lambda x, d: x.mean(d, keepdim=True), lambda x, d: x.sum(d), lambda x, d: x.amax(d), lambda x, d: x.var(d),
        lambda x, d: x.std(d, unbiased=False), lambda x, d: x.norm(dim=d, keepdim=True), lambda x, d: x.logsumexp(d),
        lambda x, d: x.tanh().prod(d), lambda x, d: x.max(dim=d, keepdim=True)[0], lambda x, d: x.median(d)[0],
        lambda x, d: x.mean(dim=(1, 2)[: x.dim() - 2]), lambda x, d: (x.cumsum(d) > 0).to(x.dtype).mean(d) + x.mean(d),
        lambda x, d: x.min(d).values, lambda x, d: torch.linalg.vector_norm(x, 3, dim=d),
        lambda x, d: x.flatten(1).quantile(0.5, dim=1)[:, None], lambda x, d: x.argmax(d).to(x.dtype) * 0.1 + x.sum(d),
        lambda x, d: x.aminmax(dim=d)[0], lambda x, d: x.kthvalue(1, d)[0], lambda x, d: x.nansum(d),
        lambda x, d: (x > 0).any(d) * x.sum(d),
    )],
    "scan": [along("b ...", function) for function in (
        lambda x, d: x.cumsum(d), lambda x, d: x.tanh().cumprod(d), lambda x, d: x.cummax(d)[0],
        lambda x, d: x.logcumsumexp(d), lambda x, d: x.flip(d).cumsum(d).flip(d), lambda x, d: x.cummin(d).values,
        lambda x, d: torch.diff(x, dim=d, prepend=torch.zeros_like(x.narrow(d, 0, 1))),
    )],
    "order": [along("b ...", function) for function in (
        lambda x, d: x.sort(d)[0], lambda x, d: x.topk(half(x, d), d)[0], sparse,
        lambda x, d: x.gather(d, x.argsort(d, descending=True)), lambda x, d: x.argsort(d).argsort(d) * x,
        lambda x, d: x * (x >= x.topk(half(x, d), d)[0].narrow(d, half(x, d) - 1, 1)),
        lambda x, d: torch.msort(x.movedim(d, 0)).movedim(0, d),
    )],
    "gathered": [on("b s d, int b t", function) for function in (
        lambda x, at: x.gather(1, (at % x.shape[1])[..., None].expand(-1, -1, x.shape[2])),
        lambda x, at: x.new_zeros(x.shape[0], 5, x.shape[2]).scatter_add(1, *bins(x, at)),
        lambda x, at: x.new_zeros(x.shape[0], 5, x.shape[2]).scatter_reduce(1, *bins(x, at), "amax"),
        lambda x, at: x[torch.arange(x.shape[0], device=x.device), at[:, 0] % x.shape[1]],
        lambda x, at: torch.take_along_dim(x, (at % x.shape[1])[..., None], dim=1),
        lambda x, at: x[torch.arange(len(x), device=x.device)[:, None], at % x.shape[1]],
        lambda x, at: x.masked_fill((at[:, :1] > 7)[..., None], 0.0),
        lambda x, at: x * (torch.arange(x.shape[1], device=x.device)[None] < at[:, :1])[..., None],
        lambda x, at: x.index_select(1, torch.tensor([0, x.shape[1] - 1, 0], device=x.device)),
    )],
    "spectral": [
        on(SEQUENCE, lambda x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real),
        along("b ...", lambda x, d: torch.fft.rfft(x, dim=d).abs()),
        on(ANY, filtered, filter=lambda n: nn.Parameter(torch.randn(n.d // 2 + 1, 2))),
        on(SEQUENCE, lambda x: torch.fft.fft2(x).imag),
        along("b ...", lambda x, d: torch.fft.irfft(torch.fft.rfft(x, dim=d) * 2, n=x.shape[d], dim=d)),
        along("b ...", lambda x, d: torch.fft.fftshift(x, dim=d)),
        along("b ...", lambda x, d: torch.view_as_real(torch.fft.rfft(x, dim=d)).flatten(-2)),
    ],
    "pooling": [
        *(layer(SEQUENCE, lambda n, made=made: made, wide) for made in (
            nn.MaxPool1d(2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(3), nn.AdaptiveMaxPool1d(2), nn.LPPool1d(2, 2),
            nn.MaxPool1d(3, 1, 1), nn.AvgPool1d(3, 1, 1, count_include_pad=False),
        )),
        *(layer(IMAGE, lambda n, made=made: made, wide) for made in (
            nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2),
            nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d((1, 3)),
        )),
    ],
    "resized": [
        resize(SEQUENCE, 2, "nearest"), resize(SEQUENCE, 2, "linear", True), resize(SEQUENCE, 0.5, "area"),
        resize(SEQUENCE, 0.5, "nearest-exact"), resize(IMAGE, 2, "bilinear", False), resize(IMAGE, 2, "nearest"),
        resize(IMAGE, 0.5, "bicubic", True), resize(IMAGE, 0.5, "area"),
    ],
    "sampled": [
        on(IMAGE, warped, project=linear("c", 6)),
        on(IMAGE, lambda x: F.unfold(x, 2, stride=2).transpose(1, 2), wide),
    ],
    "random": [
        *(on(ANY, function) for function in (
            lambda x: F.dropout(x, 0.3), lambda x: x + 0.1 * torch.randn_like(x), lambda x: x * torch.rand_like(x),
            lambda x: F.alpha_dropout(x, 0.2, training=True), lambda x: x * torch.bernoulli(torch.full_like(x, 0.7)),
            lambda x: x * (torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < 0.8).to(x.dtype),
            lambda x: x + torch.normal(torch.zeros_like(x), 0.1),
            lambda x: x + torch.randn(x.shape[-1], device=x.device, dtype=x.dtype),
            lambda x: x + x.exp().clamp(max=1) * torch.randn(x.shape, device=x.device, dtype=x.dtype),
        )),
        on(IMAGE, lambda x: F.dropout2d(x, 0.3)),
    ],
    "view": [on(SEQUENCE, function) for function in (
        lambda x: x.transpose(1, 2), lambda x: x.flatten(1), lambda x: x[:, 0], lambda x: x[:, -1], lambda x: x[:, ::2],
        lambda x: x.roll(1, 1), lambda x: x.flip(1), lambda x: x[..., 1:], lambda x: x.repeat(1, 2, 1),
        lambda x: x.permute(0, 2, 1).contiguous().view(x.size(0), -1), lambda x: x.repeat_interleave(2, dim=1),
        lambda x: F.pad(x, (1, 0)), lambda x: F.pad(x, (0, 0, 1, 1)), lambda x: F.pad(x, (1, 1), mode="replicate"),
        lambda x: x.unfold(1, 1, 1).flatten(2), lambda x: x.unsqueeze(2).expand(-1, -1, 2, -1).flatten(1, 2),
        lambda x: x.tril(), lambda x: x.split([1, x.shape[-1] - 1], dim=-1)[1],
        lambda x: torch.cat([x[:, 1:], x[:, :1]], 1), lambda x: x.reshape(-1, x.shape[-1]).view_as(x) * 2,
        lambda x: x.unbind(1)[0], lambda x: x.squeeze(1), lambda x: x.unsqueeze(1), lambda x: torch.diag_embed(x[:, 0]),
        lambda x: x.swapaxes(1, 2).flatten(1), lambda x: x.diagonal(dim1=1, dim2=2), lambda x: x.movedim(-1, 1),
        lambda x: x.tile((1, 2)), lambda x: torch.tensor_split(x, 2, dim=-1)[0], lambda x: x.narrow(-1, 0, 1),
        lambda x: x.rot90(1, (1, 2)), lambda x: x.reshape(-1, x.shape[-1])[:, :1].reshape(len(x), -1),
    )],
    "view of images": [on(IMAGE, function) for function in (
        lambda x: x.flatten(2).transpose(1, 2), lambda x: x.flatten(1), lambda x: x.mean((2, 3)), lambda x: x.flip(3),
        lambda x: x.permute(0, 2, 3, 1), lambda x: x.roll((1, 1), (2, 3)), lambda x: x[:, :, 1:, 1:], lambda x: x[:, 0],
        lambda x: torch.cat(x.chunk(2, 1)[::-1], 1), lambda x: x.transpose(2, 3),
    )],
    "shuffled": [
        on(IMAGE, lambda x: F.pad(x, (1, 1, 1, 1), mode="reflect"), wide),
        on(IMAGE, lambda x: F.pixel_unshuffle(x, 2), even_image),
        on(IMAGE, lambda x: F.pixel_shuffle(x, 2), lambda n: n.c % 4 == 0),
        on(IMAGE, lambda x: F.channel_shuffle(x, 2), lambda n: n.c % 2 == 0),
    ],
    "of higher rank": [
        on(VECTOR, lambda x: x.unsqueeze(1).expand(-1, 4, -1)),
        on(VECTOR, lambda x: x.unflatten(1, (2, -1)), lambda n: n.d % 2 == 0),
        on(VECTOR, lambda x: x[:, :, None] * x[:, None]),
        on(VECTOR, lambda x: torch.stack([x, x.sin(), x * 2], 1)),
        on(VECTOR, lambda x: x.reshape(x.size(0), -1, 1, 1).expand(-1, -1, 3, 3)),
        on(VECTOR, lambda x: x[:, None, :].repeat(1, 3, 1)),
        on(VECTOR, lambda x: torch.outer(x[:, 0], torch.arange(1, 5, device=x.device, dtype=x.dtype))),
        on(SEQUENCE, lambda x: x.unflatten(-1, (2, -1)).transpose(1, 2), lambda n: n.d % 2 == 0),
    ],
    "written in place": [on(SEQUENCE, function) for function in (first_zero, halves_written, filled, clipped)],
    "made by forward": [on(SEQUENCE, function) for function in (
        lambda x: x * torch.ones(x.shape[1], x.shape[1], device=x.device).tril().sum(-1).to(x.dtype)[:, None],
        lambda x: torch.eye(x.shape[1], dtype=x.dtype) @ x,
        lambda x: x + torch.arange(x[0].numel()).view(x.shape[1:]) * 0.01,
        lambda x: x + torch.zeros(x.shape[0], 1, x.shape[2], dtype=x.dtype),
        lambda x: x * torch.linspace(0, 1, x.shape[2], dtype=x.dtype),
        lambda x: torch.cat([x, torch.ones(x.shape[0], 1, x.shape[2], dtype=x.dtype)], 1),
        lambda x: x + torch.full((x.shape[2],), 0.5, dtype=x.dtype), lambda x: x * x.new_tensor([0.5]),
        lambda x: x.masked_fill(torch.triu(torch.ones(x.shape[1:], dtype=torch.bool), 1), -1.0),
        lambda x: x / torch.tensor(x.shape[2]).sqrt().to(x.dtype),
        lambda x: torch.cat([x, x.new_zeros(len(x), 2, x.shape[2])], dim=1),
        lambda x: torch.roll(x, 1, 2) * torch.hann_window(x.shape[2], dtype=x.dtype),
    )],
}  # fmt: skip


def _picked(lines: Sequence[Operation], values: Values) -> Made | None:
    """One of the lines that suit what there is."""
    start = values.pick(range(len(lines)))
    turned = (*lines[start:], *lines[:start])
    return next((made for line in turned if (made := line(_with(values))) is not None), None)


def _with(values: Values) -> Values:
    """The same, of which picks are taken anew."""
    return Values(values.tensors, list(values.picks), values.made)


def operations() -> Iterator[tuple[str, Operation]]:
    """Every line, by its kind and number."""
    return ((f"{name} {i}", line) for name, lines in TABLE.items() for i, line in enumerate(lines))


OPERATIONS: dict[str, Operation] = {name: partial(_picked, lines) for name, lines in TABLE.items()}
