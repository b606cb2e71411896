"""Operations of which drawn modules are made: each picks what it reads among the values so far, and its settings.

An operation is a function of `Values` that gives a `Made`: a module and which values it reads; None where no value
suits it. Every value has the batch as its first dim, and no operation lets one row of it look at another. Picks are
made in an order that leaves the most recent value, and the plainest setting, for 0.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, TypeVar

import torch
import torch.nn.functional as F
from torch import Tensor, nn

Item = TypeVar("Item")
MOST_A_ROW = 1 << 11
"""Numbers that a row of a value may have."""
TOKENS = 16
"""Different integers among the inputs."""


@dataclass
class Values:
    """What a step may read, and what decides: tensors of an eager run so far, the picks that are left, modules made
    before (which may be used again).
    """

    tensors: list[Tensor]
    picks: list[int]
    made: list[nn.Module] = field(default_factory=list)

    def pick(self, options: Iterable[Item]) -> Item:
        """One of the options; the first where nothing is left to decide by."""
        listed = list(options)
        return listed[self.picks.pop(0) % len(listed)] if self.picks else listed[0]

    def find(self, *ranks: int, suits: Callable[[Tensor], bool] = lambda _: True, dtype: str = "float") -> int | None:
        """A value of one of these ranks that suits."""
        found = [
            index
            for index, each in reversed(list(enumerate(self.tensors)))
            if (not ranks or each.dim() in ranks) and kind(each) == dtype and suits(each)
        ]
        return self.pick(found) if found else None

    def dim(self, index: int, least: int = 1) -> int:
        """A dim of a value, not the batch; from the last."""
        shape = self.tensors[index].shape
        suiting = [d for d in range(len(shape) - 1, 0, -1) if shape[d] >= least]
        return self.pick(suiting or [len(shape) - 1])


def kind(tensor: Tensor) -> str:
    return "float" if tensor.is_floating_point() else "bool" if tensor.dtype == torch.bool else "int"


@dataclass
class Made:
    module: nn.Module
    reads: Sequence[int]


class Apply(nn.Module):
    """A function, with the modules and parameters that it uses."""

    def __init__(self, function: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.function = function
        for name, part in parts.items():
            if isinstance(part, Tensor) and not isinstance(part, nn.Parameter):
                self.register_buffer(name, part)
            else:
                setattr(self, name, part)

    def forward(self, *values: Tensor) -> Any:
        return self.function(self, *values)


Operation = Callable[[Values], Made | None]
OPERATIONS: dict[str, Operation] = {}


def operation(function: Operation) -> Operation:
    OPERATIONS[function.__name__] = function
    return function


def on(index: int | None, function: Callable[..., Any], *more: int, **parts: Any) -> Made | None:
    return None if index is None else Made(Apply(function, **parts), (index, *more))


def parameter(*shape: int) -> nn.Parameter:
    return nn.Parameter(torch.randn(shape) * 0.5)


# -------------------------------------------------------------------------------------------------- layers with weights


@operation
def linear(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    width = v.tensors[i].shape[-1]
    return Made(nn.Linear(width, v.pick([width, 8, 12, 16, 5]), bias=v.pick([True, False])), [i])


@operation
def mlp(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    d = v.tensors[i].shape[-1]
    act = v.pick([nn.GELU(), nn.ReLU(), nn.SiLU(), nn.Tanh()])
    return Made(nn.Sequential(nn.Linear(d, 2 * d), act, nn.Dropout(v.pick([0.0, 0.1])), nn.Linear(2 * d, d)), [i])


@operation
def gated(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    d = v.tensors[i].shape[-1]

    def swiglu(m: Any, x: Tensor) -> Tensor:
        a, b = m.up(x).chunk(2, dim=-1)
        return m.down(F.silu(a) * b)

    return on(i, swiglu, up=nn.Linear(d, 2 * d), down=nn.Linear(d, d))


@operation
def bilinear(v: Values) -> Made | None:
    i = v.find(2, 3)
    j = None if i is None else v.find(suits=lambda t: t.shape[:-1] == v.tensors[i].shape[:-1])
    if i is None or j is None:
        return None
    return Made(nn.Bilinear(v.tensors[i].shape[-1], v.tensors[j].shape[-1], 6), [i, j])


@operation
def again(v: Values) -> Made | None:
    """A module that was used before, once more: its parameters are shared."""
    kept = [m for m in v.made if isinstance(m, nn.Linear | nn.Sequential | nn.LayerNorm)]
    if not kept:
        return None
    module = v.pick(reversed(kept))
    first = module[0] if isinstance(module, nn.Sequential) else module
    width = first.normalized_shape[-1] if isinstance(first, nn.LayerNorm) else first.in_features
    i = v.find(suits=lambda t: t.shape[-1] == width)
    return None if i is None else Made(module, [i])


@operation
def tied(v: Values) -> Made | None:
    """A product with the transpose of the weights of a module used before."""
    kept = [m for m in v.made if isinstance(m, nn.Linear | nn.Embedding)]
    if not kept:
        return None
    module = v.pick(reversed(kept))
    over = v.pick([True, False]) or isinstance(module, nn.Embedding)
    width = module.weight.shape[1 if over else 0]
    i = v.find(suits=lambda t: t.shape[-1] == width)
    if over and isinstance(module, nn.Embedding):
        return on(i, lambda m, x: F.linear(x, m.of.weight), of=module)
    return on(i, (lambda m, x: x @ m.of.weight.t()) if over else (lambda m, x: x @ m.of.weight), of=module)


@operation
def weight_made(v: Values) -> Made | None:
    """A product with weights that forward makes of parameters."""
    i = v.find()
    if i is None:
        return None
    d = v.tensors[i].shape[-1]
    how = v.pick(["normed", "positive", "low rank", "masked", "symmetric"])
    made: dict[str, Callable[[Any], Tensor]] = {
        "normed": lambda m: m.a / m.a.norm(dim=1, keepdim=True) * m.scale[:, None],
        "positive": lambda m: F.softplus(m.a),
        "low rank": lambda m: m.a[:, :2] @ m.a[:2],
        "masked": lambda m: m.a.tril(),
        "symmetric": lambda m: m.a + m.a.t(),
    }
    return on(i, lambda m, x: F.linear(x, made[how](m)), a=parameter(d, d), scale=parameter(d))


@operation
def embedding(v: Values) -> Made | None:
    i = v.find(1, 2, dtype="int")
    if i is None:
        return None
    width = v.pick([8, 12])
    how = v.pick(["plain", "padded", "bag", "one hot", "indexed"])
    if how == "bag" and v.tensors[i].dim() == 2:
        return Made(nn.EmbeddingBag(TOKENS, width, mode=v.pick(["mean", "sum", "max"])), [i])
    if how == "one hot":
        return on(i, lambda m, x: F.one_hot(x, TOKENS).to(m.weight.dtype) @ m.weight, weight=parameter(TOKENS, width))
    if how == "indexed":
        return on(i, lambda m, x: m.weight[x], weight=parameter(TOKENS, width))
    return Made(nn.Embedding(TOKENS, width, padding_idx=3 if how == "padded" else None), [i])


@operation
def norm(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    x = v.tensors[i]
    how = v.pick(["layer", "rms", "group", "instance", "batch, eval", "over all", "l2", "local"])
    if how == "layer":
        return Made(nn.LayerNorm(x.shape[-1], elementwise_affine=v.pick([True, False])), [i])
    if how == "rms":
        return Made(nn.RMSNorm(x.shape[-1]), [i])
    if how == "group" and x.dim() >= 3 and x.shape[1] % 2 == 0:
        return Made(nn.GroupNorm(v.pick([2, 1, x.shape[1]]), x.shape[1]), [i])
    if how == "instance" and x.dim() in (3, 4) and x[0, 0].numel() > 1:
        layers: dict[int, Any] = {3: nn.InstanceNorm1d, 4: nn.InstanceNorm2d}
        return Made(layers[x.dim()](x.shape[1], affine=v.pick([True, False])), [i])
    if how == "batch, eval" and x.dim() in (2, 3, 4):
        layers = {2: nn.BatchNorm1d, 3: nn.BatchNorm1d, 4: nn.BatchNorm2d}
        return Made(layers[x.dim()](x.shape[1]).eval(), [i])
    if how == "over all":
        return Made(nn.LayerNorm(x.shape[1:]), [i])
    if how == "local" and x.dim() >= 3:
        return Made(nn.LocalResponseNorm(3), [i])
    return on(i, lambda m, x: F.normalize(x, dim=-1))


@operation
def convolution(v: Values) -> Made | None:
    i = v.find(3, 4, suits=lambda t: min(t.shape[2:]) >= 3)
    if i is None:
        return None
    x = v.tensors[i]
    channels = x.shape[1]
    kinds: dict[int, Any] = {3: (nn.Conv1d, nn.ConvTranspose1d), 4: (nn.Conv2d, nn.ConvTranspose2d)}
    plain, transposed = kinds[x.dim()]
    how = v.pick(["plain", "strided", "grouped", "depthwise", "dilated", "circular", "reflected", "transposed"])
    if how == "grouped" and channels % 2 == 0:
        return Made(plain(channels, 8, 3, padding=1, groups=2), [i])
    if how == "depthwise":
        return Made(plain(channels, channels, 3, padding="same", groups=channels, bias=False), [i])
    if how == "transposed":
        return Made(transposed(channels, 6, 3, stride=v.pick([1, 2]), padding=1), [i])
    if how == "strided":
        return Made(plain(channels, 8, 2, stride=2), [i])
    if how == "dilated" and min(x.shape[2:]) >= 5:
        return Made(plain(channels, 6, 3, dilation=2, padding=1), [i])
    modes = {"circular": "circular", "reflected": "reflect"}
    return Made(plain(channels, v.pick([channels, 8]), 3, padding=1, padding_mode=modes.get(how, "zeros")), [i])


@operation
def attention(v: Values) -> Made | None:
    i = v.find(3, suits=lambda t: t.shape[-1] % 4 == 0)
    if i is None:
        return None
    d = v.tensors[i].shape[-1]
    how = v.pick(["fused", "layer", "causal", "by hand", "window", "cross", "biased", "layer with weights"])
    if how.startswith("layer"):
        layer = nn.MultiheadAttention(d, 4, batch_first=True)
        needs = how != "layer"

        def with_weights(m: Any, x: Tensor) -> Tensor:
            y, weights = m.layer(x, x, x, need_weights=needs)
            return y + weights.sum(-1, keepdim=True) if needs else y

        return on(i, with_weights, layer=layer)
    j = i
    if how == "cross":
        j = v.find(3, suits=lambda t: t.shape[-1] == d)
        assert j is not None
    s, t = v.tensors[i].shape[1], v.tensors[j].shape[1]
    heads = v.pick([4, 2])

    def attend(m: Any, x: Tensor, y: Tensor) -> Tensor:
        q, k, w = (m.q(x), *m.kv(y).chunk(2, -1))
        q, k, w = (each.unflatten(-1, (heads, d // heads)).transpose(1, 2) for each in (q, k, w))
        if how in ("by hand", "window"):
            score = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
            if how == "window":
                at = torch.arange(s, device=x.device)
                score = score.masked_fill((at[:, None] - at).abs() > 1, float("-inf"))
            out = score.softmax(-1) @ w
        elif how == "biased":
            out = F.scaled_dot_product_attention(q, k, w, attn_mask=m.bias)
        else:
            out = F.scaled_dot_product_attention(q, k, w, is_causal=how == "causal")
        return m.out(out.transpose(1, 2).flatten(2))

    layers = {"q": nn.Linear(d, d), "kv": nn.Linear(d, 2 * d), "out": nn.Linear(d, d), "bias": parameter(heads, s, t)}
    if how != "biased":
        layers.pop("bias")
    return on(i, attend, j, **layers)


@operation
def recurrent(v: Values) -> Made | None:
    i = v.find(3, suits=lambda t: t.shape[1] <= 8)
    if i is None:
        return None
    d = v.tensors[i].shape[-1]
    how = v.pick(["gru", "loop", "lstm", "rnn"])
    if how == "loop":

        def loop(m: Any, x: Tensor) -> Tensor:
            state, out = x.new_zeros(x.shape[0], 6), []
            for step in x.unbind(1):
                state = torch.tanh(m.a(step) + m.b(state))
                out.append(state)
            return torch.stack(out, 1)

        return on(i, loop, a=nn.Linear(d, 6), b=nn.Linear(6, 6, bias=False))
    layers: dict[str, Any] = {"gru": nn.GRU, "lstm": nn.LSTM, "rnn": nn.RNN}
    return on(i, lambda m, x: m.layer(x)[0], layer=layers[how](d, 6, batch_first=True))


@operation
def conditioned(v: Values) -> Made | None:
    """Adaptive scale and shift: a row's vector on all of its positions."""
    i = v.find(3, 4)
    j = v.find(2)
    if i is None or j is None:
        return None
    x = v.tensors[i]
    channels = x.shape[-1] if x.dim() == 3 else x.shape[1]

    def modulate(m: Any, x: Tensor, y: Tensor) -> Tensor:
        scale, shift = m.project(y).chunk(2, dim=1)
        if x.dim() == 3:
            return x * (1 + scale[:, None]) + shift.unsqueeze(1)
        return x * (1 + scale[:, :, None, None]) + shift[..., None, None]

    return on(i, modulate, j, project=nn.Linear(v.tensors[j].shape[-1], 2 * channels))


@operation
def learned(v: Values) -> Made | None:
    """Parameters and buffers beside rows: positions, a class token, a scale, a constant table."""
    i = v.find(3)
    if i is None:
        return None
    s, d = v.tensors[i].shape[1:]
    how = v.pick(["positions", "token", "scale", "sinus", "buffer", "prompt"])
    if how == "token":
        return on(i, lambda m, x: torch.cat([m.token.expand(x.shape[0], -1, -1), x], 1), token=parameter(1, 1, d))
    if how == "prompt":
        return on(i, lambda m, x: torch.cat([x, m.p[None].repeat(x.size(0), 1, 1)], dim=1), p=parameter(2, d))
    if how == "scale":
        return on(
            i,
            lambda m, x: x * m.scale.exp() + m.shift,
            scale=parameter(1),
            shift=parameter(d),
        )
    if how == "sinus":

        def sinus(m: Any, x: Tensor) -> Tensor:
            at = torch.arange(s, device=x.device, dtype=x.dtype)[:, None]
            rate = torch.exp(torch.arange(d, device=x.device, dtype=x.dtype) * -0.3)
            return x + torch.where(torch.arange(d, device=x.device) % 2 == 0, (at * rate).sin(), (at * rate).cos())

        return on(i, sinus)
    if how == "buffer":
        return on(i, lambda m, x: x + m.table[:s] * 0.5, table=torch.randn(s + 3, d))
    return on(i, lambda m, x: x + m.at(torch.arange(s, device=x.device)), at=nn.Embedding(s, d))


# ------------------------------------------------------------------------------------------------ operations without


@operation
def activation(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    width = v.tensors[i].shape[1]
    layers = [
        nn.Tanh(), nn.ReLU(), nn.GELU(), nn.Sigmoid(), nn.Softplus(), nn.LeakyReLU(), nn.ELU(), nn.Hardswish(),
        nn.Mish(), nn.PReLU(width), nn.Softsign(), nn.Hardtanh(), nn.LogSigmoid(), nn.CELU(), nn.Softshrink(),
        nn.Threshold(0.1, 0.2), nn.ReLU6(), nn.GELU("tanh"),
    ]  # fmt: skip
    return Made(v.pick(layers), [i])


@operation
def pointwise(v: Values) -> Made | None:
    i = v.find()
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.sin(), lambda m, x: x.abs().sqrt(), lambda m, x: (x * x + 1).log(), lambda m, x: torch.erf(x),
        lambda m, x: x.clamp(-1, 1), lambda m, x: x / (1 + x.abs()), lambda m, x: x.tanh() ** 3, lambda m, x: 1 - x,
        lambda m, x: torch.expm1(x.clamp(max=1)), lambda m, x: x * x.sign(), lambda m, x: x.square().add(1).rsqrt(),
        lambda m, x: torch.nan_to_num(x / x.abs().add(1)), lambda m, x: x.atan(), lambda m, x: x.pow(2).log1p(),
        lambda m, x: x.float().type_as(x) * 2, lambda m, x: x.detach() * x, lambda m, x: x + (x.round() - x).detach(),
        lambda m, x: torch.polar(x.abs() + 1, x).real, lambda m, x: torch.logit(x.sigmoid(), 1e-3),
        lambda m, x: torch.where(x > 0, x, x.exp() - 1), lambda m, x: x.masked_fill(x.abs() > 1, 0.5),
        lambda m, x: torch.lerp(x, x.tanh(), 0.3), lambda m, x: torch.addcmul(x, x, x.tanh(), value=0.5),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def combined(v: Values) -> Made | None:
    """Two values of one shape."""
    i = v.find()
    j = None if i is None else v.find(suits=lambda t: t.shape == v.tensors[i].shape)
    if i is None or j is None:
        return None
    functions: list[Callable[..., Tensor]] = [
        lambda m, x, y: x + y, lambda m, x, y: x * y, lambda m, x, y: x - y, torch_of(torch.maximum),
        lambda m, x, y: x / (1 + y.abs()), lambda m, x, y: torch.where(x > y, x, y * 2),
        lambda m, x, y: torch.cat([x, y], -1), lambda m, x, y: torch.stack([x, y], 1).mean(1),
        lambda m, x, y: torch.cat([x, y], 1), lambda m, x, y: torch.stack((x, y), dim=-1).flatten(-2),
        lambda m, x, y: torch.hypot(x, y + 3), lambda m, x, y: torch.atan2(x, y.abs() + 1),
        lambda m, x, y: torch.stack([x, y]).sum(0), lambda m, x, y: torch.logaddexp(x, y),
        lambda m, x, y: F.cosine_similarity(x, y, dim=-1).unsqueeze(-1) * x, lambda m, x, y: x.copysign(y),
        lambda m, x, y: torch.complex(x, y).abs(),
    ]  # fmt: skip
    return on(i, v.pick(functions), j)


def torch_of(function: Callable[..., Tensor]) -> Callable[..., Tensor]:
    return lambda m, *values: function(*values)


@operation
def product(v: Values) -> Made | None:
    """einsum, matmul and bmm of rows with themselves and with parameters."""
    i = v.find(3)
    if i is None:
        return None
    s, d = v.tensors[i].shape[1:]
    how = v.pick(["self", "weights", "mix", "outer", "per head", "low rank", "bmm", "distances"])
    if how == "self":
        return on(i, lambda m, x: torch.einsum("bsd,btd->bst", x, x) / d)
    if how == "weights":
        return on(i, lambda m, x: torch.einsum("bsd,de->bse", x, m.w), w=parameter(d, 6))
    if how == "mix":
        return on(i, lambda m, x: torch.einsum("bsd,st->btd", x, m.w), w=parameter(s, s))
    if how == "outer":
        return on(i, lambda m, x: torch.einsum("bsd,bse->bde", x, x) / s)
    if how == "per head" and d % 2 == 0:
        return on(
            i, lambda m, x: torch.einsum("bshd,hde->bshe", x.unflatten(-1, (2, -1)), m.w).flatten(2),
            w=parameter(2, d // 2, d // 2),
        )  # fmt: skip
    if how == "bmm":
        return on(i, lambda m, x: torch.bmm(x.transpose(1, 2), x) / s)
    if how == "distances":
        return on(i, lambda m, x: torch.cdist(x, m.w), w=parameter(5, d))
    return on(i, lambda m, x: x @ m.a @ m.b, a=parameter(d, 2), b=parameter(2, d))


@operation
def softmax(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    d = v.dim(i)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.softmax(d), lambda m, x: x.log_softmax(d), lambda m, x: F.softmin(x, d),
        lambda m, x: x - x.logsumexp(d, keepdim=True), lambda m, x: x.softmax(d, dtype=torch.float32).to(x.dtype),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def reduction(v: Values) -> Made | None:
    i = v.find(3, 4)
    if i is None:
        return None
    d, keeps = v.dim(i), v.pick([False, True])
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.mean(d, keepdim=keeps), lambda m, x: x.sum(d, keepdim=keeps),
        lambda m, x: x.amax(d, keepdim=keeps), lambda m, x: x.var(d, keepdim=keeps),
        lambda m, x: x.std(d, unbiased=False),
        lambda m, x: x.norm(dim=d, keepdim=keeps), lambda m, x: x.logsumexp(d), lambda m, x: x.tanh().prod(d),
        lambda m, x: x.max(dim=d, keepdim=keeps)[0], lambda m, x: x.median(d)[0],
        lambda m, x: x.mean(dim=(1, 2)[: x.dim() - 2]),
        lambda m, x: (x.cumsum(d) > 0).to(x.dtype).mean(d) + x.mean(d), lambda m, x: x.min(d).values,
        lambda m, x: torch.linalg.vector_norm(x, 3, dim=d), lambda m, x: x.flatten(1).quantile(0.5, dim=1)[:, None],
        lambda m, x: x.argmax(d).to(x.dtype) * 0.1 + x.sum(d), lambda m, x: x.aminmax(dim=d)[0],
        lambda m, x: x.kthvalue(1, d)[0], lambda m, x: x.nansum(d), lambda m, x: (x > 0).any(d) * x.sum(d),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def scan(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    d = v.dim(i)
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.cumsum(d), lambda m, x: x.tanh().cumprod(d), lambda m, x: x.cummax(d)[0],
        lambda m, x: x.logcumsumexp(d), lambda m, x: x.flip(d).cumsum(d).flip(d), lambda m, x: x.cummin(d).values,
        lambda m, x: torch.diff(x, dim=d, prepend=torch.zeros_like(x.narrow(d, 0, 1))),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def order(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    d = v.dim(i)
    most = max(1, v.tensors[i].shape[d] // 2)

    def sparse(m: Any, x: Tensor) -> Tensor:
        values, at = x.topk(most, d)
        return torch.zeros_like(x).scatter(d, at, values.softmax(d))

    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.sort(d)[0], lambda m, x: x.topk(most, d)[0], sparse,
        lambda m, x: x.gather(d, x.argsort(d, descending=True)), lambda m, x: x.argsort(d).argsort(d) * x,
        lambda m, x: x * (x >= x.topk(most, d)[0].narrow(d, most - 1, 1)),
        lambda m, x: torch.msort(x.movedim(d, 0)).movedim(0, d),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def gathered(v: Values) -> Made | None:
    """What integers of a row pick of the row."""
    i, j = v.find(3), v.find(2, dtype="int")
    if i is None or j is None:
        return None
    s, d = v.tensors[i].shape[1:]

    def expanded(m: Any, x: Tensor, at: Tensor) -> Tensor:
        return x.gather(1, (at % s)[..., None].expand(-1, -1, d))

    def added(m: Any, x: Tensor, at: Tensor) -> Tensor:
        at = (at % 5)[:, :s, None].expand(-1, -1, d)
        return x.new_zeros(x.shape[0], 5, d).scatter_add(1, at, x[:, : at.shape[1]])

    def indexed(m: Any, x: Tensor, at: Tensor) -> Tensor:
        return x[torch.arange(x.shape[0], device=x.device), at[:, 0] % s]

    functions: list[Callable[..., Tensor]] = [
        expanded, added, indexed, lambda m, x, at: torch.take_along_dim(x, (at % s)[..., None], dim=1),
        lambda m, x, at: x[torch.arange(len(x), device=x.device)[:, None], at % s],
        lambda m, x, at: x.masked_fill((at[:, :1] > 7)[..., None], 0.0),
        lambda m, x, at: x * (torch.arange(s, device=x.device)[None] < at[:, :1])[..., None],
        lambda m, x, at: x.new_zeros(x.shape[0], 5, d).scatter_reduce(
            1, (at % 5)[:, :s, None].expand(-1, -1, d), x[:, : at.shape[1]], "amax", include_self=True
        ),
        lambda m, x, at: x.index_select(1, torch.tensor([0, s - 1, 1], device=x.device)),
    ]  # fmt: skip
    return on(i, v.pick(functions), j)


@operation
def spectral(v: Values) -> Made | None:
    i = v.find(3, 4)
    if i is None:
        return None
    d = v.dim(i)
    size = v.tensors[i].shape[d]

    def filtered(m: Any, x: Tensor) -> Tensor:
        modes = torch.fft.rfft(x, dim=d)
        scale = torch.view_as_complex(m.filter).reshape([-1] + [1] * (x.dim() - 1 - d))
        return torch.fft.irfft(modes * scale, n=size, dim=d)

    functions: list[Callable[..., Tensor]] = [
        lambda m, x: torch.fft.fft(torch.fft.fft(x, dim=-1), dim=1).real, lambda m, x: torch.fft.rfft(x, dim=d).abs(),
        filtered, lambda m, x: torch.fft.fft2(x).imag,
        lambda m, x: torch.fft.irfft(torch.fft.rfft(x, dim=d) * 2, n=size, dim=d),
        lambda m, x: torch.fft.fftshift(x, dim=d),
        lambda m, x: torch.view_as_real(torch.fft.rfft(x, dim=d)).flatten(-2),
    ]  # fmt: skip
    function = v.pick(functions)
    parts = {"filter": parameter(size // 2 + 1, 2)} if function is filtered else {}
    return on(i, function, **parts)


@operation
def pooling(v: Values) -> Made | None:
    i = v.find(3, 4, suits=lambda t: min(t.shape[2:]) >= 3)
    if i is None:
        return None
    if v.tensors[i].dim() == 3:
        layers: list[nn.Module] = [
            nn.MaxPool1d(2), nn.AvgPool1d(2), nn.AdaptiveAvgPool1d(3), nn.AdaptiveMaxPool1d(2), nn.LPPool1d(2, 2),
            nn.MaxPool1d(3, 1, 1), nn.AvgPool1d(3, 1, 1, count_include_pad=False),
        ]  # fmt: skip
    else:
        layers = [
            nn.MaxPool2d(2), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(2), nn.AdaptiveMaxPool2d(2), nn.LPPool2d(2, 2),
            nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(3, 1, 1), nn.AdaptiveAvgPool2d((1, 3)),
        ]  # fmt: skip
    return Made(v.pick(layers), [i])


@operation
def resized(v: Values) -> Made | None:
    i = v.find(3, 4)
    if i is None:
        return None
    one = v.tensors[i].dim() == 3
    mode = v.pick(["nearest", "linear", "area", "nearest-exact"] if one else ["nearest", "bilinear", "bicubic", "area"])
    corners = v.pick([False, True]) if "linear" in mode or mode == "bicubic" else None
    by = v.pick([2, 0.5])
    if min(v.tensors[i].shape[2:]) < 2:
        by = 2
    return on(i, lambda m, x: F.interpolate(x, scale_factor=by, mode=mode, align_corners=corners))


@operation
def sampled(v: Values) -> Made | None:
    i = v.find(4)
    if i is None:
        return None
    channels = v.tensors[i].shape[1]

    def warped(m: Any, x: Tensor) -> Tensor:
        theta = m.project(x.mean((2, 3))).view(-1, 2, 3)
        return F.grid_sample(x, F.affine_grid(theta, list(x.shape), align_corners=False), align_corners=False)

    def unfolded(m: Any, x: Tensor) -> Tensor:
        return F.unfold(x, 2, stride=2).transpose(1, 2)

    how = v.pick([warped, unfolded])
    parts = {"project": nn.Linear(channels, 6)} if how is warped else {}
    return on(i, how, **parts)


@operation
def random(v: Values) -> Made | None:
    i = v.find()
    if i is None:
        return None
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: F.dropout(x, 0.3), lambda m, x: x + 0.1 * torch.randn_like(x), lambda m, x: x * torch.rand_like(x),
        lambda m, x: F.alpha_dropout(x, 0.2, training=True), lambda m, x: x * torch.bernoulli(torch.full_like(x, 0.7)),
        lambda m, x: x * (torch.rand(x.shape[0], *[1] * (x.dim() - 1), device=x.device) < 0.8).to(x.dtype),
        lambda m, x: x + torch.normal(torch.zeros_like(x), 0.1),
        lambda m, x: x + torch.randn(x.shape[-1], device=x.device, dtype=x.dtype),
        lambda m, x: x + x.exp().clamp(max=1) * torch.randn(x.shape, device=x.device, dtype=x.dtype),
    ]  # fmt: skip
    if v.tensors[i].dim() == 4:
        functions.append(lambda m, x: F.dropout2d(x, 0.3))
    return on(i, v.pick(functions))


@operation
def view(v: Values) -> Made | None:
    i = v.find(3)
    if i is None:
        return None
    s, d = v.tensors[i].shape[1:]
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.transpose(1, 2), lambda m, x: x.flatten(1), lambda m, x: x[:, 0], lambda m, x: x[:, -1],
        lambda m, x: x[:, ::2], lambda m, x: x.roll(1, 1), lambda m, x: x.flip(1), lambda m, x: x[..., 1:],
        lambda m, x: x.permute(0, 2, 1).contiguous().view(x.size(0), -1), lambda m, x: x.repeat(1, 2, 1),
        lambda m, x: x.repeat_interleave(2, dim=1), lambda m, x: F.pad(x, (1, 0)), lambda m, x: F.pad(x, (0, 0, 1, 1)),
        lambda m, x: F.pad(x, (1, 1), mode="replicate"), lambda m, x: x.unfold(1, 2, 1).flatten(2),
        lambda m, x: x.unsqueeze(2).expand(-1, -1, 2, -1).reshape(x.shape[0], 2 * s, d), lambda m, x: x.tril(),
        lambda m, x: x.split([1, d - 1], dim=-1)[1], lambda m, x: torch.cat([x[:, 1:], x[:, :1]], 1),
        lambda m, x: x.reshape(-1, d).view(x.shape[0], s, d) * 2, lambda m, x: x.unbind(1)[0], lambda m, x: x.squeeze(),
        lambda m, x: x.unsqueeze(1), lambda m, x: x.diagonal(dim1=1, dim2=2), lambda m, x: x.swapaxes(1, 2).flatten(1),
        lambda m, x: torch.diag_embed(x[:, 0]), lambda m, x: x.movedim(-1, 1), lambda m, x: x.tile((1, 2)),
        lambda m, x: torch.tensor_split(x, 2, dim=-1)[0], lambda m, x: x.narrow(-1, 0, 1),
        lambda m, x: x.rot90(1, (1, 2)),
        lambda m, x: x.reshape(-1, d)[:, :1].reshape(len(x), s), lambda m, x: x.reshape(-1, s * d),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def view_of_images(v: Values) -> Made | None:
    i = v.find(4)
    if i is None:
        return None
    _, c, h, w = v.tensors[i].shape
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.flatten(2).transpose(1, 2), lambda m, x: x.flatten(1), lambda m, x: x.mean((2, 3)),
        lambda m, x: x.permute(0, 2, 3, 1), lambda m, x: x.roll((1, 1), (2, 3)), lambda m, x: x[:, :, 1:, 1:],
        lambda m, x: F.pad(x, (1, 1, 1, 1), mode="reflect") if min(h, w) > 1 else x, lambda m, x: x.flip(3),
        lambda m, x: F.pixel_unshuffle(x, 2) if h % 2 == 0 and w % 2 == 0 else x, lambda m, x: x[:, 0],
        lambda m, x: F.pixel_shuffle(x, 2) if c % 4 == 0 else x,
        lambda m, x: F.channel_shuffle(x, 2) if c % 2 == 0 else x,
        lambda m, x: torch.cat(x.chunk(2, 1)[::-1], 1), lambda m, x: x.transpose(2, 3),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def lifted(v: Values) -> Made | None:
    """A value of other rank."""
    i = v.find(2)
    if i is None:
        return None
    d = v.tensors[i].shape[-1]
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x.unsqueeze(1).expand(-1, 4, -1),
        lambda m, x: x.unflatten(1, (2, -1)) if d % 2 == 0 else x[:, None],
        lambda m, x: x[:, :, None] * x[:, None], lambda m, x: torch.stack([x, x.sin(), x * 2], 1),
        lambda m, x: x.reshape(x.size(0), -1, 1, 1).expand(-1, -1, 3, 3), lambda m, x: x[:, None, :].repeat(1, 3, 1),
        lambda m, x: torch.outer(x[:, 0], torch.arange(1, 5, device=x.device, dtype=x.dtype)),
        lambda m, x: torch.einsum("bi,bj->bij", x, x),
    ]  # fmt: skip
    return on(i, v.pick(functions))


@operation
def written(v: Values) -> Made | None:
    """Written in place, as models do."""
    i = v.find(3)
    if i is None:
        return None
    s = v.tensors[i].shape[1]

    def first(m: Any, x: Tensor) -> Tensor:
        y = x.clone()
        y[:, 0] = 0
        return y

    def halves(m: Any, x: Tensor) -> Tensor:
        y = torch.zeros_like(x)
        y[..., ::2] = x[..., ::2].sin()
        y[:, 1:] += x[:, :-1]
        return y

    def filled(m: Any, x: Tensor) -> Tensor:
        y = torch.empty(x.shape, device=x.device, dtype=x.dtype).fill_(0.5)
        for t in range(s):
            y[:, t] = x[:, t] * (t + 1)
        return y

    def masked(m: Any, x: Tensor) -> Tensor:
        y = x * 1
        y[y > 0.5] = 0.5
        return y.mul_(2).add_(x)

    return on(i, v.pick([first, halves, filled, masked]))


@operation
def constants(v: Values) -> Made | None:
    """What forward makes: masks, eyes, ranges."""
    i = v.find(3)
    if i is None:
        return None
    s, d = v.tensors[i].shape[1:]
    functions: list[Callable[..., Tensor]] = [
        lambda m, x: x * torch.ones(s, s, device=x.device).tril().sum(-1).to(x.dtype)[:, None],
        lambda m, x: torch.eye(s, dtype=x.dtype) @ x, lambda m, x: x + torch.arange(s * d).view(s, d) * 0.01,
        lambda m, x: x + torch.zeros(x.shape[0], 1, d, dtype=x.dtype),
        lambda m, x: x * torch.linspace(0, 1, d, dtype=x.dtype),
        lambda m, x: torch.cat([x, torch.ones(x.shape[0], 1, d, dtype=x.dtype)], 1),
        lambda m, x: x + torch.full((d,), 0.5, dtype=x.dtype), lambda m, x: x * x.new_tensor([0.5]),
        lambda m, x: x.masked_fill(torch.triu(torch.ones(s, d, dtype=torch.bool), 1), -1.0),
        lambda m, x: x / torch.tensor(d).sqrt().to(x.dtype),
        lambda m, x: torch.cat([x, x.new_zeros(len(x), 2, d)], dim=1),
        lambda m, x: torch.roll(x, 1, 2) * torch.hann_window(d, dtype=x.dtype),
    ]  # fmt: skip
    return on(i, v.pick(functions))
